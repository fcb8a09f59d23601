package pindown

import (
	"context"
	"fmt"
	"slices"

	"github.com/pindown/pindown/epoch"
)

// What a miss registers beyond what was asked for. Every rule here keeps the
// pages that are registered in all within a factor of those that were asked for,
// whatever the order of requests, and yields to the exact range where the
// device, the monitor or a limit refuses.
//
//   - Overlap: live entries that overlap the request join it, up to MergeBytes,
//     if no VM operation has touched them.
//     Two ranges that take turns and whose union is longer would push each other
//     out for ever; so a range that comes back after it was pushed out may join
//     beyond MergeBytes, up to [crowdFactor] times that.
//   - Neighbours: idle entries that touch the request join it if they are no
//     longer than what is registered anyway, like the digits of a binary counter:
//     each page is registered anew only when the region it belongs to doubles at
//     least.
//   - Ahead: if the request extends a region that came about by extending another,
//     it is taken for a window that grows, and a share of its length is registered
//     beyond its end. A share, so the registrations of a window of n pages have
//     O(n) pages together.
//
// Neighbours and what is ahead are optional: they evict nothing, are tried once,
// and don't let peers at memory at which they weren't let before.

const (
	// crowdFactor is how far beyond MergeBytes ranges that push each other out
	// are merged.
	crowdFactor = 8
	// rememberedMerges is how many pushed-out ranges and failed extensions are
	// remembered.
	rememberedMerges = 32
)

// remote is the access that lets peers at the memory.
const remote = RemoteRead | RemoteWrite | RemoteAtomic | WindowBind

// place is a range in one set.
type place struct {
	set    *regionSet
	rng    Range
	access Access
}

// placeRing remembers the last few places.
type placeRing struct {
	list [rememberedMerges]place
	next int
}

func (p *placeRing) add(x place) {
	p.list[p.next] = x
	p.next = (p.next + 1) % len(p.list)
}

// rangeRing remembers the last few ranges.
type rangeRing struct {
	list []Range
	next int
}

func (p *rangeRing) add(r Range) {
	switch {
	case p.has(r):
	case len(p.list) < rememberedMerges:
		p.list = append(p.list, r)
	default:
		p.list[p.next] = r
		p.next = (p.next + 1) % len(p.list)
	}
}

// has reports whether one of them overlaps r.
func (p *rangeRing) has(r Range) bool {
	return slices.ContainsFunc(p.list, r.Overlaps)
}

// drop forgets those that overlap r.
func (p *rangeRing) drop(r Range) {
	p.list = slices.DeleteFunc(p.list, r.Overlaps)
	p.next = 0
}

// merging is what the cache remembers of earlier merges. It is guarded by mu.
type merging struct {
	pushed placeRing // entries that a request which overlaps them took the place of
	failed placeRing // optional parts of registrations that failed
}

// gather chooses what to register for f: its target, the access, and, appended
// to dst, the live entries that overlap the target. mu must be held.
func (c *Cache) gather(f *flight, dst []*entry) ([]*entry, Access) {
	f.target = c.round(f.want)
	f.core, f.coreAccess = f.target, f.access
	victims := f.set.spans.overlapping(f.target, dst)
	if len(victims) == 0 && c.live() < c.opts.MergeAbove {
		return victims, f.access
	}
	victims = c.join(f, victims)
	grown := c.grows(f, victims)
	switch {
	case c.opts.MergeBytes < 0:
	case grown:
		c.reachAhead(f, victims)
	case c.live() >= c.opts.MergeAbove:
		c.takeNeighbours(f)
	}
	acc := f.coreAccess
	if f.optional = f.target != f.core; f.optional {
		victims = f.set.spans.overlapping(f.target, victims[:0])
		for _, e := range victims {
			if c.unchanged(e) {
				acc |= e.granted()
			}
		}
	}
	return victims, acc
}

// live returns the number of entries that may be hit. mu must be held.
func (c *Cache) live() int { return c.sets[0].spans.n + c.sets[1].spans.n }

// join makes f's target and core the union with the entries that overlap it, if
// that may be, and returns them. mu must be held.
func (c *Cache) join(f *flight, victims []*entry) []*entry {
	exact := f.target
	for crowded := false; ; {
		u, a := f.target, f.coreAccess
		for _, e := range victims {
			if c.unchanged(e) {
				u, a = u.Union(e.rng()), a|e.granted()
			}
		}
		if u == f.target {
			f.core, f.coreAccess = u, a
			return victims
		}
		if !crowded && uint64(u.Len()) > uint64(max(c.opts.MergeBytes, 0)) {
			crowded = c.opts.MergeBytes >= 0 && c.pushedOut(f)
		}
		if crowded {
			u, a = c.crowd(f, u, a)
		}
		if !c.mayJoin(f, u, crowded) {
			break
		}
		f.target, f.coreAccess = u, a
		victims = f.set.spans.overlapping(u, victims[:0])
	}
	f.target, f.core, f.coreAccess = exact, exact, f.access
	victims = f.set.spans.overlapping(exact, victims[:0])
	for _, e := range victims {
		if !c.unchanged(e) {
			continue
		}
		f.coreAccess |= e.granted()
		if !exact.Contains(e.rng()) {
			c.merging.pushed.add(place{f.set, e.rng(), e.granted()})
		}
	}
	return victims
}

