package pindown_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pindown/pindown"
	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/devicetest"
	"github.com/pindown/pindown/monitor"
	"github.com/pindown/pindown/monitor/monitortest"
	"github.com/pindown/pindown/vm"
)

// The tests in this file inject faults into fakes; see docs/FAULTS.md for the
// numbers.

// steps returns how often to do something: PINDOWN_STEPS if that is set.
func steps(normal, short int) int {
	if n, err := strconv.Atoi(os.Getenv("PINDOWN_STEPS")); err == nil && n > 0 {
		return n
	}
	if testing.Short() || raceDetector {
		return short
	}
	return normal
}

// randomSeed returns the seed of a random test, and whether PINDOWN_SEED gives it.
func randomSeed(t *testing.T) (seed uint64, given bool) {
	t.Helper()
	seed = rand.Uint64() >> 16
	if s := os.Getenv("PINDOWN_SEED"); s != "" {
		var err error
		if seed, err = strconv.ParseUint(s, 0, 64); err != nil {
			t.Fatalf("PINDOWN_SEED: %v", err)
		}
		given = true
	}
	t.Logf("PINDOWN_SEED=%d", seed)
	return seed, given
}

// injected is a rig on a fake monitor.
type injected struct {
	*rig
	fake *monitortest.Fake
}

func newInjected(t *testing.T, fo *devicetest.FakeOptions, o *pindown.Options, mo *monitortest.FakeOptions) *injected {
	t.Helper()
	mon, err := monitortest.NewFake(mo)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = mon.Close() })
	var opts pindown.Options
	if o != nil {
		opts = *o
	}
	opts.Monitor = mon
	return &injected{newRig(t, fo, &opts), mon}
}

// TestFault10Uncovered: what the monitor can't see isn't cached, and the
// counters say so.
func TestFault10Uncovered(t *testing.T) {
	for _, tc := range []struct {
		err   error
		cause pindown.PerUseCause
	}{
		{monitor.ErrUncovered, pindown.PerUseUncovered},
		{monitor.ErrPending, pindown.PerUsePending},
		{monitor.ErrLost, pindown.PerUseLost},
		{monitor.ErrClosed, pindown.PerUseLost},
		{errors.New("something new"), pindown.PerUseLost},
	} {
		r := newInjected(t, nil, nil, nil)
		r.fake.SetCover(func(vm.Range) error { return fmt.Errorf("no: %w", tc.err) })
		for i := range 3 {
			reg := r.acquire(t, r.buf(0, page), 0)
			check(t, "cached", reg.Cached(), false)
			check(t, tc.cause.String(), r.Stats().PerUse[tc.cause], uint64(i+1))
			check(t, "regions", r.Stats().Regions, 0)
			release(t, &reg)
		}
		check(t, "watches left", r.fake.Table().Stats().Used, 0)
		r.fake.SetCover(nil)
		reg := r.acquire(t, r.buf(0, page), 0)
		check(t, "cached once covered", reg.Cached(), true)
		release(t, &reg)
	}
}

// TestFault11And12EveryStep: one operation whose two records fall before,
// between or after any of the steps of a registration. If the pages changed
// after the pin, the next acquire misses.
func TestFault11And12EveryStep(t *testing.T) {
	steps := []string{"before", "cover", "before pin", "after pin", "after"}
	for i, first := range steps {
		for j := i; j < len(steps); j++ {
			t.Run(first+" to "+steps[j], func(t *testing.T) {
				var r *injected
				b := func() pindown.Range { return vm.RangeOf(r.buf(0, page)) }
				armed := true
				at := func(step string) {
					if !armed {
						return
					}
					if step == first {
						r.fake.Table().Touch(b())
					}
					if step == steps[j] {
						r.fake.Table().Touch(b())
						armed = false
					}
				}
				fo := pages()
				fo.BeforePin = func(int, vm.Range) { at("before pin") }
				fo.AfterPin = func(int, vm.Range) { at("after pin") }
				r = newInjected(t, fo, nil, nil)
				r.fake.SetCover(func(vm.Range) error { at("cover"); return nil })
				at("before")
				one := r.use(t, r.buf(0, page), 0)
				at("after")
				reg, hit := r.TryAcquire(r.buf(0, page), 0)
				if j == 0 != hit {
					t.Errorf("hit %v on key %d", hit, one)
				}
				if hit {
					release(t, &reg)
				}
				// Whatever happened, the cache is well again.
				r.use(t, r.buf(0, page), 0)
				if reg, hit = r.TryAcquire(r.buf(0, page), 0); !hit {
					t.Error("no hit afterwards")
				} else {
					release(t, &reg)
				}
			})
		}
	}
}

