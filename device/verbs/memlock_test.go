package verbs_test

import (
	"errors"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown"
	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/monitor/manual"
	"github.com/pindown/pindown/vm"
)

// TestMemlock runs where RLIMIT_MEMLOCK counts.
func TestMemlock(t *testing.T) {
	d := openReal(t)
	limit := d.Limits().MaxPinnedBytes
	if limit == 0 {
		t.Skip("nothing limits this process; test/vm runs this test as nobody, too")
	}
	var rl unix.Rlimit
	must(t, unix.Getrlimit(unix.RLIMIT_MEMLOCK, &rl))
	if limit != rl.Cur {
		t.Errorf("the device says %d, RLIMIT_MEMLOCK is %d", limit, rl.Cur)
	}
	page := os.Getpagesize()
	pages := int(limit) / page
	b := mapMemory(t, 2*pages)
	at := func(i int) []byte { return b[i*page : (i+1)*page] }

	t.Run("device", func(t *testing.T) {
		var regs []device.Registration
		for i := range pages {
			regs = append(regs, register(t, d, at(i), device.LocalWrite))
		}
		_, err := d.Register(t.Context(), vm.RangeOf(at(pages)), device.LocalWrite)
		if !errors.Is(err, device.ErrNoMemory) {
			t.Errorf("a page more than the limit: %v", err)
		}
		must(t, d.Deregister(regs[0]))
		regs[0] = register(t, d, at(pages), device.LocalWrite) // Given back at once.
		for _, reg := range regs {
			must(t, d.Deregister(reg))
		}
	})
	t.Run("cache", func(t *testing.T) {
		m, err := manual.New(nil)
		must(t, err)
		defer m.Close()
		cache, err := pindown.New(d, &pindown.Options{Monitor: m, MergeBytes: -1})
		must(t, err)
		for round := range 2 {
			for i := range 2 * pages {
				r, err := cache.Acquire(t.Context(), at(i), pindown.LocalWrite)
				if err != nil {
					t.Fatalf("round %d, buffer %d: %v", round, i, err)
				}
				must(t, r.Release())
			}
		}
		s := cache.Stats()
		if s.TotalEvictions() == 0 || s.PinnedBytes > limit || s.RegisterErrors != 0 {
			t.Errorf("%d evictions, %d bytes pinned of %d, %d errors", s.TotalEvictions(), s.PinnedBytes, limit, s.RegisterErrors)
		}
		t.Logf("%d buffers of a page through a limit of %d: %d evictions, at most %d bytes pinned", 2*pages, pages, s.TotalEvictions(), limit)
		must(t, cache.Close())
	})
}
