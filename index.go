package pindown

import (
	"math/bits"
	"sync/atomic"

	"github.com/pindown/pindown/vm"
)

// index finds the live entry that covers a range, without a lock: a hash table
// from aligned blocks of addresses to listings. A listing has all that a hit
// needs, so a hit on one of a million regions misses the processor's caches
// once or twice, and doesn't read the entry at all.
//
// An entry of n pages is listed under every block that it touches at one
// level: the largest whose block is no longer than the entry. So it is listed
// at most 17 times, and since live entries don't overlap, a block lists at
// most two entries of its level. A look-up probes each level in use, usually
// one or two.
//
// Writers hold the cache's mu. Readers may be in an old table after growth:
// its listings are void, and what isn't found is looked up again under mu.
type index struct {
	table *atomic.Pointer[indexTable] // where hits find it

	// The rest is guarded by the cache's mu.
	each      func(func(*entry)) // visits every live entry, for rebuilding
	expected  int                // the most entries there will be
	lists     int                // listings
	void      int                // places in this table of entries that were removed
	room      int                // for so many in this table
	level     [indexLevels]int   // listings by level
	overflows int                // buckets marked as overflowed since the last rebuild, not by it
}

const (
	indexPageShift   = 12
	indexFanoutShift = 4
	indexLevels      = 12
	bucketListings   = 5
	minIndexBuckets  = 16

	overflowed = uint64(1) << 63
	tagBits    = 12
	tagMask    = 1<<tagBits - 1
	tagTop     = 1 << (tagBits - 1)
	tagLanes   = uint64(0x001001001001001)
)

type indexTable struct {
	levels  atomic.Uint32 // bit l: something is listed at level l
	short   atomic.Uint64 // requests of up to so many pages are looked for at level 0
	buckets []indexBucket
}

// indexBucket is two cache lines. meta holds a tag of 12 bits for each listing
// and, in its top bit, whether a listing that belongs here had to go to the next
// bucket.
type indexBucket struct {
	meta atomic.Uint64
	list [bucketListings]listing
}

// listing says that e may be hit. A reader loads e and then span, notes himself
// as e's holder, loads seen, and then e again. An entry is listed in one place
// only once, so if e is as before, the span was e's all the time; and if seen
// isn't zero, e was live when seen was loaded. A writer voids the listing (seen =
// 0) before he changes it, and keeps span zero while e isn't the span's. The place
// is given to another entry only when e has no holders: so a holder may replace
// the seen that he has loaded.
type listing struct {
	// span is e's first page, lack of access and number of pages: see spanOf. Zero
	// marks a free listing.
	span atomic.Uint64
	// seen is the table's word at the last check, with the mark in its lowest
	// bit; zero if no hit can succeed.
	seen atomic.Uint64
	e    atomic.Pointer[entry]
}

// seenMark is set in a listing's seen by a hit and cleared by eviction. The
// bit belongs to the word's count of busy writers, and is zero in the words
// that are noted: so a marked seen is compared with the word plus one, which
// no busy word is.
const seenMark = 1

// seenNothing is the seen of a listing that was never found valid: the next hit
// compares the stamp. No table's word is near it, since generations begin at 1.
const seenNothing = uint64(2)

// A span is first<<28 | access that it lacks<<22 | inexact<<21 | pages. Inexact ones don't
// begin and end at pages, or are too long: they give no number of pages, and the
// entry itself must be looked at.
const (
	spanFirstShift  = 28
	spanAccessShift = 22
	spanAccessMask  = 1<<6 - 1
	spanInexact     = uint64(1) << 21
	spanPagesMask   = spanInexact - 1
)

func spanOf(e *entry) uint64 {
	const page = uintptr(1) << indexPageShift
	first, last := uint64(e.start>>indexPageShift), uint64((e.end-1)>>indexPageShift)
	s, n := first<<spanFirstShift|uint64(^e.access&spanAccessMask)<<spanAccessShift, last-first+1
	if n > spanPagesMask || (e.start|e.end)&(page-1) != 0 {
		return s | spanInexact
	}
	return s | n
}

