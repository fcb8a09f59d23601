package replay_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/pindown/pindown/internal/replay"
	"github.com/pindown/pindown/internal/report/reporttest"
	"github.com/pindown/pindown/trace"
	"github.com/pindown/pindown/trace/tracetest"
	"github.com/pindown/pindown/vm"
)

// unit is a model whose costs are easy to add up: 1 ms to register and 10 µs a
// page, and so on, each a power of ten.
var unit = replay.Model{
	Name: "unit", Register: replay.Cost{Call: 1e6, Page: 1e4}, Deregister: replay.Cost{Call: 2e6, Page: 2e4},
	Update: replay.Cost{Call: 3e6, Page: 3e4}, Hit: 5e5, Touch: 7e5,
}

func ms(n int) time.Duration { return time.Duration(n) * time.Millisecond }

func pages(at, n uintptr) vm.Range {
	const base = 0x10000000
	return vm.Range{Start: base + at<<12, End: base + (at+n)<<12}
}

func use(at, took int, r vm.Range, kind trace.UseKind) *trace.Event {
	return &trace.Event{Kind: trace.KindUse, Use: kind, PID: 1, Start: ms(at), Duration: ms(took), Range: r}
}

func op(at int, o trace.Op, r vm.Range) *trace.Event {
	return &trace.Event{Kind: trace.KindOp, Op: o, PID: 1, Start: ms(at), Range: r}
}

