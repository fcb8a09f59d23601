package pindown

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"time"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/internal/forkguard"
	"github.com/pindown/pindown/monitor"
	"github.com/pindown/pindown/vm"
)

// Acquire returns a registration that covers every byte of buf (up to len)
// with at least the given access, made after every VM operation on buf that
// has returned before the call.
//
// A hit costs no system call, lock or allocation, and ignores ctx. A miss
// registers, may evict idle regions and may wait for another goroutine that is
// registering the same range; it returns early with ctx's error.
//
// The caller keeps buf alive and mapped until it has released the region, and
// must not use the keys afterwards. buf may be memory of any kind; it must not
// be an array on a goroutine's stack in code that hides it from the compiler.
//
// Errors: ErrRange for an empty buf, ErrAccess, ErrClosed, ErrForked, the
// context's error, and the device's errors (device.ErrFault for memory that
// isn't mapped or lacks permission, device.ErrNoMemory when evicting and
// trying again didn't help, …), all wrapped.
func (c *Cache) Acquire(ctx context.Context, buf []byte, access Access) (Region, error) {
	escape(buf)
	return c.AcquireRange(ctx, vm.RangeOf(buf), access)
}

// AcquireRange is Acquire for memory given by address, such as memory that Go
// doesn't own.
func (c *Cache) AcquireRange(ctx context.Context, r Range, access Access) (Region, error) {
	return c.acquire(ctx, r, access)
}

// TryAcquire returns a region if that is possible as a hit: with no context,
// lock, allocation or system call. It reports false on a miss, for a bad
// range, and on a closed cache; it never waits for a registration, for budget or
// for the device.
func (c *Cache) TryAcquire(buf []byte, access Access) (Region, bool) {
	escape(buf)
	return c.TryAcquireRange(vm.RangeOf(buf), access)
}

// TryAcquireRange is TryAcquire for memory given by address.
func (c *Cache) TryAcquireRange(r Range, access Access) (Region, bool) {
	reg, err := c.acquire(tryOnly{}, r, access)
	return reg, err == nil
}

// tryOnly is the context of an acquire that must hit.
type tryOnly struct{ context.Context }

// errMiss is what an acquire that must hit returns if it doesn't.
var errMiss = errors.New("miss")

// acquire returns a region that serves r.
//
// What it has written out is the usual hit: a listing where it is most likely
// to be, a free hold where one is most likely to be, and no VM operation since
// the last hit. Calls that return here would cost a third of its time.
//
// The holder is noted before the check, so an entry that passes can't be
// deregistered; the check reads the table's word after that, so whatever
// returned before the call is seen. See listing and holds.go.
func (c *Cache) acquire(ctx context.Context, r Range, access Access) (Region, error) {
	page, more := uint64(r.Start>>indexPageShift), uint64((r.End-1)>>indexPageShift-r.Start>>indexPageShift)
	t := c.tables[access/RelaxedOrdering&1].Load()
	h := indexHash(0, page)
	if more >= t.short.Load() {
		h = indexHashAt(indexLevel(more, t.levels.Load()), page)
	}
	l := t.bucket(h).match(h)
	e := l.e.Load()
	span := l.span.Load()
	if !spanCovers(span, page, more) || e == nil || r.Start >= r.End ||
		!spanAllows(span, access) || c.state.Load()&forkguard.Alive == 0 {
		return c.acquireSlow(ctx, r, access, nil)
	}
	reg := Region{c: c, e: e, h: c.holds.at()}
	old := reg.h.load()
	reg.word = e.id() | (old + 1)
	if old >= holdCount || !reg.h.swap(old, reg.word) {
		return c.noteSlow(ctx, r, access, nil, reg, l)
	}
	if l.seen.Load() == c.word.Load()+seenMark && l.e.Load() == e {
		return reg, nil
	}
	return c.verifySlow(ctx, r, access, reg, l)
}

