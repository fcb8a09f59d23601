package pindown_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/pindown/pindown"
	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/devicetest"
	"github.com/pindown/pindown/monitor"
	"github.com/pindown/pindown/monitor/manual"
	"github.com/pindown/pindown/vm"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const page = 4096

// rig is a cache over a fake device and a manual monitor, with memory to use.
type rig struct {
	*pindown.Cache
	dev *devicetest.Fake
	mon *manual.Monitor
	mem []byte

	kept error // that Close shall return
}

func newRig(tb testing.TB, fo *devicetest.FakeOptions, o *pindown.Options) *rig {
	tb.Helper()
	if fo == nil {
		fo = &devicetest.FakeOptions{Limits: device.Limits{PageSize: page}}
	}
	mon, err := manual.New(nil)
	if err != nil {
		tb.Fatal(err)
	}
	var opts pindown.Options
	if o != nil {
		opts = *o
	}
	if opts.Monitor == nil {
		opts.Monitor = mon
	}
	r := &rig{dev: devicetest.NewFake(fo), mon: mon, mem: mapMem(tb, 256*page)}
	r.Cache, err = pindown.New(r.dev, &opts)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := r.Close(); !errors.Is(err, r.kept) {
			tb.Errorf("close: %v, want %v", err, r.kept)
		}
		r.dev.AssertEmpty(tb)
		if err := mon.Close(); err != nil {
			tb.Error(err)
		}
	})
	return r
}

func mapMem(tb testing.TB, n int) []byte {
	tb.Helper()
	mem, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = unix.Munmap(mem) })
	return mem
}

// buf returns n bytes of the rig's memory from offset off.
func (r *rig) buf(off, n int) []byte { return r.mem[off : off+n] }

func (r *rig) acquire(tb testing.TB, b []byte, a pindown.Access) pindown.Region {
	tb.Helper()
	reg, err := r.Acquire(tb.Context(), b, a)
	if err != nil {
		tb.Fatalf("acquire: %v", err)
	}
	return reg
}

// use acquires and releases.
func (r *rig) use(tb testing.TB, b []byte, a pindown.Access) (key uint32) {
	tb.Helper()
	reg := r.acquire(tb, b, a)
	key = reg.LocalKey()
	release(tb, &reg)
	return key
}

func release(tb testing.TB, r *pindown.Region) {
	tb.Helper()
	if err := r.Release(); err != nil {
		tb.Errorf("release: %v", err)
	}
}

// change performs a VM operation as far as the cache can tell.
func (r *rig) change(tb testing.TB, b []byte) {
	tb.Helper()
	r.mon.Before(vm.RangeOf(b))
	r.mon.After(vm.RangeOf(b))
}

func stats(r *rig) *pindown.Stats {
	s := r.Stats()
	return &s
}

func check[T comparable](tb testing.TB, what string, got, want T) {
	tb.Helper()
	if got != want {
		tb.Errorf("%s: got %v, want %v", what, got, want)
	}
}

// eventually waits for something that the reaper does. It only bounds how long
// a broken reaper hangs the test.
func eventually(tb testing.TB, what string, ok func() bool) {
	tb.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for !ok() {
		if time.Now().After(deadline) {
			tb.Fatalf("%s: not within 30 s", what)
		}
		time.Sleep(100 * time.Microsecond)
	}
}

func TestHitServesEveryPartOfARegion(t *testing.T) {
	r := newRig(t, nil, nil)
	key := r.use(t, r.buf(3*page+100, 40*page), pindown.LocalWrite)
	for _, b := range [][]byte{
		r.buf(3*page+100, 40*page), r.buf(3*page+100, 1), r.buf(43*page, 100),
		r.buf(3*page, 41*page), // page rounding
		r.buf(20*page-1, 2),
	} {
		check(t, "key of a part", r.use(t, b, pindown.LocalRead), key)
	}
	s := r.Stats()
	check(t, "hits", s.Hits, 5)
	check(t, "registrations", s.Register.Count, 1)
	check(t, "pinned", s.PinnedBytes, 41*page)
	if _, ok := r.TryAcquire(r.buf(2*page, page+1), 0); ok {
		t.Error("hit beyond the region's start")
	}
	if _, ok := r.TryAcquire(r.buf(43*page, page+101), 0); ok {
		t.Error("hit beyond the region's end")
	}
}

