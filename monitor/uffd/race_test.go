package uffd

import (
	"errors"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/internal/oracle"
	"github.com/pindown/pindown/internal/sys"
	"github.com/pindown/pindown/monitor"
	"github.com/pindown/pindown/vm"
)

// holdReader stops the reader before its next read, until the function that it
// returns is called.
func holdReader(tb testing.TB, m *Monitor) func() {
	tb.Helper()
	m.reader.setHold(true)
	release := sync.OnceFunc(func() { m.reader.setHold(false) })
	tb.Cleanup(release)
	return release
}

// TestWindow shows the window that HitCheck closes, step by step:
//
//	thread A                     reader               thread B
//	munmap(p) … waits            (held)
//	                                                  mmap(p) returns
//	                                                  hit on p
//	                             reads, records
//	munmap returns
//
// B's mmap has returned, so B must not be served the registration of the old
// pages, although A's munmap is neither on record nor announced as busy.
func TestWindow(t *testing.T) {
	m := open(t, nil)
	r := mapPages(t, 4)
	x, err := watch(t, m, r)
	must(t, err)
	if !x.valid() {
		t.Fatal("not valid to begin with")
	}
	release := holdReader(t, m)
	done := make(chan error)
	go func() { done <- munmap(r) }()
	for m.reader.ctl.held.Load() == 0 {
		runtime.Gosched()
	}
	must(t, mmapAt(r, unix.MAP_FIXED_NOREPLACE))
	if !x.validUnchecked() {
		t.Error("without HitCheck: stale seen; the window isn't there on this kernel")
	}
	if x.valid() {
		t.Error("with HitCheck: served the stale registration")
	}
	select {
	case <-done:
		t.Error("munmap returned before its event was read")
	default:
	}
	release()
	must(t, <-done)
	if x.valid() || x.validUnchecked() {
		t.Error("valid after munmap returned")
	}
	if !m.hitCheck() {
		t.Error("HitCheck fails with nothing in flight")
	}
}

// TestWindowRate tries to hit the window without holding the reader: A unmaps,
// B maps the address anew as soon as that succeeds and hits at once.
func TestWindowRate(t *testing.T) {
	rounds := 1000
	if testing.Short() {
		rounds = 100
	}
	m := open(t, nil)
	r := mapPages(t, 1)
	var start, finished, stop atomic.Int64
	var wg sync.WaitGroup
	wg.Go(func() {
		runtime.LockOSThread()
		for i := int64(1); ; i++ {
			for start.Load() < i {
				if stop.Load() != 0 {
					return
				}
				runtime.Gosched()
			}
			munmap(r)
			finished.Store(i)
		}
	})
	var reused, stale, checked int
	for i := range rounds {
		x, err := watch(t, m, r)
		must(t, err)
		start.Store(int64(i + 1))
		for mmapAt(r, unix.MAP_FIXED_NOREPLACE) != nil {
		}
		reused++
		ok := x.validUnchecked()
		if ok {
			stale++
		}
		if x.valid() {
			checked++
		}
		for finished.Load() <= int64(i) {
			runtime.Gosched()
		}
		x.unwatch()
	}
	stop.Store(1)
	wg.Wait()
	t.Logf("address reused %d times; stale hits: %d without HitCheck, %d with it", reused, stale, checked)
	if checked > 0 {
		t.Errorf("%d stale hits", checked)
	}
}

// TestPending drives Cover with a made-up answer about threads: a removal stays
// pending until a proof that began after it succeeds.
func TestPending(t *testing.T) {
	m := open(t, nil)
	r, other := mapPages(t, 8), mapPages(t, 8)
	part := vm.Range{Start: r.Start + pageSize, End: r.Start + 2*pageSize}
	inside := true
	asked := 0
	m.threads = func() bool { asked++; return !inside }

	x, err := watch(t, m, r)
	must(t, err)
	must(t, m.Cover(other))
	if asked != 0 {
		t.Error("proof asked for with nothing pending")
	}
	must(t, madvise(part, unix.MADV_DONTNEED))
	for range 2 {
		if err := x.retake(r); !errors.Is(err, monitor.ErrPending) {
			t.Errorf("cover during a removal: %v, want ErrPending", err)
		}
	}
	must(t, m.Cover(other))
	must(t, m.Cover(vm.Range{Start: part.End, End: r.End}))
	if asked != 2 {
		t.Errorf("asked %d times, want 2", asked)
	}
	// A removal that comes during the proof isn't covered by it.
	m.threads = func() bool {
		must(t, madvise(part, unix.MADV_DONTNEED))
		return true
	}
	must(t, x.retake(r))
	m.threads = func() bool { return false }
	if err := x.retake(r); !errors.Is(err, monitor.ErrPending) {
		t.Errorf("cover after a removal during the proof: %v, want ErrPending", err)
	}
	m.threads = func() bool { return true }
	must(t, x.retake(r))
	m.threads = func() bool { t.Error("asked again"); return false }
	must(t, x.retake(r))
}

