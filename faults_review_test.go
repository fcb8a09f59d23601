package pindown_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"

	"github.com/pindown/pindown"
	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/devicetest"
	"github.com/pindown/pindown/vm"
)

// pages returns options of a fake whose registrations are whole pages.
func pages() *devicetest.FakeOptions {
	return &devicetest.FakeOptions{Limits: device.Limits{PageSize: page}}
}

// async acquires in a goroutine and releases at once.
func (r *rig) async(b []byte) <-chan error {
	done := make(chan error, 1)
	go func() {
		reg, err := r.Acquire(context.Background(), b, 0)
		if err == nil {
			err = reg.Release()
		}
		done <- err
	}()
	return done
}

// TestIdleRegionIsFoundBehindBusyOnes: with nearly everything in use, the one
// idle region is given up rather than the cache passed over.
func TestIdleRegionIsFoundBehindBusyOnes(t *testing.T) {
	const limit = 20
	for idle := range limit {
		r := newRig(t, nil, &pindown.Options{MaxRegions: limit, MergeBytes: -1})
		var held []pindown.Region
		for i := range limit {
			reg := r.acquire(t, r.buf(2*i*page, page), 0)
			if i == idle {
				release(t, &reg)
				continue
			}
			held = append(held, reg)
		}
		for i := range 4 {
			reg := r.acquire(t, r.buf((2*limit+2*i)*page, page), 0)
			check(t, fmt.Sprintf("cached in place of idle region %d, turn %d", idle, i), reg.Cached(), true)
			release(t, &reg)
		}
		for i := range held {
			release(t, &held[i])
		}
	}
}

// TestScanUnderBytesLimit: buffers that are used once don't push out those that
// are used all the time, whichever limit is met.
func TestScanUnderBytesLimit(t *testing.T) {
	const hot = 8
	for name, o := range map[string]*pindown.Options{
		"regions": {MaxRegions: 16, MergeBytes: -1},
		"bytes":   {MaxBytes: 16 * page, MergeBytes: -1},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, nil, o)
			useHot := func() {
				for i := range hot {
					r.use(t, r.buf(2*i*page, page), 0)
				}
			}
			useHot()
			useHot()
			const scan = 300
			before := r.Stats().Hits
			for i := range scan {
				r.use(t, r.buf((2*hot+2*(i%100))*page, page), 0)
				if i%50 == 0 {
					useHot()
				}
			}
			if got, want := r.Stats().Hits-before, uint64(scan/50*hot); got < want*3/4 {
				t.Errorf("%d hits of %d on buffers in steady use", got, want)
			}
		})
	}
}

// TestCloseWakesWhoWaitsForBudget: a closed cache has no budget to wait for.
func TestCloseWakesWhoWaitsForBudget(t *testing.T) {
	r := newRig(t, nil, &pindown.Options{MaxRegions: 1, WaitForBudget: true, MergeBytes: -1})
	held := r.acquire(t, r.buf(0, page), 0)
	waiting := r.async(r.buf(4*page, page))
	eventually(t, "a waiter", func() bool { return r.Stats().Waits == 1 })
	if err := r.Close(); !errors.Is(err, pindown.ErrInUse) {
		t.Errorf("close: %v", err)
	}
	if err := <-waiting; !errors.Is(err, pindown.ErrClosed) {
		t.Errorf("waiter: %v", err)
	}
	release(t, &held)
}

// TestShrunkRegistrationFreesBudget: a union reserves more than the exact range
// that is registered in the end; who waits for the difference gets it.
func TestShrunkRegistrationFreesBudget(t *testing.T) {
	entered, gate := make(chan struct{}), make(chan struct{})
	fo := pages()
	fo.OnRegister = func(_ int, rng vm.Range, _ device.Access) error {
		if rng.Len() == 6*page {
			close(entered)
			<-gate
			return device.ErrFault
		}
		return nil
	}
	r := newRig(t, fo, &pindown.Options{MaxBytes: 12 * page, WaitForBudget: true})
	first := r.acquire(t, r.buf(0, 4*page), 0)
	second := make(chan pindown.Region)
	go func() {
		reg, err := r.Acquire(context.Background(), r.buf(3*page, 3*page), 0)
		if err != nil {
			t.Error(err)
		}
		second <- reg
	}()
	<-entered
	third := r.async(r.buf(100*page, 4*page))
	eventually(t, "a waiter", func() bool { return r.Stats().Waits == 1 })
	close(gate)
	reg := <-second
	if err := <-third; err != nil {
		t.Error(err)
	}
	release(t, &reg)
	release(t, &first)
}