// TestInvalidation covers: whole, part, straddling either end, and neighbours
// that must stay (off by one).
func TestInvalidation(t *testing.T) {
	for _, tc := range []struct {
		name   string
		off, n int
		stale  bool
	}{
		{"whole", 8, 4, true},
		{"first page", 8, 1, true},
		{"last page", 11, 1, true},
		{"inside", 9, 1, true},
		{"straddles start", 7, 2, true},
		{"straddles end", 11, 2, true},
		{"around", 0, 64, true},
		{"before", 7, 1, false},
		{"after", 12, 1, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := newRig(t, nil, nil)
			b := r.buf(8*page, 4*page)
			reg := r.acquire(t, b, 0)
			r.change(t, r.buf(tc.off*page, tc.n*page))
			check(t, "Stale", reg.Stale(), tc.stale)
			again := r.acquire(t, b, 0)
			check(t, "new registration", again.LocalKey() != reg.LocalKey(), tc.stale)
			check(t, "new one is stale", again.Stale(), false)
			release(t, &again)
			release(t, &reg)
		})
	}
}

// TestManySmallRegionsUnderOneOperation: matching by start address finds one.
func TestManySmallRegionsUnderOneOperation(t *testing.T) {
	r := newRig(t, nil, &pindown.Options{MergeBytes: -1})
	for i := range 128 {
		r.use(t, r.buf(2*i*page, 100), 0)
	}
	r.change(t, r.mem)
	for i := range 128 {
		if _, ok := r.TryAcquire(r.buf(2*i*page, 100), 0); ok {
			t.Fatalf("region %d survived", i)
		}
	}
	eventually(t, "reclaim", func() bool { return r.Stats().Regions == 0 })
	check(t, "invalidations", stats(r).TotalInvalidations(), 128)
}

// TestReclaimWithoutAcquire: what goes stale is deregistered though nobody
// asks for it again.
func TestReclaimWithoutAcquire(t *testing.T) {
	var events []pindown.Event
	var mu sync.Mutex
	r := newRig(t, nil, &pindown.Options{OnEvent: func(e pindown.Event) {
		mu.Lock()
		defer mu.Unlock()
		events = append(events, e)
	}})
	r.use(t, r.buf(0, page), 0)
	held := r.acquire(t, r.buf(4*page, page), 0)
	if err := r.mon.Do(vm.RangeOf(r.mem), func() error { return nil }); err != nil {
		t.Fatal(err)
	}
	eventually(t, "reclaim of the idle region", func() bool { return r.Stats().Regions == 1 })
	check(t, "in use", r.Stats().InUse, 1)
	check(t, "stale", held.Stale(), true)
	release(t, &held)
	eventually(t, "reclaim of the held region", func() bool { return r.Stats().Regions == 0 })
	eventually(t, "events", func() bool { mu.Lock(); defer mu.Unlock(); return len(events) >= 2 })
	mu.Lock()
	defer mu.Unlock()
	inUse := 0
	for _, e := range events {
		check(t, "kind", e.Kind, pindown.EventInvalidated)
		if e.InUse {
			inUse++
		}
	}
	check(t, "events for regions in use", inUse, 1)
}

