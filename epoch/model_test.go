package epoch

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/pindown/pindown/vm"
)

// fataler is what testing.TB and rapid.T share.
type fataler interface {
	Helper()
	Fatalf(format string, args ...any)
}

func newTestTable(tb testing.TB, bucketBits int) *Table {
	tb.Helper()
	t, err := Format(make([]byte, Size(bucketBits)), bucketBits)
	if err != nil {
		tb.Fatal(err)
	}
	return t
}

// pages returns the range of n pages from page first.
func pages(first, n uint64) vm.Range {
	return vm.Range{Start: uintptr(first) << PageShift, End: uintptr(first+n) << PageShift}
}

// span is a half-open range of pages.
type span struct{ lo, hi uint64 }

func (s span) overlaps(o span) bool { return s.lo < o.hi && o.lo < s.hi }

// opPages is the naive reading of what an operation on r touches.
func opPages(r vm.Range) span {
	switch {
	case r.Start == r.End || r.Start >= MaxAddress:
		return span{}
	case r.End < r.Start || r.End > MaxAddress:
		return span{uint64(r.Start >> PageShift), rootPages}
	}
	return span{uint64(r.Start / 4096), uint64((r.End + 4095) / 4096)}
}

// entry is a watched range in the naive model.
type entry struct {
	watch   Watch
	exact   span   // the range, rounded to pages
	covered []span // what the watch's blocks cover
	stamp   uint64
}

// model is a table together with a plain list of what is watched.
type model struct {
	t       *Table
	entries []*entry
	// The counters as they stood after the last step, by slot.
	self, below []uint64
	needless    int // stamps changed by rounding or a full bucket only
	needed      int
	coarse      int // watches that a full bucket made coarser
	rounded     int // watches that were rounded
}

func newModel(tb testing.TB, bucketBits int) *model {
	tb.Helper()
	t := newTestTable(tb, bucketBits)
	n := len(t.buckets) * bucketSlots
	return &model{t: t, self: make([]uint64, n), below: make([]uint64, n)}
}

func (m *model) watch(f fataler, r vm.Range) {
	f.Helper()
	e := &entry{exact: opPages(r)}
	limit, coarse := m.t.blockLimit(), m.t.Stats().Coarse
	if err := m.t.Watch(&e.watch, r); err != nil {
		f.Fatalf("watch %v: %v", r, err)
	}
	for _, s := range m.t.slots(&e.watch) {
		b, i := m.t.slot(s &^ pageSlot)
		tag := b.tag[i].Load()
		shift := tagLevel(tag) * FanoutShift
		e.covered = append(e.covered, span{tagBlock(tag) << shift, (tagBlock(tag) + 1) << shift})
	}
	// Every page of the range is covered, and nothing beyond it but by the
	// documented rounding.
	sorted := slices.Clone(e.covered)
	slices.SortFunc(sorted, func(a, b span) int {
		if a.lo < b.lo {
			return -1
		}
		return 1
	})
	reach := sorted[0].lo
	for _, s := range sorted {
		if s.lo > reach {
			f.Fatalf("watch %v: hole before page %#x", r, s.lo)
		}
		reach = max(reach, s.hi)
	}
	whole := span{sorted[0].lo, reach}
	if whole.lo > e.exact.lo || whole.hi < e.exact.hi {
		f.Fatalf("watch %v: covers only pages [%#x,%#x)", r, whole.lo, whole.hi)
	}
	lo, hi := roundOut(e.exact.lo, e.exact.hi, limit)
	if n := countBlocks(lo, hi); n > MaxBlocks {
		f.Fatalf("watch %v: rounded to %d blocks", r, n)
	}
	if countBlocks(e.exact.lo, e.exact.hi) <= limit && (span{lo, hi}) != e.exact {
		f.Fatalf("watch %v: rounded without need", r)
	}
	if (span{lo, hi}) != e.exact {
		m.rounded++
	}
	if m.t.Stats().Coarse != coarse {
		m.coarse++
	} else if whole != (span{lo, hi}) || e.watch.Blocks() != int(countBlocks(lo, hi)) {
		f.Fatalf("watch %v: covers pages [%#x,%#x) in %d blocks, want [%#x,%#x)", r, whole.lo, whole.hi, e.watch.Blocks(), lo, hi)
	}
	e.stamp = m.t.Stamp(&e.watch)
	m.entries = append(m.entries, e)
	m.check(f, false)
}

func (m *model) unwatch(f fataler, i int) {
	f.Helper()
	m.t.Unwatch(&m.entries[i].watch)
	m.entries = slices.Delete(m.entries, i, i+1)
	m.check(f, false)
}