// acquireSlow is acquire without shortcuts.
func (c *Cache) acquireSlow(ctx context.Context, r Range, access Access, lane *Lane) (Region, error) {
	reg, ok := c.hit(r, access, lane)
	if ok {
		return reg, nil
	}
	return c.noHit(ctx, r, access, reg.e)
}

// noteSlow is the rest of acquire after the first hold wasn't free.
func (c *Cache) noteSlow(ctx context.Context, r Range, access Access, lane *Lane, reg Region, l *listing) (Region, error) {
	return c.verifySlow(ctx, r, access, c.note(reg, lane), l)
}

// note notes a holder of reg's entry.
func (c *Cache) note(reg Region, lane *Lane) Region {
	reg.h = nil
	if lane != nil {
		reg.h, reg.word = lane.claim(reg.e.id())
	}
	if reg.h == nil {
		reg.h, reg.word = c.holds.claim(reg.e.id())
	}
	if reg.h == nil {
		reg.e.refs.Add(1)
		c.stats.unnoted.Add(1)
	}
	return reg
}

// verifySlow is the rest of acquire after the holder was noted.
func (c *Cache) verifySlow(ctx context.Context, r Range, access Access, reg Region, l *listing) (Region, error) {
	reg, ok := c.verify(reg, l)
	if ok {
		return reg, nil
	}
	return c.noHit(ctx, r, access, reg.e)
}

// noHit is the rest of acquire after it hasn't hit, and has found a stale entry
// if that isn't nil.
func (c *Cache) noHit(ctx context.Context, r Range, access Access, stale *entry) (Region, error) {
	if _, ok := ctx.(tryOnly); !ok {
		return c.miss(ctx, r, access, stale)
	}
	if stale != nil {
		c.tryRetire(stale)
	}
	return Region{}, errMiss
}

// hit returns a region that serves r; or false and a region with the entry that
// was found stale, if any, which the caller retires.
func (c *Cache) hit(r Range, access Access, lane *Lane) (Region, bool) {
	if r.Start >= r.End || c.guard.Forked() {
		return Region{}, false
	}
	l, span, e := c.tables[access/RelaxedOrdering&1].Load().lookup(r)
	if l == nil || !spanAllows(span, access) {
		return Region{}, false
	}
	return c.verify(c.note(Region{c: c, e: e}, lane), l)
}

// verify is the rest of hit after the holder was noted. A listing that is void,
// or has changed, tells nothing: the caller looks again under mu.
func (c *Cache) verify(reg Region, l *listing) (Region, bool) {
	if c.hitCheck != nil {
		c.awaitHitCheck()
	}
	seen := l.seen.Load()
	if seen == 0 || l.e.Load() != reg.e {
		c.undo(reg)
		return Region{}, false
	}
	word := c.table.Word()
	if seen == uint64(word)+seenMark {
		return reg, true
	}
	if seen&^seenMark != uint64(word) {
		word = c.table.Quiet()
		if word.Lost() || c.table.Stamp(&reg.e.watch) != reg.e.stamp {
			c.undo(reg)
			return Region{e: reg.e}, false
		}
		c.stats.restamped.Add(1)
	}
	l.seen.CompareAndSwap(seen, uint64(word)|seenMark)
	return reg, true
}

// undo takes back an acquire that is no hit.
func (c *Cache) undo(reg Region) {
	c.stats.undone.Add(1)
	if reg.h == nil {
		reg.e.drop()
	} else {
		reg.h.release(reg.word)
	}
	_ = c.released(reg.e) // a forked child doesn't get here
}

// awaitHitCheck returns when no operation is between its change of the page
// tables and its record: the monitor is about to read it, so this is short.
func (c *Cache) awaitHitCheck() {
	for i := 0; !c.hitCheck() && !c.table.Word().Lost(); i++ {
		if i < 4096 {
			runtime.Gosched()
		} else {
			time.Sleep(20 * time.Microsecond)
		}
	}
}

