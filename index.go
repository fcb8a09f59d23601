package pindown

import (
	"math/bits"
	"sync/atomic"

	"github.com/pindown/pindown/vm"
)

// index finds the live entry that covers a range, without a lock: a hash table
// from aligned blocks of addresses to entries.
//
// An entry of n pages is listed under every block that it touches at one
// level: the largest whose block is no longer than the entry. So it is listed
// at most 17 times, and since live entries don't overlap, a block lists at
// most two entries of its level. A look-up probes each level in use, usually
// one or two.
//
// Writers hold the cache's mu. Readers may see an entry that has just been
// removed, or an old table after growth: both are harmless, since a removed
// entry is dead and a missing one is looked up again under mu.
type index struct {
	table atomic.Pointer[indexTable]

	// The rest is guarded by the cache's mu.
	each      func(func(*entry)) // visits every live entry, for rebuilding
	lists     int                // listings
	level     [indexLevels]int   // listings by level
	overflows int                // buckets marked as overflowed since the last rebuild, not by it
}

const (
	indexPageShift   = 12
	indexFanoutShift = 4
	indexLevels      = 12
	bucketEntries    = 7
	minIndexBits     = 4

	overflowed = uint64(1) << 63
	tagLanes   = uint64(0x0001010101010101)
)

type indexTable struct {
	shift   uint8
	levels  atomic.Uint32 // bit l: something is listed at level l
	buckets []indexBucket
}

// indexBucket is one cache line. meta holds a tag a byte for each listing and,
// in its top bit, whether a listing that belongs here had to go to the next
// bucket.
type indexBucket struct {
	meta atomic.Uint64
	ent  [bucketEntries]atomic.Pointer[entry]
}

func newIndexTable(bits uint8) *indexTable {
	return &indexTable{shift: 64 - bits, buckets: make([]indexBucket, 1<<bits)}
}

func newIndex(each func(func(*entry))) *index {
	x := &index{each: each}
	x.table.Store(newIndexTable(minIndexBits))
	return x
}

// indexBlocks returns the level at which e is listed and the first and last
// block there.
func indexBlocks(e *entry) (level int, first, last uint64) {
	first, last = uint64(e.start>>indexPageShift), uint64((e.end-1)>>indexPageShift)
	level = min((bits.Len64(last-first+1)-1)/indexFanoutShift, indexLevels-1)
	return level, first >> (level * indexFanoutShift), last >> (level * indexFanoutShift)
}

func indexHash(level int, block uint64) uint64 {
	// The multiplication mixes upwards, so the high bits choose the bucket and
	// the middle ones the tag.
	return (block<<4 | uint64(level)) * 0x9e3779b97f4a7c15
}

// indexTag is never zero: zero marks a free place.
func indexTag(h uint64) uint64 { return h>>20&0x7f | 0x80 }

// lookup returns the entry that covers r, or nil.
func (x *index) lookup(r vm.Range) *entry {
	t := x.table.Load()
	page := uint64(r.Start >> indexPageShift)
	for m := t.levels.Load(); m != 0; m &= m - 1 {
		level := bits.TrailingZeros32(m)
		h := indexHash(level, page>>(level*indexFanoutShift))
		tag := indexTag(h)
		for i := h >> t.shift; ; i = (i + 1) & uint64(len(t.buckets)-1) {
			b := &t.buckets[i]
			meta := b.meta.Load()
			// Bytes equal to tag become zero, and zero bytes are found by the
			// usual borrow trick; a false positive only costs a comparison.
			d := meta ^ tag*tagLanes
			for z := (d - tagLanes) &^ d & (0x80 * tagLanes); z != 0; z &= z - 1 {
				if e := b.ent[bits.TrailingZeros64(z)>>3].Load(); e != nil && e.start <= r.Start && r.End <= e.end {
					return e
				}
			}
			if meta&overflowed == 0 {
				break
			}
		}
	}
	return nil
}

// insert lists e. The cache's mu must be held, no live entry overlap e, and e
// not be among those that each visits yet.
func (x *index) insert(e *entry) {
	level, first, last := indexBlocks(e)
	n := int(last - first + 1)
	t := x.table.Load()
	if (x.lists+n)*8 > len(t.buckets)*bucketEntries*5 || x.overflows*4 > len(t.buckets) {
		t = x.rebuild(x.lists + n)
	}
	x.lists += n
	x.level[level] += n
	for b := first; b <= last; b++ {
		x.overflows += t.add(indexHash(level, b), e)
	}
	t.levels.Or(1 << level)
}

// remove takes e off every list. The cache's mu must be held.
func (x *index) remove(e *entry) {
	level, first, last := indexBlocks(e)
	n := int(last - first + 1)
	t := x.table.Load()
	for b := first; b <= last; b++ {
		t.drop(indexHash(level, b), e)
	}
	x.lists -= n
	if x.level[level] -= n; x.level[level] == 0 {
		t.levels.And(^uint32(1 << level))
	}
}

// rebuild lists every live entry in a fresh table with room for n listings. It
// also sheds the overflow marks that removals leave behind.
func (x *index) rebuild(n int) *indexTable {
	width := uint8(max(bits.Len(uint(n*2/bucketEntries)), minIndexBits))
	t, marked := x.fresh(width)
	// Addresses a fixed distance apart can fall on few buckets.
	for wider := width + 1; marked*8 > len(t.buckets) && wider <= width+2; wider++ {
		t, marked = x.fresh(wider)
	}
	// What was marked just now isn't counted: it would be marked again, and
	// each insertion would rebuild the table.
	x.overflows = 0
	x.table.Store(t)
	return t
}

// fresh returns a table of 1<<width buckets with every live entry, and how many
// of its buckets are marked as overflowed.
func (x *index) fresh(width uint8) (t *indexTable, marked int) {
	t = newIndexTable(width)
	x.each(func(e *entry) {
		level, first, last := indexBlocks(e)
		for b := first; b <= last; b++ {
			marked += t.add(indexHash(level, b), e)
		}
		t.levels.Or(1 << level)
	})
	return t, marked
}

// add lists e under h and returns the number of buckets that it newly marked
// as overflowed.
func (t *indexTable) add(h uint64, e *entry) (marked int) {
	tag := indexTag(h)
	for i := h >> t.shift; ; i = (i + 1) & uint64(len(t.buckets)-1) {
		b := &t.buckets[i]
		meta := b.meta.Load()
		for j := range bucketEntries {
			if meta>>(8*j)&0xff == 0 {
				b.ent[j].Store(e)
				b.meta.Store(meta | tag<<(8*j))
				return marked
			}
		}
		if meta&overflowed == 0 {
			b.meta.Store(meta | overflowed)
			marked++
		}
	}
}

func (t *indexTable) drop(h uint64, e *entry) {
	tag := indexTag(h)
	for i := h >> t.shift; ; i = (i + 1) & uint64(len(t.buckets)-1) {
		b := &t.buckets[i]
		meta := b.meta.Load()
		for j := range bucketEntries {
			if meta>>(8*j)&0xff == tag && b.ent[j].Load() == e {
				b.meta.Store(meta &^ (0xff << (8 * j)))
				b.ent[j].Store(nil)
				return
			}
		}
		if meta&overflowed == 0 {
			return
		}
	}
}
