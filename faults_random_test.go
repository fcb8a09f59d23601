package pindown_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/pindown/pindown"
	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/devicetest"
	"github.com/pindown/pindown/monitor"
	"github.com/pindown/pindown/monitor/monitortest"
	"github.com/pindown/pindown/vm"
)

// world is a model of an address space of a few pages: which version of each
// is mapped, and how. The fake device records the versions that it "pins".
type world struct {
	t     *testing.T
	rnd   *rand.Rand
	c     *pindown.Cache
	o     pindown.Options
	dev   *devicetest.Fake
	mon   *monitortest.Fake
	pages [worldPages]worldPage
	next  uint64 // version of the next page mapped

	faults bool // the device refuses now and then
	races  bool // operations happen inside of registrations
	raced  bool // one did since this was cleared
	lost   bool
	held   []holding
	forks  int // whose child came to its end
}

type worldPage struct {
	version  uint64 // zero: a hole
	readonly bool
	file     bool // not covered by the monitor
}

type holding struct {
	reg    pindown.Region
	rng    pindown.Range
	pinned []uint64
}

const (
	worldPages = 64
	worldStart = 0x7000_0000_0000
)

func (w *world) at(p int) uintptr { return worldStart + uintptr(p)*page }

// span returns the pages that r touches, as indices.
func (w *world) span(r pindown.Range) (from, to int) {
	r = r.RoundOut(page)
	return int(r.Start-worldStart) / page, int(r.End-worldStart) / page
}

// outside reports whether part of r is beyond the world, which is a hole.
func (w *world) outside(r pindown.Range) bool {
	from, to := w.span(r)
	return from < 0 || to > worldPages
}

func (w *world) frames(r vm.Range) ([]uint64, error) {
	if w.outside(r) {
		return nil, device.ErrFault
	}
	from, to := w.span(r)
	var v []uint64
	for _, p := range w.pages[from:to] {
		if p.version == 0 {
			return nil, device.ErrFault
		}
		v = append(v, p.version)
	}
	return v, nil
}

// operate maps, unmaps, replaces or protects a random run of pages, as the
// kernel would: recorded before and after.
func (w *world) operate() {
	from := w.rnd.IntN(worldPages)
	to := from + 1 + w.rnd.IntN(min(worldPages-from, 8))
	kind := w.rnd.IntN(8)
	w.raced = true
	w.mon.Do(vm.OpMmapFixed, vm.Range{Start: w.at(from), End: w.at(to)}, func() {
		for i := from; i < to; i++ {
			w.next++
			w.pages[i] = worldPage{version: w.next, readonly: kind == 1, file: kind == 2}
			if kind == 0 {
				w.pages[i] = worldPage{}
			}
		}
	})
}

func (w *world) randomRange() pindown.Range {
	from := w.rnd.IntN(worldPages*page - 1)
	n := 1 + w.rnd.IntN(min(worldPages*page-from, 8*page))
	return vm.Range{Start: worldStart + uintptr(from), End: worldStart + uintptr(from+n)}
}

// mapped says whether r can be registered with the access.
func (w *world) mapped(r pindown.Range, a pindown.Access) bool {
	if w.outside(r) {
		return false
	}
	from, to := w.span(r)
	for _, p := range w.pages[from:to] {
		if p.version == 0 || p.readonly && a&pindown.LocalWrite != 0 {
			return false
		}
	}
	return true
}

func (w *world) acquire() {
	r := w.randomRange()
	a := []pindown.Access{0, pindown.LocalWrite, pindown.RemoteRead, pindown.RelaxedOrdering}[w.rnd.IntN(4)]
	w.raced = false
	can := w.mapped(r, a)
	reg, err := w.c.AcquireRange(context.Background(), r, a)
	if err != nil {
		if full := errors.Is(err, device.ErrNoSlots) && w.distinct() == w.dev.Limits().MaxRegistrations; can && !w.raced && !w.faults && !full {
			w.t.Fatalf("acquire %v %v: %v", r, a, err)
		}
		return
	}
	if !can && !w.raced {
		w.t.Fatalf("acquired %v %v, part of which can't be", r, a)
	}
	if !reg.Range().Contains(r) || !reg.Access().Covers(a) {
		w.t.Fatalf("asked for %v %v, got %v %v", r, a, reg.Range(), reg.Access())
	}
	h := holding{reg: reg, rng: r, pinned: slices.Clone(w.dev.Frames(reg.Registration()))}
	if h.pinned == nil {
		w.t.Fatalf("%v isn't registered", reg.Registration())
	}
	if !w.raced {
		if !w.fresh(h) {
			w.t.Fatalf("stale: %v holds %v", r, h.pinned)
		}
		if again, ok := w.c.TryAcquireRange(r, a); ok != reg.Cached() {
			w.t.Fatalf("second acquire of %v: hit %v, cached %v", r, ok, reg.Cached())
		} else if ok {
			if err := again.Release(); err != nil {
				w.t.Fatal(err)
			}
		}
	}
	w.held = append(w.held, h)
}

