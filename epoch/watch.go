package epoch

import (
	"fmt"
	"math/bits"
	"slices"
	"sync/atomic"

	"github.com/pindown/pindown/vm"
)

// MaxBlocks is the number of canonical blocks up to which a range is watched
// exactly, by pages. A range of more is rounded outward until it has no more
// than that, at the end where a block saved costs the fewest bytes: an
// operation just outside it may then invalidate it needlessly.
//
// A table that fills up spends its slots more sparingly, since a full bucket
// costs more precision than rounding does: new watches get 8 blocks once it is
// a quarter full and 4 once it is half full, unless that more than doubled the
// range. ARCHITECTURE.md has the measurements behind the figures.
const MaxBlocks = 16

// The limits of a table a quarter full and half full.
const (
	sparingBlocks = 8
	scarceBlocks  = 4
)

// spareSlots is the number of slots of each bucket that single pages leave to
// larger blocks, and 64 KiB blocks all but one of to still larger ones. A page
// without a slot costs its 64 KiB of precision, a large block without one costs
// all below it 16 times its size. Eight pages that are neighbours may fill their
// home, and eight blocks of 64 KiB as long as the table is an eighth full at most:
// an operation on all of them is cheapest if none is elsewhere. (Up to a quarter,
// and an operation far away invalidated up to 5 % of 65536 regions.)
//
// Once the table is half full it is scarceSlots everywhere, and one less with
// each level: without that, in a table of half a slot a region, an operation far
// away invalidated up to 42 % of all regions, and with it 0.6 %.
const (
	spareSlots  = 2
	scarceSlots = 4
)

// fewBlocks is the number of slots that fit into a Watch itself.
const fewBlocks = 3

// rootPages is the number of pages that the root spans.
const rootPages = uint64(MaxAddress >> PageShift)

// Watch is a reader's interest in a range, made by [Table.Watch] and ended by
// [Table.Unwatch]. It is 16 bytes without pointers and must not be copied once
// in use.
//
// A Watch is guarded by its owner: Watch and Unwatch of one Watch must not run
// at the same time as any other use of it. Stamp, Take and Check may.
type Watch struct {
	few [fewBlocks]uint32 // slots of the canonical blocks, if they fit; else few[0] is their place in the table's overflow
	n   uint32
}

// pageSlot marks the slot of a single page in a Watch. Nothing lies strictly
// inside a page, so its second counter stays what it is and needs no look:
// one cache line less.
const pageSlot = 1 << 31

// slots returns the slots of w, marked with pageSlot where it applies.
func (t *Table) slots(w *Watch) []uint32 {
	if w.n > fewBlocks {
		return t.long.at(w.few[0])[:w.n]
	}
	return w.few[:w.n]
}

// setSlots stores the slots in w. mu must be held.
func (t *Table) setSlots(w *Watch, slots []uint32) {
	w.n = uint32(len(slots))
	if len(slots) <= fewBlocks {
		copy(w.few[:], slots)
		return
	}
	w.few[0] = t.long.take()
	copy(t.long.at(w.few[0])[:], slots)
}

// longLists holds the lists of slots that don't fit into a Watch. It is written
// with the table's mu held; a list is read without, by whoever owns its Watch.
type longLists struct {
	chunks atomic.Pointer[[]*[longChunk]longList]
	n      uint32   // lists ever made
	free   []uint32 // of them
}

type longList [MaxBlocks]uint32

const longChunk = 64

func (l *longLists) at(i uint32) *longList { return &(*l.chunks.Load())[i/longChunk][i%longChunk] }

func (l *longLists) take() uint32 {
	if last := len(l.free) - 1; last >= 0 {
		i := l.free[last]
		l.free = l.free[:last]
		return i
	}
	if l.n%longChunk == 0 {
		var chunks []*[longChunk]longList
		if old := l.chunks.Load(); old != nil {
			chunks = *old
		}
		// Readers keep the shorter slice; what is in it doesn't move.
		chunks = append(chunks, new([longChunk]longList))
		l.chunks.Store(&chunks)
	}
	l.n++
	return l.n - 1
}