// TestFault17ManyRegionsUnderOneOperation: all go, under one operation, and
// nobody has to ask for them.
func TestFault17ManyRegionsUnderOneOperation(t *testing.T) {
	n := steps(20_000, 1000)
	r := newInjected(t, &devicetest.FakeOptions{CountsOnly: true, Limits: device.Limits{PageSize: page}},
		&pindown.Options{MaxRegions: n, MaxBytes: 1 << 40, MergeBytes: -1}, &monitortest.FakeOptions{Regions: n})
	at := func(i int) pindown.Range {
		start := uintptr(1<<40 + 2*i*page)
		return vm.Range{Start: start, End: start + page}
	}
	for i := range n {
		reg, err := r.AcquireRange(t.Context(), at(i), 0)
		if err != nil {
			t.Fatal(err)
		}
		release(t, &reg)
	}
	r.fake.Touch(vm.OpMunmap, vm.Range{Start: 1 << 40, End: 1 << 41})
	for i := range n {
		if _, ok := r.TryAcquireRange(at(i), 0); ok {
			t.Fatalf("region %d survived", i)
		}
	}
	eventually(t, "reclaim", func() bool { return r.Stats().Regions == 0 })
	check(t, "invalidations", stats(r.rig).TotalInvalidations(), uint64(n))
	check(t, "watches left", r.fake.Table().Stats().Used, 0)
}

// TestFault19RegisterFails: whatever error at whatever try, nothing leaks and
// the next acquire works.
func TestFault19RegisterFails(t *testing.T) {
	for _, fault := range []error{
		device.ErrNoMemory, device.ErrNoSlots, device.ErrBusy, device.ErrFault, device.ErrPermission, device.ErrTooLarge,
		device.ErrUnsupportedMemory, device.ErrAccess, device.ErrInvalid, device.ErrClosed, errors.New("unheard of"),
	} {
		var fail atomic.Bool
		fo := pages()
		fo.OnRegister = func(int, vm.Range, device.Access) error {
			if fail.Load() {
				return fault
			}
			return nil
		}
		r := newInjected(t, fo, &pindown.Options{RegisterTimeout: -1}, nil)
		for _, covered := range []bool{true, false} {
			if !covered {
				r.fake.SetCover(func(vm.Range) error { return monitor.ErrUncovered })
			}
			held := r.acquire(t, r.buf(0, 2*page), 0)
			fail.Store(true)
			for _, b := range [][]byte{r.buf(page, 2*page), r.buf(8*page, page), r.buf(0, 4*page)} {
				if _, err := r.Acquire(t.Context(), b, pindown.LocalWrite); !errors.Is(err, fault) {
					t.Errorf("%v: got %v", fault, err)
				}
			}
			fail.Store(false)
			release(t, &held)
			r.use(t, r.buf(page, 2*page), pindown.LocalWrite)
			if _, err := r.Invalidate(vm.RangeOf(r.mem)); err != nil {
				t.Error(err)
			}
			eventually(t, "reclaim", func() bool { s := r.Stats(); return s.Regions+s.PerUseHeld == 0 && s.PinnedBytes == 0 })
			check(t, "watches left", r.fake.Table().Stats().Used, 0)
			check(t, "live", r.dev.Stats().Live, 0)
		}
	}
}

// TestDeregisterFails: the trouble is told, and nothing hangs or is counted
// for ever.
func TestDeregisterFails(t *testing.T) {
	told := make(chan pindown.Event, 16)
	var fail atomic.Bool
	fo := pages()
	fo.OnDeregister = func(int, device.Registration) error {
		if fail.CompareAndSwap(true, false) {
			return device.ErrBusy
		}
		return nil
	}
	r := newInjected(t, fo, &pindown.Options{OnEvent: func(e pindown.Event) {
		if e.Kind == pindown.EventBackgroundError {
			told <- e
		}
	}}, nil)
	r.use(t, r.buf(0, page), 0)
	reg := r.dev.Live()[0]
	fail.Store(true)
	if _, err := r.Invalidate(vm.RangeOf(r.mem)); err != nil {
		t.Fatal(err)
	}
	if e := <-told; !errors.Is(e.Err, device.ErrBusy) || e.Range != reg.Range {
		t.Errorf("event %v", e)
	}
	eventually(t, "budget", func() bool { return r.Stats().PinnedBytes == 0 })
	check(t, "errors", r.Stats().DeregisterErrors, 1)
	check(t, "tried again", r.Stats().DeregisterRetries, 1)
}