// mayJoin reports whether one registration of u may serve f. mu must be held.
func (c *Cache) mayJoin(f *flight, u Range, crowded bool) bool {
	return c.opts.MergeBytes >= 0 && uint64(u.Len()) <= c.joinLimit(f, crowded) && c.fits(u) && c.overlappingFlight(f.set, u) == nil
}

func (c *Cache) joinLimit(f *flight, crowded bool) uint64 {
	if !crowded {
		return uint64(c.opts.MergeBytes)
	}
	return max(crowdFactor*uint64(c.opts.MergeBytes), 4*uint64(f.want.Len()))
}

// pushedOut reports whether what f asks for was there, and had to make room for
// another range. mu must be held.
func (c *Cache) pushedOut(f *flight) bool {
	for _, p := range c.merging.pushed.list {
		if p.set == f.set && p.rng.Contains(f.want) {
			return true
		}
	}
	return false
}

// crowd adds to u the other ranges that were pushed out and overlap it, as far as
// the limit allows: they would come back one by one. mu must be held.
func (c *Cache) crowd(f *flight, u Range, a Access) (Range, Access) {
	for again := true; again; {
		again = false
		for _, p := range c.merging.pushed.list {
			if p.set != f.set || !p.rng.Overlaps(u) || u.Contains(p.rng) && a.Covers(p.access) {
				continue
			}
			if w := u.Union(p.rng); c.mayJoin(f, w, true) {
				u, a, again = w, a|p.access, true
			}
		}
	}
	return u, a
}

// grows notes whether f extends one of the entries that it overlaps at one end,
// and reports whether that one did so too. mu must be held.
func (c *Cache) grows(f *flight, victims []*entry) (again bool) {
	if n := len(victims); n > 0 {
		for _, e := range [2]*entry{victims[0], victims[n-1]} {
			if e.rng() != f.target && f.target.Contains(e.rng()) && (e.start == f.target.Start || e.end == f.target.End) &&
				c.unchanged(e) {
				f.grew = true
				again = again || e.refs.Load()&refGrown != 0
			}
		}
	}
	return again
}

// reachAhead extends f's target beyond the end at which it grows, if there is
// room for more. mu must be held.
func (c *Cache) reachAhead(f *flight, victims []*entry) {
	if c.opts.AheadBytes < 0 || f.coreAccess&remote != 0 {
		return
	}
	first, last := victims[0].rng(), victims[len(victims)-1].rng()
	room := c.roomBeside(f.target, victims)
	if c.lim.MaxRange != 0 {
		room = min(room, c.lim.MaxRange-min(c.lim.MaxRange, uint64(f.target.Len())))
	}
	n := f.target.Len()
	n = max(min(n/2, uintptr(c.opts.AheadBytes)), n/8)
	n = uintptr(min(uint64(n), room))
	up, down := f.target, f.target
	if first.Start == f.target.Start && n <= epoch.MaxAddress-f.target.End {
		up.End += n
	}
	if last.End == f.target.End && first.Start != f.target.Start && n < f.target.Start {
		down.Start -= n
	}
	u := c.clip(f, up.Union(down))
	if u != f.target && c.fits(u) && c.overlappingFlight(f.set, u) == nil {
		f.target = u
	}
}

// roomBeside returns how many bytes can be pinned beside r, if the idle ones
// among victims go, without evicting others. mu must be held.
func (c *Cache) roomBeside(r Range, victims []*entry) uint64 {
	held, used := c.holders(), c.bytes+c.cost(r)
	for _, e := range victims {
		if held.of(e) == 0 {
			used -= c.cost(e.rng())
		}
	}
	return c.opts.MaxBytes - min(c.opts.MaxBytes, used)
}

