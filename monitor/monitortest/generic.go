package monitortest

import (
	"errors"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/internal/vmops"
	"github.com/pindown/pindown/monitor"
	"github.com/pindown/pindown/vm"
)

// testSelfTest runs what selection relies on: no hang, no error, no blind cell
// beyond the documented ones, nothing left in the table.
func (s *suite) testSelfTest(t *testing.T) {
	m := s.monitor(t)
	trials, err := monitor.Trials(m)
	if err != nil {
		t.Fatal(err)
	}
	count := map[monitor.Outcome]int{}
	for _, tr := range trials {
		count[tr.Outcome]++
		o, ok := vmops.Lookup(tr.Operation)
		if !ok {
			t.Fatalf("unknown operation %q", tr.Operation)
		}
		by := vmops.ThisThread
		if tr.By == vmops.Ring.String() {
			by = vmops.Ring
		}
		if _, told := m.(monitor.Teller); tr.Outcome != monitor.Blind || s.told && !told {
			continue
		}
		c := combination{tr.Mapping, o, by}
		if !slices.ContainsFunc(s.o.Blind, func(e Exception) bool { return e.matches(c) }) {
			t.Errorf("%s on %v by %s: blind", tr.Operation, tr.Mapping, tr.By)
		}
	}
	t.Logf("%d caught, %d refused, %d blind, %d untested", count[monitor.Caught], count[monitor.Refused],
		count[monitor.Blind], count[monitor.Untested])
	if used := m.Table().Stats().Used; used != 0 {
		t.Errorf("%d slots left in use", used)
	}
}

func (s *suite) testClosed(t *testing.T) {
	m := s.monitor(t)
	if table := m.Table(); m.Name() == "" || table == nil || m.Table() != table {
		t.Errorf("name %q, table %p, then %p", m.Name(), table, m.Table())
	}
	if m.Table().Word().Lost() {
		t.Fatal("lost from the start")
	}
	sc := s.scratch(t, vm.MappingAnonPrivate)
	defer release(t, sc)
	p := mustRegister(t, m, sc.Slice(4, 8))
	check := m.HitCheck()
	feed := m.Subscribe()
	for range 2 {
		if err := m.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	}
	if !m.Table().Word().Lost() {
		t.Error("the table isn't lost after Close")
	}
	if check != nil {
		check() // must not panic; what it says no longer matters
	}
	if p != nil {
		if p.valid() {
			t.Error("a registration is valid after Close")
		}
		p.end()
	}
	if err := m.Cover(sc.Slice(4, 8)); !errors.Is(err, monitor.ErrClosed) && !errors.Is(err, monitor.ErrLost) {
		t.Errorf("cover after Close: %v", err)
	}
	for _, f := range []*monitor.Feed{feed, m.Subscribe()} {
		for range f.C {
			// Old news may still be there; then the channel ends.
		}
		f.Close()
		f.Close()
	}
	// The memory is as usable as before.
	if err := vmops.Perform(sc, operation(t, "munmap"), sc.Slice(2, 6), vmops.ThisThread, nil); err != nil {
		t.Error(err)
	}
}

func operation(t *testing.T, name string) *vmops.Operation {
	t.Helper()
	o, ok := vmops.Lookup(name)
	if !ok {
		t.Fatalf("no operation %q", name)
	}
	return o
}

// coverable returns a scratch mapping that the monitor covers, of a kind for
// which the test makes sense, or skips the test.
func (s *suite) coverable(t *testing.T, m monitor.Monitor, kinds ...vm.Mapping) *vmops.Scratch {
	t.Helper()
	for _, kind := range kinds {
		if !slices.Contains(s.o.Kinds, kind) {
			continue
		}
		sc := s.scratch(t, kind)
		if sc == nil {
			continue
		}
		t.Cleanup(func() {
			if err := sc.Release(); err != nil {
				t.Error(err)
			}
		})
		if p := mustRegister(t, m, sc.Range()); p != nil {
			p.end()
			return sc
		}
	}
	t.Skipf("%s covers none of %v", m.Name(), kinds)
	return nil
}

func (s *suite) testHitAllocs(t *testing.T) {
	m := s.monitor(t)
	sc := s.coverable(t, m, vm.MappingAnonPrivate, vm.MappingMemfd)
	p := mustRegister(t, m, sc.Range())
	defer p.end()
	valid := true
	if n := testing.AllocsPerRun(1000, func() { valid = valid && p.valid() }); n != 0 {
		t.Errorf("%v allocations a hit", n)
	}
	if !valid {
		t.Error("not valid though nothing happened")
	}
}

