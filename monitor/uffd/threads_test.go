package uffd

import (
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
)

func TestParseSyscall(t *testing.T) {
	for _, c := range []struct {
		text string
		want place
	}{
		{"running\n", placeRunning},
		{"-1 0x7ffe 0x401000\n", placeOutside},
		{"202 0x1 0x2 0x3 0x4 0x5 0x6 0x7ffe 0x401000\n", placeOutside},
		{syscallLine(unix.SYS_MADVISE), placeInside},
		{syscallLine(unix.SYS_MADVISE | x32Bit), placeInside},
		{syscallLine(unix.SYS_PROCESS_MADVISE), placeInside},
		{syscallLine(unix.SYS_MUNMAP), placeOutside},
		{"426 0x1 0x2 0x3 0x4 0x5 0x6 0x0 0x0\n", placeWorker},
		{"", placeUnknown},
		{"28", placeUnknown},
		{"x 0x1 0x2", placeUnknown},
	} {
		if got := parseSyscall([]byte(c.text)); got != c.want {
			t.Errorf("%q: %d, want %d", c.text, got, c.want)
		}
	}
}

func syscallLine(nr int) string {
	return itoa(nr) + " 0x1 0x2 0x3 0x4 0x5 0x6 0x7ffe 0x401000\n"
}

func itoa(n int) string {
	if n < 10 {
		return string(rune('0' + n))
	}
	return itoa(n/10) + string(rune('0'+n%10))
}

func TestParseStat(t *testing.T) {
	const rest = " 1 1 1 0 -1 4194320 0 0"
	for _, c := range []struct {
		text         string
		worker, idle bool
	}{
		{"7 (iou-wrk-1) S" + rest, true, true},
		{"7 (iou-wrk-1) D" + rest, true, false},
		{"7 (iou-wrk-1) R" + rest, true, false},
		{"7 (iou-sqp-1) R" + rest, true, true},
		// A name proves nothing.
		{"7 (iou-wrk-1) S 1 1 1 0 -1 4194304 0 0", false, false},
		{"7 (a) b) S 1 1 1 0 -1 4194304 0 0", false, false},
		{"", false, false},
	} {
		if w, i := isWorker([]byte(c.text)), idleWorker([]byte(c.text)); w != c.worker || i != c.idle {
			t.Errorf("%q: worker %v, idle %v", c.text, w, i)
		}
	}
}

func TestSignalSets(t *testing.T) {
	const ok = "Name:\tx\nSigPnd:\t0000000000000000\nSigBlk:\t0000000000000000\nSigCgt:\t0000000000400000\n"
	const blocked = "Name:\tx\nSigPnd:\t0000000000400000\nSigBlk:\t0000000000400000\nSigCgt:\t0000000000400000\n"
	const ignored = "Name:\tx\nSigPnd:\t0000000000000000\nSigBlk:\t0000000000000000\nSigCgt:\t0000000000000000\n"
	for _, c := range []struct {
		text           string
		takes, pending bool
	}{{ok, true, false}, {blocked, false, true}, {ignored, false, false}, {"", false, true}} {
		if a, b := takesSignal([]byte(c.text)), signalPending([]byte(c.text)); a != c.takes || b != c.pending {
			t.Errorf("%q: takes %v, pending %v", c.text, a, b)
		}
	}
	status, err := os.ReadFile("/proc/thread-self/status")
	must(t, err)
	if !takesSignal(status) {
		t.Error("Go's threads don't handle SIGURG")
	}
}

// TestQuiescent looks at real threads: sleeping, computing, and inside an
// madvise that waits for the reader.
func TestQuiescent(t *testing.T) {
	m := open(t, nil)
	proof := func(want bool) {
		t.Helper()
		got := false
		// Threads are born and die at any time; a busy machine needs patience.
		for range 50 {
			if got = m.threads(); got || !want {
				break
			}
		}
		if got != want {
			t.Errorf("quiescent %v, want %v", got, want)
		}
	}
	proof(true)

	var stop atomic.Bool
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			runtime.LockOSThread()
			for n := 0; !stop.Load(); n++ {
			}
		})
	}
	proof(true)

	r := mapPages(t, 4)
	must(t, m.Cover(r))
	release := holdReader(t, m)
	wg.Go(func() { madvise(r, unix.MADV_DONTNEED) })
	for m.reader.ctl.held.Load() == 0 {
		runtime.Gosched()
	}
	for range 20 {
		proof(false)
	}
	release()
	proof(true)
	stop.Store(true)
	wg.Wait()
}
