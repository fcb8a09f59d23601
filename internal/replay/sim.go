package replay

import "math"

// tally counts calls and the pages that they were for.
type tally struct {
	n     uint64
	pages uint64
}

func (t *tally) add(pages uint64) {
	t.n++
	t.pages += pages
}

// sim is a cache for each process, under one policy. It is used by one
// goroutine.
type sim struct {
	policy     Policy
	maxRegions int
	maxPages   uint64
	merge      uint64  // pages
	pageUnits  float64 // pages of the cost models in a page
	models     []Model
	adapter    *adapter // may be nil

	spaces []*cacheSpace
	held   []*region
	list   []*region // scratch
	free   *region   // to use again, by next

	requests, hits            uint64
	cold, partial, access     uint64
	stale, updates            uint64 // requests that found a stale region
	register, update          tally
	dereg                     tally // on the program's path: in requests and releases
	reclaim                   tally // when a region becomes stale
	closed                    tally // when the process ends
	evictions, perUse         uint64
	invalidIdle, invalidInUse uint64
	waits                     uint64
	wait                      []float64 // seconds, by model
	maxCall, maxPage          float64   // of all models, to skip who needn't wait

	pinned, peak  uint64 // pages
	stalePinned   uint64
	stalePeak     uint64
	regions, most int
	area          float64 // pages × seconds
	staleArea     float64
	last          int64
	series        series
}

type cacheSpace struct {
	index index
	// Ends of lists: of idle regions in the cache, next is the one released
	// longest ago; and of those in use outside of it.
	idle, outside region
	regions       int
	pages         uint64 // in the cache or given up in use

	pushed     []place // the last few whose place longer requests took
	nextPushed int
}

func newSim(p Policy, opts *Options, pageSize float64) *sim {
	s := &sim{
		policy: p, maxRegions: opts.MaxRegions, maxPages: max(1, uint64(float64(opts.MaxBytes)/pageSize)),
		merge: uint64(float64(opts.MergeBytes) / pageSize), pageUnits: pageSize / modelPage,
		models: opts.Models, wait: make([]float64, len(opts.Models)),
	}
	for _, m := range opts.Models {
		s.maxCall = max(s.maxCall, m.Register.Call, m.Update.Call)
		s.maxPage = max(s.maxPage, m.Register.Page, m.Update.Page)
	}
	return s
}

// known reports whether the process has ever made a request.
func (s *sim) known(i uint32) bool { return int(i) < len(s.spaces) && s.spaces[i] != nil }

func (s *sim) space(i uint32) *cacheSpace {
	for int(i) >= len(s.spaces) {
		s.spaces = append(s.spaces, nil)
	}
	c := s.spaces[i]
	if c == nil {
		c = new(cacheSpace)
		c.idle.prev, c.idle.next = &c.idle, &c.idle
		c.outside.prev, c.outside.next = &c.outside, &c.outside
		s.spaces[i] = c
	}
	return c
}

// tick accounts for the time since the last change of what is pinned.
func (s *sim) tick(at int64) {
	if d := at - s.last; d > 0 {
		seconds := float64(d) * 1e-9
		s.area += float64(float64(s.pinned) * seconds)
		s.staleArea += float64(float64(s.stalePinned) * seconds)
		s.last = at
	}
}

// level notes what is pinned after a change.
func (s *sim) level(at int64) {
	s.peak = max(s.peak, s.pinned)
	s.stalePeak = max(s.stalePeak, s.stalePinned)
	s.most = max(s.most, s.regions)
	s.series.add(at, s.pinned)
}

func (s *sim) run(batch []action) {
	for i := range batch {
		a := &batch[i]
		s.tick(a.at)
		switch a.kind {
		case actAcquire:
			s.acquire(a)
		case actRelease:
			s.release(a)
		case actInvalidate:
			if s.policy != PerUse && s.known(a.space) {
				s.invalidate(a)
			}
		case actReset:
			if s.known(a.space) {
				s.reset(a)
			}
		}
	}
}

// hold gives a request its region.
func (s *sim) hold(slot uint32, r *region) {
	for int(slot) >= len(s.held) {
		s.held = append(s.held, nil)
	}
	s.held[slot] = r
	if r.holds++; r.holds == 1 && !r.dead {
		r.unlink()
	}
}

func (r *region) unlink() {
	if r.next != nil {
		r.prev.next, r.next.prev = r.next, r.prev
		r.prev, r.next = nil, nil
	}
}

// link appends r to a list.
func (r *region) link(end *region) {
	r.prev, r.next = end.prev, end
	r.prev.next, end.prev = r, r
}

func (s *sim) acquire(a *action) {
	s.requests++
	c := s.space(a.space)
	if s.policy == PerUse {
		s.registerFor(c, a, a.start, a.end, a.write, true)
		return
	}
	if r := c.index.containing(a.start, a.end); r != nil && (r.write || !a.write) {
		if !r.stale {
			s.hits++
			s.waitFor(r, a.at)
			if s.adapter != nil {
				s.adapter.hit(r)
			}
			s.hold(a.slot, r)
			return
		}
		if s.policy == Update {
			s.stale++
			s.updates++
			s.update.add(r.pages())
			s.stalePinned -= r.pages()
			r.stale, r.made, r.updated = false, a.at, true
			if s.adapter != nil {
				s.adapter.update(r)
			}
			s.hold(a.slot, r)
			return
		}
	}
	s.miss(c, a)
}