// TestExactRangeWhereUnionExceedsBudget: what was asked for fits beside the
// region in use, the union doesn't.
func TestExactRangeWhereUnionExceedsBudget(t *testing.T) {
	for _, wait := range []bool{false, true} {
		r := newRig(t, nil, &pindown.Options{MaxBytes: 8 * page, WaitForBudget: wait})
		held := r.acquire(t, r.buf(0, 4*page), 0)
		reg := r.acquire(t, r.buf(3*page, 4*page), 0)
		check(t, "cached", reg.Cached(), true)
		check(t, "pinned", r.Stats().PinnedBytes, 8*page)
		release(t, &reg)
		release(t, &held)
	}
}

// TestCloseReportsRegistrationPerUseOnItsWay: Close doesn't say that all is
// given back while a registration is being made beside the cache.
func TestCloseReportsRegistrationPerUseOnItsWay(t *testing.T) {
	entered, gate := make(chan struct{}), make(chan struct{})
	fo := pages()
	fo.BeforePin = func(int, vm.Range) { close(entered); <-gate }
	r := newRig(t, fo, &pindown.Options{MaxBytes: page})
	reg := make(chan pindown.Region)
	go func() {
		x, err := r.Acquire(context.Background(), r.buf(0, 2*page), 0)
		if err != nil {
			t.Error(err)
		}
		reg <- x
	}()
	<-entered
	if err := r.Close(); !errors.Is(err, pindown.ErrInUse) {
		t.Errorf("close: %v", err)
	}
	close(gate)
	x := <-reg
	release(t, &x)
}

// TestStaleBeforePublicationIsReclaimed: the news of an operation comes while
// the registration that it hits is on its way, so that the reaper finds nothing.
// The registration goes stale into the cache, and must go by itself.
func TestStaleBeforePublicationIsReclaimed(t *testing.T) {
	var r *rig
	armed := false
	fo := pages()
	fo.AfterPin = func(int, vm.Range) {
		if !armed {
			return
		}
		armed = false
		r.change(t, r.buf(0, page))
		// A region of other attributes tells when the reaper was here.
		eventually(t, "the reaper", func() bool { return stats(r).TotalInvalidations() == 1 })
	}
	r = newRig(t, fo, nil)
	r.use(t, r.buf(0, page), pindown.RelaxedOrdering)
	armed = true
	r.use(t, r.buf(0, page), 0)
	eventually(t, "reclaim", func() bool { return r.Stats().Regions == 0 && r.dev.Stats().Live == 0 })
}

// TestInvalidateDuringRegister: Invalidate doesn't wait for a registration on
// its way, which might be what calls it, and lets no later Acquire have it.
func TestInvalidateDuringRegister(t *testing.T) {
	var r *rig
	armed := true
	fo := pages()
	fo.AfterPin = func(int, vm.Range) {
		if armed {
			armed = false
			if _, err := r.Invalidate(vm.RangeOf(r.buf(0, page))); err != nil {
				t.Error(err)
			}
		}
	}
	r = newRig(t, fo, nil)
	first := r.acquire(t, r.buf(0, 4*page), 0)
	if _, ok := r.TryAcquire(r.buf(0, page), 0); ok {
		t.Error("hit on a registration that was invalidated on its way")
	}
	release(t, &first)
	eventually(t, "reclaim", func() bool { return r.Stats().Regions == 0 })
}

// TestDeviceThatRegistersMore: a device that rounds by itself gets back the
// registration that it returned, and serves what was asked for.
func TestDeviceThatRegistersMore(t *testing.T) {
	r := newRig(t, &devicetest.FakeOptions{Round: true, Grant: pindown.LocalWrite}, nil)
	r.use(t, r.buf(100, 200), 0)
	if _, err := r.Invalidate(vm.RangeOf(r.mem)); err != nil {
		t.Fatal(err)
	}
	eventually(t, "reclaim", func() bool { return r.dev.Stats().Live == 0 })
	reg := r.acquire(t, r.buf(100, 200), 0)
	if !r.dev.IsLive(reg.Registration()) {
		t.Errorf("%+v isn't what the device returned", reg.Registration())
	}
	release(t, &reg)
}

