package pindown_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
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

// storm is a cache used by many goroutines at once in every way there is, on a
// device and a monitor with faults, while the pages behind its ranges change.
// Pages are versions, which only grow: what is handed out must hold, of each
// page, at least the version that was there when it was asked for.
type storm struct {
	weather
	t       *testing.T
	c       *pindown.Cache
	dev     *devicetest.Fake
	mon     *monitortest.Fake
	version [stormPages]atomic.Uint64

	changing           atomic.Int64 // changes that neither the record nor the busy count shows yet
	acquires, failures atomic.Int64
}

// weather says what kind of storm it is.
type weather struct {
	o       pindown.Options
	faults  int  // one in so many calls of the device fails; 0: none
	pending int  // one in so many calls of Cover is refused; 0: none
	nested  bool // the device changes the address space and calls the cache
	late    bool // the monitor records after the change, as uffd does
	lanes   bool
}

const (
	stormPages = 48
	stormStart = uintptr(0x6000_0000_0000)
)

func stormSpan(r vm.Range) (from, to int) {
	r = r.RoundOut(page)
	return int(r.Start-stormStart) / page, int(r.End-stormStart) / page
}

func (s *storm) frames(r vm.Range) ([]uint64, error) {
	if r.Start < stormStart || r.End > stormStart+stormPages*page {
		return nil, device.ErrFault
	}
	from, to := stormSpan(r)
	var v []uint64
	for i := from; i < to; i++ {
		v = append(v, s.version[i].Load())
	}
	return v, nil
}

func stormRange(rnd *rand.Rand) pindown.Range {
	from := rnd.IntN(stormPages*page - 1)
	n := 1 + rnd.IntN(min(stormPages*page-from, 6*page))
	return vm.Range{Start: stormStart + uintptr(from), End: stormStart + uintptr(from+n)}
}

// operate replaces the pages of r.
func (s *storm) operate(r pindown.Range) {
	r = r.RoundOut(page)
	change := func() {
		from, to := stormSpan(r)
		for i := from; i < to; i++ {
			s.version[i].Add(1)
		}
	}
	if !s.late {
		s.mon.Do(vm.OpMmapFixed, r, change)
		return
	}
	s.changing.Add(1)
	change()
	runtime.Gosched()
	s.mon.Table().AddBusy()
	s.changing.Add(-1)
	runtime.Gosched()
	if s.mon.Table().Touch(r) {
		s.mon.News(vm.Event{Range: r, Op: vm.OpMmapFixed})
	}
	s.mon.Table().DropBusy()
}

// fault returns what the device refuses with, now and then.
func (s *storm) fault() error {
	if s.faults == 0 || rand.IntN(s.faults) > 0 {
		return nil
	}
	return []error{device.ErrBusy, device.ErrNoMemory, device.ErrNoSlots}[rand.IntN(3)]
}

var stormAccess = []pindown.Access{0, pindown.LocalWrite, pindown.RemoteRead, pindown.RelaxedOrdering}

// verify checks a region against what was there before it was acquired, holds it
// for a moment and releases it.
func (s *storm) verify(want pindown.Range, a pindown.Access, before []uint64, reg pindown.Region) {
	t := s.t
	s.acquires.Add(1)
	if !reg.Range().Contains(want) || !reg.Access().Covers(a) {
		t.Errorf("acquired %v %v, got %v %v", want, a, reg.Range(), reg.Access())
	}
	got := s.dev.Frames(reg.Registration())
	from, _ := stormSpan(want)
	first, _ := stormSpan(reg.Range())
	if got == nil {
		t.Errorf("%v is held and not registered", reg.Range())
	} else {
		for i, v := range before {
			if got[from-first+i] < v {
				t.Errorf("stale: page %d of %v holds version %d, was %d (cached %v)", i, want, got[from-first+i], v, reg.Cached())
			}
		}
	}
	if rand.IntN(4) == 0 {
		_ = reg.Stale()
		time.Sleep(time.Duration(rand.IntN(50)) * time.Microsecond)
	}
	if s.dev.Frames(reg.Registration()) == nil {
		t.Errorf("%v is held and not registered any more", reg.Range())
	}
	if err := reg.Release(); err != nil {
		t.Errorf("release: %v", err)
	}
}