// spanAllows reports whether the span's entry has the given access.
func spanAllows(span uint64, access Access) bool {
	// Bits of access that nobody knows fall on the page's, and nobody has them.
	return uint64(access)<<spanAccessShift&(span|^uint64(1<<spanFirstShift-1)) == 0
}

// spanCovers reports whether an exact span, of a listing in use, covers a page
// and more after it.
func spanCovers(span, page, more uint64) bool {
	at, pages := page-span>>spanFirstShift, span&spanPagesMask
	return at < pages && more < pages-at
}

// matches returns a word whose lanes have their top bit set where meta has the
// tag, and perhaps others above: a false positive only costs a comparison.
func matches(meta, tag uint64) uint64 {
	// Lanes equal to tag become zero, and zero lanes are found by the usual
	// borrow trick.
	d := meta ^ tag*tagLanes
	return (d - tagLanes) &^ d & (tagTop * tagLanes)
}

func newIndexTable(buckets int) *indexTable {
	return &indexTable{buckets: make([]indexBucket, buckets)}
}

// newIndex returns an index whose table is found at the given place, for up to
// the expected number of entries: where growth stops, if each has one listing.
func newIndex(at *atomic.Pointer[indexTable], expected int, each func(func(*entry))) *index {
	// A limit that means "none" must not make sums wrap.
	x := &index{table: at, each: each, expected: min(expected, 1<<40)}
	x.table.Store(newIndexTable(minIndexBuckets))
	return x
}

// indexBlocks returns the level at which e is listed and the first and last
// block there.
func indexBlocks(e *entry) (level, first, last uint64) {
	first, last = uint64(e.start>>indexPageShift), uint64((e.end-1)>>indexPageShift)
	level = min(uint64(bits.Len64(last-first+1)-1)/indexFanoutShift, indexLevels-1)
	return level, first >> (level * indexFanoutShift), last >> (level * indexFanoutShift)
}

// indexHash has 32 bits.
func indexHash(level, block uint64) uint64 {
	// Buffers mostly lie a fixed distance apart, and what a multiplication makes
	// of that can be as regular: it put up to 85 % of them out of their place. The
	// exclusive or of its halves isn't.
	h := indexProduct(level, block)
	return uint64(uint32(h>>32) ^ uint32(h))
}

func indexProduct(level, block uint64) uint64 { return (block<<4 | level) * 0x9e3779b97f4a7c15 }

// indexHashAt returns the hash of the block at level that a page belongs to.
func indexHashAt(level, page uint64) uint64 {
	return indexHash(level, page>>(level*indexFanoutShift&63))
}

// indexLevel returns the level at which a request of more+1 pages is most likely
// listed: that of an entry as long as the request, or the lowest in use.
func indexLevel(more uint64, levels uint32) uint64 {
	level := uint(bits.Len64(more+1)-1) / indexFanoutShift & 31
	if levels>>level&1 == 0 {
		level = uint(bits.TrailingZeros32(levels)) & 15
	}
	return uint64(level)
}

// indexTag is never zero: zero marks a free place. It comes from the low end of a
// half, of which home uses the high end.
func indexTag(h uint64) uint64 { return h&(tagTop-1) | tagTop }

// home returns the number of the bucket in which h is looked for first.
func (t *indexTable) home(h uint64) uint64 {
	return h * uint64(len(t.buckets)) >> 32
}

func (t *indexTable) after(i uint64) uint64 {
	if i++; i < uint64(len(t.buckets)) {
		return i
	}
	return 0
}

