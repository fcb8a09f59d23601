package monitortest_test

import (
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/monitor"
	"github.com/pindown/pindown/monitor/manual"
	"github.com/pindown/pindown/monitor/monitortest"
	"github.com/pindown/pindown/vm"
)

// A suite that can't fail is worth nothing. Each of these monitors is wrong in
// one way; the suite, run in another process, must find it.

const brokenEnv = "PINDOWN_BROKEN_MONITOR"

// broken changes a manual monitor, or how it is told, for the worse.
type broken struct {
	name  string
	run   string // the subtest that must fail
	says  string // what the output must hold
	open  func(*manual.Monitor) monitor.Monitor
	tell  func(m *manual.Monitor, r vm.Range, op vm.Op, do func() error) error
	quick time.Duration // patience
	blind []monitortest.Exception
}

type wrapped struct {
	*manual.Monitor
	cover func(vm.Range) error
	check func() bool
	close func() error
}

func (w wrapped) Cover(r vm.Range) error {
	if w.cover != nil {
		return w.cover(r)
	}
	return w.Monitor.Cover(r)
}

func (w wrapped) HitCheck() func() bool { return w.check }

func (w wrapped) Close() error {
	if w.close != nil {
		return w.close()
	}
	return w.Monitor.Close()
}

func unwrap(m monitor.Monitor) *manual.Monitor {
	if w, ok := m.(wrapped); ok {
		return w.Monitor
	}
	return m.(*manual.Monitor)
}

var brokenMonitors = []broken{
	{
		name: "blind to one operation", run: "matrix/anon-private/madvise-dontneed/other-thread", says: "the pages changed unseen",
		tell: func(m *manual.Monitor, r vm.Range, op vm.Op, do func() error) error {
			if op == vm.OpDontneed {
				return do()
			}
			return m.Do(r, do)
		},
	},
	{
		name: "blind to the tail of a truncation by others", run: "matrix/memfd/truncate/other-process", says: "the pages changed unseen",
		tell: func(m *manual.Monitor, r vm.Range, op vm.Op, do func() error) error {
			if op == vm.OpTruncate {
				r.End = r.Start + uintptr(os.Getpagesize())
			}
			return m.Do(r, do)
		},
	},
	{
		name: "matches the start only", run: "matrix/anon-private/munmap", says: "straddle-start",
		tell: func(m *manual.Monitor, r vm.Range, _ vm.Op, do func() error) error {
			r.End = r.Start + 1
			return m.Do(r, do)
		},
	},
	{
		name: "off by one at the end", run: "matrix/anon-private/munmap", says: "invalidated by an operation next to it",
		tell: func(m *manual.Monitor, r vm.Range, _ vm.Op, do func() error) error {
			r.End++
			return m.Do(r, do)
		},
	},
	{
		name: "records late", run: "matrix/anon-private/munmap", says: "the pages changed unseen",
		tell: func(m *manual.Monitor, r vm.Range, _ vm.Op, do func() error) error {
			err := do()
			go func() {
				time.Sleep(50 * time.Millisecond)
				m.Invalidate(r)
			}()
			return err
		},
	},
	{
		name: "announces, then forgets", run: "matrix/anon-private/munmap", says: "invalid at first, then valid again",
		open: func(m *manual.Monitor) monitor.Monitor {
			return wrapped{Monitor: m, check: func() bool { return !announced.Swap(false) }}
		},
		tell: func(_ *manual.Monitor, _ vm.Range, _ vm.Op, do func() error) error {
			err := do()
			announced.Store(true)
			return err
		},
	},
	{
		name: "documented as blind but isn't", run: "matrix", says: "documented as blind, but nothing went unseen",
		blind: []monitortest.Exception{{Op: vm.OpMunmap}},
	},
	{
		name: "touches before only", run: "registration-races/plain", says: "was registered: valid, but",
		tell: func(m *manual.Monitor, r vm.Range, _ vm.Op, do func() error) error {
			m.Before(r)
			return do()
		},
	},
	{
		name: "touches after only", run: "address-reuse", says: "the old registration is served for new memory",
		tell: func(m *manual.Monitor, r vm.Range, _ vm.Op, do func() error) error {
			err := do()
			runtime.Gosched()
			m.After(r)
			return err
		},
	},
	{
		name: "only the last watch", run: "many-watches", says: "valid after munmap",
		tell: func(m *manual.Monitor, r vm.Range, _ vm.Op, do func() error) error {
			r.Start = r.End - 1
			return m.Do(r, do)
		},
	},
	{
		name: "not lost after close", run: "closed", says: "the table isn't lost after Close",
		open: func(m *manual.Monitor) monitor.Monitor {
			return wrapped{Monitor: m, close: func() error { m.CloseFeeds(); return nil }}
		},
	},
	{
		name: "hit check allocates", run: "hit-allocates-nothing", says: "allocations a hit",
		open: func(m *manual.Monitor) monitor.Monitor {
			var sink []byte
			return wrapped{Monitor: m, check: func() bool { sink = make([]byte, 64); return sink != nil }}
		},
	},
	{
		name: "no news", run: "events", says: "goroutine", quick: 2 * time.Second,
		open: func(m *manual.Monitor) monitor.Monitor { return muted{m} },
	},
	{
		name: "leaks a file", run: "open-and-close", says: "files open",
		open: func(m *manual.Monitor) monitor.Monitor {
			// A bare descriptor: the garbage collector would close a file.
			_, _ = unix.Dup(0)
			return m
		},
	},
	{
		name: "never lets go", run: "matrix/anon-private/munmap", says: "SIGQUIT", quick: 2 * time.Second,
		tell: func(*manual.Monitor, vm.Range, vm.Op, func() error) error { hang(); return nil },
	},
	{
		name: "hangs the self-test", run: "self-test", says: "blocked for 5s",
		open: func(m *manual.Monitor) monitor.Monitor { return hanging{m} },
	},
	{
		name: "refuses what is required", run: "matrix/anon-private/munmap", says: "refused, but required",
		open: func(m *manual.Monitor) monitor.Monitor {
			return wrapped{Monitor: m, cover: func(vm.Range) error { return monitor.ErrUncovered }}
		},
	},
}