// allowed are the errors that an acquire may end with here.
func (s *storm) allowed(err error) bool {
	for _, e := range []error{
		context.Canceled, context.DeadlineExceeded, device.ErrBusy, device.ErrNoMemory, device.ErrNoSlots, pindown.ErrClosed,
	} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

func (s *storm) context(rnd *rand.Rand) (context.Context, context.CancelFunc) {
	switch rnd.IntN(4) {
	case 0:
		return context.WithTimeout(context.Background(), time.Duration(rnd.IntN(300))*time.Microsecond)
	case 1:
		return context.WithTimeout(context.Background(), time.Second)
	}
	return context.WithTimeout(context.Background(), time.Minute)
}

func (s *storm) work(rnd *rand.Rand, n int) {
	var acquirer interface {
		AcquireRange(ctx context.Context, r pindown.Range, a pindown.Access) (pindown.Region, error)
		TryAcquireRange(r pindown.Range, a pindown.Access) (pindown.Region, bool)
	} = s.c
	if s.lanes {
		lane, err := s.c.NewLane()
		if err != nil {
			if !errors.Is(err, pindown.ErrClosed) {
				s.t.Error(err)
			}
			return
		}
		defer func() {
			if err := lane.Close(); err != nil {
				s.t.Error(err)
			}
		}()
		acquirer = lane
	}
	var r pindown.Range
	var a pindown.Access
	for i := range n {
		if i == 0 || rnd.IntN(3) > 0 {
			r, a = stormRange(rnd), stormAccess[rnd.IntN(len(stormAccess))]
		}
		before, _ := s.frames(r)
		ctx, cancel := s.context(rnd)
		var reg pindown.Region
		var err error
		ok := true
		switch k := rnd.IntN(16); k {
		case 0:
			s.operate(r)
			cancel()
			continue
		case 1:
			s.batch(ctx, rnd)
			cancel()
			continue
		case 2:
			if _, err := s.c.Prefetch(ctx, r, a); err != nil && !s.allowed(err) {
				s.t.Errorf("prefetch: %v", err)
			}
			cancel()
			continue
		case 3:
			if _, err := s.c.Invalidate(r); err != nil && !errors.Is(err, pindown.ErrClosed) {
				s.t.Errorf("invalidate: %v", err)
			}
			_ = s.c.Stats()
			cancel()
			continue
		case 4, 5, 6:
			reg, ok = s.c.TryAcquireRange(r, a)
		case 7, 8, 9:
			reg, ok = acquirer.TryAcquireRange(r, a)
		case 10, 11:
			reg, err = acquirer.AcquireRange(ctx, r, a)
		default:
			reg, err = s.c.AcquireRange(ctx, r, a)
		}
		cancel()
		switch {
		case !ok:
		case err != nil:
			if !s.allowed(err) {
				s.t.Errorf("acquire: %v", err)
			}
			s.failures.Add(1)
		default:
			s.verify(r, a, before, reg)
		}
	}
}

// batch acquires overlapping, duplicate and now and then invalid ranges.
func (s *storm) batch(ctx context.Context, rnd *rand.Rand) {
	// Batches that wait for budget may wait for each other.
	ctx, cancel := context.WithTimeout(ctx, 5*time.Millisecond)
	defer cancel()
	reqs := make([]pindown.Request, 1+rnd.IntN(5))
	before := make([][]uint64, len(reqs))
	bad := -1
	for i := range reqs {
		reqs[i] = pindown.Request{Range: stormRange(rnd), Access: stormAccess[rnd.IntN(len(stormAccess))]}
		switch {
		case i > 0 && rnd.IntN(3) == 0:
			reqs[i] = reqs[i-1]
		case rnd.IntN(20) == 0:
			reqs[i].Range = vm.Range{Start: stormStart, End: stormStart}
			bad = i
		}
	}
	for i := range reqs {
		before[i], _ = s.frames(reqs[i].Range)
	}
	regions := make([]pindown.Region, len(reqs))
	if err := s.c.AcquireBatch(ctx, reqs, regions); err != nil {
		if !s.allowed(err) && (bad < 0 || !errors.Is(err, pindown.ErrRange)) {
			s.t.Errorf("batch: %v", err)
		}
		for i := range regions {
			if regions[i] != (pindown.Region{}) {
				s.t.Errorf("region %d is left of a batch that failed", i)
			}
		}
		return
	}
	if bad >= 0 {
		s.t.Errorf("a batch with %v succeeded", reqs[bad])
	}
	for i, reg := range regions {
		s.verify(reqs[i].Range, reqs[i].Access, before[i], reg)
	}
}

// event calls back into the cache.
func (s *storm) event(e pindown.Event) {
	switch rand.IntN(8) {
	case 0:
		_ = s.c.Stats()
	case 1:
		if !e.Range.Empty() {
			_, _ = s.c.Invalidate(e.Range)
		}
	case 2:
		if reg, ok := s.c.TryAcquireRange(e.Range, 0); ok {
			if err := reg.Release(); err != nil {
				s.t.Error(err)
			}
		}
	case 3:
		ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond)
		defer cancel()
		if _, err := s.c.Prefetch(ctx, e.Range, 0); err != nil && !s.allowed(err) && !errors.Is(err, pindown.ErrRange) {
			s.t.Errorf("prefetch of %v from an event: %v", e.Range, err)
		}
	}
}

