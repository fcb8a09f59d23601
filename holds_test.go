package pindown

import (
	"context"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/devicetest"
	"github.com/pindown/pindown/monitor/manual"
	"github.com/pindown/pindown/vm"
)

func newTestCache(t *testing.T, o Options) (*Cache, *devicetest.Fake, *manual.Monitor) {
	t.Helper()
	mon, err := manual.New(nil)
	if err != nil {
		t.Fatal(err)
	}
	dev := devicetest.NewFake(&devicetest.FakeOptions{CountsOnly: true})
	o.Monitor = mon
	c, err := New(dev, &o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		_ = mon.Close()
	})
	return c, dev, mon
}

func pages(first, n uintptr) Range {
	return Range{Start: 0x10_0000_0000 + first<<12, End: 0x10_0000_0000 + (first+n)<<12}
}

func acquire(t *testing.T, c *Cache, r Range) Region {
	t.Helper()
	reg, err := c.AcquireRange(context.Background(), r, 0)
	if err != nil {
		t.Fatal(err)
	}
	return reg
}

func release(t *testing.T, r Region) {
	t.Helper()
	if err := r.Release(); err != nil {
		t.Error(err)
	}
}

// A hit that finds a writer busy waits for it, whether or not the region
// carries the mark of an earlier hit, which shares bits with the busy count.
func TestHitWaitsForBusyWriter(t *testing.T) {
	c, _, mon := newTestCache(t, Options{})
	for _, marked := range []bool{false, true} {
		for busy := 1; busy <= 3; busy++ {
			release(t, acquire(t, c, pages(0, 1)))
			if marked {
				release(t, acquire(t, c, pages(0, 1)))
			}
			for range busy {
				mon.Table().AddBusy()
			}
			done, begun := make(chan bool, 1), make(chan struct{})
			go func() {
				close(begun)
				r, ok := c.TryAcquireRange(pages(0, 1), 0)
				if ok {
					_ = r.Release()
				}
				done <- ok
			}()
			<-begun
			for range 1000 {
				runtime.Gosched()
			}
			mon.Table().Touch(pages(0, 1))
			for range busy {
				mon.Table().DropBusy()
			}
			if <-done {
				t.Errorf("marked %v, %d busy: hit a region that the writer was about to touch", marked, busy)
			}
		}
	}
}

// The holds of a line are few: more regions are held in another way, and all
// ways count, release and refuse a second release.
func TestMoreHoldersThanHolds(t *testing.T) {
	c, dev, _ := newTestCache(t, Options{})
	lane, err := c.NewLane()
	if err != nil {
		t.Fatal(err)
	}
	release(t, acquire(t, c, pages(0, 1)))
	const n = 100
	var held []Region
	for range n {
		a, ok := c.TryAcquireRange(pages(0, 1), 0)
		b, ok2 := lane.TryAcquireRange(pages(0, 1), 0)
		if !ok || !ok2 {
			t.Fatal("miss")
		}
		held = append(held, a, b)
	}
	c.mu.Lock()
	e := held[0].e
	got := c.holders().of(e)
	c.mu.Unlock()
	if got != 2*n {
		t.Errorf("%d holders, want %d", got, 2*n)
	}
	if s := c.Stats(); s.Hits != 2*n || s.InUse != 1 {
		t.Errorf("%d hits, %d in use, want %d and 1", s.Hits, s.InUse, 2*n)
	}
	if err := lane.Close(); err == nil {
		t.Error("a lane with regions held was closed")
	}
	if _, err := c.Invalidate(pages(0, 1)); err != nil {
		t.Fatal(err)
	}
	for i := range held {
		if got := dev.Stats().Deregisters; got != 0 {
			t.Fatalf("deregistered after %d of %d releases", i, len(held))
		}
		again := held[i]
		release(t, held[i])
		if i+1 < len(held) && again.h != nil {
			if err := again.Release(); err == nil {
				t.Error("second release of a copy was accepted")
			}
		}
	}
	if err := lane.Close(); err != nil {
		t.Error(err)
	}
	if s := c.Stats(); s.Hits != 2*n {
		t.Errorf("%d hits after the lane is closed, want %d", s.Hits, 2*n)
	}
}

// A hold's count comes round after 2^16 uses; none is lost.
func TestHoldCountComesRound(t *testing.T) {
	c, _, _ := newTestCache(t, Options{})
	lane, err := c.NewLane()
	if err != nil {
		t.Fatal(err)
	}
	release(t, acquire(t, c, pages(0, 1)))
	const n = 3<<16 + 5
	for i := range n {
		for _, try := range []func(Range, Access) (Region, bool){c.TryAcquireRange, lane.TryAcquireRange} {
			r, ok := try(pages(0, 1), 0)
			if !ok {
				t.Fatal("miss")
			}
			release(t, r)
		}
		if i%50_000 == 0 {
			if s := c.Stats(); s.Hits != uint64(2*i+2) {
				t.Fatalf("%d hits, want %d", s.Hits, 2*i+2)
			}
		}
	}
	if s := c.Stats(); s.Hits != 2*n {
		t.Errorf("%d hits, want %d", s.Hits, 2*n)
	}
}

