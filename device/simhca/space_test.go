package simhca_test

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/simhca"
	"github.com/pindown/pindown/epoch"
	"github.com/pindown/pindown/monitor/manual"
	"github.com/pindown/pindown/vm"
)

// What each VM operation does to the pages, and what it says it does.
func TestSpaceOperations(t *testing.T) {
	type event struct {
		When string
		vm.Event
	}
	var events []event
	s := simhca.NewSpace(&simhca.SpaceOptions{
		Before: func(e vm.Event) { events = append(events, event{"before", e}) },
		After:  func(e vm.Event) { events = append(events, event{"after", e}) },
	})
	g := &rig{t: t, space: s}
	a, b := g.mapped(2, 'a'), g.mapped(2, 'b')
	if len(events) != 0 {
		t.Errorf("events %v for mapping where nothing was", events)
	}
	expect := func(what string, ops ...event) {
		t.Helper()
		if diff := cmp.Diff(ops, events); diff != "" {
			t.Errorf("%s: events (-want +got):\n%s", what, diff)
		}
		events = nil
	}
	both := func(r vm.Range, op vm.Op) []event {
		return []event{{"before", vm.Event{Range: r, Op: op}}, {"after", vm.Event{Range: r, Op: op}}}
	}

	g.must(s.Dontneed(a))
	expect("dontneed", both(a, vm.OpDontneed)...)
	if got := s.Frames(a); got[0] != 0 || g.memory(a) != 0 {
		t.Errorf("after dontneed: frames %v, %q", got, g.memory(a))
	}
	g.fill(a, 'c')
	frames := s.Frames(a)
	g.must(s.Remap(a, b))
	expect("remap", event{"before", vm.Event{Range: a, Op: vm.OpMremapFixed}}, event{"before", vm.Event{Range: b, Op: vm.OpMremapFixed}},
		event{"after", vm.Event{Range: b, Op: vm.OpMremapFixed}}, event{"after", vm.Event{Range: a, Op: vm.OpMremapFixed}})
	if diff := cmp.Diff(frames, s.Frames(b)); diff != "" || g.memory(b) != 'c' {
		t.Errorf("moved pages: %s, %q", diff, g.memory(b))
	}
	g.wantError("load of what was moved away", s.Load(a.Start, make([]byte, 1)), simhca.ErrNotMapped)
	g.must(s.MapFixed(b, simhca.ProtRead))
	expect("map over", both(b, vm.OpMmapFixed)...)
	if g.memory(b) != 0 {
		t.Errorf("a new mapping has %q", g.memory(b))
	}
	g.wantError("store to a read-only mapping", s.Store(b.Start, []byte{1}), simhca.ErrNotMapped)
	_, err := s.Pin(b, true)
	g.wantError("pin a read-only mapping for writing", err, device.ErrFault)
	p, err := s.Pin(b, false)
	g.must(err)
	g.must(p.Unpin())
	g.must(s.Protect(b, rw))
	g.must(s.Store(b.Start, []byte{1}))
	events = nil
	half := vm.Range{Start: b.Start + page, End: b.End}
	g.must(s.Unmap(half))
	expect("unmap", both(half, vm.OpMunmap)...)
	_, err = s.Pin(b, false)
	g.wantError("pin over a hole", err, device.ErrFault)
	g.must(s.Unmap(b))
	g.must(s.Unmap(b)) // Nothing there: no error, as with munmap(2).
	if st := s.Stats(); st.Pages != 0 || st.Pinned != 0 {
		t.Errorf("%+v with nothing mapped", st)
	}
	g.must(s.Check())

	for name, err := range map[string]error{
		"empty":      s.Unmap(vm.Range{}),
		"unaligned":  s.Dontneed(vm.Range{Start: b.Start + 1, End: b.End}),
		"too high":   s.MapFixed(vm.Range{Start: 1 << 48, End: 1<<48 + page}, rw),
		"lengths":    s.Remap(b, half),
		"overlap":    s.Remap(b, vm.Range{Start: b.Start + page, End: b.End + page}),
		"protection": s.Protect(vm.Range{Start: 1, End: 2}, rw),
	} {
		g.wantError(name, err, simhca.ErrBadRange)
	}
	_, err = s.Map(0, rw)
	g.wantError("map nothing", err, simhca.ErrBadRange)
}

// A page lives while it is mapped or pinned, and not a moment longer.
func TestPagesLive(t *testing.T) {
	g := newRig(t, simhca.Options{}, false)
	r := g.mapped(1, 'x')
	number := g.space.Frames(r)[0]
	reg := g.register(r, allAcc)
	again := g.register(r, allAcc)
	g.must(g.space.Unmap(r))
	g.wantSees("orphan", r, reg.RemoteKey, 'x')
	g.must(g.dev.Deregister(reg))
	g.wantSees("orphan, by the other key", r, again.RemoteKey, 'x')
	if s := g.space.Stats(); s.Orphans != 1 || s.Pinned != 1 {
		t.Errorf("%+v", s)
	}
	freed := g.space.Stats().Freed
	g.must(g.dev.Deregister(again))
	if s := g.space.Stats(); s.Freed != freed+1 || s.Orphans != 0 {
		t.Errorf("%+v, want one page freed", s)
	}
	// It is soon reused, zeroed.
	n, err := g.space.Map(1, rw)
	g.must(err)
	if g.memory(n) != 0 || g.space.Frames(n)[0] != number {
		t.Errorf("new page %d has %q, want page %d of zeros", g.space.Frames(n)[0], g.memory(n), number)
	}
}

