package pindown_test

import (
	"errors"
	"fmt"
	"math/bits"
	"testing"

	"github.com/pindown/pindown"
	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/devicetest"
	"github.com/pindown/pindown/monitor"
	"github.com/pindown/pindown/vm"
)

// counted is a rig on a device that counts what it registers and refuses what
// isn't within its bounds.
type counted struct {
	*injected
	bounds              pindown.Range
	pages, calls, tries int
}

const countedStart = 1 << 40

func newCounted(t *testing.T, pages int, o *pindown.Options) *counted {
	t.Helper()
	c := &counted{bounds: vm.Range{Start: countedStart, End: countedStart + uintptr(pages)*page}}
	fo := &devicetest.FakeOptions{Limits: device.Limits{PageSize: page}}
	fo.OnRegister = func(_ int, r vm.Range, _ device.Access) error {
		c.tries++
		if !c.bounds.Contains(r) {
			return device.ErrFault
		}
		return nil
	}
	fo.AfterPin = func(_ int, r vm.Range) { c.calls++; c.pages += r.Pages(page) }
	c.injected = newInjected(t, fo, o, nil)
	return c
}

// use acquires and releases pages [from,to).
func (c *counted) use(t *testing.T, from, to int, a pindown.Access) {
	t.Helper()
	r := vm.Range{Start: countedStart + uintptr(from)*page, End: countedStart + uintptr(to)*page}
	reg, err := c.AcquireRange(t.Context(), r, a)
	if err != nil {
		t.Fatalf("pages [%d,%d): %v", from, to, err)
	}
	if !reg.Range().Contains(r) || !reg.Access().Covers(a) || !reg.Cached() {
		t.Errorf("asked for %v with %v, got %v with %v, cached %v", r, a, reg.Range(), reg.Access(), reg.Cached())
	}
	release(t, &reg)
}

// settled waits until what was given up is deregistered.
func (c *counted) settled(t *testing.T) {
	t.Helper()
	eventually(t, "deregistrations", func() bool {
		s := c.Stats()
		return uint64(s.Regions)+s.TotalEvictions()+s.TotalInvalidations() == s.Register.Count
	})
}

// TestFault36GrowingWindow: a window that grows by a page at a time costs
// registrations of O(n) pages, whichever end grows, and finds the end of the
// memory.
func TestFault36GrowingWindow(t *testing.T) {
	for _, n := range []int{64, 1024, 8192} {
		for _, beyond := range []int{n, 0, 3} {
			for _, down := range []bool{false, true} {
				t.Run(fmt.Sprintf("%d pages, %d beyond, down %v", n, beyond, down), func(t *testing.T) {
					c := newCounted(t, n+2*beyond, &pindown.Options{MaxBytes: 1 << 40})
					c.use(t, beyond+n/2, beyond+n/2+1, 0) // elsewhere, and in the way later
					for i := range n {
						if down {
							c.use(t, beyond+n-i-1, beyond+n, 0)
						} else {
							c.use(t, beyond, beyond+i+1, 0)
						}
					}
					t.Logf("%d registrations of %d pages, %d refused", c.calls, c.pages, c.tries-c.calls)
					// A share of an eighth makes it 9n; up to the memory's end it
					// takes log n more registrations of n.
					limit := 10 * n
					if beyond < n {
						limit += n * bits.Len(uint(n))
					}
					if c.pages > limit {
						t.Errorf("%d pages registered for a window of %d", c.pages, n)
					}
					if c.tries-c.calls > 2*bits.Len(uint(n)) {
						t.Errorf("%d refusals", c.tries-c.calls)
					}
					eventually(t, "one region", func() bool { return c.Stats().Regions == 1 })
				})
			}
		}
	}
}

// TestAheadIsModest: nothing is registered ahead on the first growth, for peers,
// if it is switched off, or at the cost of others.
func TestAheadIsModest(t *testing.T) {
	const n = 16
	for _, tc := range []struct {
		name   string
		o      pindown.Options
		access pindown.Access
	}{
		{"off", pindown.Options{AheadBytes: -1}, 0},
		{"no merging", pindown.Options{MergeBytes: -1}, 0},
		{"readable by peers", pindown.Options{}, pindown.RemoteRead},
		{"writable by peers", pindown.Options{}, pindown.LocalWrite | pindown.RemoteWrite},
		{"no room", pindown.Options{MaxBytes: (2*n + 4) * page}, 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := newCounted(t, 1024, &tc.o)
			other := vm.Range{Start: countedStart + 1000*page, End: countedStart + 1004*page}
			if _, err := c.Prefetch(t.Context(), other, tc.access); err != nil {
				t.Fatal(err)
			}
			c.pages = 0
			for i := range n {
				c.use(t, 0, i+1, tc.access)
			}
			if tc.o.MaxBytes == 0 {
				check(t, "pages registered", c.pages, n*(n+1)/2)
			}
			if reg, ok := c.TryAcquireRange(other, tc.access); ok {
				release(t, &reg)
			} else {
				t.Error("another region was given up")
			}
		})
	}
	c := newCounted(t, 1024, nil)
	c.use(t, 0, 4, 0)
	c.use(t, 0, 8, 0)
	check(t, "pages after the first growth", c.pages, 12)
}