// distinct returns the number of registrations that are held.
func (w *world) distinct() int {
	keys := map[uint64]bool{}
	for _, h := range w.held {
		keys[h.reg.Registration().Handle] = true
	}
	return len(keys)
}

// fresh compares what a region holds of the range asked for with what is
// mapped.
func (w *world) fresh(h holding) bool {
	from, to := w.span(h.rng)
	first, _ := w.span(h.reg.Range())
	for i := from; i < to; i++ {
		if h.pinned[i-first] != w.pages[i].version {
			return false
		}
	}
	return true
}

func (w *world) release() {
	if len(w.held) == 0 {
		return
	}
	i := w.rnd.IntN(len(w.held))
	h := w.held[i]
	w.held = slices.Delete(w.held, i, i+1)
	if err := h.reg.Release(); err != nil {
		w.t.Fatal(err)
	}
}

// fork has a forked child try everything, and be refused; what it does to its
// copy is nothing to the parent, which the next steps show.
func (w *world) fork() {
	r := w.randomRange()
	ctx := context.Background()
	regions := make([]pindown.Region, 1)
	reqs := []pindown.Request{{Range: r}}
	refused := func(bit uintptr, err error) uintptr {
		if errors.Is(err, pindown.ErrForked) {
			return 0
		}
		return bit
	}
	status, ok := forked(w.t, func() (bits uintptr) {
		if reg, ok := w.c.TryAcquireRange(r, 0); ok || reg != (pindown.Region{}) {
			bits |= 1
		}
		if w.c.TryAcquireBatch(reqs, regions) {
			bits |= 1
		}
		_, err := w.c.AcquireRange(ctx, r, 0)
		bits |= refused(2, err)
		bits |= refused(2, w.c.AcquireBatch(ctx, reqs, regions))
		_, err = w.c.Prefetch(ctx, r, 0)
		bits |= refused(2, err)
		for _, h := range w.held {
			bits |= refused(4, h.reg.Release())
		}
		_, err = w.c.Invalidate(r)
		bits |= refused(8, err)
		_, err = w.c.NewLane()
		bits |= refused(16, err)
		if s := w.c.Stats(); s.Device != "" || s.Hits != 0 {
			bits |= 32
		}
		bits |= refused(64, w.c.Dump(io.Discard))
		bits |= refused(128, w.c.Shutdown(ctx))
		return bits | refused(128, w.c.Close())
	})
	if ok && status != 0 {
		w.t.Fatalf("forked child: %#x (1 try, 2 acquire, 4 release, 8 invalidate, 16 lane, 32 stats, 64 dump, 128 close)", status)
	}
	if ok {
		w.forks++
	}
}

func (w *world) check() {
	for _, h := range w.held {
		if !w.dev.IsLive(h.reg.Registration()) {
			w.t.Fatalf("%v was deregistered while held", h.reg.Range())
		}
		if h.reg.Cached() && !w.fresh(h) && !h.reg.Stale() {
			w.t.Fatalf("%v isn't fresh and not stale", h.reg.Range())
		}
	}
	s := w.c.Stats()
	if s.Regions > w.o.MaxRegions || s.PinnedBytes > w.o.MaxBytes || s.InUse > s.Regions || s.InUse > len(w.held) {
		w.t.Fatalf("limits %d regions %d bytes, %d held: %v", w.o.MaxRegions, w.o.MaxBytes, len(w.held), s)
	}
	if n := w.dev.Stats().Live; n > s.Regions+s.PerUseHeld {
		// Live was read after Regions: nothing is made in between here.
		w.t.Fatalf("%d registrations, %d counted", n, s.Regions+s.PerUseHeld)
	}
	if m := w.dev.Misuses(); len(m) > 0 {
		w.t.Fatal(m)
	}
}

