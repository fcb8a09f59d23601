package pindown

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/pindown/pindown/internal/forkguard"
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
	c *Cache

	_    [64]byte      // what follows is written by hits
	next uint64        // the hold to try, in bytes
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
	if plainStores && sys.RegisterMembarrier() != nil {
		// No barrier: all holds are taken, and the cache's are used.
		l.block()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, fmt.Errorf("new lane: %w", ErrClosed)
	}
	c.fenceLanes = plainStores
	c.lanes = append(c.lanes, l)
	return l, nil
}

// Close ends the lane. It returns a wrapped ErrInUse, and does nothing, while a
// region is held through it. A closed lane goes on through the cache's own holds.
// Close is idempotent. It needn't be called before the cache's Close.
func (l *Lane) Close() error {
	c := l.c
	if c.guard.Forked() {
		return fmt.Errorf("close lane: %w", ErrForked)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	held := 0
	for i := range l.hold {
		if w := l.hold[i].load(); w > holdCount && w != laneBlocked {
			held++
		}
	}
	if held > 0 {
		return fmt.Errorf("close lane with %d regions held: %w", held, ErrInUse)
	}
	if at := slices.Index(c.lanes, l); at >= 0 {
		c.pastClaims += l.claims()
		l.block()
		c.lanes = slices.Delete(c.lanes, at, at+1)
	}
	return nil
}

// block makes the lane's holds look taken.
func (l *Lane) block() {
	for i := range l.hold {
		l.hold[i].put(laneBlocked)
	}
}

// laneBlocked is the word of a hold that nobody can take, and which names no
// entry.
const laneBlocked = ^uint64(0)

// claims returns how often holds of the lane have been taken.
func (l *Lane) claims() uint64 {
	n := l.laps.Load() << 16
	for i := range l.hold {
		if w := l.hold[i].load(); w != laneBlocked {
			n += w & holdCount
		}
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
	return l.acquire(ctx, r, access)
}

// TryAcquire is [Cache.TryAcquire] through the lane.
func (l *Lane) TryAcquire(buf []byte, access Access) (Region, bool) {
	escape(buf)
	return l.TryAcquireRange(vm.RangeOf(buf), access)
}

// TryAcquireRange is [Cache.TryAcquireRange] through the lane.
func (l *Lane) TryAcquireRange(r Range, access Access) (Region, bool) {
	reg, err := l.acquire(tryOnly{}, r, access)
	return reg, err == nil
}

// acquire is Cache.acquire with a hold of the lane's: that which was used
// longest ago is most likely free.
//
//go:nosplit // what it calls looks at the stack's limit
func (l *Lane) acquire(ctx context.Context, r Range, access Access) (Region, error) {
	c := l.c
	page, more := uint64(r.Start>>indexPageShift), uint64((r.End-1)>>indexPageShift-r.Start>>indexPageShift)
	t := c.tables[access/RelaxedOrdering&1].Load()
	h := indexHash(0, page)
	if more >= t.short.Load() {
		h = indexHashAt(indexLevel(more, t.levels.Load()), page)
	}
	at := t.bucket(h).match(h)
	e := at.e.Load()
	span := at.span.Load()
	if !spanCovers(span, page, more) || e == nil || r.Start >= r.End ||
		!spanAllows(span, access) || c.state.Load()&forkguard.Alive == 0 {
		return l.acquireSlow(ctx, r, access)
	}
	hold := l.try()
	word := hold.load()
	if word >= holdCount {
		return l.acquireSlow(ctx, r, access)
	}
	word = e.id() | (word + 1)
	hold.put(word)
	if at.seen.Load() == c.word.Load()+seenMark && at.e.Load() == e {
		return Region{c: c, e: e, h: hold, word: word}, nil
	}
	return l.verifySlow(ctx, r, access, at, e)
}

// acquireSlow is acquire without shortcuts. The fewer values acquire must keep
// for what is rare, the fewer it has to store.
func (l *Lane) acquireSlow(ctx context.Context, r Range, access Access) (Region, error) {
	return l.c.acquireSlow(ctx, r, access, l)
}

// verifySlow is the rest of acquire after the holder was noted in the hold that
// was tried last.
func (l *Lane) verifySlow(ctx context.Context, r Range, access Access, at *listing, e *entry) (Region, error) {
	h := &l.hold[l.next/holdSize]
	return l.c.verifySlow(ctx, r, access, Region{c: l.c, e: e, h: h, word: h.load()}, at)
}

// claim takes a hold for the entry named by id; nil if there is none.
func (l *Lane) claim(id uint64) (*hold, uint64) {
	for i := range uint64(LaneHolds) {
		// The one that acquire tried comes first, lest its count stay at its end.
		h := &l.hold[(l.next/holdSize+i)%LaneHolds]
		old := h.load()
		if old > holdCount {
			continue
		}
		word := id | (old+1)&holdCount
		h.put(word)
		// After it: Stats would count a lap too many between the two.
		if old == holdCount {
			l.laps.Store(l.laps.Load() + 1)
		}
		return h, word
	}
	return nil, 0
}
