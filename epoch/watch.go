package epoch

import (
	"fmt"

	"github.com/pindown/pindown/vm"
)

// MaxBlocks is the number of canonical blocks up to which a range is watched
// exactly. A range of more is rounded outward to the next block size that
// needs no more than that: an operation just outside it may then invalidate
// it needlessly.
const MaxBlocks = 16

// Watch is a reader's interest in a range, made by [Table.Watch] and ended by
// [Table.Unwatch]. It is 24 bytes and must not be copied once in use.
type Watch struct {
	few  [3]uint32 // slots of the canonical blocks, if no more than three
	n    uint32
	more *[]uint32 // else all of them
}

func (w *Watch) slots() []uint32 {
	if w.more != nil {
		return *w.more
	}
	return w.few[:w.n]
}

// Blocks returns the number of blocks that the watch consists of.
func (w *Watch) Blocks() int { return int(w.n) }

// Bytes returns the heap memory that the watch holds beside itself.
func (w *Watch) Bytes() int {
	if w.more == nil {
		return 0
	}
	return 24 + 4*cap(*w.more)
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

// canonical appends the tags of the blocks that watch [lo,hi): exact while
// they are few, else rounded outward.
func canonical(dst []uint64, lo, hi uint64) []uint64 {
	for level := 0; ; level++ {
		mask := uint64(1)<<(level*FanoutShift) - 1
		dst = appendBlocks(dst[:0], lo&^mask, (hi+mask)&^mask)
		if len(dst) <= MaxBlocks || level == rootLevel {
			return dst
		}
	}
}

// Watch states interest in r in w, a zero Watch. It never fails for lack of
// room: a block that finds its bucket full is watched through an ancestor.
// It returns a wrapped ErrRange for an empty range or one that isn't wholly
// below MaxAddress.
func (t *Table) Watch(w *Watch, r vm.Range) error {
	if r.Empty() || r.End > MaxAddress {
		return fmt.Errorf("watch %v: %w", r, ErrRange)
	}
	var tags [4 * MaxBlocks]uint64
	lo := uint64(r.Start >> PageShift)
	hi := uint64((r.End-1)>>PageShift) + 1
	blocks := canonical(tags[:0], lo, hi)

	slots := w.few[:0]
	if len(blocks) > len(w.few) {
		slots = make([]uint32, 0, len(blocks))
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, tag := range blocks {
		s := t.want(tag)
		// Siblings pushed up to one ancestor need it once.
		if len(slots) > 0 && slots[len(slots)-1] == s {
			t.unwant(s)
			continue
		}
		slots = append(slots, s)
	}
	w.n = uint32(len(slots))
	w.more = nil
	if len(slots) > len(w.few) {
		w.more = &slots
	} else {
		copy(w.few[:], slots)
	}
	return nil
}

// Unwatch ends the interest. w may then be used for another Watch.
func (t *Table) Unwatch(w *Watch) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, s := range w.slots() {
		t.unwant(s)
	}
	*w = Watch{}
}

// want adds interest in a block and returns its slot, or that of the nearest
// ancestor for which there is room. mu must be held.
func (t *Table) want(tag uint64) uint32 {
	level, block := tagLevel(tag), tagBlock(tag)
	slot := uint32(0) // the root
	for l := rootLevel - 1; l >= level; l-- {
		child, ok := t.claim(makeTag(l, block>>((l-level)*FanoutShift)), slot)
		if !ok {
			t.coarse++
			break
		}
		b, i := t.slot(slot)
		b.wantBelow[i].Add(1)
		slot = child
	}
	b, i := t.slot(slot)
	b.want[i].Add(1)
	return slot
}

// unwant takes back what want added. mu must be held.
func (t *Table) unwant(slot uint32) {
	b, i := t.slot(slot)
	b.want[i].Add(^uint32(0))
	for slot != 0 {
		up := t.parent[slot]
		if b.want[i].Load()|b.wantBelow[i].Load() == 0 {
			b.tag[i].Store(0)
			t.used--
		}
		slot = up
		b, i = t.slot(slot)
		b.wantBelow[i].Add(^uint32(0))
	}
}

// claim finds or takes a slot for tag. mu must be held.
func (t *Table) claim(tag uint64, parent uint32) (uint32, bool) {
	n := uint32(t.bucketOf(tag))
	b := &t.buckets[n]
	free := -1
	for i := range bucketSlots {
		switch b.tag[i].Load() {
		case tag:
			return n*bucketSlots + uint32(i), true
		case 0:
			if free < 0 {
				free = i
			}
		}
	}
	if free < 0 {
		return 0, false
	}
	s := n*bucketSlots + uint32(free)
	t.parent[s] = parent
	t.used++
	// The counters stay as the last owner left them: they only ever grow.
	b.tag[free].Store(tag)
	return s, true
}

func (t *Table) slot(s uint32) (*bucket, uint32) {
	return &t.buckets[s/bucketSlots], s % bucketSlots
}

// Stamp returns the sum of what was recorded on the watched blocks and on all
// their ancestors. It changes if and only if an overlapping range is touched.
// An ancestor of several blocks may count more than once; the weights are
// fixed, so the sum still only grows.
func (t *Table) Stamp(w *Watch) uint64 {
	var sum uint64
	last := ^uint32(0)
	for _, s := range w.slots() {
		b, i := t.slot(s)
		sum += b.self[i].Load() + b.below[i].Load()
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
