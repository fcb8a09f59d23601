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
				if x.seen(e) != 0 {
					t.Fatalf("entry %d was removed and is found", i)
				}
			}
			if x.lists != 0 || x.table.Load().levels.Load() != 0 {
				t.Errorf("%d listings left, levels %#x", x.lists, x.table.Load().levels.Load())
			}
		})
	}
}
