package pindown

import (
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// Whatever is inserted and removed, in whatever order, every question gets the
// answer that a plain list gives.
func TestSpansAgainstList(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var s spans
		var list []*entry
		// Few or many, so that leaves split and join.
		n, width := rapid.SampledFrom([]int{20, 2000}).Draw(t, "places"), rapid.IntRange(1, 3).Draw(t, "width")
		upward := rapid.Bool().Draw(t, "upward")
		place := func(i int) Range { return pages(uintptr(4*i), uintptr(1+i%(width+1))) }
		present := make([]*entry, n)
		flip := func(i int) {
			if e := present[i]; e != nil {
				s.remove(e)
				present[i] = nil
				list = slices.DeleteFunc(list, func(o *entry) bool { return o == e })
				return
			}
			e := &entry{start: place(i).Start, end: place(i).End}
			s.insert(e)
			present[i] = e
			at, _ := slices.BinarySearchFunc(list, e.start, func(o *entry, a uintptr) int { return int(int64(o.start) - int64(a)) })
			list = slices.Insert(list, at, e)
		}
		seed := rapid.Uint64().Draw(t, "seed")
		for step := range rapid.IntRange(1, 3*n).Draw(t, "steps") {
			i := step % n
			if !upward || step >= n {
				seed = seed*6364136223846793005 + 1442695040888963407
				i = int(seed>>33) % n
			}
			flip(i)
		}
		var all []*entry
		s.all(func(e *entry) { all = append(all, e) })
		if !slices.Equal(all, list) || s.n != len(list) {
			t.Fatalf("%d entries, %d by count, want %d", len(all), s.n, len(list))
		}
		for range 20 {
			from := rapid.IntRange(0, 4*n).Draw(t, "from")
			r := pages(uintptr(from), uintptr(rapid.IntRange(1, 12).Draw(t, "len")))
			want := slices.DeleteFunc(slices.Clone(list), func(e *entry) bool { return !e.rng().Overlaps(r) })
			if got := s.overlapping(r, nil); !slices.Equal(got, want) {
				t.Fatalf("%v overlaps %d entries, want %d", r, len(got), len(want))
			}
			var first *entry
			if len(want) > 0 {
				first = want[0]
			}
			if got := s.first(r); got != first {
				t.Fatalf("first of %v is %v, want %v", r, got, first)
			}
			var two [2]*entry
			if got := s.some(r, two[:]); got != min(2, len(want)) || !slices.Equal(two[:got], want[:got]) {
				t.Fatalf("some of %v are %v", r, two[:got])
			}
		}
	})
}