// clip shortens the parts of u beyond f's target: to whole pages, so that they
// reach no live entry, and, where they have failed before, to half of what has
// failed, so that the end of the memory is found in few steps. mu must be held.
func (c *Cache) clip(f *flight, u Range) Range {
	t := f.target
	if u.End > t.End {
		f.set.spans.from(t.End, ^uintptr(0), func(e *entry) bool { u.End = max(min(u.End, e.start), t.End); return false })
		for _, p := range c.merging.failed.list {
			if p.set == f.set && p.rng.Start <= t.End && t.End < p.rng.End {
				u.End = min(u.End, t.End+(p.rng.End-t.End)/2)
			}
		}
		u.End = max(u.End&^(c.pageSize-1), t.End)
	}
	if u.Start < t.Start {
		if e, _ := f.set.spans.beside(t); e != nil {
			u.Start = min(max(u.Start, e.end), t.Start)
		}
		for _, p := range c.merging.failed.list {
			if p.set == f.set && p.rng.Start < t.Start && t.Start <= p.rng.End {
				u.Start = max(u.Start, t.Start-(t.Start-p.rng.Start)/2)
			}
		}
		u.Start = min((u.Start+c.pageSize-1)&^(c.pageSize-1), t.Start)
	}
	return u
}

// takeNeighbours extends f's target by idle entries that touch it. mu must be
// held.
func (c *Cache) takeNeighbours(f *flight) {
	var held holders
	for {
		took := false
		before, after := f.set.spans.beside(f.target)
		for _, e := range [2]*entry{before, after} {
			if e == nil || e.end != f.target.Start && e.start != f.target.End || e.end-e.start > f.target.Len() {
				continue
			}
			u := f.target.Union(e.rng())
			if (e.granted()^f.coreAccess)&remote != 0 || !c.unchanged(e) || !c.mayJoin(f, u, false) || c.hasFailed(f.set, e.rng()) {
				continue
			}
			if held == nil {
				held = c.holders()
			}
			if held.of(e) == 0 {
				f.target, took = u, true
			}
		}
		if !took {
			return
		}
	}
}

// beside returns the last entry that starts before r, and the one that starts
// where r ends; nil where there is none.
func (s *spans) beside(r Range) (before, after *entry) {
	leaf, i := s.seek(r.End)
	for i >= 0 {
		l := s.leaves[leaf]
		switch start := l.start[i]; {
		case start < r.Start:
			return l.e[i], after
		case start == r.End:
			after = l.e[i]
		}
		if i--; i < 0 && leaf > 0 {
			leaf--
			i = s.leaves[leaf].n - 1
		}
	}
	return nil, after
}

// hasFailed reports whether something in r was an optional part that failed. mu
// must be held.
func (c *Cache) hasFailed(set *regionSet, r Range) bool {
	for _, p := range c.merging.failed.list {
		if p.set == set && p.rng.Overlaps(r) {
			return true
		}
	}
	return false
}

// mergeFailed notes that f's target couldn't be registered: what was optional
// isn't tried again soon, and ranges that were pushed out aren't joined again.
func (c *Cache) mergeFailed(f *flight) {
	c.mu.Lock()
	defer c.mu.Unlock()
	m := &c.merging
	if f.optional {
		if f.target.End > f.core.End {
			m.failed.add(place{set: f.set, rng: Range{Start: f.core.End, End: f.target.End}})
		}
		if f.target.Start < f.core.Start {
			m.failed.add(place{set: f.set, rng: Range{Start: f.target.Start, End: f.core.Start}})
		}
		return
	}
	for i := range m.pushed.list {
		if p := &m.pushed.list[i]; p.set == f.set && p.rng.Overlaps(f.target) {
			*p = place{}
		}
	}
}

// once is the context of a registration that isn't worth a second try or
// another's eviction.
type once struct{ context.Context }

// registerTarget registers f's target with the union of access; or, if that
// can't be had, what it needs at least.
func (c *Cache) registerTarget(ctx context.Context, f *flight, union Access) (*entry, PerUseCause, error) {
	if f.optional {
		e, why, err := c.register(once{ctx}, f.target, union)
		if e != nil {
			return e, why, err
		}
		if ctx.Err() != nil {
			// What failed isn't what was asked for.
			return nil, PerUseInvalid, fmt.Errorf("acquire %v: %w", f.want, ctx.Err())
		}
		c.mergeFailed(f)
		f.optional = false
		union = f.coreAccess
	} else {
		f.core = f.target
	}
	e, why, err := c.register(ctx, f.core, union)
	exact := c.round(f.want)
	if e != nil || f.core == exact && union == f.access {
		return e, why, err
	}
	if ctx.Err() != nil {
		return nil, PerUseInvalid, fmt.Errorf("acquire %v: %w", f.want, ctx.Err())
	}
	// The merged range has a hole, a page of another kind or permission, or is
	// too much: what was asked for may still do.
	if f.core != exact {
		c.mergeFailed(f)
	}
	return c.register(ctx, exact, f.access)
}