func (s *sim) miss(c *cacheSpace, a *action) {
	s.list = c.index.overlapping(a.start, a.end, s.list[:0])
	sawStale, sawAccess := false, false
	for _, r := range s.list {
		sawStale = sawStale || r.stale
		sawAccess = sawAccess || r.start <= a.start && r.end >= a.end
	}
	switch {
	case sawStale:
		s.stale++
	case sawAccess:
		s.access++
	case len(s.list) > 0:
		s.partial++
	default:
		s.cold++
	}
	p := place{a.start, a.end, a.write}
	if len(s.list) > 0 {
		p = s.join(c, p)
	}
	for _, r := range s.list {
		s.giveUp(c, r, &s.dereg)
	}
	if !s.makeRoom(c, p.end-p.start) {
		s.perUse++
		s.registerFor(c, a, a.start, a.end, a.write, true)
		return
	}
	s.registerFor(c, a, p.start, p.end, p.write, false)
}

// place is a range with the access that it has or had.
type place struct {
	start, end uint64
	write      bool
}

func (p place) union(q place) place {
	return place{min(p.start, q.start), max(p.end, q.end), p.write || q.write}
}

func (p place) contains(q place) bool {
	return p.start <= q.start && q.end <= p.end && (p.write || !q.write)
}

// These are the cache's.
const (
	crowdFactor      = 8
	rememberedMerges = 32
)

// join returns what to register for want, which overlaps the regions of s.list,
// and sets s.list to those that it replaces: the union with them, if it isn't too
// long. Two ranges that take turns and whose union is would push each other out
// for ever: so one that comes back after it was pushed out may be joined with
// what else was, up to a larger limit.
func (s *sim) join(c *cacheSpace, want place) place {
	target := want
	for crowded := false; ; {
		u := target
		for _, r := range s.list {
			if !r.stale {
				u = u.union(place{r.start, r.end, r.write})
			}
		}
		if u.start == target.start && u.end == target.end {
			return u
		}
		if !crowded && u.end-u.start > s.merge {
			crowded = s.merge > 0 && c.pushedOut(want)
		}
		limit := s.merge
		if crowded {
			limit = max(crowdFactor*s.merge, 4*(want.end-want.start))
			u = s.crowd(c, u, limit)
		}
		if s.merge == 0 || u.end-u.start > min(limit, s.maxPages) {
			break
		}
		target = u
		s.list = c.index.overlapping(u.start, u.end, s.list[:0])
	}
	target = want
	s.list = c.index.overlapping(want.start, want.end, s.list[:0])
	for _, r := range s.list {
		if r.stale {
			continue
		}
		target.write = target.write || r.write
		if r.start < want.start || r.end > want.end {
			if len(c.pushed) < rememberedMerges {
				c.pushed = append(c.pushed, place{})
			}
			c.pushed[c.nextPushed] = place{r.start, r.end, r.write}
			c.nextPushed = (c.nextPushed + 1) % rememberedMerges
		}
	}
	return target
}

// pushedOut reports whether what is asked for was there, and had to make room.
func (c *cacheSpace) pushedOut(want place) bool {
	for _, p := range c.pushed {
		if p.start <= want.start && want.end <= p.end {
			return true
		}
	}
	return false
}

// crowd adds to u the other ranges that were pushed out and overlap it.
func (s *sim) crowd(c *cacheSpace, u place, limit uint64) place {
	for again := true; again; {
		again = false
		for _, p := range c.pushed {
			if p.start >= u.end || u.start >= p.end || u.contains(p) {
				continue
			}
			if w := u.union(p); w.end-w.start <= min(limit, s.maxPages) {
				u, again = w, true
			}
		}
	}
	return u
}

// makeRoom evicts until another region of so many pages fits.
func (s *sim) makeRoom(c *cacheSpace, pages uint64) bool {
	if pages > s.maxPages {
		return false
	}
	for c.regions+1 > s.maxRegions || c.pages+pages > s.maxPages {
		r := c.idle.next
		if r == &c.idle {
			return false
		}
		s.evictions++
		s.giveUp(c, r, &s.dereg)
	}
	return true
}

// giveUp takes r out of the cache. If it is idle it is deregistered now, and
// counted in t; else when it is released.
func (s *sim) giveUp(c *cacheSpace, r *region, t *tally) {
	c.index.remove(r)
	r.unlink()
	if r.dead = true; r.holds == 0 {
		s.deregister(c, r, t)
		s.recycle(r)
	} else {
		r.link(&c.outside)
	}
}

