package epoch

import (
	"fmt"
	"math/bits"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pindown/pindown/vm"
)

// Word is the one word that tells a reader whether anything happened: the
// generation, the number of busy writers and whether the writer is lost.
type Word uint64

// Busy reports whether a writer has let an operation go that it hasn't
// recorded yet. A reader that finds it waits.
func (w Word) Busy() bool { return w&wordBusyMask != 0 }

// Lost reports whether the table's writer is gone. It is final: nothing that
// relies on the table may be served any more.
func (w Word) Lost() bool { return w&wordLost != 0 }

// Generation returns the number of touches that found interest, modulo 2^56.
func (w Word) Generation() uint64 { return uint64(w) >> 8 }

// Table is an epoch table over shared memory. Create it with [Format] or
// [Open].
type Table struct {
	hdr     *header
	buckets []bucket
	shift   uint8 // 64 - bucket bits
	mem     []byte
	fresh   bool // formatted here

	// parent holds, for each slot in use, the slot of its parent block. It is
	// private to the reader: made under mu by the first watch, written under
	// mu before a watch that uses the slot is handed out, stable while the
	// watch lasts.
	parent []uint32
	long   longLists

	mu     sync.Mutex
	used   atomic.Int64 // slots in use; written under mu
	coarse uint64       // blocks watched through an ancestor; guarded by mu
}

// BucketBitsFor returns the table size, as log2 of the number of hash buckets,
// that suits the given number of regions: 16 slots (512 bytes) a region, and up
// to twice that by rounding up, but no more than 16 MiB in all. From 32768
// regions on they share that, and an operation beside a region invalidates it
// needlessly more and more often; ARCHITECTURE.md has the figures.
func BucketBitsFor(regions int) int {
	buckets := (min(max(regions, 1), 1<<30)*slotsPerRegion + bucketSlots - 1) / bucketSlots
	return min(max(bits.Len(uint(buckets-1)), minBucketBits), recommendedBucketBits)
}

// Size returns the number of bytes that a table of 2^bucketBits hash buckets
// takes. bucketBits is clamped to what the layout allows.
func Size(bucketBits int) int {
	bucketBits = min(max(bucketBits, minBucketBits), maxBucketBits)
	return headerSize + (1+1<<bucketBits)*bucketSize
}

// Format writes an empty table into mem, which must be zeroed, 8-byte aligned
// and at least [Size](bucketBits) long, and returns it. Memory aligned to 64
// bytes keeps what is read together in one cache line. The caller keeps mem
// alive and mapped for as long as the table or a writer uses it. Errors wrap
// ErrMemory. Of the zeroing only the header is verified.
func Format(mem []byte, bucketBits int) (*Table, error) {
	if bucketBits < minBucketBits || bucketBits > maxBucketBits {
		return nil, fmt.Errorf("format table of 2^%d buckets: bits must be %d to %d: %w",
			bucketBits, minBucketBits, maxBucketBits, ErrMemory)
	}
	if len(mem) < Size(bucketBits) {
		return nil, fmt.Errorf("format table in %d bytes, %d needed: %w", len(mem), Size(bucketBits), ErrMemory)
	}
	h, err := overlay(mem)
	if err != nil {
		return nil, err
	}
	// Formatting a table that somebody uses would take back its counters.
	for i, b := range mem[:headerSize] {
		if b != 0 {
			return nil, fmt.Errorf("format table: byte %d is not zero: %w", i, ErrMemory)
		}
	}
	h.version = Version
	h.headerSize = headerSize
	h.features = 0
	h.pageShift = PageShift
	h.fanoutShift = FanoutShift
	h.levels = Levels
	h.bucketSlots = bucketSlots
	h.bucketBits = uint32(bucketBits)
	h.bucketSize = bucketSize
	// Generation 1, so that a word of zero (a wiped page, a region that was
	// never published) matches no table's word.
	h.word.Store(wordGenerationOne)
	t := newTable(mem, h, bucketBits)
	t.fresh = true
	t.buckets[0].tag[0].Store(rootTag)
	h.magic.Store(Magic)
	return t, nil
}

// Open attaches to a table that another party formatted in mem. It returns an
// [*IncompatibleError] for a layout, geometry or feature that this package
// doesn't know, and a wrapped ErrMemory for memory that can't hold the table.
// It announces nothing: [OpenReader] and [OpenWriter] do, and are what a party
// uses that doesn't share the other side's program.
//
// A table may have any number of writers, but only one party, that is one
// Table, may watch through it: see [ErrInUse].
func Open(mem []byte) (*Table, error) { return open(mem, current) }

// dialect is what one version of this package knows; a type so that tests can
// set versions against each other.
type dialect struct {
	version  uint32
	features Features
}