// TestOperationDuringRegister: an operation anywhere between the first step of
// a registration and its publication makes the next acquire miss.
func TestOperationDuringRegister(t *testing.T) {
	for _, when := range []string{"before pin", "after pin"} {
		t.Run(when, func(t *testing.T) {
			var r *rig
			fired := false
			hook := func(int, vm.Range) {
				if !fired {
					fired = true
					r.change(t, r.buf(0, page))
				}
			}
			fo := &devicetest.FakeOptions{Limits: device.Limits{PageSize: page}}
			if when == "before pin" {
				fo.BeforePin = hook
			} else {
				fo.AfterPin = hook
			}
			r = newRig(t, fo, nil)
			first := r.use(t, r.buf(0, page), 0)
			if _, ok := r.TryAcquire(r.buf(0, page), 0); ok {
				t.Fatal("registration that raced with an operation was served")
			}
			if second := r.use(t, r.buf(0, page), 0); second == first {
				t.Errorf("key %d again", second)
			}
			reg, ok := r.TryAcquire(r.buf(0, page), 0)
			if !ok {
				t.Fatal("no hit after the race")
			}
			release(t, &reg)
		})
	}
}

func TestConcurrentMissesRegisterOnce(t *testing.T) {
	gate := make(chan struct{})
	fo := &devicetest.FakeOptions{Limits: device.Limits{PageSize: page}, BeforePin: func(int, vm.Range) { <-gate }}
	r := newRig(t, fo, nil)
	const n = 16
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			reg, err := r.Acquire(context.Background(), r.buf(i*16, 16), pindown.LocalWrite)
			if err != nil {
				t.Error(err)
				return
			}
			release(t, &reg)
		})
	}
	eventually(t, "waiters", func() bool { return r.Stats().Waits == n-1 })
	// A waiter can be cancelled.
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("enough")
	cancel(why)
	if _, err := r.Acquire(ctx, r.buf(0, 8), 0); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled acquire: %v", err)
	}
	close(gate)
	wg.Wait()
	check(t, "registrations", r.Stats().Register.Count, 1)
}

func TestBadInput(t *testing.T) {
	r := newRig(t, nil, nil)
	start := vm.RangeOf(r.mem).Start
	for _, tc := range []struct {
		name string
		rng  pindown.Range
		acc  pindown.Access
		want error
	}{
		{"empty", pindown.Range{Start: start, End: start}, 0, pindown.ErrRange},
		{"zero", pindown.Range{}, 0, pindown.ErrRange},
		{"inverted", pindown.Range{Start: start + page, End: start}, 0, pindown.ErrRange},
		{"remote write without local write", pindown.Range{Start: start, End: start + 1}, pindown.RemoteWrite, pindown.ErrAccess},
		{"unknown access", pindown.Range{Start: start, End: start + 1}, 1 << 30, pindown.ErrAccess},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if _, err := r.AcquireRange(t.Context(), tc.rng, tc.acc); !errors.Is(err, tc.want) {
				t.Errorf("got %v, want %v", err, tc.want)
			}
			if _, ok := r.TryAcquireRange(tc.rng, tc.acc); ok {
				t.Error("TryAcquire took it")
			}
		})
	}
	if _, err := r.Acquire(t.Context(), nil, 0); !errors.Is(err, pindown.ErrRange) || !errors.Is(err, vm.ErrEmpty) {
		t.Errorf("nil slice: %v", err)
	}
	var zero pindown.Region
	if err := zero.Release(); !errors.Is(err, pindown.ErrReleased) {
		t.Errorf("release of the zero Region: %v", err)
	}
	reg := r.acquire(t, r.buf(0, 1), 0)
	copied := reg
	release(t, &reg)
	if err := reg.Release(); !errors.Is(err, pindown.ErrReleased) {
		t.Errorf("second release: %v", err)
	}
	if err := copied.Release(); !errors.Is(err, pindown.ErrReleased) {
		t.Errorf("release of a copy: %v", err)
	}
	check(t, "hits after the double release", r.Stats().Hits, 0)
	r.use(t, r.buf(0, 1), 0)
	check(t, "hits", r.Stats().Hits, 1)
	if _, err := r.Invalidate(pindown.Range{}); !errors.Is(err, pindown.ErrRange) {
		t.Errorf("invalidate nothing: %v", err)
	}
	if _, err := pindown.New(nil, nil); !errors.Is(err, pindown.ErrOptions) {
		t.Errorf("New without a device: %v", err)
	}
	if _, err := pindown.New(r.dev, &pindown.Options{MaxRegions: -1, Monitor: r.mon}); !errors.Is(err, pindown.ErrOptions) {
		t.Errorf("New with a negative limit: %v", err)
	}
}