// Blocks returns the number of blocks that the watch consists of; 0 if it is
// not in use.
func (w *Watch) Blocks() int { return int(w.n) }

// Bytes returns the memory that the watch takes beside itself.
func (w *Watch) Bytes() int {
	if w.n <= fewBlocks {
		return 0
	}
	return 4 * MaxBlocks
}

// within reports whether a block is another, or lies inside it.
func within(tag, ancestor uint64) bool {
	up := tagLevel(ancestor) - tagLevel(tag)
	return up >= 0 && tagBlock(tag)>>(up*FanoutShift) == tagBlock(ancestor)
}

// appendBlocks appends the tags of the canonical blocks of [lo,hi), in units
// of pages: the largest aligned blocks that tile it, in address order.
func appendBlocks(dst []uint64, lo, hi uint64) []uint64 {
	for lo < hi {
		level := 0
		for level < rootLevel {
			size := uint64(1) << ((level + 1) * FanoutShift)
			if lo&(size-1) != 0 || lo+size > hi {
				break
			}
			level++
		}
		dst = append(dst, makeTag(level, lo>>(level*FanoutShift)))
		lo += 1 << (level * FanoutShift)
	}
	return dst
}

// countBlocks returns the number of canonical blocks of [lo,hi).
func countBlocks(lo, hi uint64) uint64 {
	n := uint64(0)
	for range rootLevel {
		up, down := (lo+1<<FanoutShift-1)>>FanoutShift, hi>>FanoutShift
		if up >= down {
			break
		}
		n += up<<FanoutShift - lo + hi - down<<FanoutShift
		lo, hi = up, down
	}
	return n + hi - lo
}

// nextMask returns the mask of the smallest block size above a page that n is
// not a multiple of.
func nextMask(n uint64) uint64 {
	return 1<<((bits.TrailingZeros64(n)/FanoutShift+1)*FanoutShift) - 1
}

// roundOut returns [lo,hi), in pages and below rootPages, grown until it has
// at most limit canonical blocks, a number up to MaxBlocks. It settles for
// MaxBlocks if limit would more than double the range.
func roundOut(lo, hi, limit uint64) (uint64, uint64) {
	budget := hi - lo
	for n := countBlocks(lo, hi); n > limit; n = countBlocks(lo, hi) {
		// The root's bounds are a multiple of every size; they end the loop.
		canLeft, canRight := lo != 0, hi != rootPages
		left, right := lo, hi
		if canLeft {
			left &^= nextMask(lo)
		}
		if canRight {
			right = (hi + nextMask(hi)) &^ nextMask(hi)
		}
		costLeft, costRight := lo-left, right-hi
		// A step may add blocks, if both ends lie in one parent: saves none.
		savedLeft, savedRight := n-min(n, countBlocks(left, hi)), n-min(n, countBlocks(lo, right))
		cost := costRight
		switch byLeft, byRight := costLeft*savedRight, costRight*savedLeft; {
		case !canRight, canLeft && byLeft < byRight, canLeft && byLeft == byRight && costLeft < costRight:
			right, cost = hi, costLeft
		default:
			left = lo
		}
		if n <= MaxBlocks && cost > budget {
			break
		}
		budget -= min(budget, cost)
		lo, hi = left, right
	}
	return lo, hi
}

// Watch states interest in r in w, which must be zero or unwatched. It never
// fails for lack of room: a block that finds its bucket full is watched
// through an ancestor, and all of r that lies in the ancestor with it. It returns a wrapped [ErrRange] for an empty range or
// one that isn't wholly below MaxAddress, and a wrapped [ErrInUse] if another
// party watches through the table. It allocates only if w takes more than
// three blocks, and then not each time.
func (t *Table) Watch(w *Watch, r vm.Range) error {
	return t.watch(w, r, t.blockLimit())
}

