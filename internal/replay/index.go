package replay

// region is a registration that a cache keeps, or that outlives it in use.
type region struct {
	start, end uint64 // pages
	space      uint32
	write      bool
	stale      bool
	dead       bool // not in the cache any more: goes when it is released
	perUse     bool // never was in it
	holds      int32
	made       int64 // when registering or updating began
	updated    bool  // it was updating
	prev, next *region
	pin        *pinned // by a simulated adapter, if there is one
}

func (r *region) pages() uint64 { return r.end - r.start }

// index finds the regions of one process. They don't overlap.
type index struct{ regions ordered[*region] }

func (x *index) insert(r *region) { x.regions.put(r.start, r) }
func (x *index) remove(r *region) { x.regions.remove(r.start) }

// containing returns the region that contains [start,end), if any.
func (x *index) containing(start, end uint64) *region {
	if c, ok := x.regions.floor(start); ok {
		if r := x.regions.value(c); r.end >= end {
			return r
		}
	}
	return nil
}

// overlapping appends the regions that overlap [start,end), in order.
func (x *index) overlapping(start, end uint64, list []*region) []*region {
	c, ok := x.regions.floor(start)
	if !ok {
		c = cursor{}
	}
	for ; x.regions.valid(c); c = x.regions.next(c) {
		r := x.regions.value(c)
		if r.start >= end {
			break
		}
		if r.end > start {
			list = append(list, r)
		}
	}
	return list
}
