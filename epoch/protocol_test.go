package epoch

import (
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pindown/pindown/vm"
)

// The protocol, in every interleaving of one VM operation, one registration
// and one hit at the grain of the table's methods. A page is an int that the
// operation replaces; the registration pins the int it finds.

// steps of the writer and of the registering thread, in the order given.
const (
	// The operation.
	stepAnnounce = "announce" // the in-flight table: an operation began
	stepTouch    = "touch"
	stepChange   = "change" // the page tables; another thread may know from here on
	stepWithdraw = "withdraw"
	// The registration.
	stepWatch = "watch"
	stepWord  = "word"
	stepStamp = "stamp"
	stepCover = "cover" // asks the in-flight table
	stepPin   = "pin"
	// The hit.
	stepHitWord  = "hit word"
	stepHitStamp = "hit stamp"
	stepHitSeen  = "hit seen"
)

type scene struct {
	t    *Table
	r    vm.Range
	page int

	inFlight, uncacheable bool
	opSteps               int

	watch      Watch
	word       Word
	stamp      uint64
	seen       atomic.Uint64
	pinned     int
	registered int // steps done

	// The hit under way.
	hitWord            Word
	hitFast, hitValid  bool
	hitKnows, hitBegan bool
}

// protocol is one choice of orders.
type protocol struct {
	op, register []string
	// reuse demands more than the guarantee: that a hit is right once the page
	// tables are changed, though the operation has not returned. That is what
	// a thread needs whose own mmap was given the freed address.
	reuse bool
	// lateWord has the hit store a word that it loads after its stamp.
	lateWord bool
}

// run takes the steps in the order that schedule says ('w', 'r' and 'h') and
// reports whether a hit was granted that should not have been.
func (p protocol) run(s *scene, schedule []byte) (stale bool) {
	*s = scene{t: s.t, r: s.r}
	hits := []string{stepHitWord, stepHitStamp, stepHitSeen}
	hit := func(step string) {
		if s.registered < len(p.register) || s.uncacheable {
			return // nothing is published
		}
		switch step {
		case stepHitWord:
			s.hitBegan = true
			s.hitKnows = s.opSteps == len(p.op) || p.reuse && s.page == 1
			s.hitWord = s.t.Word()
			s.hitFast = uint64(s.hitWord) == s.seen.Load()
		case stepHitStamp:
			s.hitValid = s.hitBegan && (s.hitFast || s.t.Stamp(&s.watch) == s.stamp)
		case stepHitSeen:
			if s.hitValid && !s.hitFast {
				if p.lateWord {
					s.hitWord = s.t.Word()
				}
				s.seen.Store(uint64(s.hitWord))
			}
			stale = stale || s.hitValid && s.hitKnows && s.pinned != s.page
			s.hitBegan, s.hitValid = false, false
		}
	}
	nextHit := 0
	for _, who := range schedule {
		switch who {
		case 'w':
			switch p.op[s.opSteps] {
			case stepAnnounce:
				s.inFlight = true
			case stepTouch:
				s.t.Touch(s.r)
			case stepChange:
				s.page = 1
			case stepWithdraw:
				s.inFlight = false
			}
			s.opSteps++
		case 'r':
			switch p.register[s.registered] {
			case stepWatch:
				if err := s.t.Watch(&s.watch, s.r); err != nil {
					return true
				}
			case stepWord:
				s.word = s.t.Word()
			case stepStamp:
				s.stamp = s.t.Stamp(&s.watch)
			case stepCover:
				s.uncacheable = s.inFlight
			case stepPin:
				s.pinned = s.page
			}
			s.registered++
			s.seen.Store(uint64(s.word))
		case 'h':
			hit(hits[nextHit])
			nextHit++
		}
	}
	// What was published must not be poisoned for those who come later.
	for _, step := range hits {
		hit(step)
	}
	s.t.Unwatch(&s.watch)
	return stale
}

// schedules calls yield with every order of w, r and h steps.
func schedules(w, r, h int, prefix []byte, yield func([]byte)) {
	if w+r+h == 0 {
		yield(prefix)
		return
	}
	if w > 0 {
		schedules(w-1, r, h, append(prefix, 'w'), yield)
	}
	if r > 0 {
		schedules(w, r-1, h, append(prefix, 'r'), yield)
	}
	if h > 0 {
		schedules(w, r, h-1, append(prefix, 'h'), yield)
	}
}

