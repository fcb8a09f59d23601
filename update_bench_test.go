package pindown_test

import (
	"errors"
	"testing"
	"time"

	"github.com/pindown/pindown"
	"github.com/pindown/pindown/monitor/manual"
	"github.com/pindown/pindown/vm"
)

// BenchmarkUpdateUring times by turns, on an io_uring, the atomic update of a stale
// region that is held, and what its alternative begins with: a slot registration.
// ratio is the device's part of an update in registrations; of-a-miss compares the
// whole, with all that the cache does, with an acquire that finds its region stale
// and registers anew.
func BenchmarkUpdateUring(b *testing.B) {
	for _, size := range []struct {
		name  string
		bytes int
	}{{"4KiB", 4 << 10}, {"64KiB", 64 << 10}, {"1MiB", 1 << 20}} {
		b.Run(size.name, func(b *testing.B) {
			dev := openUring(b)
			mon, err := manual.New(nil)
			if err != nil {
				b.Fatal(err)
			}
			cache, err := pindown.New(dev, &pindown.Options{Monitor: mon})
			if err != nil {
				b.Fatal(err)
			}
			mem := mapMem(b, size.bytes)
			clear(mem)
			reg, err := cache.Acquire(b.Context(), mem, pindown.LocalWrite)
			if err != nil {
				b.Fatal(err)
			}
			other := mapMem(b, size.bytes)
			clear(other)
			var register, update, miss time.Duration
			for b.Loop() {
				mon.Invalidate(vm.RangeOf(other))
				begin := time.Now()
				anew, err := cache.Acquire(b.Context(), other, pindown.LocalWrite)
				miss += time.Since(begin)
				if err != nil {
					b.Fatal(err)
				}
				if err := anew.Release(); err != nil {
					b.Fatal(err)
				}
				start := time.Now()
				slot, err := dev.Register(b.Context(), vm.RangeOf(mem), pindown.LocalWrite)
				register += time.Since(start)
				if err != nil {
					b.Fatal(err)
				}
				if err := dev.Deregister(slot); err != nil {
					b.Fatal(err)
				}
				mon.Invalidate(vm.RangeOf(mem))
				start = time.Now()
				u, err := reg.Update(b.Context(), pindown.UpdateAtomic)
				update += time.Since(start)
				if err != nil || u.Outcome != pindown.UpdateDone {
					b.Fatal(u, err)
				}
			}
			st := cache.Stats()
			b.ReportMetric(float64(register.Nanoseconds())/float64(b.N), "ns/register")
			b.ReportMetric(float64(st.Update.Mean())*float64(b.N)/float64(register), "ratio")
			b.ReportMetric(float64(update)/float64(miss), "of-a-miss")
			if err := errors.Join(reg.Release(), cache.Close(), dev.Close(), mon.Close()); err != nil {
				b.Error(err)
			}
		})
	}
}