func TestAccessUnion(t *testing.T) {
	r := newRig(t, nil, nil)
	b := r.buf(0, page)
	r.use(t, b, pindown.RemoteRead)
	r.use(t, b, pindown.LocalWrite)
	key := r.use(t, b, pindown.RemoteRead)
	check(t, "registrations", r.Stats().Register.Count, 2)
	check(t, "union is a hit", r.use(t, b, pindown.LocalWrite|pindown.RemoteRead), key)
	check(t, "misses by access", r.Stats().Misses[pindown.MissAccess], 1)
	// Relaxed ordering changes what the key means: never mixed.
	relaxed := r.use(t, b, pindown.RelaxedOrdering)
	if relaxed == key {
		t.Error("one key with and without relaxed ordering")
	}
	check(t, "both stay", r.use(t, b, pindown.RemoteRead), key)
}

func TestOverlapMerges(t *testing.T) {
	r := newRig(t, nil, nil)
	r.use(t, r.buf(0, 4*page), pindown.LocalWrite)
	key := r.use(t, r.buf(2*page, 4*page), pindown.RemoteRead)
	check(t, "merged serves both", r.use(t, r.buf(0, 6*page), pindown.LocalWrite|pindown.RemoteRead), key)
	eventually(t, "one region", func() bool { return r.Stats().Regions == 1 })
	check(t, "evictions by merging", r.Stats().Evictions[pindown.EvictMerge], 1)
}

// TestMergeFallsBackToExact: the union can't be registered, what was asked for
// can.
func TestMergeFallsBackToExact(t *testing.T) {
	fo := &devicetest.FakeOptions{Limits: device.Limits{PageSize: page}}
	fo.OnRegister = func(_ int, rng vm.Range, _ device.Access) error {
		if rng.Len() > 4*page {
			return fmt.Errorf("hole: %w", device.ErrFault)
		}
		return nil
	}
	r := newRig(t, fo, nil)
	held := r.acquire(t, r.buf(0, 4*page), pindown.LocalWrite)
	reg := r.acquire(t, r.buf(2*page, 4*page), pindown.LocalWrite)
	check(t, "range", reg.Range(), vm.RangeOf(r.buf(2*page, 4*page)))
	release(t, &reg)
	release(t, &held)
}