func TestEveryInterleaving(t *testing.T) {
	if raceEnabled {
		t.Skip("one goroutine: nothing for the race detector")
	}
	right := []string{stepWatch, stepWord, stepStamp, stepCover, stepPin}
	both := []string{stepAnnounce, stepTouch, stepChange, stepTouch, stepWithdraw}
	plain := []string{stepTouch, stepChange, stepTouch}
	for _, c := range []struct {
		name  string
		p     protocol
		stale bool // some interleaving must serve a stale entry
	}{
		{"touch before and after", protocol{op: plain, register: right}, false},
		{"touch before and after, reuse, in flight", protocol{op: both, register: right, reuse: true}, false},
		{"touch only before", protocol{op: []string{stepTouch, stepChange}, register: right}, true},
		{"touch only before, in flight", protocol{op: []string{stepAnnounce, stepTouch, stepChange, stepWithdraw}, register: right, reuse: true}, false},
		{"touch only after, reuse", protocol{op: []string{stepAnnounce, stepChange, stepTouch, stepWithdraw}, register: right, reuse: true}, true},
		{"touch before and after, reuse, nothing in flight", protocol{op: plain, register: right, reuse: true}, true},
		{"stamp after the pin", protocol{op: plain, register: []string{stepWatch, stepWord, stepCover, stepPin, stepStamp}}, true},
		{"word after the pin", protocol{op: plain, register: []string{stepWatch, stepStamp, stepCover, stepPin, stepWord}}, true},
		{"word after the stamp on a hit", protocol{op: plain, register: right, lateWord: true}, true},
		{"cover before the stamp, reuse", protocol{op: both, register: []string{stepWatch, stepCover, stepWord, stepStamp, stepPin}, reuse: true}, true},
		{"watch after the stamp", protocol{op: plain, register: []string{stepWord, stepStamp, stepPin, stepWatch}}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := scene{t: newTestTable(t, 3), r: pages(0x7f0000003, 2)}
			n, bad := 0, 0
			var first string
			schedules(len(c.p.op), len(c.p.register), 3, nil, func(schedule []byte) {
				n++
				if c.p.run(&s, schedule) {
					if bad == 0 {
						first = string(schedule)
					}
					bad++
				}
			})
			if used := s.t.Stats().Used; used != 0 {
				t.Errorf("%d slots in use", used)
			}
			switch {
			case bad > 0 && !c.stale:
				t.Errorf("%d of %d interleavings serve a stale entry, first %s", bad, n, first)
			case bad == 0 && c.stale:
				t.Errorf("none of %d interleavings serves a stale entry: the test can't tell", n)
			default:
				t.Logf("%d of %d interleavings serve a stale entry", bad, n)
			}
		})
	}
}

// seed returns the seed of a random test, which PINDOWN_SEED overrides.
func seed(t *testing.T) uint64 {
	t.Helper()
	s := uint64(time.Now().UnixNano())
	if v := os.Getenv("PINDOWN_SEED"); v != "" {
		n, err := strconv.ParseUint(v, 0, 64)
		if err != nil {
			t.Fatal(err)
		}
		s = n
	}
	t.Logf("PINDOWN_SEED=%d", s)
	return s
}

// space is a simulated address space: each page's frame is a number that a VM
// operation raises, under a lock as the kernel does.
type space struct {
	mu    sync.Mutex
	frame []atomic.Int64
	// returned is the frame at which the last operation on the page returned.
	returned []atomic.Int64
}

const spaceBase = 0x7f12345fd // a little below a 64 KiB and 1 MiB boundary

// operate is a VM operation on pages [lo,hi).
func (s *space) operate(t *Table, lo, hi int) {
	r := pages(spaceBase+uint64(lo), uint64(hi-lo))
	t.Touch(r)
	s.mu.Lock()
	now := make([]int64, hi)
	for i := lo; i < hi; i++ {
		now[i] = s.frame[i].Add(1)
	}
	s.mu.Unlock()
	t.Touch(r)
	for i := lo; i < hi; i++ {
		for {
			old := s.returned[i].Load()
			if old >= now[i] || s.returned[i].CompareAndSwap(old, now[i]) {
				break
			}
		}
	}
}

