package devicetest_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/devicetest"
	"github.com/pindown/pindown/vm"
)

func rangeAt(page, pages uintptr) vm.Range {
	return vm.Range{Start: 1<<30 + page<<12, End: 1<<30 + (page+pages)<<12}
}

func TestFakeCountsAndLimits(t *testing.T) {
	ctx := context.Background()
	f := devicetest.NewFake(&devicetest.FakeOptions{Limits: device.Limits{
		MaxRegistrations: 3, MaxPinnedBytes: 5 << 12, MaxRange: 4 << 12, PageSize: 4096,
	}})
	if _, err := f.Register(ctx, rangeAt(0, 5), 0); !errors.Is(err, device.ErrTooLarge) {
		t.Errorf("five pages of at most four: %v", err)
	}
	a, err := f.Register(ctx, rangeAt(0, 3), device.LocalWrite)
	if err != nil {
		t.Fatal(err)
	}
	// Two bytes on either side of a page's edge pin two pages.
	b, err := f.Register(ctx, vm.Range{Start: 1<<30 + 4095, End: 1<<30 + 4097}, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Register(ctx, rangeAt(9, 1), 0); !errors.Is(err, device.ErrNoMemory) {
		t.Errorf("a sixth page of five: %v", err)
	}
	if err := f.Deregister(a); err != nil {
		t.Fatal(err)
	}
	c, _ := f.Register(ctx, rangeAt(0, 1), 0)
	d, err := f.Register(ctx, rangeAt(1, 1), device.LocalWrite|device.RemoteWrite)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Register(ctx, rangeAt(2, 1), 0); !errors.Is(err, device.ErrNoSlots) {
		t.Errorf("a fourth registration of three: %v", err)
	}
	if c.LocalKey == a.LocalKey || c.Handle == a.Handle {
		t.Errorf("key %#x of a dead registration came back at once", a.LocalKey)
	}
	if d.RemoteKey == 0 || c.RemoteKey != 0 {
		t.Errorf("remote keys %#x and %#x, want one for remote access alone", d.RemoteKey, c.RemoteKey)
	}
	if diff := cmp.Diff([]device.Registration{c, b, d}, f.Live()); diff != "" {
		t.Errorf("live (-want +got):\n%s", diff)
	}
	want := devicetest.FakeStats{
		Registers: 4, Deregisters: 1, Failures: 3, Live: 3, PeakLive: 3,
		PinnedBytes: 4 << 12, PeakPinnedBytes: 5 << 12,
	}
	if diff := cmp.Diff(want, f.Stats()); diff != "" {
		t.Errorf("stats (-want +got):\n%s", diff)
	}
	for _, reg := range f.Live() {
		if err := f.Deregister(reg); err != nil {
			t.Error(err)
		}
	}
	f.AssertEmpty(t)
}

// recorder notes failures instead of failing.
type recorder struct {
	testing.TB
	errors []string
}

func (r *recorder) Helper() {}
func (r *recorder) Errorf(s string, args ...any) {
	r.errors = append(r.errors, fmt.Sprintf(s, args...))
}

func TestFakeReportsMisuse(t *testing.T) {
	ctx := context.Background()
	var told []error
	f := devicetest.NewFake(&devicetest.FakeOptions{OnMisuse: func(err error) { told = append(told, err) }})
	reg, err := f.Register(ctx, rangeAt(0, 1), 0)
	if err != nil {
		t.Fatal(err)
	}
	kept, err := f.Register(ctx, rangeAt(1, 1), 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Deregister(reg); err != nil {
		t.Fatal(err)
	}
	forged := kept
	forged.Range.End++
	for _, bad := range []device.Registration{reg, forged, {}, {Handle: 1<<32 | 77}} {
		if err := f.Deregister(bad); !errors.Is(err, device.ErrNotRegistered) {
			t.Errorf("deregister %+v: %v", bad, err)
		}
	}
	if _, err := f.Updater().Update(ctx, reg); !errors.Is(err, device.ErrNotRegistered) {
		t.Errorf("update of a dead registration: %v", err)
	}
	if len(told) != 5 || len(f.Misuses()) != 5 {
		t.Errorf("%d misuses told, %d recorded, want 5", len(told), len(f.Misuses()))
	}
	r := &recorder{TB: t}
	f.AssertEmpty(r)
	if len(r.errors) != 7 { // The live one in two lines, and five misuses.
		t.Errorf("AssertEmpty reported %q", r.errors)
	}
}

func TestFakeHooks(t *testing.T) {
	ctx := context.Background()
	var log []string
	var frame uint64
	injected := errors.New("injected")
	failing := ""
	verdict := func(verb string) error {
		log = append(log, verb)
		if failing == verb {
			return fmt.Errorf("%w: %w", injected, device.ErrBusy)
		}
		return nil
	}
	f := devicetest.NewFake(&devicetest.FakeOptions{
		OnRegister: func(n int, _ vm.Range, _ device.Access) error { return verdict(fmt.Sprint("register", n)) },
		BeforePin:  func(n int, _ vm.Range) { log = append(log, fmt.Sprint("before", n)) },
		AfterPin:   func(n int, _ vm.Range) { log = append(log, fmt.Sprint("after", n)) },
		Frames: func(vm.Range) ([]uint64, error) {
			log = append(log, "pin")
			frame++
			return []uint64{frame}, nil
		},
		OnDeregister: func(n int, _ device.Registration) error { return verdict(fmt.Sprint("deregister", n)) },
		OnUpdate:     func(n int, _ device.Registration) error { return verdict(fmt.Sprint("update", n)) },
	}).Updater()
	failing = "register1"
	if _, err := f.Register(ctx, rangeAt(0, 1), 0); !errors.Is(err, injected) || !errors.Is(err, device.ErrBusy) {
		t.Errorf("register: %v", err)
	}
	reg, err := f.Register(ctx, rangeAt(0, 1), 0)
	if err != nil {
		t.Fatal(err)
	}
	if got := f.Frames(reg); len(got) != 1 || got[0] != 1 {
		t.Errorf("frames %v, want 1", got)
	}
	failing = "update1"
	if _, err := f.Update(ctx, reg); !errors.Is(err, injected) || !f.IsLive(reg) {
		t.Errorf("update: %v", err)
	}
	if got, err := f.Update(ctx, reg); err != nil || got != reg {
		t.Errorf("update: %+v, %v, want the same keys", got, err)
	}
	if got := f.Frames(reg); len(got) != 1 || got[0] != 2 {
		t.Errorf("frames after update %v, want 2", got)
	}
	failing = "deregister1"
	if err := f.Deregister(reg); !errors.Is(err, injected) || !f.IsLive(reg) {
		t.Errorf("deregister: %v", err)
	}
	if err := f.Deregister(reg); err != nil {
		t.Error(err)
	}
	if f.Frames(reg) != nil {
		t.Error("frames of a dead registration")
	}
	want := []string{
		"register1", "register2", "before1", "pin", "after1",
		"update1", "update2", "before2", "pin", "after2", "deregister1", "deregister2",
	}
	if diff := cmp.Diff(want, log); diff != "" {
		t.Errorf("hooks (-want +got):\n%s", diff)
	}
	f.AssertEmpty(t)
}

func TestFakeUpdateLosesRegistration(t *testing.T) {
	ctx := context.Background()
	f := devicetest.NewFake(&devicetest.FakeOptions{
		OnUpdate: func(int, device.Registration) error { return device.ErrRegistrationLost },
	}).Updater()
	reg, err := f.Register(ctx, rangeAt(0, 1), 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Update(ctx, reg); !errors.Is(err, device.ErrRegistrationLost) {
		t.Errorf("update: %v", err)
	}
	f.AssertEmpty(t)
}

// A hook may call the device, as a VM operation in the middle of Register can
// lead to a deregistration.
func TestFakeHookMayReenter(t *testing.T) {
	ctx := context.Background()
	var f *devicetest.Fake
	var first device.Registration
	f = devicetest.NewFake(&devicetest.FakeOptions{AfterPin: func(n int, _ vm.Range) {
		if n == 2 {
			if err := f.Deregister(first); err != nil {
				t.Error(err)
			}
		}
	}})
	first, _ = f.Register(ctx, rangeAt(0, 1), 0)
	second, err := f.Register(ctx, rangeAt(1, 1), 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Deregister(second); err != nil {
		t.Fatal(err)
	}
	f.AssertEmpty(t)
}

// A fake over another device registers with it, and undoes that on failure.
func TestFakeBacking(t *testing.T) {
	ctx := context.Background()
	inner := devicetest.NewFake(nil)
	broken := false
	outer := devicetest.NewFake(&devicetest.FakeOptions{
		Backing: inner.Updater(),
		Frames: func(vm.Range) ([]uint64, error) {
			if broken {
				return nil, errors.New("no frames")
			}
			return nil, nil
		},
	}).Updater()
	reg, err := outer.Register(ctx, rangeAt(0, 2), device.LocalWrite)
	if err != nil {
		t.Fatal(err)
	}
	if live := inner.Live(); len(live) != 1 || live[0].LocalKey != reg.LocalKey {
		t.Errorf("backing holds %+v, want %+v", live, reg)
	}
	if _, err := outer.Update(ctx, reg); err != nil || inner.Stats().Updates != 1 {
		t.Errorf("update: %v, %d in the backing", err, inner.Stats().Updates)
	}
	broken = true
	if _, err := outer.Register(ctx, rangeAt(2, 2), 0); !errors.Is(err, device.ErrFault) {
		t.Errorf("register without frames: %v", err)
	}
	if err := outer.Deregister(reg); err != nil {
		t.Fatal(err)
	}
	outer.AssertEmpty(t)
	inner.AssertEmpty(t)
}

// Limits hold when many goroutines register at once.
func TestFakeLimitConcurrent(t *testing.T) {
	ctx := context.Background()
	f := devicetest.NewFake(&devicetest.FakeOptions{Limits: device.Limits{MaxRegistrations: 5}})
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for i := range 500 {
				reg, err := f.Register(ctx, rangeAt(uintptr(i), 1), 0)
				if errors.Is(err, device.ErrNoSlots) {
					continue
				}
				if err := errors.Join(err, f.Deregister(reg)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if p := f.Stats().PeakLive; p > 5 {
		t.Errorf("%d live at once, want at most 5", p)
	}
	f.AssertEmpty(t)
}

func TestFakeAllocs(t *testing.T) {
	ctx := context.Background()
	f := devicetest.NewFake(nil)
	n := testing.AllocsPerRun(1000, func() {
		reg, err := f.Register(ctx, rangeAt(0, 1), device.LocalWrite)
		if err != nil {
			t.Fatal(err)
		}
		if err := f.Deregister(reg); err != nil {
			t.Fatal(err)
		}
	})
	if n != 0 {
		t.Errorf("%v allocations for register and deregister, want 0", n)
	}
}

func BenchmarkFake(b *testing.B) {
	ctx := context.Background()
	f := devicetest.NewFake(nil)
	b.ReportAllocs()
	for b.Loop() {
		reg, err := f.Register(ctx, rangeAt(0, 1), device.LocalWrite)
		if err != nil {
			b.Fatal(err)
		}
		if err := f.Deregister(reg); err != nil {
			b.Fatal(err)
		}
	}
}

func TestPageFrames(t *testing.T) {
	ctx := context.Background()
	f := devicetest.NewFake(&devicetest.FakeOptions{Frames: devicetest.PageFrames}).Updater()
	b, err := unix.Mmap(-1, 0, 3<<12, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	reg, err := f.Register(ctx, vm.RangeOf(b[100:len(b)-100]), device.LocalWrite)
	if err != nil {
		t.Fatal(err)
	}
	if n := len(f.Frames(reg)); n != 3 {
		t.Errorf("%d frames, want 3", n)
	}
	if err := unix.Munmap(b); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Update(ctx, reg); !errors.Is(err, device.ErrFault) || !errors.Is(err, unix.ENOMEM) {
		t.Errorf("update of unmapped memory: %v", err)
	}
	if err := f.Deregister(reg); err != nil {
		t.Error(err)
	}
	f.AssertEmpty(t)
}
