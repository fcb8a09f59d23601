package uffd

import (
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/internal/sys"
)

// TestControlLayout holds the offsets that the assembly knows against Go's.
func TestControlLayout(t *testing.T) {
	var c control
	want := map[string]uintptr{
		"uffd":        unsafe.Offsetof(c.uffd),
		"uffdRevents": unsafe.Offsetof(c.uffd) + unsafe.Offsetof(c.uffd.revents),
		"stop":        unsafe.Offsetof(c.stop),
		"stopRevents": unsafe.Offsetof(c.stop) + unsafe.Offsetof(c.stop.revents),
		"wake":        unsafe.Offsetof(c.wake),
		"word":        unsafe.Offsetof(c.word),
		"ring":        unsafe.Offsetof(c.ring),
		"mask":        unsafe.Offsetof(c.ringMask),
		"oldSet":      unsafe.Offsetof(c.oldSet),
		"fullSet":     unsafe.Offsetof(c.fullSet),
		"flag":        unsafe.Offsetof(c.flag),
		"overflow":    unsafe.Offsetof(c.overflow),
		"dead":        unsafe.Offsetof(c.dead),
		"tid":         unsafe.Offsetof(c.tid),
		"hold":        unsafe.Offsetof(c.hold),
		"held":        unsafe.Offsetof(c.held),
		"one":         unsafe.Offsetof(c.one),
		"head":        unsafe.Offsetof(c.head),
		"reads":       unsafe.Offsetof(c.reads),
		"tail":        unsafe.Offsetof(c.tail),
		"scratch":     unsafe.Offsetof(c.scratch),
	}
	if size := unsafe.Sizeof(c); size > pageSize {
		t.Errorf("control takes %d bytes", size)
	}
	for _, file := range []string{"thread_amd64.s", "thread_arm64.s"} {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Skipf("source needed: %v", err)
		}
		seen := 0
		for _, d := range regexp.MustCompile(`#define ctl_(\w+) (\d+)`).FindAllStringSubmatch(string(text), -1) {
			n, err := strconv.Atoi(d[2])
			must(t, err)
			if off, ok := want[d[1]]; !ok || off != uintptr(n) {
				t.Errorf("%s: %s is at %d, in Go at %d", file, d[1], n, off)
			}
			seen++
		}
		if seen != len(want) {
			t.Errorf("%s: %d offsets, want %d", file, seen, len(want))
		}
	}
}

// TestThread drives the reader through a pipe in place of a userfaultfd: the
// same loop, with messages of the test's making.
func TestThread(t *testing.T) {
	var p [2]int
	must(t, unix.Pipe2(p[:], unix.O_CLOEXEC|unix.O_NONBLOCK))
	defer unix.Close(p[1])
	stop, err := eventfd()
	must(t, err)
	wake, err := eventfd()
	must(t, err)
	mem, table, err := newTable(1)
	must(t, err)
	must(t, checkWord(table, word(mem)))
	th, err := newThread(p[0], stop, wake, word(mem))
	must(t, err)
	must(t, th.start())
	c := th.ctl
	wait := func(what string, ok func() bool) {
		t.Helper()
		for i := 0; !ok(); i++ {
			if i == 1e6 {
				t.Fatalf("waited in vain: %s", what)
			}
			unix.Syscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
		}
	}
	send := func(n uint64) {
		t.Helper()
		msg := sys.UFFDMsg{Event: sys.UFFDEventUnmap, Arg: [3]uint64{n}}
		_, err := unix.Write(p[1], (*[32]byte)(unsafe.Pointer(&msg))[:])
		must(t, err)
	}
	busy := func() uint64 { return uint64(table.Word()) & 0x7f }

	for n := range uint64(ringSize) {
		before := c.reads.Load()
		send(n)
		wait("read", func() bool { return c.reads.Load() > before })
	}
	if c.head.Load() != ringSize || c.overflow.Load() != 0 {
		t.Fatalf("%d messages read, overflow %d", c.head.Load(), c.overflow.Load())
	}
	for n := range uint64(ringSize) {
		if th.ring[n].Arg[0] != n {
			t.Fatalf("message %d is %+v", n, th.ring[n])
		}
	}
	// However much was read, one busy count and one wake-up until the flag is
	// cleared.
	wait("busy", func() bool { return c.flag.Load() == 1 && busy() == 1 })
	var count [8]byte
	n, err := unix.Read(wake, count[:])
	if n != 8 || err != nil || count[0] != 1 {
		t.Errorf("woken %v times: %v", count, err)
	}
	// The ring is full.
	before := c.reads.Load()
	send(0)
	wait("overflow", func() bool { return c.overflow.Load() == 1 && c.reads.Load() > before && busy() == 1 })
	if c.head.Load() != ringSize {
		t.Error("ring overwritten")
	}
	// Drained.
	c.flag.Store(0)
	c.overflow.Store(0)
	c.tail.Store(ringSize)
	table.DropBusy()
	send(7)
	wait("message after a full ring", func() bool { return c.flag.Load() == 1 && c.head.Load() == ringSize+1 && busy() == 1 })
	if th.ring[0].Arg[0] != 7 {
		t.Errorf("message is %+v", th.ring[0])
	}
	if table.Word().Lost() {
		t.Error("lost")
	}
	th.requestStop()
	th.join()
	if !table.Word().Lost() || c.dead.Load() != deadStopped {
		t.Errorf("after stop: word %#x, dead %#x", table.Word(), c.dead.Load())
	}
	// The descriptor is another one now.
	if to, err := os.Readlink("/proc/self/fd/" + strconv.Itoa(p[0])); err == nil && strings.HasPrefix(to, "pipe") {
		t.Errorf("descriptor still is %s", to)
	}
	for _, fd := range []int{p[0], stop, wake} {
		must(t, unix.Close(fd))
	}
}

// TestThreadFails: an end of file is an error, and the table is lost.
func TestThreadFails(t *testing.T) {
	var p [2]int
	must(t, unix.Pipe2(p[:], unix.O_CLOEXEC|unix.O_NONBLOCK))
	stop, err := eventfd()
	must(t, err)
	wake, err := eventfd()
	must(t, err)
	mem, table, err := newTable(1)
	must(t, err)
	th, err := newThread(p[0], stop, wake, word(mem))
	must(t, err)
	must(t, th.start())
	must(t, unix.Close(p[1])) // POLLHUP
	th.join()
	if !table.Word().Lost() || th.ctl.dead.Load() != uint32(unix.EIO) {
		t.Errorf("word %#x, dead %#x", table.Word(), th.ctl.dead.Load())
	}
	for _, fd := range []int{p[0], stop, wake} {
		must(t, unix.Close(fd))
	}
}