// announced is what the monitor that announces and forgets has announced.
var announced atomic.Bool

// hang blocks in the kernel, as an operation does whose event nobody reads.
func hang() {
	for {
		// Signals end the wait.
		_, _, _ = unix.Syscall6(unix.SYS_PPOLL, 0, 0, 0, 0, 0, 0)
	}
}

// muted sends news to nobody.
type muted struct{ *manual.Monitor }

func (m muted) Subscribe() *monitor.Feed { return new(monitor.Hub).Subscribe() }

// hanging never returns from an operation in the self-test.
type hanging struct{ *manual.Monitor }

func (hanging) Do(vm.Range, func() error) error { hang(); return nil }

func TestBrokenChild(t *testing.T) {
	name := os.Getenv(brokenEnv)
	if name == "" {
		t.Skip("runs in a child of TestSuiteFindsBrokenMonitors")
	}
	for _, b := range brokenMonitors {
		if b.name != name {
			continue
		}
		monitortest.Run(t, func(t *testing.T) monitor.Monitor {
			t.Helper()
			m, err := manual.New(nil)
			if err != nil {
				t.Fatal(err)
			}
			if b.open != nil {
				return b.open(m)
			}
			return m
		}, &monitortest.Options{
			Kinds:    []vm.Mapping{vm.MappingAnonPrivate, vm.MappingMemfd},
			Require:  []vm.Mapping{vm.MappingAnonPrivate},
			Blind:    b.blind,
			Patience: b.quick,
			Around: func(m monitor.Monitor, r vm.Range, op vm.Op, do func() error) error {
				switch inner := m.(type) {
				case muted:
					return inner.Do(r, do)
				case hanging:
					return inner.Monitor.Do(r, do)
				}
				if b.tell != nil {
					return b.tell(unwrap(m), r, op, do)
				}
				return unwrap(m).Do(r, do)
			},
		})
	}
}

func TestSuiteFindsBrokenMonitors(t *testing.T) {
	for _, b := range brokenMonitors {
		t.Run(strings.ReplaceAll(b.name, " ", "-"), func(t *testing.T) {
			if testing.Short() && b.name == "hangs the self-test" {
				t.Skip("takes five seconds")
			}
			t.Parallel() // the children are processes of their own
			cmd := exec.Command(os.Args[0], "-test.run=^TestBrokenChild$/^"+strings.ReplaceAll(b.run, "/", "$/^")+"$", "-test.count=1")
			cmd.Env = append(os.Environ(), brokenEnv+"="+b.name)
			out, err := cmd.CombinedOutput()
			if err == nil {
				t.Fatalf("the suite passes:\n%s", out)
			}
			if !strings.Contains(string(out), b.says) {
				t.Errorf("the suite fails, but doesn't say %q:\n%s", b.says, out)
			}
		})
	}
}