// TestLongestRange: rounding doesn't push a range over the device's limit.
func TestLongestRange(t *testing.T) {
	fo := pages()
	fo.Limits.MaxRange = 4 * page
	r := newRig(t, fo, nil)
	b := r.buf(100, 4*page)
	reg := r.acquire(t, b, 0)
	check(t, "covers", reg.Range().Contains(vm.RangeOf(b)), true)
	check(t, "cached", reg.Cached(), true)
	release(t, &reg)
	if _, err := r.Acquire(t.Context(), r.buf(100, 4*page+1), 0); !errors.Is(err, device.ErrTooLarge) {
		t.Errorf("one byte more: %v", err)
	}
}

// TestEndOfAddressSpace: no arithmetic wraps; whatever comes back covers what
// was asked for.
func TestEndOfAddressSpace(t *testing.T) {
	r := newRig(t, nil, nil)
	top := ^uintptr(0)
	for _, rng := range []pindown.Range{
		{Start: top - 1, End: top},
		{Start: top - page, End: top},
		{Start: 1, End: top},
		{Start: top - page + 1, End: top},
		{Start: 1 << 47, End: 1<<47 + 1},
		{Start: 1<<48 - 1, End: 1 << 48},
		{Start: 1<<48 - 1, End: 1<<48 + 1},
	} {
		reg, err := r.AcquireRange(t.Context(), rng, 0)
		if err != nil {
			t.Errorf("%v: %v", rng, err)
			continue
		}
		check(t, fmt.Sprintf("%v covers %v", reg.Range(), rng), reg.Range().Contains(rng), true)
		check(t, fmt.Sprintf("%v cached", rng), reg.Cached(), rng.End <= 1<<48 && rng.Len() < 1<<30)
		release(t, &reg)
	}
	check(t, "per use", r.Stats().PerUseHeld, 0)
}

// wiped returns the bytes of mappings that a forked child wouldn't get.
func wiped(t *testing.T) (n uint64) {
	t.Helper()
	smaps, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		t.Fatal(err)
	}
	var size uint64
	for line := range strings.Lines(string(smaps)) {
		switch {
		case strings.HasPrefix(line, "Size:"):
			if _, err := fmt.Sscanf(line, "Size: %d kB", &size); err != nil {
				t.Fatal(err)
			}
		case strings.HasPrefix(line, "VmFlags:") && strings.Contains(line, " wf"):
			n += size << 10
		}
	}
	return n
}

// TestClosedCacheLeavesNoMemory: what a cache maps goes when it is collected.
func TestClosedCacheLeavesNoMemory(t *testing.T) {
	r := newRig(t, nil, nil)
	before := wiped(t)
	for range 200 {
		c, err := pindown.New(r.dev, &pindown.Options{Monitor: r.mon})
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "unmapping", func() bool { runtime.GC(); return wiped(t) <= before })
}

//go:noinline
func onStack(t *testing.T, r *rig, depth int) {
	var buf [64]byte
	was := vm.RangeOf(buf[:]).Start
	reg, err := r.Acquire(context.Background(), buf[:], 0)
	if err != nil {
		t.Error(err)
		return
	}
	grow(depth)
	check(t, "address after the stack grew", vm.RangeOf(buf[:]).Start, was)
	if err := reg.Release(); err != nil {
		t.Error(err)
	}
}

//go:noinline
func grow(n int) int {
	var pad [256]byte
	pad[n%len(pad)] = 1
	if n == 0 {
		return int(pad[0])
	}
	return grow(n-1) + int(pad[n%len(pad)])
}

// TestBufferDoesNotMove: a buffer that looks like a local variable is moved to
// the heap, or a growing stack would leave the device with a copy.
func TestBufferDoesNotMove(t *testing.T) {
	r := newRig(t, nil, nil)
	done := make(chan struct{})
	go func() { defer close(done); onStack(t, r, 4000) }()
	<-done
}
