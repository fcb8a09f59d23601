package uffd

import (
	"testing"

	"pgregory.net/rapid"

	"github.com/pindown/pindown/vm"
)

// TestRanges holds the set against a bitmap.
func TestRanges(t *testing.T) {
	const size = 64
	rapid.Check(t, func(t *rapid.T) {
		var s ranges
		s.grow(rapid.IntRange(1, 8).Draw(t, "room"))
		var want [size]bool
		set := func(r vm.Range, v bool) {
			for a := r.Start; a < r.End; a++ {
				want[a] = v
			}
		}
		draw := func() vm.Range {
			a := rapid.UintptrRange(0, size-1).Draw(t, "start")
			return vm.Range{Start: a, End: rapid.UintptrRange(a+1, size).Draw(t, "end")}
		}
		t.Repeat(map[string]func(*rapid.T){
			"add": func(*rapid.T) {
				if r := draw(); s.add(r) {
					set(r, true)
				} else if len(s.list) < cap(s.list) || s.overlaps(r) {
					t.Fatalf("no room for %v in %v", r, s.list)
				}
			},
			"add coarse": func(*rapid.T) {
				r := draw()
				s.addCoarse(r)
				set(r, true)
				// What lies between may have been added.
				for _, r := range s.list {
					set(r, true)
				}
				if !s.contains(r) {
					t.Fatalf("%v isn't in %v", r, s.list)
				}
			},
			"remove": func(*rapid.T) {
				r := draw()
				all := s.remove(r)
				set(r, false)
				if !all {
					var have [size]bool
					for _, r := range s.list {
						for a := r.Start; a < r.End; a++ {
							have[a] = true
						}
					}
					for a := range want {
						want[a] = want[a] && have[a]
					}
				}
			},
			"": func(*rapid.T) {
				var have [size]bool
				end := uintptr(0)
				for i, r := range s.list {
					if r.Empty() || i > 0 && r.Start <= end {
						t.Fatalf("not sorted and disjoint: %v", s.list)
					}
					end = r.End
					for a := r.Start; a < r.End; a++ {
						have[a] = true
					}
				}
				if have != want {
					t.Fatalf("have %v, want %v", s.list, want)
				}
				r := draw()
				all, any := true, false
				for a := r.Start; a < r.End; a++ {
					all = all && want[a]
					any = any || want[a]
				}
				if s.contains(r) != all || s.overlaps(r) != any {
					t.Fatalf("%v in %v: contains %v overlaps %v", r, s.list, s.contains(r), s.overlaps(r))
				}
			},
		})
	})
}