func TestLimits(t *testing.T) {
	t.Run("regions", func(t *testing.T) {
		r := newRig(t, nil, &pindown.Options{MaxRegions: 4, MergeBytes: -1})
		for i := range 20 {
			r.use(t, r.buf(2*i*page, page), 0)
			if n := r.dev.Stats().Live; n > 4 {
				t.Fatalf("%d registrations with a limit of 4", n)
			}
		}
		check(t, "evictions", r.Stats().Evictions[pindown.EvictRegions], 16)
		check(t, "per use", stats(r).TotalPerUse(), 0)
	})
	t.Run("bytes are pages", func(t *testing.T) {
		r := newRig(t, &devicetest.FakeOptions{}, &pindown.Options{MaxBytes: 8 * page})
		for i := range 20 {
			// Two pages each: 4 KiB that isn't aligned.
			r.use(t, r.buf((3*i*page)+100, page), 0)
			if n := r.Stats().PinnedBytes; n > 8*page {
				t.Fatalf("%d bytes pinned with a limit of %d", n, 8*page)
			}
		}
		check(t, "regions", r.Stats().Regions, 4)
	})
	t.Run("all in use", func(t *testing.T) {
		r := newRig(t, nil, &pindown.Options{MaxRegions: 2, MergeBytes: -1})
		a, b := r.acquire(t, r.buf(0, page), 0), r.acquire(t, r.buf(2*page, page), 0)
		x := r.acquire(t, r.buf(4*page, page), 0)
		check(t, "beside the cache", x.Cached(), false)
		check(t, "per use", r.Stats().PerUse[pindown.PerUseBudget], 1)
		release(t, &x)
		check(t, "live", r.dev.Stats().Live, 2)
		release(t, &a)
		y := r.acquire(t, r.buf(4*page, page), 0)
		check(t, "cached again", y.Cached(), true)
		release(t, &y)
		release(t, &b)
	})
	t.Run("wait", func(t *testing.T) {
		r := newRig(t, nil, &pindown.Options{MaxRegions: 1, WaitForBudget: true, MergeBytes: -1})
		a := r.acquire(t, r.buf(0, page), 0)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := r.Acquire(ctx, r.buf(4*page, page), 0); !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
		got := make(chan error)
		go func() {
			b, err := r.Acquire(context.Background(), r.buf(4*page, page), 0)
			if err == nil {
				err = b.Release()
			}
			got <- err
		}()
		eventually(t, "a waiter", func() bool { return r.Stats().Waits > 0 })
		release(t, &a)
		if err := <-got; err != nil {
			t.Error(err)
		}
		check(t, "per use", stats(r).TotalPerUse(), 0)
	})
	t.Run("larger than the limit", func(t *testing.T) {
		r := newRig(t, nil, &pindown.Options{MaxBytes: 4 * page})
		keep := r.use(t, r.buf(0, page), 0)
		x := r.acquire(t, r.buf(8*page, 5*page), 0)
		check(t, "cached", x.Cached(), false)
		check(t, "covers", x.Range().Contains(vm.RangeOf(r.buf(8*page, 5*page))), true)
		release(t, &x)
		check(t, "nothing evicted for it", r.use(t, r.buf(0, page), 0), keep)
	})
	t.Run("larger than the device takes", func(t *testing.T) {
		r := newRig(t, &devicetest.FakeOptions{Limits: device.Limits{PageSize: page, MaxRange: 4 * page}}, nil)
		if _, err := r.Acquire(t.Context(), r.buf(0, 5*page), 0); !errors.Is(err, device.ErrTooLarge) {
			t.Errorf("got %v", err)
		}
	})
}

// TestCyclicBeyondLimit: a working set one larger than the limit keeps most of
// its hits.
func TestCyclicBeyondLimit(t *testing.T) {
	const limit = 32
	r := newRig(t, nil, &pindown.Options{MaxRegions: limit, MergeBytes: -1})
	for range 50 {
		for i := range limit + 1 {
			r.use(t, r.buf(2*i*page, page), 0)
		}
	}
	s := r.Stats()
	total := uint64(50 * (limit + 1))
	t.Logf("hit rate %.2f", float64(s.Hits)/float64(total))
	if s.Hits*2 < total {
		t.Errorf("%d hits of %d", s.Hits, total)
	}
}

// TestDeviceShort: the device refuses until something is given back.
func TestDeviceShort(t *testing.T) {
	t.Run("slots", func(t *testing.T) {
		r := newRig(t, &devicetest.FakeOptions{Limits: device.Limits{PageSize: page, MaxPinnedBytes: 4 * page}},
			&pindown.Options{MaxBytes: 1 << 20, MergeBytes: -1})
		for i := range 16 {
			r.use(t, r.buf(2*i*page, page), 0)
		}
		if n := r.Stats().Evictions[pindown.EvictDevice]; n == 0 {
			t.Error("nothing evicted for the device")
		}
	})
	t.Run("late", func(t *testing.T) {
		var refuse atomic.Int32
		fo := &devicetest.FakeOptions{Limits: device.Limits{PageSize: page}}
		fo.OnRegister = func(int, vm.Range, device.Access) error {
			if refuse.Add(-1) >= 0 {
				return fmt.Errorf("unpinning is asynchronous: %w", device.ErrNoMemory)
			}
			return nil
		}
		r := newRig(t, fo, nil)
		r.use(t, r.buf(0, page), 0)
		refuse.Store(4)
		r.use(t, r.buf(4*page, page), 0)
		check(t, "refusals", r.Stats().RegisterErrors, 4)
	})
	t.Run("for good", func(t *testing.T) {
		fo := &devicetest.FakeOptions{Limits: device.Limits{PageSize: page}}
		fo.OnRegister = func(int, vm.Range, device.Access) error { return device.ErrNoMemory }
		r := newRig(t, fo, &pindown.Options{RegisterTimeout: time.Millisecond})
		if _, err := r.Acquire(t.Context(), r.buf(0, page), 0); !errors.Is(err, device.ErrNoMemory) {
			t.Errorf("got %v", err)
		}
		check(t, "regions", r.Stats().Regions, 0)
		check(t, "pinned", r.Stats().PinnedBytes, 0)
	})
	t.Run("fault is final", func(t *testing.T) {
		fo := &devicetest.FakeOptions{Limits: device.Limits{PageSize: page}}
		fo.OnRegister = func(int, vm.Range, device.Access) error { return device.ErrFault }
		r := newRig(t, fo, nil)
		if _, err := r.Acquire(t.Context(), r.buf(0, page), 0); !errors.Is(err, device.ErrFault) {
			t.Errorf("got %v", err)
		}
		check(t, "tries", r.Stats().RegisterErrors, 1)
	})
}

