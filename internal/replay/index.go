package replay

import "github.com/google/btree"

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
}

func (r *region) pages() uint64 { return r.end - r.start }

// index finds the regions of one process. They don't overlap.
type index struct {
	tree  *btree.BTreeG[*region]
	exact map[uint64]*region
	key   region
}

func newIndex() *index {
	return &index{
		tree:  btree.NewG(16, func(a, b *region) bool { return a.start < b.start }),
		exact: make(map[uint64]*region),
	}
}

func (x *index) insert(r *region) {
	x.tree.ReplaceOrInsert(r)
	x.exact[r.start] = r
}

func (x *index) remove(r *region) {
	x.tree.Delete(r)
	delete(x.exact, r.start)
}

// before returns the last region that starts at or before page.
func (x *index) before(page uint64) (found *region) {
	x.key.start = page
	x.tree.DescendLessOrEqual(&x.key, func(r *region) bool {
		found = r
		return false
	})
	return found
}

// containing returns the region that contains [start,end), if any.
func (x *index) containing(start, end uint64) *region {
	if r := x.exact[start]; r != nil {
		// No other can: they don't overlap.
		if r.end >= end {
			return r
		}
		return nil
	}
	if r := x.before(start); r != nil && r.end >= end {
		return r
	}
	return nil
}

// overlapping appends the regions that overlap [start,end), in order.
func (x *index) overlapping(start, end uint64, list []*region) []*region {
	if x.tree.Len() == 0 {
		return list
	}
	from := start
	if r := x.before(start); r != nil && r.end > start {
		from = r.start
	}
	x.key.start = from
	x.tree.AscendGreaterOrEqual(&x.key, func(r *region) bool {
		if r.start >= end {
			return false
		}
		list = append(list, r)
		return true
	})
	return list
}