func (m *model) touch(f fataler, r vm.Range) {
	f.Helper()
	op := opPages(r)
	before := m.t.Word()
	found := m.t.Touch(r)
	any := false
	for _, e := range m.entries {
		hit := slices.ContainsFunc(e.covered, op.overlaps)
		any = any || hit
		now := m.t.Stamp(&e.watch)
		changed := now != e.stamp
		switch {
		case changed && now < e.stamp:
			f.Fatalf("touch %v: stamp of %v fell", r, e.exact)
		case op.overlaps(e.exact) && !changed:
			f.Fatalf("touch %v: missed by the watch of pages %v", r, e.exact)
		case changed != hit:
			f.Fatalf("touch %v: watch of pages %v, covered %v: changed %v", r, e.exact, e.covered, changed)
		}
		if changed && op.overlaps(e.exact) {
			m.needed++
		} else if changed {
			m.needless++
		}
		e.stamp = now
	}
	if found != any {
		f.Fatalf("touch %v: reported %v, want %v", r, found, any)
	}
	want := before.Generation()
	if any {
		want++
	}
	if got := m.t.Word(); got.Generation() != want || got.Busy() || got.Lost() {
		f.Fatalf("touch %v: word %#x after %#x", r, got, before)
	}
	m.check(f, true)
}

// check compares every slot with what the list of watches implies.
func (m *model) check(f fataler, touched bool) {
	f.Helper()
	t := m.t
	want, below := map[uint32]uint32{}, map[uint32]uint32{}
	inUse := map[uint32]bool{0: true}
	for _, e := range m.entries {
		for _, s := range t.slots(&e.watch) {
			s &^= pageSlot
			want[s]++
			for !inUse[s] {
				inUse[s] = true
				b, i := t.slot(s)
				below[t.parent[s]] += childUnits(b.tag[i].Load(), uint64(s/bucketSlots) != t.bucketOf(b.tag[i].Load(), 0))
				s = t.parent[s]
			}
		}
	}
	if got := t.Stats().Used; got != len(inUse)-1 {
		f.Fatalf("%d slots in use, want %d", got, len(inUse)-1)
	}
	tags := map[uint64]bool{}
	for s := range uint32(len(t.buckets) * bucketSlots) {
		b, i := t.slot(s)
		tag := b.tag[i].Load()
		if (tag != 0) != inUse[s] {
			f.Fatalf("slot %d: tag %#x, in use %v", s, tag, inUse[s])
		}
		if b.want[i].Load() != want[s] || b.wantBelow[i].Load() != below[s] {
			f.Fatalf("slot %d, tag %#x: want %d below %d, should be %d and %d",
				s, tag, b.want[i].Load(), b.wantBelow[i].Load(), want[s], below[s])
		}
		self, bel := b.self[i].Load(), b.below[i].Load()
		if self < m.self[s] || bel < m.below[s] || !touched && (self != m.self[s] || bel != m.below[s]) {
			f.Fatalf("slot %d: counters went from %d, %d to %d, %d", s, m.self[s], m.below[s], self, bel)
		}
		m.self[s], m.below[s] = self, bel
		if tag == 0 {
			continue
		}
		if tags[tag] {
			f.Fatalf("tag %#x twice", tag)
		}
		tags[tag] = true
		if (s == 0) != (tag == rootTag) || s != 0 && !mayBeIn(t, tag, uint64(s/bucketSlots)) {
			f.Fatalf("slot %d: tag %#x in the wrong bucket", s, tag)
		}
		if s != 0 {
			p, j := t.slot(t.parent[s])
			if p.tag[j].Load() != makeTag(tagLevel(tag)+1, tagBlock(tag)>>FanoutShift) {
				f.Fatalf("slot %d: parent of tag %#x is slot %d", s, tag, t.parent[s])
			}
		}
	}
}

func mayBeIn(t *Table, tag, bucket uint64) bool {
	for try := range triesOf(tag) {
		if t.bucketOf(tag, try) == bucket {
			return true
		}
	}
	return false
}

