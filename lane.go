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
	c      *Cache
	fenced bool // holds must be stored with a barrier
	closed bool

	_    [64]byte // what follows is written by hits
	hold [LaneHolds]hold
	laps atomic.Uint64 // times that a hold's count has come round
	_    [56]byte
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
		l.fenced = sys.RegisterMembarrier() != nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, fmt.Errorf("new lane: %w", ErrClosed)
	}
	c.fenceLanes = plainStores && !l.fenced
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
		l.closed = true
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
	reg, cause := l.hit(r, access)
	if cause == hitValid {
		return reg, nil
	}
	return l.c.miss(ctx, r, access, cause, reg.e)
}

// TryAcquire is [Cache.TryAcquire] through the lane.
func (l *Lane) TryAcquire(buf []byte, access Access) (Region, bool) {
	escape(buf)
	return l.TryAcquireRange(vm.RangeOf(buf), access)
}

// TryAcquireRange is [Cache.TryAcquireRange] through the lane.
func (l *Lane) TryAcquireRange(r Range, access Access) (Region, bool) {
	reg, cause := l.hit(r, access)
	switch {
	case cause == hitValid:
		return reg, true
	case reg.e != nil:
		l.c.retire(reg.e, vm.OpUnknown)
	}
	return Region{}, false
}

// hit is Cache.hit with a hold of the lane's.
func (l *Lane) hit(r Range, access Access) (Region, MissCause) {
	c := l.c
	if l.fenced || l.closed {
		return c.hit(r, access)
	}
	at, span, e, cause := c.find(r, access)
	if e == nil {
		return Region{}, cause
	}
	for i := range l.hold {
		h := &l.hold[i]
		old := h.load()
		if old > holdCount {
			continue
		}
		if old++; old > holdCount {
			old = 0
			l.laps.Store(l.laps.Load() + 1)
		}
		word := e.id() | old
		h.put(word)
		return c.verify(Region{c: c, e: e, h: h, word: word}, at, span)
	}
	return c.hit(r, access)
}
