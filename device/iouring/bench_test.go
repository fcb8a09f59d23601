package iouring_test

import (
	"fmt"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/iouring"
	"github.com/pindown/pindown/internal/uring"
	"github.com/pindown/pindown/vm"
)

var benchSizes = []struct {
	name string
	size int
}{{"4KiB", 4 << 10}, {"64KiB", 64 << 10}, {"1MiB", 1 << 20}}

func benchMemory(b *testing.B, size int, huge bool) vm.Range {
	b.Helper()
	const hugePage = 2 << 20
	m, err := unix.Mmap(-1, 0, size+2*hugePage, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = unix.Munmap(m) })
	advice := unix.MADV_NOHUGEPAGE
	if huge {
		advice = unix.MADV_HUGEPAGE
	}
	_ = unix.Madvise(m, advice) // Without huge pages in the kernel it is all the same.
	fill(m, 1)
	r := vm.RangeOf(m)
	r.Start = (r.Start + hugePage - 1) &^ (hugePage - 1)
	r.End = r.Start + uintptr(size)
	return r
}

// BenchmarkRegister times a registration and its deregistration.
func BenchmarkRegister(b *testing.B) {
	for _, c := range benchSizes {
		b.Run(c.name, func(b *testing.B) { benchRegister(b, open(b, nil), benchMemory(b, c.size, false)) })
	}
	b.Run("1MiB/huge", func(b *testing.B) { benchRegister(b, open(b, nil), benchMemory(b, 1<<20, true)) })
	// What the rest of the table costs: nothing, but for huge pages.
	for _, huge := range []bool{false, true} {
		b.Run(fmt.Sprintf("4KiB/others=10000/huge=%v", huge), func(b *testing.B) {
			d := open(b, nil)
			small := benchMemory(b, 4096, false)
			for range 10000 {
				if _, err := d.Register(b.Context(), small, 0); err != nil {
					b.Fatal(err)
				}
			}
			benchRegister(b, d, benchMemory(b, 4096, huge))
		})
	}
}

