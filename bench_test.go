package pindown_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"

	"github.com/pindown/pindown"
	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/devicetest"
	"github.com/pindown/pindown/vm"
)

// BenchmarkHit acquires and releases one of n resident 4 KiB regions, chosen
// uniformly at random.
func BenchmarkHit(b *testing.B) {
	for _, n := range []int{1, 1000, 10_000, 100_000} {
		b.Run(fmt.Sprintf("regions=%d", n), func(b *testing.B) {
			r, ranges := resident(b, n)
			order := make([]uint32, 1<<16)
			for i := range order {
				order[i] = rand.Uint32N(uint32(n))
			}
			i := 0
			b.ReportAllocs()
			for b.Loop() {
				reg, ok := r.TryAcquireRange(ranges[order[i&(len(order)-1)]], 0)
				if !ok {
					b.Fatal("miss")
				}
				_ = reg.Release()
				i++
			}
		})
	}
}

// resident returns a cache that holds n regions of a page, two pages apart.
// The addresses are never dereferenced.
func resident(b *testing.B, n int) (*rig, []pindown.Range) {
	b.Helper()
	r := newRig(b, &devicetest.FakeOptions{CountsOnly: true, Limits: device.Limits{PageSize: page}},
		&pindown.Options{MaxRegions: n + 1, MaxBytes: 1 << 40, MergeBytes: -1})
	ranges := make([]pindown.Range, n)
	for i := range ranges {
		start := uintptr(0x10_0000_0000 + 2*i*page)
		ranges[i] = vm.Range{Start: start, End: start + page}
		reg, err := r.AcquireRange(context.Background(), ranges[i], 0)
		if err != nil {
			b.Fatal(err)
		}
		_ = reg.Release()
	}
	return r, ranges
}

// BenchmarkMiss registers with a device that costs nothing.
func BenchmarkMiss(b *testing.B) {
	for _, n := range []int{1000, 100_000} {
		b.Run(fmt.Sprintf("resident=%d", n), func(b *testing.B) {
			r, _ := resident(b, n)
			at := uintptr(0x20_0000_0000)
			b.ReportAllocs()
			for b.Loop() {
				reg, err := r.AcquireRange(context.Background(), vm.Range{Start: at, End: at + page}, 0)
				if err != nil {
					b.Fatal(err)
				}
				_ = reg.Release()
				at += 2 * page
			}
		})
	}
}

// BenchmarkHitParallel hits from all processors, on one region or on one each.
func BenchmarkHitParallel(b *testing.B) {
	for _, same := range []bool{false, true} {
		b.Run(fmt.Sprintf("same=%v", same), func(b *testing.B) {
			r, ranges := resident(b, 64)
			next := make(chan int, 64)
			for i := range 64 {
				next <- i
			}
			b.RunParallel(func(pb *testing.PB) {
				i := <-next
				if same {
					i = 0
				}
				for pb.Next() {
					reg, ok := r.TryAcquireRange(ranges[i], 0)
					if !ok {
						b.Error("miss")
						return
					}
					_ = reg.Release()
				}
			})
		})
	}
}

// BenchmarkRestamp hits after an operation that touched another watched range.
func BenchmarkRestamp(b *testing.B) {
	r, ranges := resident(b, 1000)
	other := ranges[999]
	b.ReportAllocs()
	for b.Loop() {
		r.mon.Table().Touch(other)
		reg, ok := r.TryAcquireRange(ranges[0], 0)
		if !ok {
			b.Fatal("miss")
		}
		_ = reg.Release()
	}
}

// BenchmarkFloor is what two atomic additions cost: the least that counting a
// holder in and out can.
func BenchmarkFloor(b *testing.B) {
	var n atomic.Int64
	for b.Loop() {
		n.Add(1)
		n.Add(-1)
	}
}

// BenchmarkLane is BenchmarkHit through a lane.
func BenchmarkLane(b *testing.B) {
	for _, n := range []int{1, 1000, 10_000, 100_000} {
		b.Run(fmt.Sprintf("regions=%d", n), func(b *testing.B) {
			r, ranges := resident(b, n)
			lane, err := r.NewLane()
			if err != nil {
				b.Fatal(err)
			}
			order := make([]uint32, 1<<16)
			for i := range order {
				order[i] = rand.Uint32N(uint32(n))
			}
			i := 0
			b.ReportAllocs()
			for b.Loop() {
				reg, ok := lane.TryAcquireRange(ranges[order[i&(len(order)-1)]], 0)
				if !ok {
					b.Fatal("miss")
				}
				_ = reg.Release()
				i++
			}
		})
	}
}