// genRange draws ranges that meet often: near a few bases, near block
// boundaries of every level and near both ends of the address space.
func genRange(top uintptr) *rapid.Generator[vm.Range] {
	return rapid.Custom(func(t *rapid.T) vm.Range {
		level := rapid.IntRange(0, Levels-1).Draw(t, "level")
		size := uintptr(1) << (PageShift + FanoutShift*level)
		var at uintptr
		switch rapid.IntRange(0, 3).Draw(t, "base") {
		case 0:
			at = 0x7f1234500000
		case 1:
			at = 0x7f1230000000
		case 2:
			at = rapid.SampledFrom([]uintptr{0, MaxAddress - size, MaxAddress - 1}).Draw(t, "end")
		case 3:
			at = rapid.UintptrRange(0, MaxAddress-1).Draw(t, "any") &^ (size - 1)
		}
		at += size * rapid.UintptrRange(0, 20).Draw(t, "blocks")
		if d := rapid.IntRange(-5000, 5000).Draw(t, "bytes"); rapid.Bool().Draw(t, "off") {
			at += uintptr(d)
		}
		length := rapid.UintptrRange(1, 40).Draw(t, "length") << (PageShift + FanoutShift*rapid.IntRange(0, Levels-1).Draw(t, "unit"))
		if rapid.Bool().Draw(t, "ragged") {
			length += rapid.UintptrRange(0, 4096).Draw(t, "rag") - 2048
		}
		at = min(at, top-1)
		return vm.Range{Start: at, End: max(at+1, min(at+length, top))}
	})
}

func TestAgainstNaiveModel(t *testing.T) {
	for _, bits := range []int{3, 5, 8} {
		t.Run(fmt.Sprintf("bits=%d", bits), func(t *testing.T) {
			var needed, needless, coarse, rounded, watches int
			if bits == 3 {
				// A table that is full, whatever is drawn.
				m := newModel(t, bits)
				for i := range uint64(16) {
					m.watch(t, pages(i<<31, 1))
				}
				for i := range uint64(16) {
					m.touch(t, pages(i<<31+i%2, 1))
				}
				for len(m.entries) > 0 {
					m.unwatch(t, 0)
				}
				coarse = m.coarse
			}
			rapid.Check(t, func(rt *rapid.T) {
				m := newModel(t, bits)
				ranges, ops := genRange(MaxAddress), genRange(math.MaxUint64)
				rt.Repeat(map[string]func(*rapid.T){
					"watch": func(rt *rapid.T) {
						m.watch(rt, ranges.Draw(rt, "range"))
						watches++
					},
					"unwatch": func(rt *rapid.T) {
						if len(m.entries) == 0 {
							rt.Skip("nothing is watched")
						}
						m.unwatch(rt, rapid.IntRange(0, len(m.entries)-1).Draw(rt, "entry"))
					},
					"touch": func(rt *rapid.T) { m.touch(rt, ops.Draw(rt, "op")) },
					"touch inside": func(rt *rapid.T) {
						if len(m.entries) == 0 {
							rt.Skip("nothing is watched")
						}
						e := m.entries[rapid.IntRange(0, len(m.entries)-1).Draw(rt, "entry")]
						// The last page before it to the first page after it.
						lo := rapid.Uint64Range(max(e.exact.lo, 1)-1, e.exact.hi).Draw(rt, "lo")
						m.touch(rt, pages(lo, rapid.Uint64Range(1, 3).Draw(rt, "n")))
					},
					"touch between": func(rt *rapid.T) {
						if len(m.entries) < 2 {
							rt.Skip("no two ranges are watched")
						}
						// From around one range to around another: both ends
						// are in blocks with interest.
						var at [2]uint64
						for i := range at {
							e := m.entries[rapid.IntRange(0, len(m.entries)-1).Draw(rt, "entry")]
							at[i] = rapid.Uint64Range(max(e.exact.lo, 1)-1, e.exact.hi+1).Draw(rt, "page")
						}
						lo, hi := min(at[0], at[1]), max(at[0], at[1])
						m.touch(rt, pages(lo, hi-lo))
					},
					"touch beside": func(rt *rapid.T) {
						if len(m.entries) == 0 {
							rt.Skip("nothing is watched")
						}
						// Reaches to a page before, at or after one of the ends
						// of a range or of one of its blocks.
						e := m.entries[rapid.IntRange(0, len(m.entries)-1).Draw(rt, "entry")]
						s := rapid.SampledFrom(append([]span{e.exact}, e.covered...)).Draw(rt, "span")
						far := rapid.Uint64Range(1, 40).Draw(rt, "far") << (FanoutShift * rapid.IntRange(0, 4).Draw(rt, "level"))
						near := rapid.Uint64Range(0, 2).Draw(rt, "near")
						if rapid.Bool().Draw(rt, "below") {
							hi := max(s.lo+near, 2) - 1
							m.touch(rt, pages(hi-min(hi, far), min(hi, far)))
						} else {
							lo := max(s.hi+near, 2) - 1
							m.touch(rt, pages(lo-1, far))
						}
					},
				})
				for len(m.entries) > 0 {
					m.unwatch(rt, len(m.entries)-1)
				}
				needed, needless = needed+m.needed, needless+m.needless
				coarse, rounded = coarse+m.coarse, rounded+m.rounded
			})
			t.Logf("%d watches, %d rounded, %d coarse; %d stamps changed by an overlap, %d by rounding or a full bucket",
				watches, rounded, coarse, needed, needless)
			if needed == 0 || bits == 3 && coarse == 0 || bits == 8 && rounded == 0 {
				t.Error("the test doesn't test what it should")
			}
		})
	}
}