// flight is a registration on its way. Others that want an overlapping range
// wait for it.
type flight struct {
	want   Range // what was asked for
	target Range // what is being registered; guarded by mu
	access Access
	set    *regionSet
	// What the target is without what is optional; see gather.
	core       Range
	coreAccess Access
	optional   bool          // the target is more than the core
	grew       bool          // it extends an entry at one end
	done       chan struct{} // made by the first who waits; guarded by mu
	perUse     PerUseCause   // why it wasn't cached; valid once done is closed
	err        error         // what the device hadn't enough of, for as long as it was asked; likewise
	void       bool          // Invalidate has been called for it; guarded by mu
	// crowded says that live entries may overlap the target; if not, they do
	// only if the set's spans.inserted has changed.
	crowded  bool
	inserted uint64
}

// landed returns what is closed when f ends. mu must be held, and f be listed.
func (f *flight) landed() <-chan struct{} {
	if f.done == nil {
		f.done = make(chan struct{})
	}
	return f.done
}

// takeOff returns a flight that isn't listed yet; it may have been another's
// before. mu must be held.
func (c *Cache) takeOff(want Range, access Access, set *regionSet) *flight {
	f := c.spare
	if c.spare = nil; f == nil {
		f = new(flight)
	}
	*f = flight{want: want, access: access, set: set, crowded: true}
	return f
}

// miss is Acquire after the first try for a hit, which failed and may have
// found a stale entry.
func (c *Cache) miss(ctx context.Context, want Range, access Access, stale *entry) (Region, error) {
	if err := want.Check(); err != nil {
		return Region{}, fmt.Errorf("acquire %v: %w: %w", want, ErrRange, err)
	}
	if !access.Valid() {
		return Region{}, fmt.Errorf("acquire %v with access %v (remote write and atomics need local write): %w", want, access, ErrAccess)
	}
	if c.guard.Forked() {
		return Region{}, fmt.Errorf("acquire %v: %w", want, ErrForked)
	}
	if ctx == nil {
		ctx = context.Background()
	}
	cause := MissInvalid
	if stale != nil {
		cause = MissStale
	}
	for first, counted := true, false; ; first = false {
		if err := ctx.Err(); err != nil {
			return Region{}, fmt.Errorf("acquire %v: %w", want, err)
		}
		if !first {
			reg, ok := c.hit(want, access, nil)
			if ok {
				if counted {
					c.stats.undone.Add(1) // it is a miss already
				}
				return reg, nil
			}
			stale = reg.e
		}
		if stale != nil {
			c.replace(stale)
		}
		c.lock()
		if c.closed {
			c.mu.Unlock()
			return Region{}, fmt.Errorf("acquire %v: %w", want, ErrClosed)
		}
		set := c.set(access)
		over := set.spans.first(want)
		if over != nil && over.covers(want) && over.granted().Covers(access) {
			// Published since the hit was tried; or stale, and then the next
			// try retires it.
			c.mu.Unlock()
			continue
		}
		if !counted {
			counted = true
			if cause == MissInvalid {
				cause = whyNot(over, want)
			}
			c.stats.misses[cause].Add(1)
		}
		if c.perUseOnly != PerUseInvalid {
			why := c.perUseOnly
			c.mu.Unlock()
			return c.registerPerUse(ctx, want, access, why)
		}
		if c.uncovered.has(want) {
			// Nothing is given up, and nobody waited for, unless it has changed.
			c.mu.Unlock()
			if errors.Is(c.opts.Monitor.Cover(c.round(want)), monitor.ErrUncovered) {
				return c.registerPerUse(ctx, want, access, PerUseUncovered)
			}
			c.lock()
			c.uncovered.drop(want)
			c.mu.Unlock()
			continue
		}
		if f := c.overlappingFlight(set, want); f != nil {
			done := f.landed()
			c.mu.Unlock()
			c.stats.waits.Add(1)
			select {
			case <-done:
			case <-ctx.Done():
				return Region{}, fmt.Errorf("acquire %v: wait for registration of %v: %w", want, f.want, ctx.Err())
			}
			if f.perUse != PerUseInvalid && f.target.Contains(want) {
				// What keeps that range out of the cache keeps this one out:
				// don't queue up for the same answer.
				return c.registerPerUse(ctx, want, access, f.perUse)
			}
			if f.err != nil && c.round(f.want).Contains(want) && f.access.Covers(access) {
				// Nor for the same refusal, which takes its time.
				return Region{}, fmt.Errorf("acquire %v: %w", want, f.err)
			}
			continue
		}
		f := c.takeOff(want, access, set)
		// A releaser looks at state after it has let go, the planner at
		// holders after it has announced itself: one of them sees the other.
		if c.opts.WaitForBudget {
			c.wait()
		}
		union, wait := c.plan(f)
		budget, closed := c.budget, c.closed
		c.mu.Unlock()
		if !wait {
			if c.opts.WaitForBudget {
				c.unwait()
			}
			return c.fly(ctx, f, union)
		}
		if closed {
			c.unwait()
			continue // nobody will wake us any more
		}
		c.stats.waits.Add(1)
		select {
		case <-budget:
		case <-ctx.Done(): // the loop returns its error
		}
		c.unwait()
	}
}

