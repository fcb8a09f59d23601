package pindown_test

import (
	"context"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/pindown/pindown"
	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/devicetest"
	"github.com/pindown/pindown/monitor"
	"github.com/pindown/pindown/monitor/monitortest"
	"github.com/pindown/pindown/vm"
)

// TestDevicePanics: whoever survives a panic of the device, or the end of its
// goroutine, finds the cache as before: nobody waits for what will never come, and
// nothing is charged.
func TestDevicePanics(t *testing.T) {
	for _, perUse := range []bool{false, true} {
		for name, end := range map[string]func(){
			"panic": func() { panic("device") },
			"exit":  runtime.Goexit,
		} {
			var armed atomic.Bool
			fo := pages()
			fo.OnRegister = func(int, vm.Range, device.Access) error {
				if armed.CompareAndSwap(true, false) {
					end()
				}
				return nil
			}
			r := newInjected(t, fo, &pindown.Options{MaxRegions: 1}, nil)
			if perUse {
				r.fake.SetCover(func(vm.Range) error { return monitor.ErrUncovered })
			}
			for range 3 {
				armed.Store(true)
				var wg sync.WaitGroup
				wg.Go(func() {
					defer func() { _ = recover() }()
					reg, err := r.Acquire(context.Background(), r.buf(0, page), 0)
					t.Errorf("%s: %v, %v", name, reg, err)
				})
				wg.Wait()
				r.use(t, r.buf(0, page), 0)
				if _, err := r.Invalidate(vm.RangeOf(r.mem)); err != nil {
					t.Fatal(err)
				}
				eventually(t, "reclaim", func() bool { return r.Stats().Regions == 0 })
				s := r.Stats()
				check(t, name+": bytes", s.PinnedBytes, 0)
				check(t, name+": held per use", s.PerUseHeld, 0)
				check(t, name+": watches", r.fake.Table().Stats().Used, 0)
			}
		}
	}
}

// TestCloseSaysWhatTheDeviceKept: what the device doesn't take back when the cache
// is closed, or at a release after that, is an error of that call.
func TestCloseSaysWhatTheDeviceKept(t *testing.T) {
	for _, fault := range []error{device.ErrInvalid, device.ErrBusy} {
		var refuse atomic.Bool
		fo := pages()
		fo.OnDeregister = func(int, device.Registration) error {
			if refuse.Load() {
				return fault
			}
			return nil
		}
		mon, err := monitortest.NewFake(nil)
		if err != nil {
			t.Fatal(err)
		}
		dev := devicetest.NewFake(fo)
		var leaked atomic.Int32
		c, err := pindown.New(dev, &pindown.Options{Monitor: mon, MergeBytes: -1, RegisterTimeout: 1, OnEvent: func(e pindown.Event) {
			if e.Kind == pindown.EventLeaked {
				leaked.Add(1)
			}
		}})
		if err != nil {
			t.Fatal(err)
		}
		get := func(at uintptr) pindown.Region {
			reg, err := c.AcquireRange(t.Context(), vm.Range{Start: at * page, End: (at + 1) * page}, 0)
			if err != nil {
				t.Fatal(err)
			}
			return reg
		}
		held := get(10)
		for at := range uintptr(3) {
			reg := get(20 + 2*at)
			release(t, &reg)
		}
		refuse.Store(true)
		if err := c.Close(); !errors.Is(err, pindown.ErrInUse) || !errors.Is(err, fault) {
			t.Errorf("close: %v", err)
		}
		check(t, "told", leaked.Load(), 3)
		if err := held.Release(); !errors.Is(err, fault) {
			t.Errorf("release after close: %v", err)
		}
		check(t, "regions", c.Stats().Regions, 0)
		check(t, "leaked", c.Stats().Leaked, 4)
		for range 2 {
			if err := c.Shutdown(t.Context()); errors.Is(err, pindown.ErrInUse) || !errors.Is(err, fault) {
				t.Errorf("shut down: %v", err)
			}
		}
		if err := mon.Close(); err != nil {
			t.Error(err)
		}
	}
}

// TestPrefetchOvertaken: what was given up before it was there isn't said to be
// cached.
func TestPrefetchOvertaken(t *testing.T) {
	for name, overtake := range map[string]func(*rig){
		"operation":  func(r *rig) { r.change(t, r.buf(0, page)) },
		"invalidate": func(r *rig) { _, _ = r.Invalidate(vm.RangeOf(r.buf(0, page))) },
		"close": func(r *rig) {
			if err := r.Close(); !errors.Is(err, pindown.ErrInUse) {
				t.Errorf("close: %v", err)
			}
		},
	} {
		var r *rig
		fo := pages()
		fo.AfterPin = func(int, vm.Range) { overtake(r) }
		r = newRig(t, fo, nil)
		cached, err := r.Prefetch(t.Context(), vm.RangeOf(r.buf(0, page)), 0)
		if cached || err != nil {
			t.Errorf("%s: %v, %v", name, cached, err)
		}
		eventually(t, "reclaim", func() bool { return r.dev.Stats().Live == 0 })
	}
}