func write(tb testing.TB, events ...*trace.Event) []byte {
	tb.Helper()
	var b bytes.Buffer
	w, err := trace.NewWriter(&b, nil)
	if err != nil {
		tb.Fatal(err)
	}
	for _, e := range events {
		if err := w.Event(e); err != nil {
			tb.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		tb.Fatal(err)
	}
	return b.Bytes()
}

func run(tb testing.TB, b []byte, opts *replay.Options) *replay.Result {
	tb.Helper()
	r, err := trace.NewReader(bytes.NewReader(b))
	if err != nil {
		tb.Fatal(err)
	}
	res, err := replay.Run(tb.Context(), r, opts)
	if err != nil {
		tb.Fatal(err)
	}
	return res
}

func policy(tb testing.TB, r *replay.Result, p replay.Policy) replay.PolicyResult {
	tb.Helper()
	for _, x := range r.Policies {
		if x.Policy == p {
			return x
		}
	}
	tb.Fatalf("no %v", p)
	return replay.PolicyResult{}
}

func calls(n, pages uint64) replay.Calls { return replay.Calls{Count: n, Bytes: pages << 12} }

// figures are those of a policy's result that tests add up by hand.
type figures struct {
	Hits, Cold, Partial, Access, Stale              uint64
	Register, Update, Deregister, Reclaimed, Closed replay.Calls
	Left                                            replay.Calls
	Idle, InUse, Evictions, PerUse                  uint64
	Peak, PeakStale                                 uint64 // pages
}

func figuresOf(p replay.PolicyResult) figures {
	return figures{
		p.Hits, p.MissesCold, p.MissesPartial, p.MissesAccess, p.MissesStale, p.Register, p.Update, p.Deregister, p.Reclaimed, p.Closed,
		p.Left, p.InvalidatedIdle, p.InvalidatedInUse, p.Evictions, p.PerUse, p.PeakBytes >> 12, p.PeakStaleBytes >> 12,
	}
}

// byHand is a program of a few steps, with the figures that it must give.
//
//	 0 write from A = [0,4)        10 again, while the region is registered
//	20 unmap [1,2)                 30 read into A
//	40 write from B = [100,102)    until 60; 50 DONTNEED [100,101): in use
//	70 write from B
//	80 unmap [100,102), [200,300) where nobody is
func byHand() []*trace.Event {
	a, b := pages(0, 4), pages(100, 2)
	return []*trace.Event{
		use(0, 1, a, trace.UseWrite),
		use(10, 1, a, trace.UseWrite),
		op(20, trace.OpMunmap, pages(1, 1)),
		use(30, 1, a, trace.UseRead),
		use(40, 20, b, trace.UseWrite),
		op(50, trace.OpDontneed, pages(100, 1)),
		use(70, 1, b, trace.UseWrite),
		op(80, trace.OpMunmap, b),
		op(81, trace.OpMunmap, pages(200, 100)),
	}
}

func TestPoliciesByHand(t *testing.T) {
	res := run(t, write(t, byHand()...), &replay.Options{Models: []replay.Model{unit}})
	want := map[replay.Policy]figures{
		replay.PerUse: {
			Cold: 5, Register: calls(5, 4+4+4+2+2), Deregister: calls(5, 16), Peak: 4,
		},
		// A is found stale at 30, B (in use then) at 70, and again at 80 nobody
		// asks: it stays.
		replay.Lazy: {
			Hits: 1, Cold: 2, Stale: 2, Register: calls(4, 4+4+2+2), Deregister: calls(2, 4+2),
			Left: calls(2, 6), Idle: 2, InUse: 1, Peak: 6, PeakStale: 4,
		},
		// A goes at 20, B at its release at 60 and again at 80.
		replay.Drop: {
			Hits: 1, Cold: 4, Register: calls(4, 12), Deregister: calls(1, 2), Reclaimed: calls(2, 4+2),
			Left: calls(1, 4), Idle: 2, InUse: 1, Peak: 6, PeakStale: 2,
		},
		// A and B are updated once each.
		replay.Update: {
			Hits: 1, Cold: 2, Stale: 1 + 1, Register: calls(2, 6), Update: calls(2, 6),
			Left: calls(2, 6), Idle: 2, InUse: 1, Peak: 6, PeakStale: 4,
		},
	}
	// A was registered for the device to read, at 30 it is to write: with update
	// the stale region lacks access, so it is registered anew.
	u := want[replay.Update]
	u.Register, u.Update, u.Deregister = calls(3, 10), calls(1, 2), calls(1, 4)
	want[replay.Update] = u
	want[replay.DropKernel] = want[replay.Drop]
	for p, w := range want {
		if diff := cmp.Diff(w, figuresOf(policy(t, res, p))); diff != "" {
			t.Errorf("%v:\n%s", p, diff)
		}
	}

	times := map[replay.Policy]replay.Time{
		replay.PerUse:     {Register: 5e-3 + 16e-5, Deregister: 10e-3 + 32e-5},
		replay.Lazy:       {Register: 4e-3 + 12e-5, Deregister: 4e-3 + 12e-5, Hit: 5e-4, Invalidate: 28e-4, AtExit: 4e-3 + 12e-5},
		replay.Drop:       {Register: 4e-3 + 12e-5, Deregister: 2e-3 + 4e-5, Hit: 5e-4, Invalidate: 28e-4, Beside: 4e-3 + 12e-5, AtExit: 2e-3 + 8e-5},
		replay.DropKernel: {Register: 4e-3 + 12e-5, Deregister: 6e-3 + 16e-5, Hit: 5e-4, Invalidate: 28e-4, AtExit: 2e-3 + 8e-5},
		replay.Update:     {Register: 3e-3 + 10e-5, Deregister: 2e-3 + 8e-5, Update: 3e-3 + 6e-5, Hit: 5e-4, Invalidate: 28e-4, AtExit: 4e-3 + 12e-5},
	}
	for p, w := range times {
		got := policy(t, res, p).Times[0]
		w.Model = "unit"
		w.Total = w.Register + w.Deregister + w.Update + w.Hit + w.Invalidate + w.Wait
		near := cmp.Comparer(func(a, b float64) bool { return math.Abs(a-b) < 1e-12 })
		if diff := cmp.Diff(w, got, near); diff != "" {
			t.Errorf("%v:\n%s", p, diff)
		}
	}
	c := res.Counts
	if c.Changing != 4 || c.Monitored != 4 || c.Uses != 5 || c.Operations["munmap"] != 3 || c.Operations["madvise-dontneed"] != 1 || c.Processes != 1 {
		t.Errorf("%+v", c)
	}
}

func TestMergeAndLimits(t *testing.T) {
	events := []*trace.Event{
		use(0, 1, pages(0, 4), trace.UseWrite),
		use(10, 1, pages(2, 4), trace.UseWrite),   // overlaps: [0,6)
		use(20, 1, pages(0, 6), trace.UseWrite),   // hits the union
		use(30, 1, pages(1, 1), trace.UseRead),    // access
		use(40, 1, pages(100, 8), trace.UseWrite), // evicts it, of 10 pages
		use(50, 5, pages(200, 8), trace.UseWrite), // evicts that, and is in use
		use(52, 1, pages(300, 8), trace.UseWrite), // no room: per use
		use(60, 1, pages(400, 11), trace.UseWrite),
	}
	res := run(t, write(t, events...), &replay.Options{Models: []replay.Model{unit}, MaxBytes: 10 << 12})
	want := figures{
		Hits: 1, Cold: 5, Partial: 1, Access: 1, Register: calls(7, 4+6+6+8+8+8+11), Deregister: calls(6, 4+6+6+8+8+11),
		Left: calls(1, 8), Evictions: 2, PerUse: 2, Peak: 19,
	}
	for _, p := range []replay.Policy{replay.Lazy, replay.Drop, replay.Update} {
		if diff := cmp.Diff(want, figuresOf(policy(t, res, p))); diff != "" {
			t.Errorf("%v:\n%s", p, diff)
		}
	}
	res = run(t, write(t, events[:3]...), &replay.Options{Models: []replay.Model{unit}, NoMerge: true})
	want = figures{Cold: 1, Partial: 2, Register: calls(3, 4+4+6), Deregister: calls(2, 8), Left: calls(1, 6), Peak: 6}
	if diff := cmp.Diff(want, figuresOf(policy(t, res, replay.Drop))); diff != "" {
		t.Errorf("not merged:\n%s", diff)
	}
	res = run(t, write(t, events...), &replay.Options{Models: []replay.Model{unit}, MaxRegions: 1})
	if p := policy(t, res, replay.Drop); p.PeakRegions != 2 || p.Evictions != 3 || p.PerUse != 1 {
		t.Errorf("one region: %+v", p)
	}
}

// TestWait: who asks for a region that is being registered waits for the rest.
func TestWait(t *testing.T) {
	slow := unit
	slow.Register = replay.Cost{Call: 10e6}
	e := []*trace.Event{use(0, 1, pages(0, 1), trace.UseRead), use(4, 1, pages(0, 1), trace.UseRead), use(12, 1, pages(0, 1), trace.UseRead)}
	res := run(t, write(t, e...), &replay.Options{Models: []replay.Model{slow}})
	p := policy(t, res, replay.Drop)
	if p.Waits != 1 || math.Abs(p.Times[0].Wait-0.006) > 1e-12 || p.Hits != 2 {
		t.Errorf("%d waits of %v, %d hits", p.Waits, p.Times[0].Wait, p.Hits)
	}
}

// TestRegistrations: what the program registers itself is in use until it is
// deregistered, and ends with the process.
func TestRegistrations(t *testing.T) {
	reg := func(at int, kind trace.Kind, h uint64, r vm.Range) *trace.Event {
		return &trace.Event{Kind: kind, Via: trace.ViaVerbs, Handle: h, PID: 1, Start: ms(at), Range: r}
	}
	failed := reg(5, trace.KindRegister, 9, pages(0, 1))
	failed.Result = -12
	through := use(6, 1, pages(0, 1), trace.UseWriteFixed)
	through.Via, through.Handle = trace.ViaVerbs, 1
	events := []*trace.Event{
		reg(0, trace.KindRegister, 1, pages(0, 4)),
		failed,
		through,                               // needs none of its own
		op(10, trace.OpDontneed, pages(0, 1)), // in use
		reg(20, trace.KindDeregister, 1, vm.Range{}),
		reg(30, trace.KindRegister, 2, pages(8, 2)),
		reg(40, trace.KindRegister, 2, pages(16, 2)), // replaces it
		reg(45, trace.KindDeregister, 77, vm.Range{}),
		op(50, trace.OpExec, vm.Range{}),
		use(60, 1, pages(8, 2), trace.UseRead),
	}
	res := run(t, write(t, events...), &replay.Options{Models: []replay.Model{unit}})
	want := figures{
		Cold: 4, Register: calls(4, 10), Deregister: calls(1, 4), Closed: calls(2, 4), Left: calls(1, 2), InUse: 1, Peak: 4, PeakStale: 4,
	}
	if diff := cmp.Diff(want, figuresOf(policy(t, res, replay.Drop))); diff != "" {
		t.Error(diff)
	}
	want = figures{Cold: 4, Register: calls(4, 10), Deregister: calls(3, 8), Closed: calls(1, 2), Peak: 4}
	if diff := cmp.Diff(want, figuresOf(policy(t, res, replay.PerUse))); diff != "" {
		t.Error(diff)
	}
	if res.Counts.Skipped != 2 || res.Counts.Registered != 1 || res.Counts.Registrations != 3 {
		t.Errorf("%+v", res.Counts)
	}
	var text bytes.Buffer
	if err := res.WriteText(&text); err != nil {
		t.Fatal(err)
	}
	if s := text.String(); !strings.Contains(s, "left out: 1 uses through buffers that the program had registered itself") ||
		!strings.Contains(s, "; 1 uses or registrations that failed") {
		t.Error(s)
	}
	for _, c := range []struct {
		r    replay.Requests
		min  uint64
		want uint64
	}{{replay.UsesOnly, 0, 1}, {replay.RegistrationsOnly, 0, 3}, {replay.AllRequests, 1 << 20, 3}} {
		res := run(t, write(t, events...), &replay.Options{Requests: c.r, MinUse: c.min})
		if n := policy(t, res, replay.PerUse).Requests; n != c.want {
			t.Errorf("%v, at least %d: %d requests, want %d", c.r, c.min, n, c.want)
		}
	}
}

// TestProcessesAreApart: the same addresses are other memory.
func TestProcessesAreApart(t *testing.T) {
	a, b, c := use(0, 1, pages(0, 1), trace.UseRead), use(10, 1, pages(0, 1), trace.UseRead), use(30, 1, pages(0, 1), trace.UseRead)
	b.PID = 2
	o := op(20, trace.OpMunmap, pages(0, 1))
	o.PID = 2
	res := run(t, write(t, a, b, o, c), nil)
	if p := policy(t, res, replay.Drop); p.Hits != 1 || p.InvalidatedIdle != 1 || res.Counts.Processes != 2 {
		t.Errorf("%+v", p)
	}
	// One that has no requests needs no monitor.
	b.PID = 1
	if res := run(t, write(t, a, b, o, c), nil); res.Counts.Changing != 1 || res.Counts.Monitored != 0 {
		t.Errorf("%+v", res.Counts)
	}
	if p := res.Curve.At(4096); p.Hits != 1 {
		t.Errorf("%+v", p)
	}
}

// TestManyProcesses: those that have ended take no room, nor do their
// registrations.
func TestManyProcesses(t *testing.T) {
	var b bytes.Buffer
	w, err := trace.NewWriter(&b, nil)
	if err != nil {
		t.Fatal(err)
	}
	const n = 140_000 // more than there may be at once
	for i := range n {
		pid, at := uint32(i+1), time.Duration(i)*time.Microsecond
		for _, e := range []trace.Event{
			{Kind: trace.KindRegister, Via: trace.ViaIOUring, PID: pid, Start: at, Range: pages(0, 1)},
			{Kind: trace.KindOp, Op: trace.OpMunmap, PID: pid, Start: at + 1, Range: pages(0, 1)},
			{Kind: trace.KindOp, Op: trace.OpExit, PID: pid, Start: at + 2},
		} {
			if err := w.Event(&e); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	res := run(t, b.Bytes(), nil)
	p := policy(t, res, replay.Drop)
	if res.Counts.Processes != n || res.Counts.Monitored != n || p.Register.Count != n || p.Closed.Count != n || p.PeakRegions != 1 || p.InvalidatedInUse != n {
		t.Errorf("%+v\n%+v", res.Counts, figuresOf(p))
	}
}

// TestAnything: whatever the events, the books are kept and can be written.
func TestAnything(t *testing.T) {
	edge := rapid.OneOf(rapid.Uint64(), rapid.Uint64Range(0, 1<<16), rapid.SampledFrom([]uint64{0, 1, 4095, 4096, 1 << 30, 1 << 47, 1 << 48, 1<<64 - 1}))
	ranges := rapid.Custom(func(t *rapid.T) vm.Range {
		a, b := edge.Draw(t, "a"), edge.Draw(t, "b")
		return vm.Range{Start: uintptr(min(a, b)), End: uintptr(max(a, b))}
	})
	times := rapid.OneOf(rapid.Int64Range(0, 10000), rapid.Int64Range(0, 1<<62-1))
	rapid.Check(t, func(rt *rapid.T) {
		var events []*trace.Event
		for range rapid.IntRange(0, 40).Draw(rt, "events") {
			e := &trace.Event{
				Kind: trace.Kind(rapid.IntRange(1, 4).Draw(rt, "kind")), PID: rapid.Uint32Range(0, 3).Draw(rt, "pid"),
				Start: time.Duration(times.Draw(rt, "start")), Duration: time.Duration(times.Draw(rt, "duration")),
				Range: ranges.Draw(rt, "range"), Dest: ranges.Draw(rt, "dest"),
				Result: rapid.SampledFrom([]int64{0, 0, 0, -12, 4096}).Draw(rt, "result"), Handle: rapid.Uint64Range(0, 2).Draw(rt, "handle"),
			}
			switch e.Kind {
			case trace.KindOp:
				e.Op = trace.Op(rapid.IntRange(1, int(trace.OpUnknown)).Draw(rt, "op"))
			case trace.KindUse:
				e.Use = trace.UseKind(rapid.IntRange(1, int(trace.UseOther)).Draw(rt, "use"))
			default:
				e.Via = trace.ViaVerbs
			}
			events = append(events, e)
		}
		r, err := trace.NewReader(bytes.NewReader(write(t, events...)))
		if err != nil {
			rt.Fatal(err)
		}
		res, err := replay.Run(t.Context(), r, &replay.Options{
			MaxBytes: rapid.SampledFrom([]uint64{0, 1, 1 << 20, 1<<64 - 1}).Draw(rt, "max"), MaxRegions: rapid.IntRange(0, 3).Draw(rt, "regions"),
			Simhca: rapid.IntRange(0, 3).Draw(rt, "simhca") == 0,
		})
		if err != nil {
			rt.Fatal(err)
		}
		for _, x := range res.Policies {
			if gone := x.Deregister.Count + x.Reclaimed.Count + x.Closed.Count + x.Left.Count; gone != x.Register.Count {
				rt.Fatalf("%v: registered %+v, gone or left %d", x.Policy, x.Register, gone)
			}
			if x.Requests != x.Hits+x.Register.Count+x.Update.Count || x.Adapter != nil && x.Adapter.StaleHits > 0 {
				rt.Fatalf("%v: %+v, %+v", x.Policy, x, x.Adapter)
			}
		}
		var html bytes.Buffer
		if err := errors.Join(res.WriteHTML(&html), res.WriteJSON(io.Discard), res.WriteText(io.Discard)); err != nil {
			rt.Fatal(err)
		}
		reporttest.WellFormed(t, html.Bytes())
	})
}

// TestOrder: recorders may write an event when the call returns.
func TestOrder(t *testing.T) {
	events := byHand()
	want := run(t, write(t, events...), nil)
	slices.Reverse(events)
	got := run(t, write(t, events...), nil)
	if got.Counts.Late != 0 {
		t.Errorf("%d late", got.Counts.Late)
	}
	if diff := cmp.Diff(want.Policies, got.Policies); diff != "" {
		t.Error(diff)
	}
}

func TestEmptyAndDamaged(t *testing.T) {
	res := run(t, write(t), nil)
	if len(res.Policies) != 5 || res.Recommended.MaxBytes != 0 || !strings.Contains(res.Answers[0].Text, "no requests") {
		t.Errorf("%+v", res)
	}
	var text, html bytes.Buffer
	if err := errors.Join(res.WriteText(&text), res.WriteHTML(&html)); err != nil {
		t.Fatal(err)
	}
	reporttest.WellFormed(t, html.Bytes())
	if s := text.String(); !strings.Contains(s, "no requests") || strings.Contains(s, "left out") || strings.Contains(s, "POLICY") || strings.Contains(s, "best policy") {
		t.Error(s)
	}
	if s := html.String(); !strings.Contains(s, "no requests") || strings.Contains(s, "best policy") {
		t.Error(s)
	}

	whole := tracetest.Bytes(t, tracetest.Mixed, 1, 40000)
	res = run(t, whole[:len(whole)/2], nil)
	if !strings.Contains(res.Counts.Damage, "truncated") || res.Counts.LostPlaces != 1 || res.Counts.Uses == 0 {
		t.Errorf("%+v", res.Counts)
	}
}

func TestDeterministic(t *testing.T) {
	b := tracetest.Bytes(t, tracetest.Mixed, 3, 40000)
	var first []byte
	for range 3 {
		res := run(t, b, nil)
		var out bytes.Buffer
		if err := errors.Join(res.WriteJSON(&out), res.WriteText(&out), res.WriteHTML(&out)); err != nil {
			t.Fatal(err)
		}
		if first == nil {
			first = out.Bytes()
		}
		if !bytes.Equal(first, out.Bytes()) {
			t.Fatal("not the same twice")
		}
	}
}

// TestCurveAgainstCache: the curve, from one pass, and the policies agree where
// they are of the same cache: no overlaps, and everything fits.
func TestCurveAgainstCache(t *testing.T) {
	res := run(t, tracetest.Bytes(t, tracetest.Pool, 1, 30000), nil)
	curve := res.Curve.At(1 << 40)
	drop := policy(t, res, replay.Drop)
	// The policies tell reading from writing, the curve doesn't.
	if curve.Hits != drop.Hits+drop.MissesAccess || curve.Hits == 0 {
		t.Errorf("curve %d, policy %d and %d", curve.Hits, drop.Hits, drop.MissesAccess)
	}
	if n := res.Recommended.MaxBytes; n == 0 || n > 1<<30 || res.Recommended.MaxRegions < 1000 {
		t.Errorf("%+v", res.Recommended)
	}
}

func TestBooks(t *testing.T) {
	for _, p := range []tracetest.Program{tracetest.Pool, tracetest.Churn, tracetest.Collected, tracetest.Scan, tracetest.Mixed} {
		for _, limit := range []uint64{64 << 10, 1 << 20, 1 << 30} {
			res := run(t, tracetest.Bytes(t, p, 5, 8000), &replay.Options{MaxBytes: limit, MaxRegions: 300})
			for _, x := range res.Policies {
				gone := x.Deregister.Count + x.Reclaimed.Count + x.Closed.Count + x.Left.Count
				bytes := x.Deregister.Bytes + x.Reclaimed.Bytes + x.Closed.Bytes + x.Left.Bytes
				if gone != x.Register.Count || bytes != x.Register.Bytes {
					t.Errorf("%d, %v: registered %+v, gone or left %d, %d bytes", p, x.Policy, x.Register, gone, bytes)
				}
				if x.Requests != x.Hits+x.MissesCold+x.MissesPartial+x.MissesAccess+x.MissesStale {
					t.Errorf("%d, %v: requests don't add up: %+v", p, x.Policy, x)
				}
				if x.Requests != x.Hits+x.Register.Count+x.Update.Count {
					t.Errorf("%d, %v: a request is neither a hit nor a call: %+v", p, x.Policy, x)
				}
				if x.PeakBytes < x.MeanBytes || x.PeakStaleBytes < x.MeanStaleBytes {
					t.Errorf("%d, %v: peak below mean: %+v", p, x.Policy, x)
				}
				if top := slices.Max(append(x.PinnedBytesSeries, 0)); uint64(top) != x.PeakBytes {
					t.Errorf("%d, %v: peak %d, series %v", p, x.Policy, x.PeakBytes, top)
				}
			}
		}
	}
}

// TestSimhca: the simulated adapter carries out what the books say, at the same
// cost; and no policy that heeds changes hands out pages that aren't mapped.
func TestSimhca(t *testing.T) {
	for _, p := range []tracetest.Program{tracetest.Pool, tracetest.Churn, tracetest.Collected, tracetest.Mixed} {
		res := run(t, tracetest.Bytes(t, p, 9, 5000), &replay.Options{Models: []replay.Model{unit}, Simhca: true, MaxBytes: 8 << 20})
		for _, x := range res.Policies {
			a := x.Adapter
			gone := x.Deregister.Count + x.Reclaimed.Count + x.Closed.Count
			if a.Registers != x.Register.Count || a.Updates != x.Update.Count || a.Deregisters != gone || a.LeftOut != 0 {
				t.Errorf("%d, %v: %+v carried out, %+v in the books", p, x.Policy, *a, figuresOf(x))
			}
			tm := x.Times[0]
			closed := float64(x.Closed.Count)*2e-3 + float64(x.Closed.Bytes/4096)*2e-5
			deregister := tm.Deregister + tm.Beside + closed
			for _, c := range []struct{ got, want float64 }{{a.Register, tm.Register}, {a.Update, tm.Update}, {a.Deregister, deregister}} {
				if math.Abs(c.got-c.want) > 1e-9*(1+c.want) {
					t.Errorf("%d, %v: the adapter's clock says %v, the books %v", p, x.Policy, c.got, c.want)
				}
			}
			if x.Policy != replay.PerUse && a.Checked != x.Hits || a.StaleHits != 0 {
				t.Errorf("%d, %v: %d hits, %d checked, %d stale", p, x.Policy, x.Hits, a.Checked, a.StaleHits)
			}
			if p == tracetest.Churn && x.Policy == replay.Lazy && a.OrphanPages == 0 {
				t.Error("lazily kept registrations have no orphan pages")
			}
		}
	}
}

func TestModels(t *testing.T) {
	for _, m := range replay.Presets() {
		if m.Source == "" || (m.Assumed == "") != (m.Name == "iouring") || m.Hit <= 0 || m.Touch <= 0 {
			t.Errorf("%+v", m)
		}
		b, err := json.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		got, err := replay.ReadModel(bytes.NewReader(b))
		if err != nil || got != m {
			t.Errorf("%v: %+v", err, got)
		}
		if p, err := replay.Preset(m.Name); err != nil || p != m {
			t.Errorf("%v: %+v", err, p)
		}
	}
	if _, err := replay.Preset("abacus"); !errors.Is(err, replay.ErrModel) {
		t.Error(err)
	}
	for _, s := range []string{"", "{", "[]", "{}", `{"name":"x"}`, `{"name":"x","register":{"call_ns":-1}}`, `{"name":"x","register":{"call_ns":1e300}}`, `{"register":{"call_ns":1}}`} {
		if _, err := replay.ReadModel(strings.NewReader(s)); !errors.Is(err, replay.ErrModel) {
			t.Errorf("%q: %v", s, err)
		}
	}
	r, err := trace.NewReader(bytes.NewReader(write(t)))
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range []replay.Options{{MaxRegions: -1}, {Models: []replay.Model{}}, {Models: []replay.Model{{}}}, {Models: []replay.Model{unit, unit}}} {
		if _, err := replay.Run(t.Context(), r, &o); !errors.Is(err, replay.ErrOptions) && !errors.Is(err, replay.ErrModel) {
			t.Errorf("%+v: %v", o, err)
		}
	}
}

func TestCanceled(t *testing.T) {
	r, err := trace.NewReader(bytes.NewReader(tracetest.Bytes(t, tracetest.Pool, 1, 60000)))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := replay.Run(ctx, r, nil); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

func TestBrowser(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: a browser takes seconds")
	}
	path := filepath.Join(t.TempDir(), "replay.html")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	res := run(t, tracetest.Bytes(t, tracetest.Mixed, 2, 30000), nil)
	if err := errors.Join(res.WriteHTML(f), f.Close()); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	reporttest.WellFormed(t, b)
	plots := reporttest.Render(t, path)
	if want := len(replay.Presets()) + 3; len(plots) != want {
		t.Errorf("%d plots, want %d", len(plots), want)
	}
	reporttest.Drawn(t, plots)
}

func BenchmarkReplay(b *testing.B) {
	for name, p := range map[string]tracetest.Program{"pool": tracetest.Pool, "churn": tracetest.Churn, "collected": tracetest.Collected, "scan": tracetest.Scan, "mixed": tracetest.Mixed} {
		b.Run(name, func(b *testing.B) {
			const n = 1_000_000
			whole := tracetest.Bytes(b, p, 1, n)
			before := cpuTime(b)
			for b.Loop() {
				res := run(b, whole, nil)
				if err := res.WriteJSON(io.Discard); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(n*float64(b.N)/b.Elapsed().Seconds(), "events/s")
			b.ReportMetric(float64((cpuTime(b)-before).Nanoseconds())/n/float64(b.N), "cpu-ns/event")
		})
	}
}

// cpuTime is what the process has used of all CPUs. On a busy machine it says
// more than the clock.
func cpuTime(tb testing.TB) time.Duration {
	tb.Helper()
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		tb.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