// pinning is a published registration with a reference count, as in a cache:
// the interest ends with the last reference.
type pinning struct {
	lo, hi int
	watch  Watch
	stamp  uint64
	seen   atomic.Uint64
	pinned []int64
	refs   atomic.Int32
}

func (p *pinning) acquire() bool {
	for {
		n := p.refs.Load()
		if n == 0 {
			return false
		}
		if p.refs.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

func (p *pinning) release(t *Table) {
	if p.refs.Add(-1) == 0 {
		t.Unwatch(&p.watch)
	}
}

func TestConcurrentProtocol(t *testing.T) {
	for _, bits := range []int{3, 8} {
		t.Run(fmt.Sprintf("bits=%d", bits), func(t *testing.T) {
			const nPages, nEntries, nWriters, nRegistrars, nHitters = 600, 16, 2, 2, 3
			rounds := 4000
			if testing.Short() {
				rounds = 600
			}
			base := seed(t)
			table := newTestTable(t, bits)
			sp := &space{frame: make([]atomic.Int64, nPages), returned: make([]atomic.Int64, nPages)}
			var entries [nEntries]atomic.Pointer[pinning]
			var valid, stale, busyHits atomic.Int64
			var wg sync.WaitGroup
			// All start together; the writers go on until the others are done.
			gate := make(chan struct{})
			var working atomic.Int32
			working.Store(nRegistrars + nHitters)
			lengths := []int{1, 2, 5, 16, 17, 40, 256}
			for id := range nWriters {
				wg.Go(func() {
					rng := rand.New(rand.NewPCG(base, uint64(id)))
					<-gate
					for i := 0; working.Load() > 0; i++ {
						runtime.Gosched()
						lo := rng.IntN(nPages)
						sp.operate(table, lo, min(nPages, lo+1+rng.IntN(lengths[i%len(lengths)])))
					}
				})
			}
			// A writer of the other kind: busy around a change, one touch.
			wg.Go(func() {
				rng := rand.New(rand.NewPCG(base, 99))
				<-gate
				for working.Load() > 0 {
					runtime.Gosched()
					lo := rng.IntN(nPages)
					table.AddBusy()
					n := sp.frame[lo].Add(1)
					table.Touch(pages(spaceBase+uint64(lo), 1))
					for {
						old := sp.returned[lo].Load()
						if old >= n || sp.returned[lo].CompareAndSwap(old, n) {
							break
						}
					}
					table.DropBusy()
				}
			})
			for id := range nRegistrars {
				wg.Go(func() {
					defer working.Add(-1)
					rng := rand.New(rand.NewPCG(base, 100+uint64(id)))
					<-gate
					for i := range rounds {
						runtime.Gosched()
						lo := rng.IntN(nPages)
						p := &pinning{lo: lo, hi: min(nPages, lo+lengths[i%len(lengths)])}
						p.refs.Store(1)
						if err := table.Watch(&p.watch, pages(spaceBase+uint64(p.lo), uint64(p.hi-p.lo))); err != nil {
							t.Error(err)
							return
						}
						word, stamp := table.Take(&p.watch)
						p.stamp = stamp
						p.seen.Store(uint64(word))
						for j := p.lo; j < p.hi; j++ {
							p.pinned = append(p.pinned, sp.frame[j].Load())
						}
						if old := entries[rng.IntN(nEntries)].Swap(p); old != nil {
							old.release(table)
						}
					}
				})
			}
			for id := range nHitters {
				wg.Go(func() {
					defer working.Add(-1)
					rng := rand.New(rand.NewPCG(base, 200+uint64(id)))
					<-gate
					// Longer, within bounds, if the scheduler kept us apart.
					for n := 0; n < rounds*4 || stale.Load() == 0 && n < rounds*1000; n++ {
						runtime.Gosched()
						p := entries[rng.IntN(nEntries)].Load()
						if p == nil || !p.acquire() {
							busyHits.Add(1)
							continue
						}
						j := rng.IntN(p.hi - p.lo)
						returned := sp.returned[p.lo+j].Load()
						ok := uint64(table.Word()) == p.seen.Load()
						if !ok {
							ok = table.Check(&p.watch, p.stamp, &p.seen) == VerdictValid
						}
						if !ok {
							stale.Add(1)
						} else if valid.Add(1); p.pinned[j] < returned {
							t.Errorf("page %d: a hit served frame %d although the operation that gave frame %d had returned",
								p.lo+j, p.pinned[j], returned)
						}
						p.release(table)
					}
				})
			}
			close(gate)
			wg.Wait()
			// At rest, valid means equal, to the page.
			for i := range entries {
				p := entries[i].Load()
				if p == nil {
					continue
				}
				if table.Check(&p.watch, p.stamp, &p.seen) == VerdictValid {
					for j, f := range p.pinned {
						if now := sp.frame[p.lo+j].Load(); now != f {
							t.Errorf("page %d: frame %d served at rest, %d mapped", p.lo+j, f, now)
						}
					}
				}
				p.release(table)
			}
			assertEmpty(t, table)
			t.Logf("%d valid, %d stale, %d missed; coarse %d", valid.Load(), stale.Load(), busyHits.Load(), table.Stats().Coarse)
			if valid.Load() == 0 || stale.Load() == 0 {
				t.Error("the threads never met")
			}
			if table.Word().Busy() || table.Word().Lost() {
				t.Errorf("word %#x at the end", table.Word())
			}
		})
	}
}

// assertEmpty fails if any interest is left.
func assertEmpty(t *testing.T, table *Table) {
	t.Helper()
	if used := table.Stats().Used; used != 0 {
		t.Errorf("%d slots in use", used)
	}
	for s := range uint32(len(table.buckets) * bucketSlots) {
		b, i := table.slot(s)
		if n := b.want[i].Load() | b.wantBelow[i].Load(); n != 0 || s != 0 && b.tag[i].Load() != 0 {
			t.Errorf("slot %d: tag %#x, want %d below %d", s, b.tag[i].Load(), b.want[i].Load(), b.wantBelow[i].Load())
		}
	}
}

// TestConcurrentWatches has every thread count its own operations while slots
// come and go under them: no touch of a range that is watched all the while
// may be lost, in whatever slot.
func TestConcurrentWatches(t *testing.T) {
	rounds := 5000
	if testing.Short() {
		rounds = 1000
	}
	base := seed(t)
	table := newTestTable(t, 3)
	var wg sync.WaitGroup
	gate := make(chan struct{})
	for id := range uint64(4) {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(base, id))
			<-gate
			for range rounds {
				runtime.Gosched()
				var w Watch
				first := rng.Uint64N(4096) + id<<20
				if err := table.Watch(&w, pages(first, 1+rng.Uint64N(40))); err != nil {
					t.Error(err)
					return
				}
				_, stamp := table.Take(&w)
				if rng.IntN(2) == 0 {
					if !table.Touch(pages(first, 1)) || table.Stamp(&w) == stamp {
						t.Error("a touch of a watched page was lost")
					}
				}
				table.Unwatch(&w)
			}
		})
	}
	close(gate)
	wg.Wait()
	assertEmpty(t, table)
}

func TestQuietWaits(t *testing.T) {
	table := newTestTable(t, 3)
	var w Watch
	if err := table.Watch(&w, pages(7, 1)); err != nil {
		t.Fatal(err)
	}
	word, stamp := table.Take(&w)
	var seen atomic.Uint64
	seen.Store(uint64(word))
	table.AddBusy()
	began, answer := make(chan struct{}), make(chan Verdict)
	go func() {
		close(began)
		answer <- table.Check(&w, stamp, &seen)
	}()
	<-began
	table.Touch(pages(7, 1))
	table.DropBusy()
	if v := <-answer; v != VerdictStale {
		t.Errorf("verdict %d after a busy writer touched", v)
	}
	// A lost table doesn't keep anybody waiting, busy or not.
	table.AddBusy()
	table.SetLost()
	if v := table.Check(&w, stamp, &seen); v != VerdictLost {
		t.Errorf("verdict %d of a lost table", v)
	}
	if s := fmt.Sprint(table.Quiet()); strings.TrimSpace(s) == "" || !table.Quiet().Lost() {
		t.Error("Quiet of a lost table")
	}
}
