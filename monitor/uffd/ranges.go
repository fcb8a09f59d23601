package uffd

import (
	"slices"

	"github.com/pindown/pindown/vm"
)

// ranges is a set of addresses as sorted, disjoint, non-adjacent ranges, at
// most cap(list) of them. No method but grow allocates.
type ranges struct {
	list []vm.Range
}

// grow makes room for n ranges in all.
func (s *ranges) grow(n int) {
	if n > cap(s.list) {
		s.list = append(make([]vm.Range, 0, n), s.list...)
	}
}

// search returns the index of the first range that ends after addr.
func (s *ranges) search(addr uintptr) int {
	i, _ := slices.BinarySearchFunc(s.list, addr, func(r vm.Range, addr uintptr) int {
		if r.End <= addr {
			return -1
		}
		return 1
	})
	return i
}

// contains reports whether all of r is in the set.
func (s *ranges) contains(r vm.Range) bool {
	i := s.search(r.Start)
	return i < len(s.list) && s.list[i].Contains(r)
}

// overlaps reports whether any of r is in the set.
func (s *ranges) overlaps(r vm.Range) bool {
	i := s.search(r.Start)
	return i < len(s.list) && s.list[i].Overlaps(r)
}

// add adds r, merged with what it overlaps or touches. It returns false, and
// adds nothing, if there is no room.
func (s *ranges) add(r vm.Range) bool {
	if r.Empty() {
		return true
	}
	i := s.search(r.Start)
	if i > 0 && s.list[i-1].End == r.Start {
		i--
	}
	j := i
	for j < len(s.list) && s.list[j].Start <= r.End {
		r = r.Union(s.list[j])
		j++
	}
	if i == j && len(s.list) == cap(s.list) {
		return false
	}
	s.list = slices.Replace(s.list, i, j, r)
	return true
}

// addCoarse adds r; for lack of room, with all that lies between it and its
// nearest neighbour. The set must have room for one range at least.
func (s *ranges) addCoarse(r vm.Range) {
	if s.add(r) {
		return
	}
	// r touches no range and the list is full: join it to the closer one.
	i := s.search(r.Start)
	switch {
	case i == len(s.list) || i > 0 && r.Start-s.list[i-1].End < s.list[i].Start-r.End:
		s.add(vm.Range{Start: s.list[i-1].End, End: r.End})
	default:
		s.add(vm.Range{Start: r.Start, End: s.list[i].Start})
	}
}

// remove takes r out. If that leaves one range more than there is room for,
// the shorter rest of the one that was cut is taken out as well, and remove
// returns false.
func (s *ranges) remove(r vm.Range) bool {
	if r.Empty() {
		return true
	}
	i := s.search(r.Start)
	j := i
	var rest [2]vm.Range
	n := 0
	for j < len(s.list) && s.list[j].Start < r.End {
		if p := (vm.Range{Start: s.list[j].Start, End: r.Start}); !p.Empty() {
			rest[n] = p
			n++
		}
		if p := (vm.Range{Start: r.End, End: s.list[j].End}); !p.Empty() {
			rest[n] = p
			n++
		}
		j++
	}
	fits := len(s.list)-(j-i)+n <= cap(s.list)
	if !fits {
		if rest[0].Len() < rest[1].Len() {
			rest[0] = rest[1]
		}
		n--
	}
	s.list = slices.Replace(s.list, i, j, rest[:n]...)
	return fits
}

// clear empties the set.
func (s *ranges) clear() { s.list = s.list[:0] }