// TestManyWaitForWhatIsRefused: who has waited for a registration that the device
// hadn't the memory for isn't refused once more, after all the others.
func TestManyWaitForWhatIsRefused(t *testing.T) {
	const n = 16
	var calls atomic.Int32
	refused := make(chan struct{})
	fo := pages()
	fo.OnRegister = func(int, vm.Range, device.Access) error {
		calls.Add(1)
		<-refused
		return device.ErrNoMemory
	}
	r := newRig(t, fo, &pindown.Options{RegisterTimeout: -1})
	var wg sync.WaitGroup
	for range n {
		wg.Go(func() {
			if reg, err := r.Acquire(context.Background(), r.buf(0, page), 0); !errors.Is(err, device.ErrNoMemory) {
				t.Errorf("%v, %v", reg, err)
			}
		})
	}
	eventually(t, "waiters", func() bool { return r.Stats().Waits == n-1 })
	close(refused)
	wg.Wait()
	check(t, "calls of the device", calls.Load(), 1)
	check(t, "misses", r.Stats().Misses[pindown.MissAbsent], n)
	// The next to come asks again, and so does who wants more.
	if _, err := r.Acquire(context.Background(), r.buf(0, page), 0); !errors.Is(err, device.ErrNoMemory) {
		t.Error(err)
	}
	check(t, "calls of the device", calls.Load(), 2)
}

// TestContextEndsInUnion: a context that ends while more than was asked for is
// refused is the error, not the refusal.
func TestContextEndsInUnion(t *testing.T) {
	for name, o := range map[string]*pindown.Options{
		"union": {},
		"ahead": {MergeAbove: -1},
	} {
		var end func()
		fo := pages()
		fo.OnRegister = func(int, vm.Range, device.Access) error {
			if end != nil {
				end()
				return device.ErrFault
			}
			return nil
		}
		r := newRig(t, fo, o)
		r.use(t, r.buf(0, 4*page), 0)
		if name == "ahead" {
			r.use(t, r.buf(0, 5*page), 0) // it grows
		}
		ctx, cancel := context.WithCancel(t.Context())
		end = cancel
		if reg, err := r.Acquire(ctx, r.buf(page, 6*page), 0); !errors.Is(err, context.Canceled) || errors.Is(err, device.ErrFault) {
			t.Errorf("%s: %v, %v", name, reg, err)
		}
		end = nil
		r.use(t, r.buf(page, 6*page), 0)
	}
}

// constant returns the value of a constant of a package's source, as written.
func constant(t *testing.T, file, name string) string {
	t.Helper()
	f, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range f.Decls {
		g, ok := d.(*ast.GenDecl)
		if !ok || g.Tok != token.CONST {
			continue
		}
		for _, s := range g.Specs {
			v, ok := s.(*ast.ValueSpec)
			if !ok {
				continue
			}
			for i, id := range v.Names {
				if lit, ok := v.Values[i].(*ast.BasicLit); ok && id.Name == name {
					return lit.Value
				}
			}
		}
	}
	t.Fatalf("no constant %s in %s", name, file)
	return ""
}

// TestReplayMergesAlike: replay keeps the cache's rules for merging with constants
// of its own.
func TestReplayMergesAlike(t *testing.T) {
	for _, name := range []string{"crowdFactor", "rememberedMerges"} {
		check(t, name, constant(t, "internal/replay/sim.go", name), constant(t, "merge.go", name))
	}
}

// TestUncoveredEvictsNothing: what can't be cached doesn't push out, again and
// again, what is.
func TestUncoveredEvictsNothing(t *testing.T) {
	const regions, turns = 8, 20
	r := newInjected(t, pages(), &pindown.Options{MaxBytes: 4 * regions * page, MergeBytes: -1}, nil)
	big := vm.RangeOf(r.buf(200*page, 3*regions*page))
	r.fake.SetCover(func(rng vm.Range) error {
		if rng.Overlaps(big) {
			return monitor.ErrUncovered
		}
		return nil
	})
	for range turns {
		for i := range regions {
			r.use(t, r.buf(8*i*page, 4*page), 0)
		}
		reg, err := r.AcquireRange(t.Context(), big, 0)
		if err != nil {
			t.Fatal(err)
		}
		check(t, "cached", reg.Cached(), false)
		release(t, &reg)
	}
	s := r.Stats()
	check(t, "per use", s.PerUse[pindown.PerUseUncovered], turns)
	if n := s.TotalEvictions(); n > regions {
		t.Errorf("%d evictions in %d turns", n, turns)
	}
	// It is cached as soon as that is possible.
	r.fake.SetCover(nil)
	reg, err := r.AcquireRange(t.Context(), big, 0)
	if err != nil {
		t.Fatal(err)
	}
	check(t, "cached", reg.Cached(), true)
	release(t, &reg)
}