// TestPendingBounded: any number of removals is remembered, in bounded memory.
func TestPendingBounded(t *testing.T) {
	m := open(t, nil)
	m.threads = func() bool { return false }
	r := mapPages(t, 1024)
	must(t, m.Cover(r))
	for i := uintptr(0); i < 1024; i += 2 {
		at := r.Start + i*pageSize
		must(t, madvise(vm.Range{Start: at, End: at + pageSize}, unix.MADV_DONTNEED))
	}
	m.table.Quiet()
	for i := uintptr(0); i < 1024; i += 2 {
		at := r.Start + i*pageSize
		if err := m.Cover(vm.Range{Start: at, End: at + pageSize}); !errors.Is(err, monitor.ErrPending) {
			t.Fatalf("page %d: %v, want ErrPending", i, err)
		}
	}
	m.drainMu.Lock()
	n := len(m.fresh.list) + len(m.proving.list)
	m.drainMu.Unlock()
	if n > 2*pendingRoom {
		t.Errorf("%d ranges remembered", n)
	}
}

// TestRemoveRace races registrations with MADV_DONTNEED, whose event comes
// before the pages go: B registers while A is inside the call, and when A's
// call has returned the pages must be those that B's registration holds, or it
// must be invalid. Without the rule about pending removals it isn't so.
func TestRemoveRace(t *testing.T) {
	if err := oracle.CheckPFN(); err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatal(err)
		}
		t.Skipf("frame numbers needed: %v", err)
	}
	rounds := 500
	if testing.Short() {
		rounds = 50
	}
	for _, rule := range []bool{false, true} {
		m := open(t, nil)
		if !rule {
			m.threads = func() bool { return true }
		}
		// Several pages, so that the removal takes a while.
		r := mapPages(t, 64)
		must(t, m.Cover(r))
		var start, finished, stop atomic.Int64
		var wg sync.WaitGroup
		wg.Go(func() {
			runtime.LockOSThread()
			for i := int64(1); ; i++ {
				for start.Load() < i {
					if stop.Load() != 0 {
						return
					}
					runtime.Gosched()
				}
				madvise(r, unix.MADV_DONTNEED)
				finished.Store(i)
			}
		})
		last := vm.Range{Start: r.End - pageSize, End: r.End}
		var stale, pending, good, invalid int
		for i := int64(1); i <= int64(rounds); i++ {
			fill(r)
			start.Store(i)
			// Not before the event is recorded: earlier registrations are
			// caught by their stamp.
			gen := m.table.Word().Generation()
			x, err := watch(t, m, last)
			for err == nil && m.table.Word().Generation() == gen && finished.Load() < i {
				m.hitCheck()
				err = x.retake(last)
			}
			if err == nil {
				err = x.retake(last)
			}
			if errors.Is(err, monitor.ErrPending) {
				pending++
			} else {
				must(t, err)
				w, err := oracle.Hold(last, pageSize)
				must(t, err)
				for finished.Load() < i {
					runtime.Gosched()
				}
				d, err := w.Compare()
				must(t, err)
				switch {
				case !x.valid():
					invalid++
				case d.Any():
					stale++
				default:
					good++
				}
				must(t, w.Close())
			}
			for finished.Load() < i {
				runtime.Gosched()
			}
			x.unwatch()
		}
		stop.Store(1)
		wg.Wait()
		t.Logf("rule %v: %d stale, %d good, %d invalid, %d refused as pending", rule, stale, good, invalid, pending)
		if rule && stale > 0 {
			t.Errorf("%d stale registrations", stale)
		}
		must(t, m.Close())
	}
}