// TestAheadIsTriedOnce: what the device is too short for isn't waited for, nor
// evicted for, and what the monitor doesn't see isn't taken.
func TestAheadIsTriedOnce(t *testing.T) {
	for _, fault := range []error{device.ErrNoMemory, device.ErrNoSlots, device.ErrBusy, device.ErrFault, monitor.ErrUncovered, monitor.ErrPending} {
		end, tries := uintptr(0), 0 // of what is asked for
		refuse := func(r vm.Range) error {
			if r.End > end {
				tries++
				return fault
			}
			return nil
		}
		fo := pages()
		fo.OnRegister = func(_ int, r vm.Range, _ device.Access) error {
			if errors.Is(fault, monitor.ErrUncovered) || errors.Is(fault, monitor.ErrPending) {
				return nil
			}
			return refuse(r)
		}
		r := newInjected(t, fo, nil, nil)
		if fo.OnRegister(0, vm.Range{End: 1}, 0) == nil {
			r.fake.SetCover(refuse)
		}
		tries = 0
		for i := range 32 {
			b := r.buf(0, (i+1)*page)
			end = vm.RangeOf(b).End
			reg := r.acquire(t, b, 0)
			check(t, "cached", reg.Cached(), true)
			release(t, &reg)
		}
		s := r.Stats()
		if tries == 0 || tries > 32 {
			t.Errorf("%v: %d tries", fault, tries)
		}
		check(t, "evicted for the device", s.Evictions[pindown.EvictDevice], 0)
		check(t, "per use", s.TotalPerUse(), 0)
	}
}

// TestNeighboursJoin: page after page costs O(n log n) pages and leaves few
// regions.
func TestNeighboursJoin(t *testing.T) {
	const n = 1 << 10
	for _, o := range []pindown.Options{{MergeAbove: 1, MergeBytes: 1 << 30}, {MergeAbove: 1}, {MaxRegions: 8}, {MaxRegions: 1}, {}, {MergeAbove: -1}} {
		t.Run(fmt.Sprintf("MergeAbove=%d,MergeBytes=%d,MaxRegions=%d", o.MergeAbove, o.MergeBytes, o.MaxRegions), func(t *testing.T) {
			for _, down := range []bool{false, true} {
				c := newCounted(t, n, &o)
				for i := range n {
					if down {
						i = n - 1 - i
					}
					c.use(t, i, i+1, 0)
				}
				check(t, "registrations", c.calls, n)
				check(t, "refused", c.tries, n)
				limit, regions := n*(bits.Len(n)), bits.Len(n)
				switch {
				case o.MergeAbove < 0 || o.MaxRegions == 0 && o.MergeAbove == 0:
					limit, regions = n, n
				case o.MergeBytes == 0:
					regions = n*page>>20 + bits.Len(n)
				}
				if o.MaxRegions > 0 {
					regions = o.MaxRegions
				}
				c.settled(t)
				s := c.Stats()
				t.Logf("%d registrations of %d pages, %d regions", c.calls, c.pages, s.Regions)
				if c.pages > limit || s.Regions > regions {
					t.Errorf("%d pages, at most %d; %d regions, at most %d", c.pages, limit, s.Regions, regions)
				}
				if s.Evictions[pindown.EvictMerge]+uint64(s.Regions)+s.Evictions[pindown.EvictRegions] != n {
					t.Errorf("%v", s)
				}
			}
		})
	}
}

// TestNeighboursStay: a neighbour that is held, or that peers have other
// access to, stays as it is; one that can't be joined is tried once.
func TestNeighboursStay(t *testing.T) {
	r := newRig(t, nil, &pindown.Options{MergeAbove: 1})
	held := r.acquire(t, r.buf(0, page), 0)
	r.use(t, r.buf(page, page), 0)
	check(t, "beside one in use: regions", r.Stats().Regions, 2)
	r.use(t, r.buf(2*page, page), pindown.RemoteRead)
	check(t, "beside one that peers may not read: regions", r.Stats().Regions, 3)
	r.use(t, r.buf(3*page, page), pindown.RelaxedOrdering)
	check(t, "of another set: regions", r.Stats().Regions, 4)
	r.use(t, r.buf(2*page-1, 2), 0)
	check(t, "in use after all that", held.Stale(), false)
	eventually(t, "overlapping ones joined: 3 regions", func() bool { return r.Stats().Regions == 3 })
	release(t, &held)
}