func (t *Table) watch(w *Watch, r vm.Range, limit uint64) error {
	if r.Empty() || r.End > MaxAddress {
		return fmt.Errorf("watch %v: %w", r, ErrRange)
	}
	lo, hi := roundOut(uint64(r.Start>>PageShift), uint64((r.End-1)>>PageShift)+1, limit)
	var tags [MaxBlocks]uint64
	blocks := appendBlocks(tags[:0], lo, hi)
	var list longList
	slots := list[:0]

	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.adopt(); err != nil {
		*w = Watch{}
		return fmt.Errorf("watch %v: %w", r, err)
	}
	var wide uint64 // tag of the ancestor that watches what comes next, if any
	for _, tag := range blocks {
		if wide != 0 && within(tag, wide) {
			continue
		}
		s := t.want(tag)
		b, i := t.slot(s)
		if wide = b.tag[i].Load(); wide == tag {
			wide = 0
		} else {
			// Whatever else of this range lies in there is watched with it.
			for n, marked := range slices.Backward(slots) {
				slot := marked &^ pageSlot
				b, i := t.slot(slot)
				if !within(b.tag[i].Load(), wide) {
					break
				}
				t.unwant(slot)
				slots = slots[:n]
			}
		}
		if wide == 0 && tagLevel(tag) == 0 {
			s |= pageSlot
		}
		slots = append(slots, s)
	}
	t.setSlots(w, slots)
	return nil
}

// Unwatch ends the interest. w may then be used for another Watch. It does
// nothing if w is not in use.
func (t *Table) Unwatch(w *Watch) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, s := range t.slots(w) {
		t.unwant(s &^ pageSlot)
	}
	if w.n > fewBlocks {
		t.long.free = append(t.long.free, w.few[0])
	}
	*w = Watch{}
}

// blockLimit returns how many blocks a new watch may take. It needs no lock:
// a stale answer is only a little more or less precise.
func (t *Table) blockLimit() uint64 {
	switch used, slots := t.used.Load(), int64(len(t.buckets)*bucketSlots); {
	case used < slots/4:
		return MaxBlocks
	case used < slots/2:
		return sparingBlocks
	default:
		return scarceBlocks
	}
}

// adopt prepares the table for this party's first watch. mu must be held.
func (t *Table) adopt() error {
	if t.parent != nil {
		return nil
	}
	// The parents of slots that another party took are unknown here, and its
	// mutex is too: sharing a table between watching parties isn't possible.
	for i := range t.buckets {
		if t.fresh {
			break // empty by contract; spare the pages
		}
		b := &t.buckets[i]
		for j := range bucketSlots {
			tag := b.tag[j].Load()
			if (i|j == 0) != (tag == rootTag) || i|j != 0 && tag != 0 ||
				b.want[j].Load()|b.wantBelow[j].Load() != 0 {
				return fmt.Errorf("adopt table, slot %d of bucket %d: %w", j, i, ErrInUse)
			}
		}
	}
	t.parent = make([]uint32, len(t.buckets)*bucketSlots)
	return nil
}

// want adds interest in a block and returns its slot, or that of the nearest
// ancestor for which there is room. mu must be held.
//
// Each slot in use but the root has its bit in its parent's wantBelow, so that a
// slot in use implies its ancestors and only new slots climb.
func (t *Table) want(tag uint64) uint32 {
	level, block := tagLevel(tag), tagBlock(tag)
	at, slot := t.nearest(level, block)
	// And down again, as far as there is room.
	for at > level {
		tag := makeTag(at-1, block>>((at-1-level)*FanoutShift))
		child, away, ok := t.claim(tag, slot)
		if !ok {
			t.coarse++
			break
		}
		b, i := t.slot(slot)
		b.wantBelow[i].Add(childUnits(tag, away))
		slot = child
		at--
	}
	b, i := t.slot(slot)
	b.want[i].Add(1)
	return slot
}

