package pindown

import "slices"

// spans holds the live entries of one set in address order, for whoever holds
// the cache's mu: misses, sweeps and reports. They never overlap. It is a B+
// tree of two levels; at a million entries the upper one is 16 thousand words.
// An append to a full last leaf begins a new one, so that addresses which come
// in order fill leaves wholly.
type spans struct {
	first  []uintptr // the start of each leaf's first entry
	leaves []*spanLeaf
	n      int
}

const spanLeafSize = 63

// spanLeaf is just below 1 KiB, a size class of the allocator. It carries the start addresses beside the entries, so that a search
// doesn't touch entries.
type spanLeaf struct {
	n     int
	start [spanLeafSize]uintptr
	e     [spanLeafSize]*entry
}

// seek returns the place of the last entry that starts at or before addr;
// (0, -1) if all start later. There is no leaf 0 in an empty set.
func (s *spans) seek(addr uintptr) (leaf, i int) {
	leaf = max(search(s.first, addr)-1, 0)
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

// from calls visit with the entries that end after addr, in address order,
// until it returns false.
func (s *spans) from(addr uintptr, visit func(*entry) bool) {
	leaf, i := s.seek(addr)
	if i < 0 || s.leaves[leaf].e[i].end <= addr {
		i++
	}
	for ; leaf < len(s.leaves); leaf, i = leaf+1, 0 {
		for l := s.leaves[leaf]; i < l.n; i++ {
			if !visit(l.e[i]) {
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
	s.from(r.Start, func(e *entry) bool {
		if e.start >= r.End {
			return false
		}
		dst = append(dst, e)
		return true
	})
	return dst
}

// some is overlapping for the first len(dst) of them, and returns their
// number.
func (s *spans) some(r Range, dst []*entry) (n int) {
	s.from(r.Start, func(e *entry) bool {
		if n == len(dst) || e.start >= r.End {
			return false
		}
		dst[n] = e
		n++
		return true
	})
	return n
}

// covering returns the entry that contains r, or nil.
func (s *spans) covering(r Range) *entry {
	leaf, i := s.seek(r.Start)
	if i < 0 {
		return nil
	}
	if e := s.leaves[leaf].e[i]; e.end >= r.End {
		return e
	}
	return nil
}

// insert adds e, which overlaps none.
func (s *spans) insert(e *entry) {
	s.n++
	leaf, i := s.seek(e.start)
	i++ // e's place
	if len(s.leaves) == 0 {
		s.leaves, s.first = []*spanLeaf{{}}, []uintptr{e.start}
	}
	l := s.leaves[leaf]
	if l.n == spanLeafSize {
		next := &spanLeaf{}
		half := spanLeafSize / 2
		if leaf == len(s.leaves)-1 && i == l.n {
			half = l.n
		}
		next.n = copy(next.start[:], l.start[half:l.n])
		copy(next.e[:], l.e[half:l.n])
		clear(l.e[half:])
		l.n = half
		first := e.start
		if next.n > 0 {
			first = next.start[0]
		}
		s.leaves = slices.Insert(s.leaves, leaf+1, next)
		s.first = slices.Insert(s.first, leaf+1, first)
		if i > half || i == half && next.n == 0 {
			leaf, l, i = leaf+1, next, i-half
		}
	}
	copy(l.start[i+1:l.n+1], l.start[i:l.n])
	copy(l.e[i+1:l.n+1], l.e[i:l.n])
	l.start[i], l.e[i] = e.start, e
	l.n++
	if i == 0 {
		s.first[leaf] = e.start
	}
}

// remove takes e off, which is there.
func (s *spans) remove(e *entry) {
	leaf, i := s.seek(e.start)
	l := s.leaves[leaf]
	s.n--
	copy(l.start[i:], l.start[i+1:l.n])
	copy(l.e[i:], l.e[i+1:l.n])
	l.n--
	l.e[l.n] = nil
	if i == 0 && l.n > 0 {
		s.first[leaf] = l.start[0]
	}
	// A leaf that gets lean joins a lean neighbour.
	for _, at := range [2]int{leaf - 1, leaf} {
		if at < 0 || at+1 >= len(s.leaves) {
			continue
		}
		if a, b := s.leaves[at], s.leaves[at+1]; a.n+b.n <= spanLeafSize/2 {
			copy(a.start[a.n:], b.start[:b.n])
			copy(a.e[a.n:], b.e[:b.n])
			a.n += b.n
			s.first[at] = a.start[0]
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
	s.first = slices.Delete(s.first, leaf, leaf+1)
}
