package monitortest

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/internal/oracle"
	"github.com/pindown/pindown/internal/vmops"
	"github.com/pindown/pindown/monitor"
	"github.com/pindown/pindown/vm"
)

// seed returns PINDOWN_SEED or a fresh one, and logs it.
func seed(t *testing.T) uint64 {
	t.Helper()
	n, err := strconv.ParseUint(os.Getenv("PINDOWN_SEED"), 10, 64)
	if err != nil {
		n = uint64(time.Now().UnixNano())
	}
	t.Logf("PINDOWN_SEED=%d", n)
	return n
}

// spin does nothing for a while, without giving up the processor.
func spin(n int) {
	var x atomic.Int64
	for range n {
		x.Add(1)
	}
}

// testAddressReuse: one thread unmaps a range while another waits for the
// addresses to become free, maps them again, and asks for a hit. The old
// registration must not be served, though the first thread may still be inside
// its system call.
func (s *suite) testAddressReuse(t *testing.T) {
	for _, name := range []string{"munmap", "mremap-move", "mremap-shrink"} {
		t.Run(name, func(t *testing.T) {
			m := s.monitor(t)
			s.coverable(t, m, vm.MappingAnonPrivate)
			o := operation(t, name)
			reused := 0
			for range rounds(150) {
				s.dog.pat()
				if s.reuseOnce(t, m, o) {
					reused++
				}
			}
			t.Logf("address reused in %d rounds", reused)
			if reused == 0 {
				t.Error("no address was ever reused")
			}
		})
	}
}

func (s *suite) reuseOnce(t *testing.T, m monitor.Monitor, o *vmops.Operation) bool {
	t.Helper()
	sc := s.scratch(t, vm.MappingAnonPrivate)
	r := sc.Slice(4, 8)
	p := mustRegister(t, m, r)
	if p == nil {
		t.Fatal("refused what was covered before")
	}
	defer p.end()
	var returned atomic.Bool
	errc := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := s.perform(m, sc, o, r, vmops.ThisThread, nil)
		returned.Store(true)
		errc <- err
	}()
	got := false
	for last := false; !got && !last; {
		last = returned.Load()
		a, _, errno := unix.Syscall6(unix.SYS_MMAP, r.Start, r.Len(), unix.PROT_READ|unix.PROT_WRITE,
			unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_FIXED_NOREPLACE, ^uintptr(0), 0)
		got = errno == 0
		if got && a != r.Start {
			t.Errorf("mapped at %#x instead of %#x", a, r.Start)
		}
	}
	if got && p.valid() {
		t.Errorf("%v of %v: the old registration is served for new memory", o, r)
	}
	if err := <-errc; err != nil {
		t.Fatal(err)
	}
	p.settle()
	if p.valid() {
		t.Errorf("%v of %v: valid in the end", o, r)
	}
	if got {
		_, _, _ = unix.Syscall(unix.SYS_MUNMAP, r.Start, r.Len(), 0)
	}
	if err := sc.Release(); err != nil {
		t.Error(err)
	}
	return got
}

// testRaces: an operation and a registration at the same time. Once both are
// over, either the registration isn't valid (or was never made) or it holds
// the pages that are mapped.
func (s *suite) testRaces(t *testing.T) {
	anon := []vm.Mapping{vm.MappingAnonPrivate}
	for _, env := range []struct {
		name    string
		kinds   []vm.Mapping
		procs   int
		storm   bool
		collect bool
	}{
		{name: "plain", kinds: []vm.Mapping{vm.MappingAnonPrivate, vm.MappingMemfd, vm.MappingFileShared}},
		{name: "gomaxprocs-1", kinds: anon, procs: 1},
		{name: "gomaxprocs-2", kinds: anon, procs: 2},
		{name: "signals", kinds: anon, storm: true},
		{name: "gc-gomaxprocs-1", kinds: anon, procs: 1, collect: true},
		{name: "gc-gomaxprocs-2-signals", kinds: anon, procs: 2, collect: true, storm: true},
	} {
		t.Run(env.name, func(t *testing.T) {
			if env.procs != 0 {
				defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(env.procs))
			}
			if env.storm {
				defer signalStorm(t)()
			}
			if env.collect {
				defer collector()()
			}
			m := s.monitor(t)
			rng := rand.New(rand.NewPCG(seed(t), 1))
			for _, kind := range env.kinds {
				s.raceKind(t, m, kind, rng)
			}
		})
	}
}

// collector forces garbage collections until the returned function is called.
func collector() (stop func()) {
	var wg sync.WaitGroup
	var done atomic.Bool
	wg.Go(func() {
		for !done.Load() {
			runtime.GC()
			garbage := make([][]byte, 64)
			for i := range garbage {
				garbage[i] = make([]byte, 8<<10)
			}
			runtime.Gosched()
		}
	})
	return func() {
		done.Store(true)
		wg.Wait()
	}
}

func (s *suite) raceKind(t *testing.T, m monitor.Monitor, kind vm.Mapping, rng *rand.Rand) {
	t.Helper()
	for _, name := range []string{
		"munmap", "mmap-fixed", "mremap-move", "mremap-onto", "madvise-dontneed", "madvise-remove", "truncate", "punch-hole",
	} {
		o := operation(t, name)
		c := combination{kind, o, vmops.ThisThread}
		if !o.Changes(kind) || s.isBlind(c) {
			continue
		}
		var n raceCount
		for range rounds(60) {
			s.dog.pat()
			if !s.raceOnce(t, m, kind, o, rng, &n) {
				break
			}
		}
		t.Logf("%v on %v: %+v", o, kind, n)
	}
}