func benchRegister(b *testing.B, d *iouring.Device, r vm.Range) {
	b.Helper()
	b.ReportAllocs()
	for b.Loop() {
		reg, err := d.Register(b.Context(), r, device.LocalWrite)
		if err != nil {
			b.Fatal(err)
		}
		if err := d.Deregister(reg); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkUpdate times an update, to compare with a registration and its
// deregistration.
func BenchmarkUpdate(b *testing.B) {
	for _, c := range benchSizes {
		b.Run(c.name, func(b *testing.B) {
			d := open(b, nil)
			reg, err := d.Register(b.Context(), benchMemory(b, c.size, false), device.LocalWrite)
			if err != nil {
				b.Fatal(err)
			}
			b.ReportAllocs()
			for b.Loop() {
				if reg, err = d.Update(b.Context(), reg); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkWrite times writes to a file in memory, through the table and plain,
// one at a time and in batches of 16.
func BenchmarkWrite(b *testing.B) {
	for _, c := range benchSizes {
		for _, batch := range []int{1, 16} {
			for _, kind := range []string{"fixed", "plain"} {
				b.Run(fmt.Sprintf("%s/batch=%d/%s", c.name, batch, kind), func(b *testing.B) {
					d := open(b, nil)
					ring, r := d.Ring(), benchMemory(b, c.size, false)
					reg, err := d.Register(b.Context(), r, 0)
					if err != nil {
						b.Fatal(err)
					}
					fd := memfd(b)
					done := make([]iouring.Completion, batch)
					b.SetBytes(int64(c.size * batch))
					b.ReportAllocs()
					for b.Loop() {
						for i := range batch {
							if kind == "fixed" {
								err = ring.WriteFixed(fd, r, 0, reg.LocalKey, uint64(i))
							} else {
								err = ring.Write(fd, r, 0, uint64(i))
							}
							if err != nil {
								b.Fatal(err)
							}
						}
						if err := ring.Do(done); err != nil {
							b.Fatal(err)
						}
						for _, c := range done {
							if int(c.Res) != int(r.Len()) {
								b.Fatalf("write: %+v", c)
							}
						}
					}
				})
			}
		}
	}
}

// BenchmarkOpen times a device's life: a ring, a table, and closing both.
func BenchmarkOpen(b *testing.B) {
	for b.Loop() {
		d, err := iouring.Open(nil)
		needRing(b, err)
		if err := d.Close(); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkUpdateRatio times by turns an update, a registration, and a
// deregistration; and the same by bare io_uring_register(2), on a ring beside. None
// waits for anything in flight.
//
//   - ratio is an update in registrations of an empty slot, raw-ratio the same of
//     the bare calls: what the kernel takes to unpin the old pages is in it.
//   - replaced is an update in pairs of registration and deregistration, which also
//     unpin old pages and are what an update is instead of; raw-replaced of the bare
//     calls.
func BenchmarkUpdateRatio(b *testing.B) {
	for _, c := range benchSizes {
		b.Run(c.name, func(b *testing.B) { benchUpdateRatio(b, benchMemory(b, c.size, false)) })
	}
	b.Run("16MiB", func(b *testing.B) { benchUpdateRatio(b, benchMemory(b, 16<<20, false)) })
	b.Run("1MiB/huge", func(b *testing.B) { benchUpdateRatio(b, benchMemory(b, 1<<20, true)) })
}

// timed adds what f takes to sum.
func timed(b *testing.B, sum *time.Duration, f func() error) {
	b.Helper()
	start := time.Now()
	err := f()
	*sum += time.Since(start)
	if err != nil {
		b.Fatal(err)
	}
}

func benchUpdateRatio(b *testing.B, r vm.Range) {
	b.Helper()
	d := open(b, nil)
	kept, err := d.Register(b.Context(), r, 0)
	if err != nil {
		b.Fatal(err)
	}
	bare, err := iouring.NewRing(nil)
	needRing(b, err)
	defer bare.Close()
	// As many slots as the device's table has in use, so that both are alike.
	const keptSlot, slots = 0, 128
	if err := uring.RegisterSparse(bare.Fd(), slots); err != nil {
		b.Fatal(err)
	}
	call := uring.NewUpdate()
	fill := func(slot uint32) error { return call.Do(bare.Fd(), slot, uint64(r.Start), uint64(r.Len())) }
	if err := fill(keptSlot); err != nil {
		b.Fatal(err)
	}
	var register, deregister, update, rawRegister, rawDeregister, rawUpdate time.Duration
	for slot := uint32(1); b.Loop(); slot = slot%(slots-1) + 1 {
		var reg device.Registration
		timed(b, &register, func() error { reg, err = d.Register(b.Context(), r, 0); return err })
		timed(b, &update, func() error { _, err := d.Update(b.Context(), kept); return err })
		timed(b, &deregister, func() error { return d.Deregister(reg) })
		timed(b, &rawRegister, func() error { return fill(slot) })
		timed(b, &rawUpdate, func() error { return fill(keptSlot) })
		timed(b, &rawDeregister, func() error { return call.Do(bare.Fd(), slot, 0, 0) })
	}
	b.ReportMetric(float64(register.Nanoseconds())/float64(b.N), "ns/register")
	b.ReportMetric(float64(deregister.Nanoseconds())/float64(b.N), "ns/deregister")
	b.ReportMetric(float64(update.Nanoseconds())/float64(b.N), "ns/update")
	b.ReportMetric(float64(rawRegister.Nanoseconds())/float64(b.N), "ns/raw-register")
	b.ReportMetric(float64(rawDeregister.Nanoseconds())/float64(b.N), "ns/raw-deregister")
	b.ReportMetric(float64(rawUpdate.Nanoseconds())/float64(b.N), "ns/raw-update")
	b.ReportMetric(float64(update)/float64(register), "ratio")
	b.ReportMetric(float64(rawUpdate)/float64(rawRegister), "raw-ratio")
	b.ReportMetric(float64(update)/float64(register+deregister), "replaced")
	b.ReportMetric(float64(rawUpdate)/float64(rawRegister+rawDeregister), "raw-replaced")
}