func TestRoundOut(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		s := opPages(genRange(MaxAddress).Draw(rt, "range"))
		limit := rapid.SampledFrom([]uint64{scarceBlocks, sparingBlocks, MaxBlocks}).Draw(rt, "limit")
		if got, want := countBlocks(s.lo, s.hi), len(appendBlocks(nil, s.lo, s.hi)); got != uint64(want) {
			rt.Fatalf("countBlocks(%#x, %#x) = %d, want %d", s.lo, s.hi, got, want)
		}
		lo, hi := roundOut(s.lo, s.hi, limit)
		n := countBlocks(lo, hi)
		switch {
		case lo > s.lo || hi < s.hi || hi > rootPages:
			rt.Fatalf("roundOut(%#x, %#x, %d) = %#x, %#x", s.lo, s.hi, limit, lo, hi)
		case n > MaxBlocks:
			rt.Fatalf("roundOut(%#x, %#x, %d): %d blocks", s.lo, s.hi, limit, n)
		case n > limit && hi-lo > 2*(s.hi-s.lo) && countBlocks(s.lo, s.hi) <= MaxBlocks:
			rt.Fatalf("roundOut(%#x, %#x, %d): doubled to %#x, %#x", s.lo, s.hi, limit, lo, hi)
		}
	})
}

func TestTouchEdges(t *testing.T) {
	const top = MaxAddress - 4096
	for _, c := range []struct {
		name    string
		watched vm.Range
		op      vm.Range
		want    bool
	}{
		{"empty op", vm.Range{Start: 0, End: MaxAddress}, vm.Range{Start: 8192, End: 8192}, false},
		{"zero op", vm.Range{Start: 0, End: MaxAddress}, vm.Range{}, false},
		{"first byte", vm.Range{Start: 0, End: 1}, vm.Range{Start: 0, End: 1}, true},
		{"first page, next op", vm.Range{Start: 0, End: 1}, vm.Range{Start: 4096, End: 8192}, false},
		{"one byte before", vm.Range{Start: 8192, End: 12288}, vm.Range{Start: 4096, End: 8192}, false},
		{"one byte into", vm.Range{Start: 8192, End: 12288}, vm.Range{Start: 4096, End: 8193}, true},
		{"one byte after", vm.Range{Start: 8192, End: 12288}, vm.Range{Start: 12288, End: 12289}, false},
		{"same page, other bytes", vm.Range{Start: 8192, End: 8193}, vm.Range{Start: 12287, End: 12288}, true},
		{"last page", vm.Range{Start: top, End: MaxAddress}, vm.Range{Start: MaxAddress - 1, End: MaxAddress}, true},
		{"last page, op beyond", vm.Range{Start: top, End: MaxAddress}, vm.Range{Start: MaxAddress, End: math.MaxUint64}, false},
		{"op across the top", vm.Range{Start: top, End: MaxAddress}, vm.Range{Start: top, End: math.MaxUint64}, true},
		{"op whose end wrapped", vm.Range{Start: top, End: MaxAddress}, vm.Range{Start: 4096, End: 0}, true},
		{"op whose end wrapped, below it", vm.Range{Start: 0, End: 4096}, vm.Range{Start: 4096, End: 0}, false},
		{"op that is inverted", vm.Range{Start: top, End: MaxAddress}, vm.Range{Start: 8192, End: 4096}, true},
		{"whole, one page", vm.Range{Start: 0, End: MaxAddress}, vm.Range{Start: top, End: MaxAddress}, true},
		{"one page, whole", vm.Range{Start: top, End: MaxAddress}, vm.Range{Start: 0, End: MaxAddress}, true},
		{"whole, whole", vm.Range{Start: 0, End: MaxAddress}, vm.Range{Start: 0, End: MaxAddress}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := newModel(t, 5)
			if m.t.Touch(c.op) {
				t.Error("an empty table reports interest")
			}
			m.watch(t, c.watched)
			stamp := m.entries[0].stamp
			m.touch(t, c.op)
			if changed := m.entries[0].stamp != stamp; changed != c.want {
				t.Errorf("watch of %v, operation on %v: changed %v", c.watched, c.op, changed)
			}
		})
	}
}
