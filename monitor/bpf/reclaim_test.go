package bpf_test

import (
	"errors"
	"os"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown"
	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/devicetest"
	"github.com/pindown/pindown/monitor"
	"github.com/pindown/pindown/monitor/bpf"
)

// reclaims unmaps n registered ranges, one after the other with a rest between,
// and returns how long after each munmap the device was told to deregister.
// Nobody asks for anything meanwhile: that is the reaper's doing.
func reclaims(tb testing.TB, n int, rest time.Duration) []time.Duration {
	tb.Helper()
	m, err := bpf.Open(nil)
	if errors.Is(err, monitor.ErrNotSupported) && os.Getenv("CI") != "true" {
		tb.Skipf("CAP_BPF and CAP_PERFMON needed: %v", err)
	}
	if err != nil {
		tb.Fatal(err)
	}
	defer func() {
		if err := m.Close(); err != nil {
			tb.Error(err)
		}
	}()
	gone := make(chan time.Time, 1)
	dev := devicetest.NewFake(&devicetest.FakeOptions{
		Limits: device.Limits{PageSize: uintptr(os.Getpagesize())},
		OnDeregister: func(int, device.Registration) error {
			gone <- time.Now()
			return nil
		},
	})
	cache, err := pindown.New(dev, &pindown.Options{Monitor: m})
	if err != nil {
		tb.Fatal(err)
	}
	defer func() {
		if err := cache.Close(); err != nil {
			tb.Error(err)
		}
		dev.AssertEmpty(tb)
	}()
	times := make([]time.Duration, 0, n)
	for range n {
		mem, err := unix.Mmap(-1, 0, 64<<10, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
		if err != nil {
			tb.Fatal(err)
		}
		mem[0] = 1
		r, err := cache.Acquire(tb.Context(), mem, pindown.LocalWrite)
		if err != nil {
			tb.Fatal(err)
		}
		if err := r.Release(); err != nil {
			tb.Fatal(err)
		}
		if err := unix.Munmap(mem); err != nil {
			tb.Fatal(err)
		}
		start := time.Now()
		select {
		case end := <-gone:
			times = append(times, max(end.Sub(start), 0))
			time.Sleep(rest)
		case <-time.After(10 * time.Second):
			tb.Fatalf("the reaper never came: %d of %d, %v", len(times), n, cache.Stats())
		}
	}
	s := cache.Stats()
	var invalidated uint64
	for _, n := range s.Invalidations {
		invalidated += n
	}
	if d := dev.Stats(); int(invalidated) != n || int(d.Registers) != n || int(d.Deregisters) != n || d.Live != 0 || s.Regions != 0 {
		tb.Errorf("after %d munmaps: %d invalidated, device %+v", n, invalidated, d)
	}
	slices.Sort(times)
	return times
}

// Idle stale registrations go by themselves, each once.
func TestReclaim(t *testing.T) {
	times := reclaims(t, 100, 0)
	t.Logf("from munmap's return to deregistration: p50 %v, p99 %v", times[len(times)/2], times[len(times)*99/100])
}

// BenchmarkReclaim is the time from munmap's return to the device's
// deregistration: of operations after a quiet time, and of one after the other.
func BenchmarkReclaim(b *testing.B) {
	for name, rest := range map[string]time.Duration{"quiet": 25 * time.Millisecond, "busy": 0} {
		b.Run(name, func(b *testing.B) {
			times := reclaims(b, b.N, rest)
			b.ReportMetric(float64(times[len(times)/2].Microseconds()), "p50-µs")
			b.ReportMetric(float64(times[len(times)*99/100].Microseconds()), "p99-µs")
			b.ReportMetric(0, "ns/op")
		})
	}
}
