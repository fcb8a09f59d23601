package pindown

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/pindown/pindown/internal/sys"
	"github.com/pindown/pindown/vm"
)

// Lane is a handle on a cache for the hottest paths: its hits use no atomic
// read-modify-write instruction, where the cache's own use one. In exchange it
// must be used by one goroutine at a time, and giving up registrations costs
// the cache a barrier on every processor (membarrier(2), Linux 4.14), which it
// makes for many at once. Without that system call a lane works and is as fast
// as the cache. On other architectures than amd64 it needs none.
//
// Its regions are like others: any goroutine may release them. Up to
// [LaneHolds] of them can be held through the lane at a time; more are acquired
// through the cache.
//
// Make one for each long-lived worker, and close it: a cache remembers its
// lanes.
type Lane struct {
	c     *Cache
	plain bool // has no holds of its own: closed, or there is no barrier

	_    [64]byte      // what follows is written by hits
	next uint32        // the hold to try
	laps atomic.Uint64 // times that a hold's count has come round
	hold [LaneHolds]hold
	_    [64]byte
}

// LaneHolds is how many regions a lane can hold.
const LaneHolds = 32

// NewLane returns a lane of c. Errors: ErrClosed, ErrForked.
func (c *Cache) NewLane() (*Lane, error) {
	if c.guard.Forked() {
		return nil, fmt.Errorf("new lane: %w", ErrForked)
	}
	l := &Lane{c: c}
	if plainStores {
		l.plain = sys.RegisterMembarrier() != nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, fmt.Errorf("new lane: %w", ErrClosed)
	}
	c.fenceLanes = plainStores && !l.plain
	c.lanes = append(c.lanes, l)
	return l, nil
}

// Close ends the lane. It returns a wrapped ErrInUse, and does nothing, while a
// region is held through it. Close is idempotent. It needn't be called before
// the cache's Close.
func (l *Lane) Close() error {
	c := l.c
	if c.guard.Forked() {
		return fmt.Errorf("close lane: %w", ErrForked)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	held := 0
	for i := range l.hold {
		if l.hold[i].load() > holdCount {
			held++
		}
	}
	if held > 0 {
		return fmt.Errorf("close lane with %d regions held: %w", held, ErrInUse)
	}
	if at := slices.Index(c.lanes, l); at >= 0 {
		l.plain = true
		c.pastClaims += l.claims()
		c.lanes = slices.Delete(c.lanes, at, at+1)
	}
	return nil
}

// claims returns how often holds of the lane have been taken.
func (l *Lane) claims() uint64 {
	n := l.laps.Load() << 16
	for i := range l.hold {
		n += l.hold[i].load() & holdCount
	}
	return n
}

// Acquire is [Cache.Acquire] through the lane.
func (l *Lane) Acquire(ctx context.Context, buf []byte, access Access) (Region, error) {
	escape(buf)
	return l.AcquireRange(ctx, vm.RangeOf(buf), access)
}

// AcquireRange is [Cache.AcquireRange] through the lane.
func (l *Lane) AcquireRange(ctx context.Context, r Range, access Access) (Region, error) {
	return l.c.acquire(ctx, r, access, l)
}

// TryAcquire is [Cache.TryAcquire] through the lane.
func (l *Lane) TryAcquire(buf []byte, access Access) (Region, bool) {
	escape(buf)
	return l.TryAcquireRange(vm.RangeOf(buf), access)
}

// TryAcquireRange is [Cache.TryAcquireRange] through the lane.
func (l *Lane) TryAcquireRange(r Range, access Access) (Region, bool) {
	reg, err := l.c.acquire(tryOnly{}, r, access, l)
	return reg, err == nil
}

// at returns a hold that is most likely free: the one that was used longest
// ago.
func (l *Lane) at() *hold {
	l.next++
	return &l.hold[l.next%LaneHolds]
}

// claim takes a hold for the entry named by id; nil if there is none.
func (l *Lane) claim(id uint64) (*hold, uint64) {
	if l.plain {
		return nil, 0
	}
	for i := range l.hold {
		h := &l.hold[i]
		old := h.load()
		if old > holdCount {
			continue
		}
		if old == holdCount {
			l.laps.Store(l.laps.Load() + 1)
		}
		word := id | (old+1)&holdCount
		h.put(word)
		return h, word
	}
	return nil, 0
}