func (s *storm) run(seed uint64) {
	t := s.t
	mo := &monitortest.FakeOptions{Regions: 64}
	if s.late {
		mo.HitCheck = func() bool { return s.changing.Load() == 0 }
	}
	if s.pending > 0 {
		mo.Cover = func(vm.Range) error {
			if rand.IntN(s.pending) == 0 {
				return []error{monitor.ErrPending, monitor.ErrUncovered}[rand.IntN(2)]
			}
			return nil
		}
	}
	var err error
	if s.mon, err = monitortest.NewFake(mo); err != nil {
		t.Fatal(err)
	}
	fo := &devicetest.FakeOptions{Limits: device.Limits{PageSize: page}, Frames: s.frames}
	fo.OnRegister = func(int, vm.Range, device.Access) error { return s.fault() }
	fo.OnDeregister = func(int, device.Registration) error { return s.fault() }
	fo.AfterPin = func(_ int, r vm.Range) {
		if s.nested && rand.IntN(8) == 0 {
			// The device changes the address space, and calls the cache.
			s.operate(vm.Range{Start: r.Start + uintptr(rand.IntN(int(r.Len()))), End: r.End})
			if rand.IntN(4) == 0 {
				_, _ = s.c.Invalidate(r)
			}
			if reg, ok := s.c.TryAcquireRange(r, 0); ok {
				_ = reg.Release()
			}
		}
	}
	s.dev = devicetest.NewFake(fo)
	s.o.Monitor, s.o.OnEvent = s.mon, s.event
	fired := make(chan struct{})
	s.o.SetPressure(fired)
	if s.c, err = pindown.New(s.dev, &s.o); err != nil {
		t.Fatal(err)
	}
	n := steps(1500, 300)
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() { s.work(rand.New(rand.NewPCG(seed, uint64(w))), n) })
	}
	wg.Go(func() {
		for range 10 {
			select {
			case fired <- struct{}{}:
			case <-time.After(time.Minute):
				t.Error("the reaper hangs")
				return
			}
			time.Sleep(time.Millisecond)
		}
	})
	wg.Wait()
	eventually(t, "registrations per use go, with as many tries as it takes", func() bool { return s.c.Stats().PerUseHeld == 0 })
	st := s.c.Stats()
	check(t, "in use", st.InUse, 0)
	if st.Regions > s.o.MaxRegions || st.PinnedBytes > s.o.MaxBytes {
		t.Errorf("%d regions of %d bytes", st.Regions, st.PinnedBytes)
	}
	if s.o.WaitForBudget && s.pending == 0 {
		if p := s.dev.Stats(); p.PeakLive > s.o.MaxRegions || p.PeakPinnedBytes > s.o.MaxBytes {
			t.Errorf("%d registrations of %d bytes at a time", p.PeakLive, p.PeakPinnedBytes)
		}
	}
	if rand.IntN(2) == 0 {
		s.mon.Lose()
	}
	// Several close it, while others still try.
	for w := range 3 {
		wg.Go(func() { s.work(rand.New(rand.NewPCG(seed, uint64(100+w))), n/10) })
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			if err := s.c.Shutdown(ctx); err != nil {
				t.Errorf("shutdown: %v", err)
			}
		})
	}
	wg.Wait()
	if err := s.c.Close(); err != nil {
		t.Errorf("close: %v", err)
	}
	s.dev.AssertEmpty(t)
	check(t, "watches left", s.mon.Table().Stats().Used, 0)
	if err := s.mon.Close(); err != nil {
		t.Error(err)
	}
	st = s.c.Stats()
	check(t, "regions", st.Regions, 0)
	check(t, "pinned", st.PinnedBytes, 0)
	check(t, "leaked", st.Leaked, 0)
	check(t, "registrations that ended", st.Deregister.Count, st.Register.Count)
	t.Logf("%d acquired, %d refused, hits %d, misses %d, per use %v, evictions %v", s.acquires.Load(), s.failures.Load(),
		st.Hits, st.TotalMisses(), st.PerUse, st.Evictions)
	if s.acquires.Load() == 0 || st.Hits == 0 || st.TotalInvalidations() == 0 {
		t.Error("nothing tried")
	}
}

