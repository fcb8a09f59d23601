package pindown

import (
	"math/bits"
	"runtime"
	"slices"
	"sync/atomic"
)

// Who holds an entry is written where the holder is, not where the entry is:
// a hold is a word that names the entry, and a goroutine takes one on a cache
// line that others don't use at the time. So hits on one region from many
// processors write no common line, and a hit needs one atomic
// read-modify-write instead of two.
//
// Finding the holders is the work of whoever gives an entry up, which is rare:
// it kills the entry and then looks at every hold. A hit writes its hold and
// then looks whether the entry is dead. One of the two sees the other:
//
//   - A hold on a shared line is taken by compare-and-swap, a full barrier.
//   - A hold of a Lane is taken by a plain store, and then Cache.fence makes
//     the barrier on the lane's behalf (membarrier(2)).
//   - Whoever lets go of a dead entry looks for other holders, and hands the
//     entry over if there are none. He clears his hold by a plain store and
//     then looks whether the entry is dead; his processor may do the second
//     before the first. So the reaper looks again, as long as there are dead
//     entries that seem to be held.
//
// A hold's word is the entry's address (48 bits) and a count of its uses,
// modulo 2^16, which makes a second release of one Region an error and adds up
// to the number of hits.
type hold struct{ word uint64 }

const holdCount = 1<<16 - 1

func (h *hold) load() uint64 { return atomic.LoadUint64(&h.word) }

func (h *hold) swap(old, word uint64) bool { return atomic.CompareAndSwapUint64(&h.word, old, word) }

// release clears a hold whose word is still the given one.
func (h *hold) release(word uint64) bool {
	if h.load() != word {
		return false
	}
	h.put(word & holdCount)
	return true
}

const holdsPerLine = 7

// holdLine is one cache line, and one that keeps the next away: processors
// fetch lines in pairs.
type holdLine struct {
	// used<<63 | times a hold's count has come round.
	state atomic.Uint64
	hold  [holdsPerLine]hold
	_     [64]byte
}

const lineUsed = uint64(1) << 63

// claim takes a free hold for the entry named by id; nil if there is none, or
// another goroutine is at the same ones. The line must be marked as used.
func (l *holdLine) claim(id uint64) (*hold, uint64) {
	for i := range l.hold {
		h := &l.hold[i]
		old := h.load()
		if old > holdCount {
			continue
		}
		word := id | (old+1)&holdCount
		if !h.swap(old, word) {
			continue
		}
		if old == holdCount {
			l.state.Add(1)
		}
		return h, word
	}
	return nil, 0
}

// claims returns how often holds of the line have been taken.
func (l *holdLine) claims() uint64 {
	// Counts began at their end, one short of coming round.
	n := l.state.Load()&^lineUsed<<16 - holdsPerLine*holdCount
	for i := range l.hold {
		n += l.hold[i].load() & holdCount
	}
	return n
}

// holdTable is the lines of holds that goroutines share. A goroutine finds its
// line by the address of its stack: that is as good as a thread's number, and
// costs nothing to learn.
type holdTable struct {
	lines []holdLine
	shift uint8
	used  []atomic.Uint64 // a bit for each line that was ever used
}

func newHoldTable() *holdTable {
	// So many that goroutines running at the same time seldom meet on one.
	width := min(bits.Len(uint(runtime.NumCPU()*32-1)), 12)
	n := 1 << max(width, 6)
	t := &holdTable{
		lines: make([]holdLine, n),
		shift: uint8(64 - bits.Len(uint(n-1))),
		used:  make([]atomic.Uint64, n/64),
	}
	for i := range t.lines {
		for j := range t.lines[i].hold {
			t.lines[i].hold[j].word = holdCount
		}
	}
	return t
}

// line returns the number of the calling goroutine's line.
func (t *holdTable) line() uint64 {
	// The smallest stack is 2 KiB.
	return uint64(stackAddress()>>11) * 0x9e3779b97f4a7c15 >> (t.shift & 63)
}

// at returns the first hold on the calling goroutine's line, for whoever wants
// to try it. On a line that was never used it can't be claimed.
func (t *holdTable) at() *hold { return &t.lines[t.line()].hold[0] }

// claim takes a hold on the calling goroutine's line for the entry named by id;
// nil if there is none.
func (t *holdTable) claim(id uint64) (*hold, uint64) {
	i := t.line()
	l := &t.lines[i]
	if l.state.Load()&lineUsed == 0 {
		t.use(i)
	}
	return l.claim(id)
}

// use lists line i among those that are looked at. It comes before the line's
// first hold: until then counts are at their end, with which acquire doesn't
// deal.
func (t *holdTable) use(i uint64) {
	t.used[i/64].Or(1 << (i % 64))
	t.lines[i].state.Or(lineUsed)
}

// each calls visit with every line that was ever used.
func (t *holdTable) each(visit func(*holdLine)) {
	for w := range t.used {
		for m := t.used[w].Load(); m != 0; m &= m - 1 {
			visit(&t.lines[w*64+bits.TrailingZeros64(m)])
		}
	}
}

// holders is the entries that are in a hold, by id, sorted: once for each
// hold.
type holders []uint64

// holders returns who is in a hold now. mu must be held. Of an entry that was
// killed before a fence, this is everybody.
func (c *Cache) holders() holders {
	held := c.scratch[:0]
	note := func(h *hold) {
		if w := h.load(); w > holdCount && w != laneBlocked {
			held = append(held, w&^holdCount)
		}
	}
	c.holds.each(func(l *holdLine) {
		for i := range l.hold {
			note(&l.hold[i])
		}
	})
	for _, lane := range c.lanes {
		for i := range lane.hold {
			note(&lane.hold[i])
		}
	}
	slices.Sort(held)
	c.scratch = held
	return held
}

// of returns the number of e's holders, those in refs included.
func (hs holders) of(e *entry) int {
	n := int(e.refs.Load() & refHolders)
	id := e.id()
	for i, _ := slices.BinarySearch(hs, id); i < len(hs) && hs[i] == id; i++ {
		n++
	}
	return n
}

// claims returns how many times a hold was taken, ever. mu must be held.
func (c *Cache) claims() uint64 {
	n := c.pastClaims
	c.holds.each(func(l *holdLine) { n += l.claims() })
	for _, lane := range c.lanes {
		n += lane.claims()
	}
	return n
}
