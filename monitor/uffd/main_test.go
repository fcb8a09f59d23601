package uffd

import (
	"errors"
	"os"
	"sync/atomic"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/epoch"
	"github.com/pindown/pindown/monitor"
	"github.com/pindown/pindown/vm"
)

func TestMain(m *testing.M) {
	if f, ok := children[os.Getenv(childEnv)]; ok {
		os.Exit(f())
	}
	goleak.VerifyTestMain(m)
}

// childEnv names the function that a re-executed test binary runs.
const childEnv = "UFFD_TEST_CHILD"

var children = map[string]func() int{}

// open returns a monitor that is closed when the test ends.
func open(tb testing.TB, o *Options) *Monitor {
	tb.Helper()
	m, err := Open(o)
	if errors.Is(err, monitor.ErrNotSupported) && os.Getenv("CI") != "true" {
		tb.Skipf("userfaultfd with write-protect mode needed: %v", err)
	}
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { m.Close() })
	return m
}

// nextPages is where mapPages looks for room next. It is far from where the
// kernel puts mappings by itself, so that nobody maps into a hole that a test
// makes.
var nextPages atomic.Uintptr

func init() { nextPages.Store(0x1000_0000_0000) }

// mapPages returns n pages of private anonymous memory, written, with nothing
// near them. They are never unmapped.
func mapPages(tb testing.TB, n int) vm.Range {
	tb.Helper()
	const gap = 16 << 20
	for range 100 {
		size := uintptr(n) * pageSize
		start := nextPages.Add(size+2*gap) - size - gap
		start &^= gap - 1
		r := vm.Range{Start: start, End: start + size}
		if err := mmapAt(r, unix.MAP_FIXED_NOREPLACE); err == nil {
			fill(r)
			return r
		}
	}
	tb.Fatal("no room")
	return vm.Range{}
}

func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

func munmap(r vm.Range) error { return sysErr(unix.SYS_MUNMAP, r.Start, r.Len(), 0, 0, 0, 0) }

func madvise(r vm.Range, advice int) error {
	return sysErr(unix.SYS_MADVISE, r.Start, r.Len(), uintptr(advice), 0, 0, 0)
}

func mmapAt(r vm.Range, flags int) error {
	return sysErr(unix.SYS_MMAP, r.Start, r.Len(), unix.PROT_READ|unix.PROT_WRITE,
		uintptr(unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|flags), ^uintptr(0), 0)
}

func mremap(from vm.Range, size uintptr, flags int, to uintptr) error {
	return sysErr(unix.SYS_MREMAP, from.Start, from.Len(), size, uintptr(flags), to, 0)
}

func sysErr(nr, a, b, c, d, e, f uintptr) error {
	if _, _, errno := unix.Syscall6(nr, a, b, c, d, e, f); errno != 0 {
		return errno
	}
	return nil
}

// watched is a range under watch, as a region is.
type watched struct {
	m     *Monitor
	w     *epoch.Watch
	stamp uint64
	word  epoch.Word
}

// watch makes the steps of a registration, but the pin.
func watch(tb testing.TB, m *Monitor, r vm.Range) (*watched, error) {
	tb.Helper()
	x := &watched{m: m, w: new(epoch.Watch)}
	must(tb, m.Table().Watch(x.w, r))
	tb.Cleanup(x.unwatch)
	return x, x.retake(r)
}

func (x *watched) retake(r vm.Range) error {
	x.word, x.stamp = x.m.Table().Take(x.w)
	return x.m.Cover(r)
}

func (x *watched) unwatch() {
	if x.w != nil {
		x.m.Table().Unwatch(x.w)
		x.w = nil
	}
}

// valid is what a hit does.
func (x *watched) valid() bool {
	return x.m.hitCheck() && x.validUnchecked()
}

// validUnchecked is what a hit would do without HitCheck.
func (x *watched) validUnchecked() bool {
	t := x.m.Table()
	w := t.Word()
	if w == x.word {
		return true
	}
	if w.Busy() {
		w = t.Quiet()
	}
	return !w.Lost() && t.Stamp(x.w) == x.stamp
}
