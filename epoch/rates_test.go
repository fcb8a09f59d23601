package epoch

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/pindown/pindown/vm"
)

// sizes are region sizes in pages, placed at any page.
var sizes = []struct {
	name  string
	pages uint64
}{{"4KiB", 1}, {"16KiB", 4}, {"64KiB", 16}, {"1MiB", 256}, {"64MiB", 16384}}

// TestRoundingRates measures what rounding to so many blocks costs: blocks a
// region, bytes watched beyond it, and the share of single-page operations
// among those that invalidate it which needn't have.
func TestRoundingRates(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	const exact = 1 << 20
	t.Log("size     limit  blocks  beyond  needless")
	for _, size := range sizes {
		for _, limit := range []uint64{scarceBlocks, sparingBlocks, MaxBlocks, 32, exact} {
			const n = 2000
			var blocks, beyond uint64
			for range n {
				lo := 0x7f0000000 + rng.Uint64N(1<<24)
				a, b := roundOut(lo, lo+size.pages, limit)
				blocks += countBlocks(a, b)
				beyond += b - a - size.pages
			}
			ratio := float64(beyond) / float64(n*size.pages)
			name := fmt.Sprint(limit)
			if limit == exact {
				name = "exact"
			}
			t.Logf("%-7s  %5s  %6.1f  %5.1f%%  %7.1f%%", size.name, name,
				float64(blocks)/n, 100*ratio, 100*ratio/(1+ratio))
			// What the documentation promises.
			if limit == MaxBlocks && (size.pages <= 16 && beyond != 0 || ratio > 0.35) || limit == exact && beyond != 0 {
				t.Errorf("%s in %d blocks: %.3f watched beyond it", size.name, limit, ratio)
			}
		}
	}
}

// placements are where regions of n pages lie in an address space.
var placements = []struct {
	name string
	next func(rng *rand.Rand, at, n uint64) (lo, next uint64)
}{
	{"adjacent", func(_ *rand.Rand, at, n uint64) (uint64, uint64) { return at, at + n }},
	{"guard page", func(_ *rand.Rand, at, n uint64) (uint64, uint64) { return at, at + n + 1 }},
	{"gaps", func(rng *rand.Rand, at, n uint64) (uint64, uint64) { return at, at + n + rng.Uint64N(4*n) }},
	{"scattered", func(rng *rand.Rand, at, n uint64) (uint64, uint64) { return rng.Uint64N(1<<35 - n), at }},
}

// TestFullTableRates fills tables of the recommended size to the number of
// regions that they are meant for, and measures how often an operation on
// somebody else's memory invalidates a region.
func TestFullTableRates(t *testing.T) {
	if raceEnabled {
		t.Skip("one goroutine: nothing for the race detector")
	}
	type fill struct{ limit, n int }
	fills := []fill{{16384, 4096}, {16384, 16384}, {65536, 65536}}
	if testing.Short() {
		fills = fills[:1]
	}
	t.Log("limit   regions  size    placement   fill  coarse  beyond(median)  neighbour  far")
	for _, c := range fills {
		n := c.n
		table := newTestTable(t, BucketBitsFor(c.limit))
		for _, size := range sizes[2:4] {
			for _, place := range placements {
				rng := rand.New(rand.NewPCG(7, uint64(n)))
				watches, los := make([]Watch, n), make([]uint64, n)
				at := uint64(0x7f0000000) + 3
				blocks, coarse := 0, 0
				for i := range watches {
					los[i], at = place.next(rng, at, size.pages)
					c := table.coarse
					if err := table.Watch(&watches[i], pages(los[i], size.pages)); err != nil {
						t.Fatal(err)
					}
					blocks += watches[i].Blocks()
					if table.coarse != c {
						coarse++
					}
				}
				st := table.Stats()
				fill := float64(st.Used) / float64(st.Slots)

				var beyond []float64
				order := slices.Clone(los)
				slices.Sort(order)
				var near, nearAsked, far, farAsked int
				for k := range 4000 {
					i := rng.IntN(n)
					w := &watches[i]
					beyond = append(beyond, float64(coveredPages(table, w))/float64(size.pages)-1)
					stamp := table.Stamp(w)
					// Its own page: never missed.
					table.Touch(pages(los[i]+rng.Uint64N(size.pages), 1))
					if table.Stamp(w) == stamp {
						t.Fatalf("%s, %s: missed", size.name, place.name)
					}
					stamp = table.Stamp(w)
					j, _ := slices.BinarySearch(order, los[i])
					if k%2 == 0 {
						j++
					} else {
						j--
					}
					if j >= 0 && j < n {
						op := pages(order[j], size.pages)
						if !op.Overlaps(pages(los[i], size.pages)) {
							nearAsked++
							table.Touch(op)
							if table.Stamp(w) != stamp {
								near++
							}
						}
					}
					stamp = table.Stamp(w)
					op := pages(los[rng.IntN(n)], size.pages)
					own := vm.Range{Start: uintptr(los[i]-min(los[i], 4096)) << PageShift, End: uintptr(los[i]+4096) << PageShift}
					if !op.Overlaps(own) {
						farAsked++
						table.Touch(op)
						if table.Stamp(w) != stamp {
							far++
						}
					}
				}
				slices.Sort(beyond)
				t.Logf("%6d  %7d  %-6s  %-10s  %3.0f%%  %5.2f%%  %13.1f%%  %8.2f%%  %.3f%%", c.limit, n, size.name, place.name, 100*fill,
					100*float64(coarse)/float64(n), 100*beyond[len(beyond)/2], 100*float64(near)/float64(max(nearAsked, 1)), 100*float64(far)/float64(max(farAsked, 1)))
				if fill > 0.98 {
					t.Errorf("%s, %s: table %d%% full", size.name, place.name, int(100*fill))
				}
				for i := range watches {
					table.Unwatch(&watches[i])
				}
			}
		}
		assertEmpty(t, table)
	}
}

// coveredPages returns how many pages the blocks of w cover.
func coveredPages(t *Table, w *Watch) uint64 {
	var lo, hi uint64 = 1 << 60, 0
	for _, s := range t.slots(w) {
		b, i := t.slot(s &^ pageSlot)
		tag := b.tag[i].Load()
		shift := tagLevel(tag) * FanoutShift
		lo = min(lo, tagBlock(tag)<<shift)
		hi = max(hi, (tagBlock(tag)+1)<<shift)
	}
	return hi - lo
}
