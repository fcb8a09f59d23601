package replay

import (
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// lru is the cache that the curve is of, one size, done by hand.
type lru struct {
	size  int
	pages []uint64 // most recent last
	hits  int
}

func (c *lru) use(start, end uint64) {
	hit := true
	for p := start; p < end; p++ {
		hit = hit && slices.Contains(c.pages, p)
	}
	if hit {
		c.hits++
	}
	for p := start; p < end; p++ {
		c.pages = slices.DeleteFunc(c.pages, func(q uint64) bool { return p == q })
		c.pages = append(c.pages, p)
	}
	c.pages = c.pages[max(0, len(c.pages)-c.size):]
}

func (c *lru) invalidate(start, end uint64) {
	c.pages = slices.DeleteFunc(c.pages, func(q uint64) bool { return q >= start && q < end })
}

// hits returns how many requests a cache of that size hits.
func (c *curve) hitsAt(size int64) uint64 {
	sizes, hits := c.steps()
	n := uint64(0)
	for i, d := range sizes {
		if d <= size {
			n = hits[i].n
		}
	}
	return n
}

func TestStackAgainstEverySize(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const sizes = 40
		caches := make([]lru, sizes)
		for i := range caches {
			caches[i].size = i + 1
		}
		c := newCurve()
		for range rapid.IntRange(1, 80).Draw(t, "steps") {
			start := uint64(rapid.IntRange(0, 30).Draw(t, "start"))
			end := start + uint64(rapid.IntRange(1, 8).Draw(t, "len"))
			kind := actAcquire
			if rapid.IntRange(0, 3).Draw(t, "kind") == 0 {
				kind = actInvalidate
			}
			c.run([]action{{kind: kind, start: start, end: end}})
			for i := range caches {
				if kind == actAcquire {
					caches[i].use(start, end)
				} else {
					caches[i].invalidate(start, end)
				}
			}
		}
		if s := c.processes[0]; s != nil { // something was used
			check(t, s)
		}
		for _, l := range caches {
			if got := c.hitsAt(int64(l.size)); got != uint64(l.hits) {
				t.Fatalf("size %d: %d hits, by hand %d", l.size, got, l.hits)
			}
		}
	})
}

type fataler interface {
	Helper()
	Fatalf(format string, args ...any)
}

// check verifies the structure.
func check(t fataler, s *stack) {
	t.Helper()
	total, live, pieces := int64(0), 0, 0
	for slot, x := range s.slots {
		l := x.pieces
		sum, hole := int64(0), false
		for i, p := range l {
			pieces++
			sum += p.len()
			if p.slot != int32(slot) || p.start >= p.end || i > 0 && l[i-1].start > p.start {
				t.Fatalf("piece %+v in slot %d", *p, slot)
			}
			if p.hole {
				hole = true
			} else {
				live++
				if q, ok := s.live.get(p.start); !ok || q != p {
					t.Fatalf("piece %+v isn't indexed", *p)
				}
			}
		}
		if above := s.above(int32(slot)); s.above(int32(slot)-1)-above != sum {
			t.Fatalf("weight of slot %d", slot)
		}
		if hole != x.inHeap {
			t.Fatalf("slot %d has holes: %v, heap says %v", slot, hole, x.inHeap)
		}
		total += sum
	}
	if total != s.total || pieces != s.pieces || live != s.live.len() {
		t.Fatalf("total %d %d, pieces %d %d, live %d %d", total, s.total, pieces, s.pieces, live, s.live.len())
	}
}

// TestStackLong goes through many compactions, at five sizes.
func TestStackLong(t *testing.T) {
	rnd := rand.New(rand.NewPCG(7, 7))
	caches := []lru{{size: 10}, {size: 60}, {size: 200}, {size: 350}, {size: 1000}}
	c := newCurve()
	for range 12000 {
		start := uint64(rnd.IntN(400))
		end := start + 1 + uint64(rnd.IntN(20))
		if rnd.IntN(2) == 0 {
			start, end = start/16*16, start/16*16+16
		}
		kind := actAcquire
		if rnd.IntN(10) == 0 {
			kind = actInvalidate
		}
		c.run([]action{{kind: kind, start: start, end: end}})
		for i := range caches {
			if kind == actAcquire {
				caches[i].use(start, end)
			} else {
				caches[i].invalidate(start, end)
			}
		}
	}
	check(t, c.processes[0])
	for _, l := range caches {
		if got := c.hitsAt(int64(l.size)); got != uint64(l.hits) || got == 0 {
			t.Errorf("size %d: %d hits, by hand %d", l.size, got, l.hits)
		}
	}
}

// TestStackForgets: memory is bounded, and it is said that it was.
func TestStackForgets(t *testing.T) {
	s := newStack(100)
	for i := range uint64(5000) {
		s.use(i*3, i*3+1)
	}
	check(t, s)
	if s.pieces > 1000 || !s.forgot {
		t.Errorf("%d pieces, forgot %v", s.pieces, s.forgot)
	}
	if d := s.use(4999*3, 4999*3+1); d != 1 {
		t.Errorf("distance %d of what was used last", d)
	}
	if d := s.use(0, 1); d != infinite {
		t.Errorf("distance %d of what was forgotten", d)
	}
}

func TestFarDistancesAreRoundedUp(t *testing.T) {
	c := newCurve()
	for _, d := range []int64{nearPages, nearPages + 1, 3*nearPages + 7, 1 << 40} {
		c.count(d, 1)
	}
	sizes, hits := c.steps()
	if len(sizes) != 4 || hits[3].n != 4 {
		t.Fatal(sizes, hits)
	}
	for i, d := range []int64{nearPages, nearPages + 1, 3*nearPages + 7, 1 << 40} {
		if sizes[i] < d || float64(sizes[i]) > float64(d)*1.017 {
			t.Errorf("%d became %d", d, sizes[i])
		}
	}
}