// TestFault24NewsLost: what can't be told by news is found by looking at
// everything.
func TestFault24NewsLost(t *testing.T) {
	r := newInjected(t, nil, &pindown.Options{MergeBytes: -1}, nil)
	for i := range 64 {
		r.use(t, r.buf(2*i*page, page), 0)
	}
	r.fake.DropNews(true)
	r.fake.Touch(vm.OpMunmap, vm.RangeOf(r.buf(0, 64*page)))
	if _, ok := r.TryAcquire(r.buf(0, page), 0); ok {
		t.Error("stale hit")
	}
	eventually(t, "sweep", func() bool { return r.Stats().Regions == 32 })
	if r.Stats().Sweeps == 0 {
		t.Error("no sweep")
	}
}

// TestFault25SmallAdjacentBuffers: many more buffers than the device has
// registrations.
func TestFault25SmallAdjacentBuffers(t *testing.T) {
	n := steps(100_000, 5000) // the fault was seen with 1 000 000
	fo := &devicetest.FakeOptions{CountsOnly: true, Limits: device.Limits{PageSize: page, MaxRegistrations: 8}}
	r := newInjected(t, fo, nil, nil)
	for i := range n {
		start := uintptr(1<<40 + 512*i)
		reg, err := r.AcquireRange(t.Context(), vm.Range{Start: start, End: start + 512}, 0)
		if err != nil {
			t.Fatal(err)
		}
		release(t, &reg)
	}
	s := r.Stats()
	check(t, "per use", s.TotalPerUse(), 0)
	if want := uint64(n/8 + 1); s.Register.Count > want {
		t.Errorf("%d registrations of %d buffers, eight to a page", s.Register.Count, n)
	}
}

// TestFault26Limits: one below the limit, the limit, one above.
func TestFault26Limits(t *testing.T) {
	const limit = 8
	for n := limit - 1; n <= limit+1; n++ {
		for name, o := range map[string]*pindown.Options{
			"regions": {MaxRegions: limit, MergeBytes: -1},
			"bytes":   {MaxBytes: limit * page, MergeBytes: -1},
		} {
			r := newInjected(t, nil, o, nil)
			var held []pindown.Region
			for i := range n {
				held = append(held, r.acquire(t, r.buf(2*i*page, page), 0))
			}
			s := r.Stats()
			check(t, fmt.Sprintf("%s: cached of %d", name, n), s.Regions, min(n, limit))
			check(t, fmt.Sprintf("%s: beside of %d", name, n), s.PerUseHeld, max(0, n-limit))
			if n%2 == 0 {
				if err := r.Close(); !errors.Is(err, pindown.ErrInUse) {
					t.Errorf("close: %v", err)
				}
			}
			for i := range held {
				release(t, &held[i])
			}
			s = r.Stats()
			check(t, "beside the cache", s.PerUseHeld, 0)
			check(t, "live", r.dev.Stats().Live, s.Regions)
			if n%2 == 0 {
				check(t, "regions after close", s.Regions, 0)
			}
		}
	}
}

// TestFault32Defaults: zero options are sensible, whatever the device says of
// itself.
func TestFault32Defaults(t *testing.T) {
	for _, lim := range []device.Limits{
		{}, {MaxRegistrations: 1}, {MaxPinnedBytes: page}, {MaxPinnedBytes: 1}, {MaxRange: page, PageSize: page}, {PageSize: 1 << 16},
	} {
		r := newInjected(t, &devicetest.FakeOptions{Limits: lim}, &pindown.Options{}, nil)
		for i := range 4 {
			reg, err := r.Acquire(t.Context(), r.buf(i*16*page, 100), 0)
			if lim.MaxPinnedBytes == 1 {
				if !errors.Is(err, device.ErrNoMemory) {
					t.Errorf("%+v: %v", lim, err)
				}
				break // each takes the time of all its tries
			}
			if err != nil {
				t.Errorf("%+v: %v", lim, err)
				continue
			}
			release(t, &reg)
		}
		if n := r.dev.Stats().PeakLive; lim.MaxRegistrations > 0 && n > lim.MaxRegistrations {
			t.Errorf("%d registrations", n)
		}
	}
}