// A reader who holds an entry and has found its listing in order may be about to
// write the new word there. Meanwhile the entry can be given up, but its place in
// the index can't go to another: that would be re-stamped without a look.
func TestListingStaysWithHolders(t *testing.T) {
	c, _, mon := newTestCache(t, Options{MergeBytes: -1})
	first := pages(0, 1)
	release(t, acquire(t, c, first))
	for i := range uintptr(80) { // so that the table has room
		release(t, acquire(t, c, pages(300_000+2*i, 1)))
	}
	tab := c.tables[0].Load()
	l, _, e := tab.lookup(first)
	reader := c.note(Region{c: c, e: e}, nil)
	seen := l.seen.Load()
	if l.e.Load() != e || seen == 0 {
		t.Fatal("not listed")
	}
	if n, err := c.Invalidate(first); n != 1 || err != nil {
		t.Fatal(n, err)
	}
	// Others that belong in the same bucket, more than it has places.
	home, others := tab.home(indexHash(0, uint64(first.Start>>indexPageShift))), 0
	for p := uintptr(2); others < bucketListings && p < 100_000; p += 2 {
		if r := pages(p, 1); tab.home(indexHash(0, uint64(r.Start>>indexPageShift))) == home {
			release(t, acquire(t, c, r))
			others++
		}
	}
	if c.tables[0].Load() != tab || others < bucketListings {
		t.Fatalf("%d others, or another table", others)
	}
	if got := l.e.Load(); got != e {
		t.Errorf("the place of %v went to %v", e.rng(), got.rng())
	}
	mon.Invalidate(pages(0, 200_000))
	l.seen.CompareAndSwap(seen, uint64(mon.Table().Word())|seenMark)
	for p := uintptr(0); p < 100_000; p += 2 {
		if r, ok := c.TryAcquireRange(pages(p, 1), 0); ok {
			t.Fatalf("hit %v after the operation", r.Range())
		}
	}
	c.undo(reader)
	c.settleDying()
	if l.e.Load() == e {
		t.Error("the place stays taken without holders")
	}
}

// However hits and releases, by the cache and by lanes, race invalidations and
// evictions: nothing that is held is deregistered, and in the end everything
// is. (That a lane needs the fence is shown by the model: model/holds.pml.)
func TestHoldersRace(t *testing.T) {
	rounds := 20_000
	if testing.Short() {
		rounds = 2000
	}
	mon, err := manual.New(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = mon.Close() }()
	dev := &flagDevice{}
	c, err := New(dev, &Options{Monitor: mon, MaxRegions: 6, MergeBytes: -1})
	if err != nil {
		t.Fatal(err)
	}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for w := range 3 {
		wg.Go(func() {
			try := c.TryAcquireRange
			if w > 0 {
				lane, err := c.NewLane()
				if err != nil {
					t.Error(err)
					return
				}
				try = lane.TryAcquireRange
			}
			for i := uintptr(0); ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				if r, ok := try(pages(2*(i%8), 1), 0); ok {
					key := r.LocalKey()
					for range 20 {
						if !dev.live[key].Load() {
							t.Errorf("%v is held and not registered", r.Range())
							return
						}
					}
					_ = r.Release()
				}
			}
		})
	}
	for i := range rounds {
		p := uintptr(2 * (i % 8))
		release(t, acquire(t, c, pages(p, 1)))
		if i%3 == 0 {
			mon.Invalidate(pages(p, 1))
		}
	}
	close(stop)
	wg.Wait()
	if err := c.Shutdown(context.Background()); err != nil {
		t.Fatal(err)
	}
	for key := range dev.live {
		if dev.live[key].Load() {
			t.Errorf("registration %d is left", key)
		}
	}
}

// flagDevice is a device whose registrations are flags that can be looked at
// without a lock or barrier. Keys are used once.
type flagDevice struct {
	live [1 << 20]atomic.Bool
	next atomic.Uint32
}

func (d *flagDevice) Name() string          { return "flags" }
func (d *flagDevice) Limits() device.Limits { return device.Limits{PageSize: 4096} }

func (d *flagDevice) Register(_ context.Context, r vm.Range, a device.Access) (device.Registration, error) {
	key := d.next.Add(1)
	d.live[key].Store(true)
	return device.Registration{Range: r, Access: a, LocalKey: key}, nil
}

func (d *flagDevice) Deregister(reg device.Registration) error {
	if !d.live[reg.LocalKey].CompareAndSwap(true, false) {
		return device.ErrNotRegistered
	}
	return nil
}

// Misses of several goroutines that end in registrations per use: each gets its
// own range. (Their records are used again by the next miss.)
func TestPerUseKeepsItsRange(t *testing.T) {
	c, _, _ := newTestCache(t, Options{MaxBytes: 1 << 12})
	var wg sync.WaitGroup
	for w := range uintptr(4) {
		wg.Go(func() {
			want := pages(100*w, 2+w)
			for range 5000 {
				r, err := c.AcquireRange(context.Background(), want, 0)
				if err != nil {
					t.Error(err)
					return
				}
				if !r.Range().Contains(want) {
					t.Errorf("acquired %v, got %v", want, r.Range())
					return
				}
				_ = r.Release()
			}
		})
	}
	wg.Wait()
}