func newWorld(t *testing.T, seed uint64) *world {
	w := &world{t: t, rnd: rand.New(rand.NewPCG(seed, 1))}
	fo := &devicetest.FakeOptions{Frames: w.frames, Round: w.rnd.IntN(4) == 0}
	if w.rnd.IntN(2) == 0 {
		fo.Limits.PageSize = page
	}
	if w.rnd.IntN(4) == 0 {
		fo.Limits.MaxRegistrations = 12
	}
	fo.OnRegister = func(_ int, r vm.Range, a device.Access) error {
		if w.faults && w.rnd.IntN(4) == 0 {
			return []error{device.ErrNoMemory, device.ErrBusy, device.ErrFault, device.ErrNoSlots, device.ErrInvalid}[w.rnd.IntN(5)]
		}
		if !w.mapped(r, a) {
			return device.ErrFault
		}
		return nil
	}
	race := func(int, vm.Range) {
		if w.races && w.rnd.IntN(4) == 0 {
			w.operate()
		}
	}
	fo.BeforePin, fo.AfterPin = race, race
	w.dev = devicetest.NewFake(fo)
	var err error
	if w.mon, err = monitortest.NewFake(&monitortest.FakeOptions{Regions: 1 + w.rnd.IntN(64)}); err != nil {
		t.Fatal(err)
	}
	w.mon.SetCover(func(r vm.Range) error {
		race(0, r)
		if w.rnd.IntN(16) == 0 {
			return monitor.ErrPending
		}
		if w.outside(r) {
			return nil // the device finds out
		}
		from, to := w.span(r)
		for _, p := range w.pages[from:to] {
			if p.file {
				return monitor.ErrUncovered
			}
		}
		return nil
	})
	w.o = pindown.Options{
		Monitor: w.mon, MaxRegions: 1 + w.rnd.IntN(12), MaxBytes: uint64(1+w.rnd.IntN(40)) * page,
		MergeBytes: []int64{-1, 0, 4 * page, 16 * page}[w.rnd.IntN(4)], MergeAbove: []int{-1, 0, 1}[w.rnd.IntN(3)],
		AheadBytes: []int64{-1, 0, 4 * page}[w.rnd.IntN(3)], RegisterTimeout: time.Microsecond,
	}
	if w.c, err = pindown.New(w.dev, &w.o); err != nil {
		t.Fatal(err)
	}
	for i := range w.pages {
		w.next++
		w.pages[i].version = w.next
	}
	return w
}

func (w *world) end() {
	err := w.c.Close()
	if inUse := len(w.held) > 0; errors.Is(err, pindown.ErrInUse) != inUse {
		w.t.Errorf("close with %d held: %v", len(w.held), err)
	}
	w.operate()
	for _, h := range w.held {
		if !w.dev.IsLive(h.reg.Registration()) {
			w.t.Errorf("%v was deregistered by Close", h.reg.Range())
		}
		if err := h.reg.Release(); err != nil {
			w.t.Error(err)
		}
	}
	w.dev.AssertEmpty(w.t)
	s := w.c.Stats()
	if s.Regions != 0 || s.PinnedBytes != 0 || s.PerUseHeld != 0 || s.InUse != 0 {
		w.t.Errorf("left: %v", s)
	}
	if n := w.mon.Table().Stats().Used; n != 0 {
		w.t.Errorf("%d slots of the table left in use", n)
	}
	if err := w.mon.Close(); err != nil {
		w.t.Error(err)
	}
}

// TestRandomHistories plays random histories against the model: PINDOWN_STEPS
// is the number of steps of each, PINDOWN_SEED repeats one.
func TestRandomHistories(t *testing.T) {
	seeds, n := 60, steps(600, 200)
	if testing.Short() || raceDetector {
		seeds = 20
	}
	forks := 0
	base, given := randomSeed(t)
	if given {
		seeds = 1
	}
	for i := range seeds {
		seed := base + uint64(i)
		ok := t.Run(fmt.Sprintf("seed=%#x", seed), func(t *testing.T) {
			w := newWorld(t, seed)
			defer func() { w.end(); forks += w.forks }()
			for range n {
				switch k := w.rnd.IntN(100); {
				case k < 45:
					w.acquire()
				case k < 75:
					w.release()
				case k < 92:
					w.operate()
				case k < 94:
					r := w.randomRange()
					if _, err := w.c.Invalidate(r); err != nil {
						t.Fatal(err)
					}
				case k < 96:
					w.faults = !w.faults
				case k < 98:
					w.races = !w.races
				case k < 99 && w.rnd.IntN(8) == 0:
					if !raceDetector { // its locks don't survive a fork
						w.fork()
					}
				case k < 99:
					w.mon.DropNews(w.rnd.IntN(2) == 0)
				case w.rnd.IntN(200) == 0 && !w.lost:
					w.lost = true
					w.mon.Lose()
				}
				w.check()
			}
		})
		if !ok {
			t.Fatalf("repeat with PINDOWN_SEED=%#x", seed)
		}
	}
	t.Logf("%d forks", forks)
	if forks == 0 && seeds > 1 && !raceDetector {
		t.Error("no child came to its end")
	}
}