func (s *sim) deregister(c *cacheSpace, r *region, t *tally) {
	t.add(r.pages())
	if s.adapter != nil {
		s.adapter.deregister(r)
	}
	s.pinned -= r.pages()
	s.regions--
	if r.stale {
		s.stalePinned -= r.pages()
	}
	if !r.perUse {
		c.pages -= r.pages()
		c.regions--
	}
}

func (s *sim) registerFor(c *cacheSpace, a *action, start, end uint64, write, perUse bool) {
	r := s.free
	if r != nil {
		s.free = r.next
	} else {
		r = new(region)
	}
	*r = region{start: start, end: end, space: a.space, write: write, perUse: perUse, dead: perUse, made: a.at}
	s.register.add(r.pages())
	if s.adapter != nil {
		s.adapter.register(r)
	}
	s.pinned += r.pages()
	s.regions++
	if perUse {
		r.link(&c.outside)
	} else {
		c.pages += r.pages()
		c.regions++
		c.index.insert(r)
	}
	s.hold(a.slot, r)
	s.level(a.at)
}

func (s *sim) release(a *action) {
	if int(a.slot) >= len(s.held) {
		return
	}
	r := s.held[a.slot]
	if r == nil {
		return
	}
	s.held[a.slot] = nil
	if r.holds == 0 {
		return // the address space has ended
	}
	if r.holds--; r.holds > 0 {
		return
	}
	c := s.space(r.space)
	if !r.dead {
		r.link(&c.idle)
		return
	}
	r.unlink()
	s.deregister(c, r, &s.dereg)
	s.recycle(r)
	s.level(a.at)
}

// recycle keeps r, to which nothing refers, for the next registration.
func (s *sim) recycle(r *region) {
	r.next, s.free = s.free, r
}

func (s *sim) invalidate(a *action) {
	c := s.space(a.space)
	s.list = c.index.overlapping(a.start, a.end, s.list[:0])
	if s.adapter != nil {
		s.adapter.change(a.space, a.start, a.end, s.list)
	}
	for _, r := range s.list {
		if r.stale {
			continue
		}
		if r.holds > 0 {
			s.invalidInUse++
		} else {
			s.invalidIdle++
		}
		r.stale = true
		s.stalePinned += r.pages()
		if s.policy == Drop || s.policy == DropKernel {
			s.giveUp(c, r, &s.reclaim)
		}
	}
	if len(s.list) > 0 {
		s.level(a.at)
	}
}

// reset is the end of an address space: the kernel deregisters everything.
func (s *sim) reset(a *action) {
	c := s.space(a.space)
	s.list = c.index.overlapping(0, math.MaxUint64, s.list[:0])
	for r := c.outside.next; r != &c.outside; r = r.next {
		s.list = append(s.list, r)
	}
	// Requests may still refer to them: they are not used again.
	for _, r := range s.list {
		if !r.dead {
			c.index.remove(r)
		}
		r.unlink()
		r.dead, r.holds = true, 0
		s.deregister(c, r, &s.closed)
	}
	if a.last {
		s.spaces[a.space] = nil
	}
	s.level(a.at)
}

// waitFor accounts for what is left of r's registering or updating.
func (s *sim) waitFor(r *region, at int64) {
	since, pages := float64(at-r.made), float64(r.pages())*s.pageUnits
	if since >= s.maxCall+float64(pages*s.maxPage) {
		return
	}
	waited := false
	for i := range s.models {
		c := s.models[i].Register
		if r.updated {
			c = s.models[i].Update
		}
		if left := c.Call + float64(pages*c.Page) - since; left > 0 {
			s.wait[i] += float64(left * 1e-9)
			waited = true
		}
	}
	if waited {
		s.waits++
	}
}

// series keeps the highest value of each of at most seriesSize spans of time,
// which get longer as time goes on.
type series struct {
	shift uint
	max   []uint64
	last  uint64
}

const seriesSize = 512

func (s *series) add(at int64, v uint64) {
	for at>>s.shift >= seriesSize {
		for i := range (len(s.max) + 1) / 2 {
			m := s.max[2*i]
			if 2*i+1 < len(s.max) {
				m = max(m, s.max[2*i+1])
			}
			s.max[i] = m
		}
		s.max = s.max[:(len(s.max)+1)/2]
		s.shift++
	}
	i := int(at >> s.shift)
	for len(s.max) <= i {
		s.max = append(s.max, s.last)
	}
	s.max[i] = max(s.max[i], v)
	s.last = v
}

// points returns the series up to the end of time, in seconds.
func (s *series) points(end int64, unit float64) (x, y []float64) {
	for i, v := range s.max {
		x = append(x, float64(int64(i)<<s.shift)*1e-9)
		y = append(y, float64(v)*unit)
	}
	if n := len(x); n > 0 && float64(end)*1e-9 > x[n-1] {
		x, y = append(x, float64(end)*1e-9), append(y, float64(s.last)*unit)
	}
	return x, y
}

// share returns a/b, 0 if b is 0.
func share(a, b float64) float64 {
	if b == 0 || math.IsNaN(b) {
		return 0
	}
	return a / b
}
