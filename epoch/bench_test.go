package epoch

import (
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"

	"github.com/pindown/pindown/vm"
)

// regionCases are the ranges that stamps and watches are measured with.
var regionCases = []struct {
	name        string
	first, size uint64
}{
	{"page", 0x7f0000003, 1},
	{"aligned_64KiB", 0x7f0000010, 16},
	{"unaligned_64KiB", 0x7f0000013, 16},
	{"unaligned_1MiB", 0x7f0000103, 256},
	{"unaligned_64MiB", 0x7f0000103, 16384},
}

// BenchmarkHitGeneration is the check of a hit when nothing happened.
func BenchmarkHitGeneration(b *testing.B) {
	table := newTestTable(b, 10)
	var seen atomic.Uint64
	seen.Store(uint64(table.Word()))
	b.ReportAllocs()
	n := 0
	for b.Loop() {
		if uint64(table.Word()) == seen.Load() {
			n++
		}
	}
	if n != b.N {
		b.Error("a quiet table's word changed")
	}
}

func BenchmarkStamp(b *testing.B) {
	for _, c := range regionCases {
		b.Run(c.name, func(b *testing.B) {
			table := newTestTable(b, 10)
			var w Watch
			if err := table.Watch(&w, pages(c.first, c.size)); err != nil {
				b.Fatal(err)
			}
			b.ReportAllocs()
			var sum uint64
			for b.Loop() {
				sum += table.Stamp(&w)
			}
			b.ReportMetric(float64(w.Blocks()), "blocks")
		})
	}
}

// BenchmarkCheck is the slow half of a hit: an unrelated operation happened.
func BenchmarkCheck(b *testing.B) {
	for _, c := range regionCases {
		b.Run(c.name, func(b *testing.B) {
			table := newTestTable(b, 10)
			var w Watch
			if err := table.Watch(&w, pages(c.first, c.size)); err != nil {
				b.Fatal(err)
			}
			_, stamp := table.Take(&w)
			var seen atomic.Uint64
			b.ReportAllocs()
			for b.Loop() {
				if table.Check(&w, stamp, &seen) != VerdictValid {
					b.Fatal("stale")
				}
			}
		})
	}
}

// BenchmarkTouch is one touch of 8 GiB that hold so many regions of 64 KiB,
// and, for "aside", of 8 GiB beside them.
func BenchmarkTouch(b *testing.B) {
	const first, size = 0x7f0000003, 1 << 21
	for _, n := range []int{0, 1, 1000, 100000} {
		table := newTestTable(b, BucketBitsFor(n))
		for i := range n {
			if err := table.Watch(new(Watch), pages(first+uint64(i)*(size/uint64(n)), 16)); err != nil {
				b.Fatal(err)
			}
		}
		for _, c := range []struct {
			name string
			r    vm.Range
			want bool
		}{
			{"over", pages(first-1, size+2), n > 0},
			{"page", pages(first, 1), n > 0},
			{"aside", pages(first+3*size, size), false},
		} {
			b.Run(fmt.Sprintf("regions=%d/%s", n, c.name), func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					if table.Touch(c.r) != c.want {
						b.Fatal("wrong answer")
					}
				}
			})
		}
	}
}

func BenchmarkWatchUnwatch(b *testing.B) {
	for _, neighbours := range []bool{false, true} {
		for _, c := range regionCases {
			b.Run(fmt.Sprintf("%s/neighbours=%v", c.name, neighbours), func(b *testing.B) {
				table := newTestTable(b, 14)
				if neighbours {
					// The upper blocks are there already.
					for _, at := range []uint64{c.first - c.size, c.first + c.size} {
						if err := table.Watch(new(Watch), pages(at, c.size)); err != nil {
							b.Fatal(err)
						}
					}
				}
				var w Watch
				b.ReportAllocs()
				for b.Loop() {
					if err := table.Watch(&w, pages(c.first, c.size)); err != nil {
						b.Fatal(err)
					}
					table.Unwatch(&w)
				}
			})
		}
	}
}

// BenchmarkWatchParallel shows the table's mutex under misses from all sides.
func BenchmarkWatchParallel(b *testing.B) {
	table := newTestTable(b, 14)
	var id atomic.Uint64
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		at := 0x7f0000003 + id.Add(1)<<20
		var w Watch
		for pb.Next() {
			if err := table.Watch(&w, pages(at, 16)); err != nil {
				b.Error(err)
				return
			}
			table.Unwatch(&w)
		}
	})
}

// BenchmarkBlockLimit is the trade behind MaxBlocks: what stamping regions of
// a size costs when they may take so many blocks. 4096 regions, so that the
// slots don't all sit in the first-level cache. TestRoundingRates has the
// other side of the trade.
func BenchmarkBlockLimit(b *testing.B) {
	for _, size := range sizes[2:4] {
		for _, limit := range []uint64{4, 8, 16, 32} {
			b.Run(fmt.Sprintf("%s/blocks=%d", size.name, limit), func(b *testing.B) {
				if limit > MaxBlocks {
					b.Skip("more than MaxBlocks")
				}
				const n = 4096
				table := newTestTable(b, 16)
				rng := rand.New(rand.NewPCG(1, 2))
				watches := make([]Watch, n)
				at := uint64(0x7f0000000)
				for i := range watches {
					at += size.pages + rng.Uint64N(size.pages)
					if err := table.watch(&watches[i], pages(at, size.pages), limit); err != nil {
						b.Fatal(err)
					}
				}
				b.ReportAllocs()
				var sum uint64
				i := 0
				for b.Loop() {
					sum += table.Stamp(&watches[i%n])
					i += 17
				}
				b.ReportMetric(float64(table.Stats().Used)/n, "slots/region")
			})
		}
	}
}