var current = dialect{version: Version, features: knownFeatures}

func open(mem []byte, d dialect) (*Table, error) {
	h, err := overlay(mem)
	if err != nil {
		return nil, err
	}
	for _, f := range []struct {
		name       string
		have, want uint64
	}{
		{"magic", h.magic.Load(), Magic},
		{"version", uint64(h.version), uint64(d.version)},
		{"header_size", uint64(h.headerSize), headerSize},
		{"page_shift", uint64(h.pageShift), PageShift},
		{"fanout_shift", uint64(h.fanoutShift), FanoutShift},
		{"levels", uint64(h.levels), Levels},
		{"bucket_slots", uint64(h.bucketSlots), bucketSlots},
		{"bucket_size", uint64(h.bucketSize), bucketSize},
	} {
		if f.have != f.want {
			return nil, &IncompatibleError{Field: f.name, Have: f.have, Want: f.want}
		}
	}
	if h.features&^uint64(d.features) != 0 {
		return nil, &IncompatibleError{Field: "features", Have: h.features, Want: uint64(d.features)}
	}
	// Read once: the memory may be another party's to change.
	bucketBits := h.bucketBits
	if bucketBits < minBucketBits || bucketBits > maxBucketBits {
		return nil, &IncompatibleError{Field: "bucket_bits", Have: uint64(bucketBits), Want: maxBucketBits}
	}
	if need := Size(int(bucketBits)); len(mem) < need {
		return nil, fmt.Errorf("open table in %d bytes, %d needed: %w", len(mem), need, ErrMemory)
	}
	return newTable(mem, h, int(bucketBits)), nil
}

func newTable(mem []byte, h *header, bucketBits int) *Table {
	return &Table{
		hdr:     h,
		buckets: overlayBuckets(mem, 1+1<<bucketBits),
		shift:   uint8(64 - bucketBits),
		mem:     mem,
	}
}

// Word returns the table's word. It is one atomic load.
func (t *Table) Word() Word { return Word(t.hdr.word.Load()) }

// WordPlace returns where the table's word is, for a reader who keeps it at
// hand. It must not be stored to.
func (t *Table) WordPlace() *atomic.Uint64 { return &t.hdr.word }

// AddBusy tells readers to wait: an operation is about to be let go before it
// is recorded. Each call must be paired with [Table.DropBusy]. The word counts
// to 127; one more at the same time and the table is lost.
func (t *Table) AddBusy() {
	for {
		w := t.hdr.word.Load()
		if w&wordBusyMask == wordBusyMask {
			// A carry would clear or set the lost bit behind it.
			t.SetLost()
			return
		}
		if t.hdr.word.CompareAndSwap(w, w+1) {
			return
		}
	}
}

// DropBusy ends what AddBusy began. One call too many and the table is lost:
// somebody's busy period would end early.
func (t *Table) DropBusy() {
	for {
		w := t.hdr.word.Load()
		if w&wordBusyMask == 0 {
			t.SetLost()
			return
		}
		if t.hdr.word.CompareAndSwap(w, w-1) {
			return
		}
	}
}

// SetLost says that the table's writer is gone or can't be trusted any more.
// There is no way back: every later check fails.
func (t *Table) SetLost() {
	t.hdr.word.Or(wordLost)
	t.hdr.word.Add(wordGenerationOne)
}

// Quiet returns the word once no writer is busy. It spins and yields; a busy
// period is a few microseconds. It returns at once if the table is lost.
func (t *Table) Quiet() Word {
	for i := 0; ; i++ {
		w := t.Word()
		if !w.Busy() || w.Lost() {
			return w
		}
		switch {
		case i < 32:
			// The writer is on another processor, in the middle of it.
		case i < 4096:
			runtime.Gosched()
		default:
			time.Sleep(20 * time.Microsecond)
		}
	}
}

// Stats describes how full a table is.
type Stats struct {
	Slots  int    // slots in all
	Used   int    // slots in use, by this party; the root is not counted
	Coarse uint64 // canonical blocks that a full bucket pushed up to an ancestor, ever
}

// Stats returns a snapshot.
func (t *Table) Stats() Stats {
	t.mu.Lock()
	defer t.mu.Unlock()
	return Stats{Slots: len(t.buckets) * bucketSlots, Used: int(t.used.Load()), Coarse: t.coarse}
}

// triesOf returns the number of buckets that a block may be in. Large ones have
// more: one that found no room would drag all regions near it along.
func triesOf(tag uint64) int {
	if tagLevel(tag) >= largeLevel {
		return largeTries
	}
	return smallTries
}