// Pages of a pin that was given back are out of reach: the simulation says so
// rather than letting a bug of its user through.
func TestFreedPage(t *testing.T) {
	s := simhca.NewSpace(nil)
	g := &rig{t: t, space: s}
	r := g.mapped(1, 'x')
	p, err := s.Pin(r, true)
	g.must(err)
	g.must(s.Unmap(r))
	g.must(p.Unpin())
	g.wantError("read", p.Read(0, 0, make([]byte, 1)), simhca.ErrFreedPage)
	g.wantError("write", p.Write(0, 0, make([]byte, 1)), simhca.ErrFreedPage)
	g.wantError("check", s.Check(), simhca.ErrFreedPage)
}

func TestOutOfPages(t *testing.T) {
	s := simhca.NewSpace(&simhca.SpaceOptions{Pages: 2})
	g := &rig{t: t, space: s}
	r := g.mapped(2, 'x')
	more, err := s.Map(2, rw)
	g.must(err)
	_, err = s.Pin(more, true)
	g.wantError("pin", err, device.ErrNoMemory)
	g.wantError("store", s.Store(more.Start, []byte{1}), simhca.ErrOutOfPages)
	if st := s.Stats(); st.Pinned != 0 || st.Pages != 2 {
		t.Errorf("%+v after a failed pin", st)
	}
	g.must(s.Unmap(r))
	g.must(s.Store(more.Start, []byte{1}))
}

// The space tells a monitor, as the kernel does: an epoch table's stamp moves
// with each operation that changes a watched range, and with no other.
func TestSpaceTellsMonitor(t *testing.T) {
	m, err := manual.New(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	s := simhca.NewSpace(&simhca.SpaceOptions{
		Before: func(e vm.Event) { m.Before(e.Range) },
		After:  func(e vm.Event) { m.After(e.Range) },
	})
	g := &rig{t: t, space: s}
	r, other := g.mapped(16, 'x'), g.mapped(16, 'o')
	var w epoch.Watch
	g.must(m.Table().Watch(&w, r))
	defer m.Table().Unwatch(&w)
	_, stamp := m.Table().Take(&w)
	for _, c := range []struct {
		name  string
		op    func() error
		moves bool
	}{
		{"elsewhere", func() error { return s.Dontneed(other) }, false},
		{"protect", func() error { return s.Protect(r, rw) }, false},
		{"store", func() error { return s.Store(r.Start, []byte("x")) }, false},
		{"one page of it", func() error { return s.Dontneed(vm.Range{Start: r.Start, End: r.Start + page}) }, true},
		{"map over", func() error { return s.MapFixed(r, rw) }, true},
		{"move away", func() error { return s.Remap(r, other) }, true},
		{"move back", func() error { return s.Remap(other, r) }, true},
		{"unmap", func() error { return s.Unmap(r) }, true},
	} {
		g.must(c.op())
		_, now := m.Table().Take(&w)
		if moved := now != stamp; moved != c.moves {
			t.Errorf("%s: stamp moved: %v, want %v", c.name, moved, c.moves)
		}
		stamp = now
	}
}

// Costs are charged by call and page, to a clock that doesn't sleep.
func TestCosts(t *testing.T) {
	const ns = time.Nanosecond
	g := newRig(t, simhca.Options{Costs: simhca.Costs{
		Register: simhca.Cost{Call: 1000 * ns, Page: 10 * ns}, Deregister: simhca.Cost{Call: 2000 * ns, Page: 20 * ns},
		Update: simhca.Cost{Call: 3000 * ns, Page: 30 * ns}, Revoke: simhca.Cost{Call: 4000 * ns}, Load: simhca.Cost{Call: 5000 * ns, Page: 50 * ns},
		Expose: 6000 * ns, Withdraw: 7000 * ns, Shootdown: 100_000 * ns, Packet: 1 * ns,
		FastRegister: simhca.Cost{Call: 100 * ns, Page: 1 * ns}, LocalInvalidate: simhca.Cost{Call: 200 * ns},
	}}, false)
	r := g.mapped(3, 'x')
	reg := g.register(r, allAcc)
	_, err := g.dev.Update(ctx, reg)
	g.must(err)
	g.must(g.dev.Revoke(ctx, reg))
	_, err = g.dev.Load(ctx, reg)
	g.must(err)
	x, err := g.dev.Expose(ctx, reg, r, device.RemoteRead)
	g.must(err)
	g.must(g.dev.Withdraw(ctx, x))
	k := g.fastKey(r, reg)
	g.wantStatus("local-invalidate", g.do(g.queue, invalidate(1, k.Key)), simhca.StatusSuccess)
	g.wantStatus("write", g.do(g.queue, write(1, reg, r.Start, reg.RemoteKey)), simhca.StatusSuccess)
	g.must(g.dev.Deregister(reg))
	want := map[simhca.Verb]time.Duration{
		simhca.VerbRegister: 1030, simhca.VerbUpdate: 103_090, simhca.VerbRevoke: 104_000, simhca.VerbLoad: 5150,
		simhca.VerbExpose: 6000, simhca.VerbWithdraw: 107_000, simhca.VerbDeregister: 102_060, simhca.VerbExecute: 103 + 100_200 + 3,
	}
	stats := g.dev.Stats()
	var sum time.Duration
	for v, d := range want {
		sum += d
		if got := stats.Verbs[v].Time; got != d {
			t.Errorf("%v took %v, want %v", v, got, d)
		}
	}
	if stats.Time() != sum {
		t.Errorf("%v in all, want %v", stats.Time(), sum)
	}
	if n := stats.Verbs[simhca.VerbExecute].Calls; n != 5 {
		t.Errorf("%d packets and requests without, want 5", n)
	}
}
