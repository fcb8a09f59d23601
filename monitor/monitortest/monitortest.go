package monitortest

import (
	"os"
	"slices"
	"testing"
	"time"

	"github.com/pindown/pindown/internal/oracle"
	"github.com/pindown/pindown/internal/vmops"
	"github.com/pindown/pindown/monitor"
	"github.com/pindown/pindown/vm"
)

// Exception is a weakness of a monitor that its documentation states.
type Exception struct {
	// Op and Mapping are the cell; zero stands for any.
	Op      vm.Op
	Mapping vm.Mapping
	// Operation is a way to do Op, as the suite's subtests name it, such as
	// "mremap-move"; By is who does it, such as "io_uring". Empty stands for
	// any.
	Operation, By string
}

func (e Exception) matches(c combination) bool {
	return (e.Op == 0 || e.Op == c.o.Op) && (e.Mapping == 0 || e.Mapping == c.kind) &&
		(e.Operation == "" || e.Operation == c.o.Name) && (e.By == "" || e.By == c.by.String())
}

// Options configure Run. The zero value means defaults.
type Options struct {
	// Kinds are the kinds of mapping to try. Default all.
	Kinds []vm.Mapping
	// Require are kinds that must be available here and must be covered:
	// operations on them must be caught. Default none.
	Require []vm.Mapping
	// Blind are operations that the monitor, as documented, doesn't see though
	// it covers the range. Others fail. An exception that never applies fails
	// too, unless nothing that it matches could be tried.
	Blind []Exception
	// Needless are operations that, as documented, invalidate ranges next to
	// the one they act on. Others fail.
	Needless []Exception
	// Around, if set, carries out every operation: for monitors that must be
	// told. It must call do, and r is what do may change.
	Around func(m monitor.Monitor, r vm.Range, op vm.Op, do func() error) error
	// Dir is where file mappings have their file. Default t.TempDir.
	Dir string
	// Opens is how many monitors each of 8 goroutines opens and closes in the
	// test of that. Default 10; 3 with -short.
	Opens int
	// Patience is how long a step may take before it counts as hung. Nothing
	// here takes a second on an idle machine. Default 90 s.
	Patience time.Duration
}

func (o *Options) withDefaults(t *testing.T) Options {
	t.Helper()
	var opt Options
	if o != nil {
		opt = *o
	}
	if opt.Kinds == nil {
		opt.Kinds = vmops.Kinds()
	}
	if opt.Dir == "" {
		opt.Dir = t.TempDir()
	}
	if opt.Around == nil {
		opt.Around = func(_ monitor.Monitor, _ vm.Range, _ vm.Op, do func() error) error { return do() }
	}
	if opt.Opens == 0 {
		opt.Opens = rounds(10)
	}
	if opt.Patience == 0 {
		opt.Patience = 90 * time.Second
	}
	return opt
}

// rounds scales a number of rounds down for -short.
func rounds(n int) int {
	if testing.Short() {
		return max(n/4, 3)
	}
	return n
}

// suite is one run.
type suite struct {
	o    Options
	open func(t *testing.T) monitor.Monitor
	dog  *watchdog
	told bool // the monitor must be told of operations
}

// Run runs the suite on the monitors that open returns. The suite closes each
// of them. open calls t.Fatal if it can't open one, and may be called from any
// goroutine. Nil options mean defaults.
//
// As a user without CAP_SYS_ADMIN, pages are compared by content rather than
// by frame number, and some operations by another process aren't tried.
//
// A hang ends the process with a dump of its goroutines.
func Run(t *testing.T, open func(t *testing.T) monitor.Monitor, o *Options) {
	t.Helper()
	s := &suite{o: o.withDefaults(t), open: open, told: o != nil && o.Around != nil}
	s.dog = startWatchdog(t, s.o.Patience)
	if err := oracle.CheckPFN(); err != nil {
		if os.Getenv("CI") == "true" {
			t.Error(err)
		}
		t.Logf("pages are compared by content: %v", err)
	}
	t.Run("matrix", s.testMatrix)
	t.Run("self-test", s.testSelfTest)
	t.Run("closed", s.testClosed)
	t.Run("hit-allocates-nothing", s.testHitAllocs)
	t.Run("many-watches", s.testManyWatches)
	t.Run("events", s.testEvents)
	t.Run("feed-overflow", s.testFeedOverflow)
	t.Run("exec-child", s.testExecChild)
	t.Run("address-reuse", s.testAddressReuse)
	t.Run("registration-races", s.testRaces)
	t.Run("go-heap-reuse", s.testGoHeapReuse)
	t.Run("close-during-operations", s.testCloseDuring)
	t.Run("open-and-close", s.testOpenAndClose)
}

// monitor opens a monitor for one test.
func (s *suite) monitor(t *testing.T) monitor.Monitor {
	t.Helper()
	s.dog.pat()
	m := s.open(t)
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return m
}

// scratch makes a mapping for one test, or returns nil if there is none of
// that kind here.
func (s *suite) scratch(t *testing.T, kind vm.Mapping) *vmops.Scratch {
	t.Helper()
	sc, err := vmops.New(kind, &vmops.Options{Dir: s.o.Dir})
	if err != nil {
		if vmops.Unavailable(err) {
			if slices.Contains(s.o.Require, kind) {
				t.Errorf("required: %v", err)
			}
			t.Log(err)
			return nil
		}
		t.Fatal(err)
	}
	return sc
}

// perform carries out o as the options say.
func (s *suite) perform(m monitor.Monitor, sc *vmops.Scratch, o *vmops.Operation, r vm.Range, by vmops.Actor, h *vmops.Helper) error {
	return s.o.Around(m, o.Affected(sc, r), o.Op, func() error { return vmops.Perform(sc, o, r, by, h) })
}

func release(t *testing.T, sc *vmops.Scratch) {
	t.Helper()
	if err := sc.Release(); err != nil {
		t.Errorf("release: %v", err)
	}
}

func closeWitness(t *testing.T, w *oracle.Witness) {
	t.Helper()
	if err := w.Close(); err != nil {
		t.Error(err)
	}
}