// TestStopTheWorld: operations by raw system calls, which keep the P, with
// stop-the-world asked for all the time.
func TestStopTheWorld(t *testing.T) {
	rounds := 200
	if testing.Short() {
		rounds = 40
	}
	for _, procs := range []int{1, 2} {
		old := runtime.GOMAXPROCS(procs)
		m := open(t, nil)
		r := mapPages(t, 4)
		x, err := watch(t, m, r)
		must(t, err)
		var stop atomic.Bool
		var wg sync.WaitGroup
		wg.Go(func() {
			for !stop.Load() {
				runtime.GC()
			}
		})
		for range rounds {
			must(t, m.Cover(r))
			if _, _, errno := unix.RawSyscall(unix.SYS_MUNMAP, r.Start, r.Len(), 0); errno != 0 {
				t.Fatal(errno)
			}
			must(t, mmapAt(r, unix.MAP_FIXED_NOREPLACE))
			// Busy until it is drained: by this call.
			if x.valid() {
				t.Fatal("valid after munmap")
			}
			x.word, x.stamp = m.table.Take(x.w)
		}
		stop.Store(true)
		wg.Wait()
		must(t, m.Close())
		runtime.GOMAXPROCS(old)
	}
}

// TestOverflow fills the ring: operations go on, and everything is suspect.
func TestOverflow(t *testing.T) {
	m := open(t, nil)
	far := mapPages(t, 1)
	x, err := watch(t, m, far)
	must(t, err)
	r := mapPages(t, 2*ringSize)
	must(t, m.Cover(r))
	feed := m.Subscribe()
	defer feed.Close()
	// Nobody drains.
	m.drainMu.Lock()
	for i := range uintptr(2 * ringSize) {
		at := r.Start + i*pageSize
		must(t, munmap(vm.Range{Start: at, End: at + pageSize}))
	}
	if m.reader.ctl.overflow.Load() == 0 {
		t.Error("no overflow")
	}
	m.drainMu.Unlock()
	if x.valid() {
		t.Error("a range far away is valid after messages were lost")
	}
	if feed.Lost() == 0 {
		t.Error("the feed doesn't know that news was lost")
	}
	m.threads = func() bool { return true }
	must(t, x.retake(far))
	if !x.valid() {
		t.Error("not valid after it was registered anew")
	}
	must(t, munmap(far))
	if x.valid() {
		t.Error("valid after munmap")
	}
}

func BenchmarkHitCheck(b *testing.B) {
	m := open(b, nil)
	check := m.HitCheck()
	b.ReportAllocs()
	for b.Loop() {
		if !check() {
			b.Fatal("operation in flight")
		}
	}
}

func BenchmarkGetppid(b *testing.B) {
	for b.Loop() {
		unix.RawSyscall(unix.SYS_GETPPID, 0, 0, 0)
	}
}

func BenchmarkCover(b *testing.B) {
	m := open(b, nil)
	r := mapPages(b, 16)
	b.Run("armed", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			must(b, m.Cover(r))
		}
	})
	b.Run("arm", func(b *testing.B) {
		for b.Loop() {
			m.drainMu.Lock()
			m.armed.clear()
			m.drainMu.Unlock()
			must(b, sys.UFFDUnregister(int(m.fd.Load()), r))
			must(b, m.Cover(r))
		}
	})
	b.Run("pending", func(b *testing.B) {
		refused := 0
		for b.Loop() {
			must(b, madvise(r, unix.MADV_DONTNEED))
			if m.Cover(r) != nil {
				refused++
			}
		}
		b.ReportMetric(float64(refused)/float64(b.N), "refused/op")
	})
}

func BenchmarkOperation(b *testing.B) {
	m := open(b, nil)
	r := mapPages(b, 1)
	for _, armed := range []bool{false, true} {
		name := "unarmed"
		if armed {
			name = "armed"
		}
		b.Run("dontneed/"+name, func(b *testing.B) {
			if armed {
				must(b, m.Cover(r))
			}
			for b.Loop() {
				must(b, madvise(r, unix.MADV_DONTNEED))
			}
		})
	}
}