func TestMonitorLost(t *testing.T) {
	lost := make(chan pindown.Event, 16)
	r := newRig(t, nil, &pindown.Options{OnEvent: func(e pindown.Event) {
		if e.Kind == pindown.EventMonitorLost {
			lost <- e
		}
	}})
	r.use(t, r.buf(0, page), 0)
	if err := r.mon.Close(); err != nil {
		t.Fatal(err)
	}
	if _, ok := r.TryAcquire(r.buf(0, page), 0); ok {
		t.Fatal("hit after the monitor was lost")
	}
	reg := r.acquire(t, r.buf(0, page), 0)
	check(t, "cached", reg.Cached(), false)
	release(t, &reg)
	if e := <-lost; !errors.Is(e.Err, monitor.ErrLost) {
		t.Errorf("event %v", e)
	}
	eventually(t, "everything given up", func() bool { return r.dev.Stats().Live == 0 })
}

func TestClose(t *testing.T) {
	r := newRig(t, nil, nil)
	held := r.acquire(t, r.buf(0, page), 0)
	r.use(t, r.buf(4*page, page), 0)
	if err := r.Close(); !errors.Is(err, pindown.ErrInUse) {
		t.Errorf("close with a region in use: %v", err)
	}
	check(t, "live", r.dev.Stats().Live, 1)
	if _, err := r.Acquire(t.Context(), r.buf(0, page), 0); !errors.Is(err, pindown.ErrClosed) {
		t.Errorf("acquire on a closed cache: %v", err)
	}
	if _, ok := r.TryAcquire(r.buf(0, page), 0); ok {
		t.Error("hit on a closed cache")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := r.Shutdown(ctx); !errors.Is(err, pindown.ErrInUse) || !errors.Is(err, context.Canceled) {
		t.Errorf("shutdown: %v", err)
	}
	done := make(chan error)
	go func() { done <- r.Shutdown(context.Background()) }()
	release(t, &held)
	if err := <-done; err != nil {
		t.Error(err)
	}
	check(t, "live", r.dev.Stats().Live, 0)
	if err := r.Close(); err != nil {
		t.Errorf("second close: %v", err)
	}
}

func TestInvalidate(t *testing.T) {
	r := newRig(t, nil, &pindown.Options{MergeBytes: -1})
	for i := range 4 {
		r.use(t, r.buf(2*i*page, page), 0)
	}
	n, err := r.Invalidate(vm.RangeOf(r.buf(2*page, 3*page)))
	if err != nil || n != 2 {
		t.Errorf("got %d, %v", n, err)
	}
	_, a := r.TryAcquire(r.buf(2*page, page), 0)
	check(t, "hit on what was invalidated", a, false)
	eventually(t, "reclaim", func() bool { return r.Stats().Regions == 2 })
}

func TestHitAllocatesNothing(t *testing.T) {
	r := newRig(t, nil, nil)
	b := r.buf(100, 3*page)
	r.use(t, b, 0)
	ctx := t.Context()
	for name, f := range map[string]func(){
		"acquire": func() { reg, _ := r.Acquire(ctx, b, 0); _ = reg.Release() },
		"try":     func() { reg, _ := r.TryAcquire(b, 0); _ = reg.Release() },
		"restamp": func() {
			r.mon.Before(vm.Range{Start: page, End: 2 * page})
			reg, _ := r.TryAcquire(b, 0)
			_ = reg.Stale()
			_ = reg.Release()
		},
	} {
		check(t, "allocations of "+name, testing.AllocsPerRun(1000, f), 0)
	}
}

func TestConcurrentUse(t *testing.T) {
	r := newRig(t, nil, &pindown.Options{MaxRegions: 16})
	n := 3000
	if testing.Short() {
		n = 300
	}
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			for i := range n {
				off := (i*7 + g*13) % 200
				reg, err := r.Acquire(context.Background(), r.buf(off*page, (1+i%5)*page), pindown.Access(i%2))
				if err != nil {
					t.Error(err)
					return
				}
				if !reg.Range().Contains(vm.RangeOf(r.buf(off*page, (1+i%5)*page))) {
					t.Errorf("got %v", reg.Range())
				}
				if i%11 == 0 {
					r.change(t, r.buf(off*page, page))
				}
				if i%97 == 0 {
					_ = r.Stats()
					if _, err := r.Invalidate(vm.RangeOf(r.buf(off*page, 9*page))); err != nil {
						t.Error(err)
					}
				}
				release(t, &reg)
			}
		})
	}
	wg.Wait()
	s := r.Stats()
	check(t, "acquires", s.Hits+s.TotalMisses(), uint64(8*n))
	check(t, "in use", s.InUse, 0)
	t.Log(s)
}