// TestStaleOnesDontJoin: what a VM operation has touched is no reason to register
// more than what is asked for.
func TestStaleOnesDontJoin(t *testing.T) {
	for _, n := range []int{1, 2} { // a neighbour, an overlapping one
		c := newCounted(t, 64, &pindown.Options{MergeAbove: 1})
		c.fake.DropNews(true)
		c.use(t, 0, 8, 0)
		c.pages = 0
		c.fake.Table().Touch(vm.Range{Start: countedStart, End: countedStart + page})
		c.use(t, 9-n, 17-n, 0)
		check(t, "pages", c.pages, 8)
	}
}

// TestNeighbourThatCannotJoin: a seam over which nothing can be registered is
// tried once.
func TestNeighbourThatCannotJoin(t *testing.T) {
	refused := 0
	fo := pages()
	var seam uintptr
	fo.OnRegister = func(_ int, r vm.Range, _ device.Access) error {
		if r.Start < seam && seam < r.End {
			refused++
			return device.ErrFault
		}
		return nil
	}
	r := newRig(t, fo, &pindown.Options{MergeAbove: 1})
	seam = vm.RangeOf(r.buf(8*page, 1)).Start
	for range 10 {
		r.use(t, r.buf(7*page, page), 0)
		r.use(t, r.buf(8*page, page), 0)
		if _, err := r.Invalidate(vm.RangeOf(r.buf(8*page, page))); err != nil {
			t.Fatal(err)
		}
	}
	if refused == 0 || refused > 2 {
		t.Errorf("refused %d times", refused)
	}
}

// TestPushedOutRangesJoin: ranges that take turns and whose union is longer than
// MergeBytes aren't registered in every turn.
func TestPushedOutRangesJoin(t *testing.T) {
	type span struct{ from, to int }
	for _, tc := range []struct {
		name  string
		spans []span
	}{
		{"two", []span{{0, 175}, {125, 300}}},
		{"two long ones", []span{{0, 5000}, {2500, 7500}}},
		{"three in a row", []span{{0, 250}, {225, 475}, {450, 700}}},
		{"three with a common part", []span{{0, 200}, {100, 300}, {150, 350}}},
		{"a chain", []span{{0, 256}, {200, 456}, {400, 656}, {600, 856}, {800, 1056}, {1000, 1256}}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := newCounted(t, 10000, &pindown.Options{MaxBytes: 1 << 40})
			for range 20 {
				for _, s := range tc.spans {
					c.use(t, s.from, s.to, 0)
				}
			}
			t.Logf("%d registrations of %d pages", c.calls, c.pages)
			if limit := 3 * len(tc.spans); c.calls > limit {
				t.Errorf("%d registrations, more than %d", c.calls, limit)
			}
		})
	}
	// One that goes by never comes back, so nothing is joined for it; and what
	// can't be joined is tried once.
	c := newCounted(t, 100_000, &pindown.Options{MaxBytes: 1 << 40})
	for i := range 50 {
		c.use(t, 200*i, 200*i+256, 0)
	}
	check(t, "pages of a sliding window", c.pages, 50*256)

	refused := 0
	fo := pages()
	fo.OnRegister = func(_ int, r vm.Range, _ device.Access) error {
		if r.Len() > 200*page {
			refused++
			return device.ErrFault
		}
		return nil
	}
	r := newInjected(t, fo, &pindown.Options{MaxBytes: 1 << 40, MergeBytes: 64 * page}, nil)
	for range 20 {
		for _, at := range []int{0, 64} {
			reg := r.acquire(t, r.mem[at*page:(at+175)*page], 0)
			release(t, &reg)
		}
	}
	if refused > 20 {
		t.Errorf("%d unions refused in 40 turns", refused)
	}
}

// TestGrowingAtTheLimit: what was replaced makes room, be it just being
// deregistered by the reaper, before anything else is given up or passed over.
func TestGrowingAtTheLimit(t *testing.T) {
	for range steps(300, 50) {
		const n = 16
		c := newCounted(t, 1024, &pindown.Options{MaxBytes: (n + 4) * page, AheadBytes: -1})
		other := vm.Range{Start: countedStart + 1000*page, End: countedStart + 1004*page}
		if _, err := c.Prefetch(t.Context(), other, 0); err != nil {
			t.Fatal(err)
		}
		for i := range n {
			c.use(t, 0, i+1, 0)
		}
		reg, ok := c.TryAcquireRange(other, 0)
		if !ok {
			t.Fatalf("another region was given up: %v", c.Stats())
		}
		release(t, &reg)
	}
}