// lookup returns the listing of the entry that covers r, with its span and the
// entry; or nil.
func (t *indexTable) lookup(r vm.Range) (*listing, uint64, *entry) {
	page, more := uint64(r.Start>>indexPageShift), uint64((r.End-1)>>indexPageShift-r.Start>>indexPageShift)
	for m := t.levels.Load(); m != 0; m &= m - 1 {
		h := indexHashAt(uint64(bits.TrailingZeros32(m)), page)
		for i := t.home(h); ; i = t.after(i) {
			b := &t.buckets[i]
			meta := b.meta.Load()
			for z := matches(meta, indexTag(h)); z != 0; z &= z - 1 {
				l := &b.list[bits.TrailingZeros64(z)/tagBits]
				e := l.e.Load()
				span := l.span.Load()
				if e != nil && (spanCovers(span, page, more) || span&spanInexact != 0 && e.start <= r.Start && r.End <= e.end) {
					return l, span, e
				}
			}
			if meta&overflowed == 0 {
				break
			}
		}
	}
	return nil, 0, nil
}

// visit calls f with every listing of e in the current table, with some perhaps
// more than once. The cache's mu must be held.
func (x *index) visit(e *entry, f func(b *indexBucket, place int)) {
	t := x.table.Load()
	level, first, last := indexBlocks(e)
	for block := first; block <= last; block++ {
		h := indexHash(level, block)
		tag := indexTag(h)
		for i := t.home(h); ; i = t.after(i) {
			b := &t.buckets[i]
			meta := b.meta.Load()
			for j := range bucketListings {
				if meta>>(tagBits*j)&tagMask == tag && b.list[j].e.Load() == e {
					f(b, j) // once: two blocks of e don't have one tag
				}
			}
			if meta&overflowed == 0 {
				break
			}
		}
	}
}

// insert lists e with the word that it was last found valid at. The cache's mu
// must be held, no live entry overlap e, and e not be among those that each visits
// yet.
func (x *index) insert(e *entry, seen uint64) {
	level, first, last := indexBlocks(e)
	n := int(last - first + 1)
	t := x.table.Load()
	if x.lists+x.void+n > x.room || x.overflows*4 > len(t.buckets) {
		t = x.rebuild(x.lists + n)
	}
	x.lists += n
	x.level[level] += n
	span := spanOf(e)
	for b := first; b <= last; b++ {
		x.overflows += t.add(indexHash(level, b), e, span, seen)
	}
	t.setLevels(t.levels.Load() | 1<<level)
}

// setLevels notes at which levels something is listed.
func (t *indexTable) setLevels(levels uint32) {
	t.levels.Store(levels)
	if levels&1 == 0 {
		t.short.Store(0)
	} else {
		t.short.Store(1<<indexFanoutShift - 1)
	}
}

// remove takes e off every list: no hit on it succeeds any more. Its places stay
// taken until forget. The cache's mu must be held.
func (x *index) remove(e *entry) {
	x.visit(e, func(b *indexBucket, j int) {
		if b.list[j].span.Load() == 0 {
			return
		}
		b.list[j].seen.Store(0)
		b.list[j].span.Store(0)
		x.void++
	})
	level, first, last := indexBlocks(e)
	n := int(last - first + 1)
	x.lists -= n
	if x.level[level] -= n; x.level[level] == 0 {
		t := x.table.Load()
		t.setLevels(t.levels.Load() &^ (1 << level))
	}
}

// forget frees the places of a removed entry. It must not have holders: one that
// is about to re-stamp the listing would re-stamp another entry's. The cache's mu
// must be held.
func (x *index) forget(e *entry) {
	x.visit(e, func(b *indexBucket, j int) {
		b.meta.Store(b.meta.Load() &^ (tagMask << (tagBits * j)))
		b.list[j].e.Store(nil)
		x.void--
	})
}

// used reports whether e was hit since the last call, or since it was listed.
// The cache's mu must be held.
func (x *index) used(e *entry) (used bool) {
	x.visit(e, func(b *indexBucket, j int) {
		if l := &b.list[j]; l.seen.Load()&seenMark != 0 {
			l.seen.And(^uint64(seenMark))
			used = true
		}
	})
	return used
}