// testManyWatches has one operation invalidate many registrations.
func (s *suite) testManyWatches(t *testing.T) {
	o := operation(t, "munmap")
	for _, n := range []int{1, 1000, 20000} {
		if n > 1000 && testing.Short() {
			continue
		}
		s.dog.pat()
		m := s.monitor(t)
		sc, err := vmops.New(vm.MappingAnonPrivate, &vmops.Options{Units: n + 2})
		if err != nil {
			t.Fatal(err)
		}
		var probes []*probe
		refused := 0
		for i := range n {
			if p := mustRegister(t, m, sc.Slice(i+1, i+2)); p != nil {
				probes = append(probes, p)
			} else {
				refused++
			}
		}
		for _, p := range probes {
			if !p.valid() {
				t.Fatalf("%d registrations: not valid before the operation", n)
			}
		}
		if err := s.perform(m, sc, o, sc.Slice(1, n+1), vmops.ThisThread, nil); err != nil {
			t.Fatal(err)
		}
		stale := 0
		for _, p := range probes {
			if !p.valid() {
				stale++
			}
		}
		if len(probes) > 0 {
			probes[0].settle()
		}
		for i, p := range probes {
			if p.valid() {
				t.Errorf("%d registrations: number %d is valid after munmap", n, i)
				break
			}
		}
		if stale != len(probes) {
			t.Errorf("%d of %d registrations were invalid when munmap returned", stale, len(probes))
		}
		for _, p := range probes {
			p.end()
		}
		t.Logf("%d registrations in one munmap, %d refused", len(probes), refused)
		if err := sc.Release(); err != nil {
			t.Error(err)
		}
		if used := m.Table().Stats().Used; used != 0 {
			t.Errorf("%d slots left in use", used)
		}
	}
}

func (s *suite) testEvents(t *testing.T) {
	m := s.monitor(t)
	sc := s.coverable(t, m, vm.MappingAnonPrivate, vm.MappingMemfd)
	feeds := []*monitor.Feed{m.Subscribe(), m.Subscribe()}
	r := sc.Slice(6, 8)
	p := mustRegister(t, m, sc.Slice(4, 12))
	defer p.end()
	if err := s.perform(m, sc, operation(t, "mmap-fixed"), r, vmops.ThisThread, nil); err != nil {
		t.Fatal(err)
	}
	for _, f := range feeds {
		// Another operation on the same addresses may have sent news first.
		for e := range f.C {
			if e.Op == vm.OpInvalid {
				t.Errorf("event without an operation: %v", e)
			}
			if e.Range.Overlaps(r) {
				break
			}
		}
		if n := f.Lost(); n != 0 {
			t.Errorf("%d of one event lost", n)
		}
		f.Close()
		f.Close()
	}
}

// testFeedOverflow sends more news than anybody receives: nothing blocks, what
// is lost is counted, and validity doesn't suffer.
func (s *suite) testFeedOverflow(t *testing.T) {
	m := s.monitor(t)
	sc := s.coverable(t, m, vm.MappingAnonPrivate, vm.MappingMemfd)
	feed := m.Subscribe()
	defer feed.Close()
	o := operation(t, "mmap-fixed")
	for i := 0; feed.Lost() == 0; i++ {
		// Again each time: the new memory is covered only once it is asked for.
		p := mustRegister(t, m, sc.Range())
		if p == nil {
			t.Fatal("refused what was covered before")
		}
		if err := s.perform(m, sc, o, sc.Slice(i%16, i%16+1), vmops.ThisThread, nil); err != nil {
			t.Fatal(err)
		}
		p.end()
	}
	q := mustRegister(t, m, sc.Range())
	if q == nil {
		t.Fatal("refused after an overflow")
	}
	defer q.end()
	if err := s.perform(m, sc, o, sc.Slice(3, 4), vmops.ThisThread, nil); err != nil {
		t.Fatal(err)
	}
	if q.valid() {
		t.Error("valid after an operation whose news was lost")
	}
}

