package pindown

import (
	"math/rand/v2"
	"testing"
)

// TestSpansBeside compares with a search of all entries.
func TestSpansBeside(t *testing.T) {
	var s spans
	var list []*entry
	rnd := rand.New(rand.NewPCG(1, 2))
	for range 500 {
		at := uintptr(1+rnd.IntN(10_000)) * 2
		e := &entry{start: at, end: at + uintptr(1+rnd.IntN(2))}
		if len(s.overlapping(e.rng(), nil)) == 0 {
			s.insert(e)
			list = append(list, e)
		}
	}
	for range 20_000 {
		start := uintptr(1 + rnd.IntN(20_100))
		r := Range{Start: start, End: start + uintptr(1+rnd.IntN(300))}
		var before, after *entry
		for _, e := range list {
			if e.start < r.Start && (before == nil || e.start > before.start) {
				before = e
			}
			if e.start == r.End {
				after = e
			}
		}
		if b, a := s.beside(r); b != before || a != after {
			t.Fatalf("beside %v: got %v and %v, want %v and %v", r, b, a, before, after)
		}
	}
	if b, a := new(spans).beside(Range{Start: 1, End: 2}); b != nil || a != nil {
		t.Error("something in an empty set")
	}
}
