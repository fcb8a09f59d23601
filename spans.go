package pindown

import "slices"

// spans holds the live entries of one set in address order, for whoever holds
// the cache's mu: misses, sweeps and reports. They never overlap. It is a B+
// tree of two levels; at a million entries the upper one is 16 thousand words.
// An append to a full last leaf begins a new one, so that addresses which come
// in order fill leaves wholly.
type spans struct {
	starts []uintptr // of each leaf's first entry
	leaves []*spanLeaf
	n      int

	inserted uint64 // entries ever
}

const spanLeafSize = 85

// spanLeaf is 2 KiB, a size class of the allocator. It carries the addresses
// beside the entries, so that a search doesn't touch entries, which are far apart.
type spanLeaf struct {
	n     int
	start [spanLeafSize]uintptr
	end   [spanLeafSize]uintptr
	e     [spanLeafSize]*entry
}

// shift moves what is at i and after it to i+by.
func (l *spanLeaf) shift(i, by int) {
	copy(l.start[i+by:], l.start[i:l.n])
	copy(l.end[i+by:], l.end[i:l.n])
	copy(l.e[i+by:], l.e[i:l.n])
	l.n += by
	if by < 0 {
		clear(l.e[l.n : l.n-by])
	}
}

// take appends what is at i and after it in o, where it leaves it.
func (l *spanLeaf) take(o *spanLeaf, i int) {
	copy(l.start[l.n:], o.start[i:o.n])
	copy(l.end[l.n:], o.end[i:o.n])
	copy(l.e[l.n:], o.e[i:o.n])
	l.n += o.n - i
}

// seek returns the place of the last entry that starts at or before addr;
// (0, -1) if all start later. There is no leaf 0 in an empty set.
func (s *spans) seek(addr uintptr) (leaf, i int) {
	leaf = max(search(s.starts, addr)-1, 0)
	if leaf == len(s.leaves) {
		return leaf, -1
	}
	l := s.leaves[leaf]
	return leaf, search(l.start[:l.n], addr) - 1
}

// search returns the number of elements of a sorted slice that are at most x.
func search(a []uintptr, x uintptr) int {
	lo, hi := 0, len(a)
	for lo < hi {
		if mid := int(uint(lo+hi) >> 1); a[mid] <= x {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	return lo
}

// from calls visit with the entries that end after addr and start before end,
// in address order, until it returns false.
func (s *spans) from(addr, end uintptr, visit func(*entry) bool) {
	leaf, i := s.seek(addr)
	if i < 0 || s.leaves[leaf].end[i] <= addr {
		i++
	}
	for ; leaf < len(s.leaves); leaf, i = leaf+1, 0 {
		for l := s.leaves[leaf]; i < l.n; i++ {
			if l.start[i] >= end || !visit(l.e[i]) {
				return
			}
		}
	}
}

// all calls visit with every entry, in address order.
func (s *spans) all(visit func(*entry)) {
	for _, l := range s.leaves {
		for _, e := range l.e[:l.n] {
			visit(e)
		}
	}
}

// overlapping appends the entries that overlap r, in address order.
func (s *spans) overlapping(r Range, dst []*entry) []*entry {
	s.from(r.Start, r.End, func(e *entry) bool {
		dst = append(dst, e)
		return true
	})
	return dst
}

// some is overlapping for the first len(dst) of them, and returns their
// number.
func (s *spans) some(r Range, dst []*entry) (n int) {
	s.from(r.Start, r.End, func(e *entry) bool {
		dst[n] = e
		n++
		return n < len(dst)
	})
	return n
}

// first returns the first entry that overlaps r, or nil.
func (s *spans) first(r Range) *entry {
	leaf, i := s.seek(r.Start)
	if leaf == len(s.leaves) {
		return nil
	}
	l := s.leaves[leaf]
	if i >= 0 && l.end[i] > r.Start {
		return l.e[i]
	}
	if i++; i == l.n {
		if leaf++; leaf == len(s.leaves) {
			return nil
		}
		l, i = s.leaves[leaf], 0
	}
	if l.start[i] < r.End {
		return l.e[i]
	}
	return nil
}

// insert adds e, which overlaps none.
func (s *spans) insert(e *entry) {
	s.n++
	s.inserted++
	leaf, i := s.seek(e.start)
	i++ // e's place
	if len(s.leaves) == 0 {
		s.leaves, s.starts = []*spanLeaf{{}}, []uintptr{e.start}
	}
	l := s.leaves[leaf]
	if l.n == spanLeafSize {
		next, half := &spanLeaf{}, spanLeafSize/2
		if leaf == len(s.leaves)-1 && i == l.n {
			half = l.n
		}
		first := e.start
		if half < l.n {
			next.take(l, half)
			l.shift(l.n, half-l.n)
			first = next.start[0]
		}
		s.leaves = slices.Insert(s.leaves, leaf+1, next)
		s.starts = slices.Insert(s.starts, leaf+1, first)
		if i > half || next.n == 0 {
			leaf, l, i = leaf+1, next, i-half
		}
	}
	l.shift(i, 1)
	l.start[i], l.end[i], l.e[i] = e.start, e.end, e
	if i == 0 {
		s.starts[leaf] = e.start
	}
}

// remove takes e off, which is there.
func (s *spans) remove(e *entry) {
	leaf, i := s.seek(e.start)
	l := s.leaves[leaf]
	s.n--
	l.shift(i+1, -1)
	if i == 0 && l.n > 0 {
		s.starts[leaf] = l.start[0]
	}
	// A leaf that gets lean joins a lean neighbour.
	for _, at := range [2]int{leaf - 1, leaf} {
		if at < 0 || at+1 >= len(s.leaves) {
			continue
		}
		if a, b := s.leaves[at], s.leaves[at+1]; a.n+b.n <= spanLeafSize/2 {
			a.take(b, 0)
			s.starts[at] = a.start[0]
			s.cut(at + 1)
			return
		}
	}
	if l.n == 0 {
		s.cut(leaf)
	}
}

func (s *spans) cut(leaf int) {
	s.leaves = slices.Delete(s.leaves, leaf, leaf+1)
	s.starts = slices.Delete(s.starts, leaf, leaf+1)
}