// whyNot returns why no live entry serves r, given the first that overlaps it.
func whyNot(over *entry, r Range) MissCause {
	switch {
	case over == nil:
		return MissAbsent
	case over.covers(r):
		return MissAccess
	default:
		return MissPartial
	}
}

// plan chooses what to register for f and with which access, lists f, and
// makes room: idle regions that the new one will replace, and others if that is
// not enough, are given up. It reports true, with f unlisted again, if the
// caller must wait for budget. mu must be held; it is released and retaken
// while evicted regions are deregistered.
func (c *Cache) plan(f *flight) (acc Access, wait bool) {
	var buf [4]*entry
	victims, acc := c.gather(f, buf[:0])
	f.crowded, f.inserted = len(victims) > 0, f.set.spans.inserted
	c.flights = append(c.flights, f)
	if !c.fits(f.target) {
		// It will never fit: register beside the cache.
		f.perUse = PerUseBudget
		return acc, false
	}
	if c.reserve(f.target, victims) {
		return acc, false
	}
	if exact := c.round(f.want); f.target != exact {
		// All together is too much beside what is in use; what was asked for
		// may not be.
		f.target, acc, f.optional = exact, f.access, false
		victims = f.set.spans.overlapping(exact, victims[:0])
		for _, v := range victims {
			acc |= v.granted()
		}
		if c.reserve(exact, victims) {
			return acc, false
		}
	}
	c.state.Or(stateRefused)
	c.reaper.wake() // a release may miss that: it must look again
	if c.opts.WaitForBudget {
		c.unlist(f)
		return acc, true
	}
	f.perUse = PerUseBudget
	return acc, false
}

// fly carries out a planned flight: with the target and the union of access
// that plan chose, or, if that can't be had, with exactly what was asked for.
func (c *Cache) fly(ctx context.Context, f *flight, union Access) (Region, error) {
	// Once landed, f may serve another miss.
	want, access, why := f.want, f.access, f.perUse
	if why != PerUseInvalid {
		c.land(f)
		return c.registerPerUse(ctx, want, access, why)
	}
	switch e, why, err := c.registerReserved(ctx, f, union); {
	case err != nil:
		return Region{}, err
	case why != PerUseInvalid:
		return c.registerPerUse(ctx, want, access, why)
	default:
		c.publish(f, e)
		return Region{c: c, e: e}, nil
	}
}

// registerReserved is registerTarget, and ends f with nothing left of it unless
// there is an entry to be published: also when the device panics.
func (c *Cache) registerReserved(ctx context.Context, f *flight, union Access) (e *entry, why PerUseCause, err error) {
	defer func() {
		if e == nil {
			c.lock()
			c.unreserve(f.target)
			if why == PerUseUncovered {
				c.uncovered.add(c.round(f.want))
			}
			c.mu.Unlock()
			c.letGo()
			f.perUse = why
			if transient(err) && ctx.Err() == nil {
				f.err = err
			}
			c.land(f)
		}
	}()
	return c.registerTarget(ctx, f, union)
}