// seen returns what a new listing of e is to have as its seen.
func (x *index) seen(e *entry) (seen uint64) {
	x.visit(e, func(b *indexBucket, j int) { seen = max(seen&^seenMark, b.list[j].seen.Load()) | seen&seenMark })
	return seen
}

// indexFill is how full, in per cent, a table of so many listings may be. A small
// one affords that nearly all are found in the first place; of a large one most
// of the cost is that it doesn't fit the processor's caches.
func indexFill(lists int) int {
	if lists <= 1<<16 {
		return 40
	}
	return 75
}

// rebuild lists every live entry in a fresh table with room for n listings and
// more, and voids the old one. It also sheds the overflow marks that removals
// leave behind.
func (x *index) rebuild(n int) *indexTable {
	room := 2 * n
	if n <= x.expected {
		room = min(room, x.expected+x.expected/256+1)
	}
	x.room = room
	buckets := max(room*100/(bucketListings*indexFill(room))+1, minIndexBuckets)
	t, marked := x.fresh(buckets)
	// Addresses may fall on few buckets, whatever the hash.
	for range 3 {
		if marked*3 <= len(t.buckets) {
			break
		}
		buckets += buckets/2 | 1
		t, marked = x.fresh(buckets)
	}
	// What was marked just now isn't counted: it would be marked again, and
	// each insertion would rebuild the table.
	x.overflows, x.void = 0, 0
	old := x.table.Swap(t)
	for i := range old.buckets {
		for j := range bucketListings {
			if l := &old.buckets[i].list[j]; l.seen.Load() != 0 {
				l.seen.Store(0)
			}
		}
	}
	return t
}

// fresh returns a table with every live entry, and how many of its buckets are
// marked as overflowed.
func (x *index) fresh(buckets int) (t *indexTable, marked int) {
	t = newIndexTable(buckets)
	t.setLevels(x.table.Load().levels.Load())
	rest := false
	old := x.table.Load()
	for i := range old.buckets {
		b := &old.buckets[i]
		if b.meta.Load()&^overflowed == 0 {
			continue
		}
		for j := range b.list {
			l := &b.list[j]
			span := l.span.Load()
			if span == 0 {
				continue
			}
			// Most are listed once, and the span tells where: the entry, which
			// is far away, needn't be read.
			level, block, once := spanBlock(span)
			if !once {
				rest = true
				continue
			}
			marked += t.add(indexHash(level, block), l.e.Load(), span, l.seen.Load())
		}
	}
	if rest {
		x.each(func(e *entry) {
			span := spanOf(e)
			if _, _, once := spanBlock(span); once {
				return
			}
			seen := x.seen(e)
			level, first, last := indexBlocks(e)
			for b := first; b <= last; b++ {
				marked += t.add(indexHash(level, b), e, span, seen)
			}
		})
	}
	return t, marked
}

// spanBlock returns the level and block under which an entry with the given span
// is listed, if that is one and the span tells.
func spanBlock(span uint64) (level, block uint64, once bool) {
	first, pages := span>>spanFirstShift, span&spanPagesMask
	if pages == 0 {
		return 0, 0, false
	}
	level = min(uint64(bits.Len64(pages)-1)/indexFanoutShift, indexLevels-1)
	block = first >> (level * indexFanoutShift)
	return level, block, block == (first+pages-1)>>(level*indexFanoutShift)
}

// add lists e under h and returns the number of buckets that it newly marked
// as overflowed.
func (t *indexTable) add(h uint64, e *entry, span, seen uint64) (marked int) {
	tag := indexTag(h)
	for i := t.home(h); ; i = t.after(i) {
		b := &t.buckets[i]
		meta := b.meta.Load()
		for j := range bucketListings {
			if meta>>(tagBits*j)&tagMask == 0 {
				l := &b.list[j]
				l.e.Store(e)
				l.span.Store(span)
				l.seen.Store(seen)
				b.meta.Store(meta | tag<<(tagBits*j))
				return marked
			}
		}
		if meta&overflowed == 0 {
			b.meta.Store(meta | overflowed)
			marked++
		}
	}
}
