package pindown

import (
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/pindown/pindown/vm"
)

// However far apart entries are, the table is rebuilt a few times for each
// doubling, all are found, and none is once it was removed.
func TestIndexGrowth(t *testing.T) {
	const n, page = 100_000, 1 << indexPageShift
	for _, stride := range []int{1, 2, 3, 16, 17, 32, 256, 512, 4096, 1 << 18} {
		t.Run(fmt.Sprint(stride), func(t *testing.T) {
			var live []*entry
			var table atomic.Pointer[indexTable]
			x := newIndex(&table, n, func(f func(*entry)) {
				for _, e := range live {
					f(e)
				}
			})
			at := func(i int) vm.Range {
				start := uintptr(0x10_0000_0000 + i*stride*page)
				return vm.Range{Start: start, End: start + page}
			}
			tables, last := 0, x.table.Load()
			for i := range n {
				r := at(i)
				e := &entry{start: r.Start, end: r.End}
				x.insert(e, 1<<8)
				live = append(live, e)
				if now := x.table.Load(); now != last {
					tables, last = tables+1, now
				}
			}
			if tables > 30 {
				t.Errorf("rebuilt %d times", tables)
			}
			if limit := 4 * n; len(last.buckets) > limit {
				t.Errorf("%d buckets for %d entries", len(last.buckets), n)
			}
			for i, e := range live {
				if x.seen(e) != 1<<8 {
					t.Fatalf("entry %d isn't found", i)
				}
			}
			for i, e := range live {
				x.remove(e)
				x.forget(e)
				if x.seen(e) != 0 {
					t.Fatalf("entry %d was removed and is found", i)
				}
			}
			if x.lists != 0 || x.void != 0 || x.table.Load().levels.Load() != 0 {
				t.Errorf("%d listings left, levels %#x", x.lists, x.table.Load().levels.Load())
			}
		})
	}
}

// Whatever the distance between entries, most are found where a hit looks first.
// (A single multiplication as the hash left 85 % of them elsewhere, at some
// distances.)
func TestIndexPlaces(t *testing.T) {
	for _, stride := range []uintptr{1, 2, 3, 4, 5, 16, 17, 32, 33, 100, 256, 512, 513, 5000, 1 << 18} {
		for _, n := range []int{1000, 5000, 10_000, 20_000, 60_000} {
			var table atomic.Pointer[indexTable]
			x := newIndex(&table, n, nil)
			missed := 0
			for i := range n {
				r := pages(uintptr(i)*stride, 1)
				x.insert(&entry{start: r.Start, end: r.End}, 1<<8)
			}
			for i := range n {
				page := uint64(pages(uintptr(i)*stride, 1).Start >> indexPageShift)
				h, tab := indexHash(0, page), table.Load()
				if !spanCovers(tab.buckets[tab.home(h)].match(h).span.Load(), page, 0) {
					missed++
				}
			}
			if missed > n/6 {
				t.Errorf("%d entries %d pages apart: %d are elsewhere", n, stride, missed)
			}
		}
	}
}

// Two blocks of one entry, which are at most 16 apart, have different tags. So a
// listing is found by its tag and its entry. A tag depends on the lowest bits of
// the product's halves, on those of the distance's, and on a carry: this is all.
func TestIndexTagsOfEntryDiffer(t *testing.T) {
	for d := uint64(1); d <= 1<<indexFanoutShift; d++ {
		step := indexProduct(0, d)
		for lo := range uint64(tagTop) {
			for hi := range uint64(tagTop) {
				for carry := range uint64(2) {
					if indexTag(lo^hi) == indexTag((lo+step)^(hi+step>>32+carry)) {
						t.Fatalf("blocks %d apart have one tag", d)
					}
				}
			}
		}
	}
}
