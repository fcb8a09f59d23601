package pindown

import (
	"context"
	"errors"
	"math"
	"runtime"
	"slices"
	"sync"
	"testing"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/devicetest"
	"github.com/pindown/pindown/monitor/manual"
)

// The first hold of a line is taken in two steps: between them its count has come
// round and the line's hasn't. Who looks then finds a few hits too few, not 2^64.
func TestStatsBetweenTwoStepsOfAClaim(t *testing.T) {
	c, _, _ := newTestCache(t, Options{})
	i := c.holds.line()
	c.holds.use(i)
	l := &c.holds.lines[i]
	h := &l.hold[0]
	e := &entry{}
	if old := h.load(); old != holdCount || !h.swap(old, e.id()) {
		t.Fatalf("count %d", old)
	}
	if n := c.Stats().Hits; n > 1 {
		t.Errorf("%d hits", n)
	}
	l.state.Add(1)
	h.put(0)
	if n := c.Stats().Hits; n != 1 {
		t.Errorf("%d hits, want 1", n)
	}
}

// Limits that mean "no limit" are none.
func TestLargestRegionLimit(t *testing.T) {
	for _, n := range []int{math.MaxInt, math.MaxInt - 1<<20, math.MaxInt / 2, math.MaxInt/2 + 1, 1 << 40} {
		c, _, _ := newTestCache(t, Options{MaxRegions: n, MergeBytes: -1})
		for i := range uintptr(500) {
			release(t, acquire(t, c, pages(2*i, 1)))
		}
		if b := len(c.tables[0].Load().buckets); b < 500/bucketListings || b > 1<<16 {
			t.Errorf("MaxRegions %d: %d buckets for 500 listings", n, b)
		}
		if s := c.Stats(); s.Regions != 500 {
			t.Errorf("MaxRegions %d: %d regions of 500", n, s.Regions)
		}
	}
}

// An event says whether a region is held, with lanes too, where the holders are
// made sure of only later.
func TestEventsSayInUseWithLanes(t *testing.T) {
	var mu sync.Mutex
	var told []Event
	c, _, mon := newTestCache(t, Options{MergeBytes: -1, OnEvent: func(e Event) {
		mu.Lock()
		defer mu.Unlock()
		told = append(told, e)
	}})
	if _, err := c.NewLane(); err != nil {
		t.Fatal(err)
	}
	release(t, acquire(t, c, pages(10, 1)))
	held := acquire(t, c, pages(0, 1))
	// No news: the next acquires find out.
	mon.Table().Touch(pages(0, 20))
	again, idle := acquire(t, c, pages(0, 1)), acquire(t, c, pages(10, 1))
	eventually(t, "events", func() bool { mu.Lock(); defer mu.Unlock(); return len(told) == 2 })
	mu.Lock()
	for _, e := range told {
		if e.Kind != EventInvalidated || e.InUse != (e.Range == pages(0, 1)) {
			t.Errorf("event %v", e)
		}
	}
	mu.Unlock()
	for _, r := range []Region{held, again, idle} {
		release(t, r)
	}
}

// slowPressure is a trigger whose Close takes its time.
type slowPressure struct {
	fired          chan struct{}
	closing, close chan struct{}
}

func (p *slowPressure) Fired() <-chan struct{} { return p.fired }
func (p *slowPressure) Path() string           { return "slow" }

func (p *slowPressure) Close() error {
	close(p.closing)
	<-p.close
	return nil
}

// Whoever closes a cache second returns when it is closed.
func TestSecondCloseWaitsForFirst(t *testing.T) {
	for _, second := range []func(*Cache) error{
		(*Cache).Close,
		func(c *Cache) error { return c.Shutdown(context.Background()) },
	} {
		p := &slowPressure{make(chan struct{}), make(chan struct{}), make(chan struct{})}
		c, _, _ := newTestCache(t, Options{Pressure: true, openPressure: func() (pressure, error) { return p, nil }})
		var wg sync.WaitGroup
		var mu sync.Mutex
		var order []string
		done := func(what string) { mu.Lock(); defer mu.Unlock(); order = append(order, what) }
		wg.Go(func() {
			if err := c.Close(); err != nil {
				t.Error(err)
			}
		})
		<-p.closing
		wg.Go(func() {
			if err := second(c); err != nil {
				t.Error(err)
			}
			done("second")
		})
		for range 10_000 {
			runtime.Gosched()
		}
		done("first")
		close(p.close)
		wg.Wait()
		if !slices.Equal(order, []string{"first", "second"}) {
			t.Error("the second Close returned while the first was at work")
		}
	}
}