// register takes the steps of the protocol and returns an entry with one
// holder, not yet published; or why the range can't be cached; or an error.
func (c *Cache) register(ctx context.Context, r Range, access Access) (*entry, PerUseCause, error) {
	e := &entry{start: r.Start, end: r.End, mode: modeCached}
	if err := c.table.Watch(&e.watch, r); err != nil {
		return nil, PerUseUncovered, nil // beyond the table's reach
	}
	made := false
	defer func() {
		if !made {
			c.table.Unwatch(&e.watch)
		}
	}()
	if c.hitCheck != nil {
		// Not needed for what is right, but whoever asks brings the record up
		// to date, and Take needn't wait for it.
		c.awaitHitCheck()
	}
	_, stamp := c.table.Take(&e.watch)
	if err := c.opts.Monitor.Cover(r); err != nil {
		switch {
		case errors.Is(err, monitor.ErrPending):
			return nil, PerUsePending, nil
		case errors.Is(err, monitor.ErrUncovered):
			return nil, PerUseUncovered, nil
		}
		return nil, PerUseLost, nil
	}
	reg, err := c.deviceRegister(ctx, r, access)
	if err != nil {
		return nil, PerUseInvalid, err
	}
	made = true
	e.refs.Store(1)
	c.adopt(e, reg)
	e.stamp = stamp
	return e, PerUseInvalid, nil
}

// registerPerUse registers exactly what one holder needs, beside the cache.
func (c *Cache) registerPerUse(ctx context.Context, want Range, access Access, why PerUseCause) (Region, error) {
	r := c.round(want)
	// Counted before it is made, so that Close knows of it.
	c.lock()
	if c.closed {
		c.mu.Unlock()
		return Region{}, fmt.Errorf("acquire %v: %w", want, ErrClosed)
	}
	c.perUseHeld++
	c.mu.Unlock()
	c.stats.perUse[why].Add(1)
	made := false
	defer func() {
		if !made { // an error, or the device has panicked
			c.perUseGone()
		}
	}()
	reg, err := c.deviceRegister(ctx, r, access)
	if err != nil {
		return Region{}, err
	}
	made = true
	e := &entry{start: r.Start, end: r.End, mode: modePerUse}
	e.refs.Store(1)
	c.adopt(e, reg)
	return Region{c: c, e: e}, nil
}

func (c *Cache) perUseGone() {
	c.lock()
	c.perUseHeld--
	c.freed()
	c.finish()
	c.mu.Unlock()
	c.letGo()
}

func (c *Cache) releasePerUse(e *entry) error {
	if e.refs.Or(refDead)&refDead != 0 {
		return fmt.Errorf("release %v: %w", e.rng(), ErrReleased)
	}
	return c.exhume(e)
}

// deviceRegister calls the device, patiently.
func (c *Cache) deviceRegister(ctx context.Context, r Range, access Access) (reg device.Registration, err error) {
	err = c.patiently(ctx, r, func() error {
		start := c.clock()
		if reg, err = c.dev.Register(ctx, r, access); err != nil {
			c.stats.registerErrors.Add(1)
			return err
		}
		c.stats.register.record(c.clock() - start)
		return nil
	})
	if err != nil {
		return reg, fmt.Errorf("acquire %v: %w", r, err)
	}
	if !reg.Range.Contains(r) || reg.Range.Len()-r.Len() > math.MaxUint32 || !reg.Access.Covers(access) {
		return reg, errors.Join(fmt.Errorf("register %v with %v: device returned %v with %v: %w",
			r, access, reg.Range, reg.Access, device.ErrInvalid), c.refuse(reg))
	}
	return reg, nil
}