// bucketOf returns the bucket of a block that isn't the root's that is looked
// in after so many others. The first is home: half of a block's children share
// one and the other half has its neighbour, so that an operation on many of
// them finds them together. The others are its own.
func (t *Table) bucketOf(tag uint64, try int) uint64 {
	if try == 0 {
		return 1 + (t.hash(parentTag(tag)) ^ tag/bucketSlots&1)
	}
	return 1 + (t.hash(tag) ^ uint64(try-1))
}

// find returns the bucket, slot and bucket's number of a tag that isn't the
// root's, or nil. far says whether it may be elsewhere than at home. It takes
// no lock: tags are only ever set and cleared, never moved.
func (t *Table) find(tag uint64, far bool) (*bucket, int, uint64) {
	for try := range triesOf(tag) {
		n := t.bucketOf(tag, try)
		b := &t.buckets[n]
		for i := range bucketSlots {
			if b.tag[i].Load() == tag {
				return b, i, n
			}
		}
		if !far {
			break
		}
	}
	return nil, 0, 0
}

func (t *Table) hash(tag uint64) uint64 { return tag * hashMultiplier >> t.shift }

// Touch records that the pages behind r changed or are about to: the writer's
// half of the protocol. It must be called before the page tables change and
// again after, and reports whether any watched range overlaps r. Parts of r
// beyond MaxAddress are ignored: nothing there can be watched. An end below
// the start is one that wrapped, and is taken for the end of the address space.
func (t *Table) Touch(r vm.Range) bool {
	if r.Start == r.End || r.Start >= MaxAddress {
		return false
	}
	end := r.End
	if end < r.Start || end > MaxAddress {
		end = MaxAddress
	}
	lo, hi := uint64(r.Start>>PageShift), uint64((end-1)>>PageShift)+1
	found := false

	// Top down. edges are the present blocks of the level above that r covers
	// in part and that have watched blocks below: at most one at either end.
	// under are their wantBelow.
	var edges, next [2]uint64
	var under, nextUnder [2]uint32
	n := 0
	if root := &t.buckets[0]; lo == 0 && hi == rootPages {
		if root.want[0].Load()|root.wantBelow[0].Load() != 0 {
			root.self[0].Add(1)
			found = true
		}
	} else {
		if root.want[0].Load() != 0 {
			root.below[0].Add(1)
			found = true
		}
		if under[0] = root.wantBelow[0].Load(); under[0] != 0 {
			n = 1
		}
	}
	for level := rootLevel - 1; level >= 0 && n > 0; level-- {
		shift := uint(level * FanoutShift)
		m := 0
		for e, edge := range edges[:n] {
			// At most one child is cut by either end of r: m stays within next.
			first := max(edge<<FanoutShift, lo>>shift)
			last := min(edge<<FanoutShift|(1<<FanoutShift-1), (hi-1)>>shift)
			for c := first; c <= last; c++ {
				tag := makeTag(level, c)
				bits := under[e] & childUnits(tag, true)
				if bits == 0 {
					continue
				}
				b, i, _ := t.find(tag, bits>>farShift != 0)
				if b == nil {
					continue // no more
				}
				if c<<shift >= lo && (c+1)<<shift <= hi {
					// It is there because of interest in it or below.
					b.self[i].Add(1)
					found = true
					continue
				}
				if b.want[i].Load() != 0 {
					b.below[i].Add(1)
					found = true
				}
				if below := b.wantBelow[i].Load(); below != 0 {
					next[m], nextUnder[m] = c, below
					m++
				}
			}
		}
		edges, under, n = next, nextUnder, m
	}
	if found {
		t.hdr.word.Add(wordGenerationOne)
	}
	return found
}

// Verdict is the answer of [Table.Check].
type Verdict uint8

// Verdicts.
const (
	VerdictInvalid Verdict = iota
	VerdictValid           // no operation touched the watched range
	VerdictStale           // one did
	VerdictLost            // the writer is gone: no telling
)

// Take returns what a registration made from now on is published with: the
// word, and the stamp of w read after it. It waits while a writer is busy. The
// word of a lost table is returned as zero, which matches no table's word.
func (t *Table) Take(w *Watch) (Word, uint64) {
	word := t.Quiet()
	if word.Lost() {
		word = 0
	}
	return word, t.Stamp(w)
}

// Check decides whether a watched range is untouched since Take returned stamp
// and the word that seen was first set to. It is the slow half of a hit, for
// when the word differs from seen; it then stores the word it found, so that
// the next check is one load again. It waits while a writer is busy.
func (t *Table) Check(w *Watch, stamp uint64, seen *atomic.Uint64) Verdict {
	word := t.Quiet()
	if word.Lost() {
		return VerdictLost
	}
	if t.Stamp(w) != stamp {
		return VerdictStale
	}
	seen.Store(uint64(word))
	return VerdictValid
}