// TestStorm: under tiny limits and faults nothing stale is served, no limit is
// exceeded, nothing hangs, and nothing is left.
func TestStorm(t *testing.T) {
	seed, _ := randomSeed(t)
	for i, w := range []weather{
		{o: pindown.Options{MaxRegions: 1, MaxBytes: 1 << 30}},
		{o: pindown.Options{MaxRegions: 1000, MaxBytes: page}},
		{o: pindown.Options{MaxRegions: 8, MaxBytes: 1 << 30, MergeBytes: -1}, faults: 10},
		{o: pindown.Options{MaxRegions: 8, MaxBytes: 24 * page, MergeBytes: 16 * page, MergeAbove: 1}, pending: 10, nested: true},
		{o: pindown.Options{MaxRegions: 6, MaxBytes: 32 * page, WaitForBudget: true}},
		{o: pindown.Options{MaxRegions: 6, MaxBytes: 32 * page, WaitForBudget: true, MergeAbove: 1}, faults: 20, pending: 20, nested: true},
		{o: pindown.Options{MaxRegions: 1 << 16, MaxBytes: 1 << 30}, faults: 30, nested: true},
		{o: pindown.Options{MaxRegions: 8, MaxBytes: 1 << 30}, late: true, nested: true},
		{o: pindown.Options{MaxRegions: 1 << 16, MaxBytes: 1 << 30, MergeAbove: 1}, late: true, faults: 50},
	} {
		for _, lanes := range []bool{false, true} {
			t.Run(fmt.Sprintf("%d/lanes=%v", i, lanes), func(t *testing.T) {
				w.lanes = lanes
				(&storm{weather: w, t: t}).run(seed + uint64(i))
			})
		}
	}
}