// childUnits is what a child adds to its parent's wantBelow: a bit of its own in
// the lower half, and in the upper half if it isn't at home.
func childUnits(tag uint64, away bool) uint32 {
	bits := uint32(1)
	if away {
		bits |= 1 << farShift
	}
	return bits << (tag % (1 << FanoutShift))
}

// nearest returns the level and slot of a block, or of its nearest ancestor that
// is there; the root always is. A block that isn't at home costs a look at other
// buckets only if its parent has children away from home. mu must be held.
func (t *Table) nearest(level int, block uint64) (at int, slot uint32) {
	if level == rootLevel {
		return rootLevel, 0
	}
	tag := makeTag(level, block)
	if b, i, n := t.find(tag, false); b != nil {
		return level, uint32(n)*bucketSlots + uint32(i)
	}
	at, slot = t.nearest(level+1, block>>FanoutShift)
	if b, i := t.slot(slot); at == level+1 && b.wantBelow[i].Load()>>farShift&childUnits(tag, false) != 0 {
		if b, i, n := t.find(tag, true); b != nil {
			return level, uint32(n)*bucketSlots + uint32(i)
		}
	}
	return at, slot
}

// unwant takes back what want added. mu must be held.
func (t *Table) unwant(slot uint32) {
	b, i := t.slot(slot)
	b.want[i].Add(^uint32(0))
	for slot != 0 && b.want[i].Load()|b.wantBelow[i].Load() == 0 {
		tag := b.tag[i].Load()
		units := childUnits(tag, uint64(slot/bucketSlots) != t.bucketOf(tag, 0))
		b.tag[i].Store(0)
		t.used.Add(-1)
		slot = t.parent[slot]
		b, i = t.slot(slot)
		b.wantBelow[i].Add(-units)
	}
}

// claim takes a free slot for a tag that isn't there, at home if there is room.
// mu must be held.
func (t *Table) claim(tag uint64, parent uint32) (slot uint32, away, ok bool) {
	level := tagLevel(tag)
	used, slots := t.used.Load(), int64(len(t.buckets)*bucketSlots)
	plenty, scarce := used < slots/8, used > slots/2
	for try := range triesOf(tag) {
		n := t.bucketOf(tag, try)
		b := &t.buckets[n]
		spare := max(spareSlots-level, 0)
		switch {
		case scarce:
			spare = max(scarceSlots-level, 0)
		case try == 0 && (level == 0 || level == 1 && plenty):
			spare = 0
		}
		// At home in order, so that a writer finds neighbours where it looks first.
		first := 0
		if own := int(tag % bucketSlots); try == 0 && own < bucketSlots-spare {
			first = own
		}
		for k := range bucketSlots - spare {
			i := (first + k) % (bucketSlots - spare)
			if b.tag[i].Load() != 0 {
				continue
			}
			s := uint32(n)*bucketSlots + uint32(i)
			t.parent[s] = parent
			t.used.Add(1)
			// The counters stay as the last owner left them: they only ever grow.
			b.tag[i].Store(tag)
			return s, n != t.bucketOf(tag, 0), true
		}
	}
	return 0, false, false
}

func (t *Table) slot(s uint32) (*bucket, uint32) {
	return &t.buckets[s/bucketSlots], s % bucketSlots
}

// Stamp returns the sum of what was recorded on the watched blocks and on all
// their ancestors. It changes if and only if an overlapping range is touched.
// An ancestor of several blocks may count more than once; the weights are
// fixed while the watch lasts, so the sum still only grows.
func (t *Table) Stamp(w *Watch) uint64 {
	var sum uint64
	last := ^uint32(0)
	for _, s := range t.slots(w) {
		page := s&pageSlot != 0
		s &^= pageSlot
		b, i := t.slot(s)
		sum += b.self[i].Load()
		if !page {
			sum += b.below[i].Load()
		}
		if s == 0 || t.parent[s] == last {
			continue
		}
		last = t.parent[s]
		for a := last; ; a = t.parent[a] {
			b, i := t.slot(a)
			sum += b.self[i].Load()
			if a == 0 {
				break
			}
		}
	}
	return sum
}