// TestFault33And37Access: the union of access ends re-registration; attributes
// are part of the key.
func TestFault33And37Access(t *testing.T) {
	r := newInjected(t, nil, nil, nil)
	b := r.buf(0, page)
	for range 10 {
		for _, a := range []pindown.Access{0, pindown.LocalWrite, pindown.RemoteRead, pindown.LocalWrite | pindown.RemoteWrite} {
			for _, attr := range []pindown.Access{0, pindown.RelaxedOrdering} {
				reg := r.acquire(t, b, a|attr)
				check(t, "attributes", reg.Access().Attributes(), attr)
				check(t, "access", reg.Access().Covers(a|attr), true)
				release(t, &reg)
			}
		}
	}
	if n := r.Stats().Register.Count; n > 8 {
		t.Errorf("%d registrations for 4 kinds of access with and without an attribute", n)
	}
}

// TestFault35TwoBuffersInOnePage: the second is served only by a registration
// that covers its bytes.
func TestFault35TwoBuffersInOnePage(t *testing.T) {
	for _, size := range []uintptr{0, page} {
		r := newInjected(t, &devicetest.FakeOptions{Limits: device.Limits{PageSize: size}}, nil, nil)
		r.use(t, r.buf(100, 100), 0)
		reg, hit := r.TryAcquire(r.buf(300, 100), 0)
		check(t, fmt.Sprintf("hit on the neighbour with rounding to %d", size), hit, size > 0)
		if hit {
			release(t, &reg)
		}
		reg = r.acquire(t, r.buf(150, 100), pindown.LocalWrite)
		check(t, "covers", reg.Range().Contains(vm.RangeOf(r.buf(150, 100))), true)
		check(t, "access", reg.Access().Covers(pindown.LocalWrite), true)
		release(t, &reg)
	}
}

// TestFault42PromptReclaim: a program that only hits doesn't keep what went
// stale beside.
func TestFault42PromptReclaim(t *testing.T) {
	r := newInjected(t, nil, &pindown.Options{MergeBytes: -1}, nil)
	r.use(t, r.buf(0, page), 0)
	for i := range 32 {
		r.use(t, r.buf((2+2*i)*page, page), 0)
	}
	r.fake.Touch(vm.OpDontneed, vm.RangeOf(r.buf(2*page, 64*page)))
	eventually(t, "reclaim", func() bool {
		reg, ok := r.TryAcquire(r.buf(0, page), 0)
		if !ok {
			t.Fatal("miss on what didn't change")
		}
		release(t, &reg)
		return r.dev.Stats().Live == 1
	})
}

// TestHitCheckHoldsHitsBack: while an operation isn't on record, a hit waits.
func TestHitCheckHoldsHitsBack(t *testing.T) {
	var inFlight atomic.Bool
	r := newInjected(t, nil, nil, &monitortest.FakeOptions{HitCheck: func() bool { return !inFlight.Load() }})
	r.use(t, r.buf(0, page), 0)
	inFlight.Store(true)
	done := make(chan bool)
	started := make(chan struct{})
	go func() {
		close(started)
		reg, ok := r.TryAcquire(r.buf(0, page), 0)
		if ok {
			_ = reg.Release()
		}
		done <- ok
	}()
	<-started
	r.fake.Touch(vm.OpMunmap, vm.RangeOf(r.buf(0, page)))
	inFlight.Store(false)
	if <-done {
		t.Error("hit that ran while the operation wasn't on record")
	}
}

// TestCancelledFlightIsTakenOver: the one that registers gives up; who waited
// for it registers.
func TestCancelledFlightIsTakenOver(t *testing.T) {
	entered := make(chan struct{})
	fo := pages()
	fo.OnRegister = func(n int, _ vm.Range, _ device.Access) error {
		if n == 1 {
			close(entered)
		}
		if n <= 3 {
			return device.ErrBusy
		}
		return nil
	}
	r := newInjected(t, fo, &pindown.Options{RegisterTimeout: time.Hour}, nil)
	ctx, cancel := context.WithCancel(t.Context())
	first := make(chan error)
	go func() {
		reg, err := r.Acquire(ctx, r.buf(0, 2*page), 0)
		if err == nil {
			err = reg.Release()
		}
		first <- err
	}()
	<-entered
	second := r.async(r.buf(page, page))
	cancel()
	if err := <-first; err != nil && !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if err := <-second; err != nil {
		t.Error(err)
	}
}