// TryAcquire on a stale region waits for nobody who has the lock.
func TestTryAcquireDoesNotWait(t *testing.T) {
	c, dev, mon := newTestCache(t, Options{})
	release(t, acquire(t, c, pages(0, 1)))
	mon.Table().Touch(pages(0, 1))
	c.mu.Lock()
	done := make(chan bool, 1)
	go func() { _, ok := c.TryAcquireRange(pages(0, 1), 0); done <- ok }()
	eventually(t, "TryAcquire returns", func() bool { return len(done) == 1 })
	c.mu.Unlock()
	if <-done {
		t.Error("a stale region was served")
	}
	// If nobody is in the way it goes.
	if _, ok := c.TryAcquireRange(pages(0, 1), 0); ok {
		t.Error("a stale region was served")
	}
	eventually(t, "deregistered", func() bool { return dev.Stats().Deregisters == 1 })
}

// lossy is a device that registers less than it is asked for.
type lossy struct {
	*devicetest.Fake
	keep error // what Deregister fails with, or nil
}

func (d *lossy) Register(ctx context.Context, r Range, a Access) (device.Registration, error) {
	reg, err := d.Fake.Register(ctx, r, a)
	reg.Range.End--
	return reg, err
}

func (d *lossy) Deregister(reg device.Registration) error {
	if d.keep != nil {
		return d.keep
	}
	return d.Fake.Deregister(reg)
}

// What a device got wrong is given back, and is on the books.
func TestBadRegistrationIsGivenBack(t *testing.T) {
	mon, err := manual.New(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = mon.Close() }()
	for _, keep := range []error{nil, device.ErrInvalid} {
		dev := &lossy{Fake: devicetest.NewFake(&devicetest.FakeOptions{CountsOnly: true}), keep: keep}
		c, err := New(dev, &Options{Monitor: mon})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.AcquireRange(t.Context(), pages(0, 1), 0); err == nil {
			t.Error("less than asked for was handed out")
		}
		s := c.Stats()
		if s.Register.Count != s.Deregister.Count+s.Leaked || s.Regions != 0 || (s.Leaked > 0) != (keep != nil) {
			t.Errorf("%v", s)
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
}

// A time limit that means "for ever" is no time in the past.
func TestLongestRegisterTimeout(t *testing.T) {
	mon, err := manual.New(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = mon.Close() }()
	refusals := 5
	dev := devicetest.NewFake(&devicetest.FakeOptions{
		OnRegister: func(int, Range, Access) error {
			if refusals--; refusals >= 0 {
				return device.ErrBusy
			}
			return nil
		},
		OnDeregister: func(int, device.Registration) error {
			if refusals--; refusals >= 0 {
				return device.ErrBusy
			}
			return nil
		},
	})
	c, err := New(dev, &Options{Monitor: mon, RegisterTimeout: math.MaxInt64})
	if err != nil {
		t.Fatal(err)
	}
	release(t, acquire(t, c, pages(0, 1)))
	refusals = 5
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if s := c.Stats(); s.Leaked != 0 {
		t.Errorf("%v", s)
	}
}

// Access bits that nobody knows are refused, whatever is cached: they don't reach
// other parts of what a hit compares.
func TestUnknownAccessOfCachedRange(t *testing.T) {
	c, _, _ := newTestCache(t, Options{})
	lane, err := c.NewLane()
	if err != nil {
		t.Fatal(err)
	}
	for _, first := range []uintptr{0, 1, 1 << 18} {
		r := pages(first, 1)
		release(t, acquire(t, c, r))
		for bit := range 32 {
			a := Access(1) << bit
			if a.Valid() {
				continue
			}
			for name, try := range map[string]func() (Region, error){
				"cache": func() (Region, error) { return c.AcquireRange(t.Context(), r, a) },
				"lane":  func() (Region, error) { return lane.AcquireRange(t.Context(), r, a) },
			} {
				if reg, err := try(); !errors.Is(err, ErrAccess) {
					t.Errorf("%s: %v with access %v: got %v, %v", name, r, a, reg, err)
				}
			}
		}
	}
}