func (s *suite) isBlind(c combination) bool {
	for _, e := range s.o.Blind {
		if e.matches(c) {
			return true
		}
	}
	return false
}

// raceCount says how the races went.
type raceCount struct{ Stale, Good, Failed, Pending int }

func (s *suite) raceOnce(t *testing.T, m monitor.Monitor, kind vm.Mapping, o *vmops.Operation, rng *rand.Rand, n *raceCount) bool {
	t.Helper()
	sc := s.scratch(t, kind)
	if sc == nil {
		return false
	}
	defer release(t, sc)
	watched, r := sc.Slice(4, 12), sc.Slice(6, 9)
	p := mustRegister(t, m, watched)
	if p == nil {
		return false
	}
	p.end()
	// How long each side waits at its points, by the logarithm: a registration
	// takes from a microsecond up, an operation likewise.
	delay := func() func() {
		n, yield := 1<<rng.IntN(14), rng.IntN(3) == 0
		return func() {
			if yield {
				runtime.Gosched()
			}
			spin(n)
		}
	}
	before, announced, beforePin, afterPin := delay(), delay(), delay(), delay()
	operate := func() error {
		before()
		return s.o.Around(m, o.Affected(sc, r), o.Op, func() error {
			announced()
			return vmops.Perform(sc, o, r, vmops.ThisThread, nil)
		})
	}
	var ready sync.WaitGroup
	ready.Add(2)
	errc := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		ready.Done()
		ready.Wait()
		errc <- operate()
	}()
	ready.Done()
	ready.Wait()
	var w *oracle.Witness
	p, err := register(m, watched, func() (err error) {
		beforePin()
		w, err = oracle.Hold(watched, sc.Unit())
		afterPin()
		return err
	})
	if w != nil {
		defer closeWitness(t, w)
	}
	if err == nil {
		defer p.end()
		for range 20 {
			p.valid() // hits while the operation runs; their answer is the program's race
		}
	}
	if opErr := <-errc; opErr != nil {
		if vmops.Unavailable(opErr) {
			return false
		}
		t.Fatal(opErr)
	}
	switch {
	case errors.Is(err, monitor.ErrPending):
		n.Pending++
		return true
	case err != nil:
		// The pin failed for want of memory at the address, or the range is
		// of no kind that is covered any more.
		n.Failed++
		return true
	}
	valid := p.valid()
	p.settle()
	valid = p.valid() || valid
	if !valid {
		n.Stale++
		return true
	}
	d, err := w.Compare()
	if err != nil {
		t.Fatal(err)
	}
	if d.Any() {
		t.Errorf("%v of %v on %v while %v was registered: valid, but %v", o, r, kind, watched, d)
	}
	n.Good++
	return true
}

// testGoHeapReuse: memory that the Go runtime gave back to the kernel and
// allocates again.
func (s *suite) testGoHeapReuse(t *testing.T) {
	m := s.monitor(t)
	if s.told {
		t.Skip("nobody tells what the Go runtime does")
	}
	for _, procs := range []int{1, 2} {
		t.Run(fmt.Sprintf("gomaxprocs-%d", procs), func(t *testing.T) {
			defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(procs))
			same, refused := 0, 0
			for range rounds(20) {
				s.dog.pat()
				again, covered := heapOnce(t, m)
				if again {
					same++
				}
				if !covered {
					refused++
				}
			}
			t.Logf("same address in %d rounds, %d refused", same, refused)
			if same == 0 && refused == 0 {
				t.Error("no memory ever came back at its address")
			}
		})
	}
}

func heapOnce(t *testing.T, m monitor.Monitor) (again, covered bool) {
	t.Helper()
	const size = 128 << 10
	// The runtime takes the lowest free address that fits. Without garbage
	// below, that will be the same again.
	debug.FreeOSMemory()
	var r vm.Range
	var p *probe
	var w *oracle.Witness
	func() {
		b := make([]byte, size)
		for i := range b {
			b[i] = 1
		}
		r = vm.RangeOf(b)
		if p = mustRegister(t, m, r); p == nil {
			return
		}
		var err error
		if w, err = oracle.Hold(r, 0); err != nil {
			t.Fatal(err)
		}
		if !p.valid() {
			t.Error("not valid though nothing happened")
		}
		runtime.KeepAlive(b)
	}()
	if p == nil {
		return false, false
	}
	defer p.end()
	defer closeWitness(t, w)
	debug.FreeOSMemory()
	// Keep what doesn't fit alive, so that the right span comes up in the end.
	var kept [][]byte
	for range 32 {
		b := make([]byte, size)
		b[0] = 2
		kept = append(kept, b)
		if vm.RangeOf(b) == r {
			again = true
			for i := range b {
				b[i] = 3
			}
			break
		}
	}
	valid := p.valid()
	if again && valid {
		d, err := w.Compare()
		if err != nil {
			t.Fatal(err)
		}
		if d.Any() {
			t.Errorf("heap memory %v came back with other pages, unseen: %v", r, d)
		}
	}
	runtime.KeepAlive(kept)
	return again, true
}