// testExecChild starts processes: that changes no page of this one.
func (s *suite) testExecChild(t *testing.T) {
	m := s.monitor(t)
	sc := s.coverable(t, m, vm.MappingAnonPrivate, vm.MappingMemfd)
	p := mustRegister(t, m, sc.Range())
	defer p.end()
	for range 3 {
		h, err := vmops.StartHelper(helperCommand())
		if err != nil {
			t.Fatal(err)
		}
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	}
	if !p.valid() {
		t.Error("invalidated by a child process")
	}
	if err := s.perform(m, sc, operation(t, "munmap"), sc.Slice(3, 4), vmops.ThisThread, nil); err != nil {
		t.Fatal(err)
	}
	if p.valid() {
		t.Error("valid after munmap")
	}
}

// testCloseDuring closes the monitor while operations and hits go on.
func (s *suite) testCloseDuring(t *testing.T) {
	for range rounds(12) {
		s.dog.pat()
		m := s.monitor(t)
		var wg sync.WaitGroup
		var stop atomic.Bool
		started := make(chan struct{}, 4)
		for i := range 4 {
			wg.Go(func() {
				names := []string{"munmap", "madvise-dontneed", "mmap-fixed", "mremap-move"}
				o, _ := vmops.Lookup(names[i])
				for n := 0; ; n++ {
					sc, err := vmops.New(vm.MappingAnonPrivate, nil)
					if err != nil {
						t.Error(err)
						return
					}
					p, err := register(m, sc.Range(), nil)
					closed := m.Table().Word().Lost()
					if err := s.perform(m, sc, o, sc.Slice(3, 5), vmops.ThisThread, nil); err != nil {
						t.Error(err)
					}
					if err == nil {
						if p.valid() {
							t.Errorf("valid after %v, closed before %v", o, closed)
						}
						p.end()
					}
					if err := sc.Release(); err != nil {
						t.Error(err)
					}
					if n == 2 {
						started <- struct{}{}
					}
					if stop.Load() {
						return
					}
				}
			})
		}
		for range 4 {
			<-started
		}
		if err := m.Close(); err != nil {
			t.Error(err)
		}
		if !m.Table().Word().Lost() {
			t.Error("not lost after Close")
		}
		stop.Store(true)
		wg.Wait()
	}
}

// testOpenAndClose has 8 goroutines open and close monitors while others map
// and unmap, and looks for what is left.
func (s *suite) testOpenAndClose(t *testing.T) {
	// The first monitor may open what stays for the process's life.
	if err := s.open(t).Close(); err != nil {
		t.Error(err)
	}
	fds := openFiles(t)
	var workers, mappers sync.WaitGroup
	var stop atomic.Bool
	for range 2 {
		mappers.Go(func() {
			o, _ := vmops.Lookup("munmap")
			for !stop.Load() {
				sc, err := vmops.New(vm.MappingAnonPrivate, nil)
				if err != nil {
					t.Error(err)
					return
				}
				err = vmops.Perform(sc, o, sc.Slice(3, 5), vmops.ThisThread, nil)
				if err := errors.Join(err, sc.Release()); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	for range 8 {
		workers.Go(func() {
			o, _ := vmops.Lookup("munmap")
			for range s.o.Opens {
				s.dog.pat()
				m := s.open(t)
				sc, err := vmops.New(vm.MappingAnonPrivate, nil)
				if err != nil {
					t.Error(err)
					return
				}
				p, err := register(m, sc.Range(), nil)
				if e := s.perform(m, sc, o, sc.Slice(3, 5), vmops.ThisThread, nil); e != nil {
					t.Error(e)
				}
				if err == nil {
					if p.valid() {
						t.Error("valid after munmap")
					}
					p.end()
				}
				if err := errors.Join(m.Close(), sc.Release()); err != nil {
					t.Error(err)
				}
			}
		})
	}
	workers.Wait()
	stop.Store(true)
	mappers.Wait()
	if n := openFiles(t); n > fds {
		t.Errorf("%d files open, %d before", n, fds)
	}
}

func openFiles(t *testing.T) int {
	t.Helper()
	d, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(d)
}

// signalStorm has signals sent to the process until the returned function is
// called.
func signalStorm(t *testing.T) (stop func()) {
	t.Helper()
	var wg sync.WaitGroup
	var done atomic.Bool
	wg.Go(func() {
		for i := 0; !done.Load(); i++ {
			// The runtime's own preemption signal, to whichever thread.
			_ = unix.Kill(os.Getpid(), unix.SIGURG)
			pause(i)
		}
	})
	return func() {
		done.Store(true)
		wg.Wait()
	}
}