// TestBudgetFreedEvent: who was refused at a limit learns when to try again, also
// when a region only becomes idle.
func TestBudgetFreedEvent(t *testing.T) {
	freed := make(chan struct{}, 16)
	r := newRig(t, nil, &pindown.Options{MaxRegions: 1, MergeBytes: -1, OnEvent: func(e pindown.Event) {
		if e.Kind == pindown.EventBudgetFreed {
			freed <- struct{}{}
		}
	}})
	a := r.acquire(t, r.buf(0, page), 0)
	b := r.acquire(t, r.buf(4*page, page), 0)
	check(t, "cached", b.Cached(), false)
	release(t, &a)
	<-freed
	release(t, &b)
	c := r.acquire(t, r.buf(4*page, page), 0)
	check(t, "cached", c.Cached(), true)
	release(t, &c)
}

// TestCloseIsNoLoss: a cache that closes the shared monitor as its last user
// doesn't report that as the loss of it.
func TestCloseIsNoLoss(t *testing.T) {
	for range 5 {
		dev := devicetest.NewFake(&devicetest.FakeOptions{Limits: device.Limits{PageSize: page}})
		var lost atomic.Int32
		c, err := pindown.New(dev, &pindown.Options{OnEvent: func(e pindown.Event) {
			if e.Kind == pindown.EventMonitorLost {
				lost.Add(1)
			}
		}})
		if err != nil {
			t.Fatal(err)
		}
		r, err := c.Acquire(t.Context(), mapMem(t, page), 0)
		if err != nil {
			t.Fatal(err)
		}
		// Released while closing: the reaper finds the last registration.
		if err := c.Close(); r.Cached() && !errors.Is(err, pindown.ErrInUse) {
			t.Errorf("close: %v", err)
		}
		release(t, &r)
		r, err = c.Acquire(t.Context(), mapMem(t, page), 0)
		if !errors.Is(err, pindown.ErrClosed) {
			t.Errorf("acquire %v: %v", r, err)
		}
		check(t, "monitor lost", lost.Load(), 0)
		dev.AssertEmpty(t)
	}
}
