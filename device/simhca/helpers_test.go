package simhca_test

import (
	"context"
	"errors"
	"testing"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/simhca"
	"github.com/pindown/pindown/vm"
)

const page = 4096

const (
	rw     = simhca.ProtRead | simhca.ProtWrite
	allAcc = device.LocalWrite | device.RemoteRead | device.RemoteWrite | device.WindowBind
)

var ctx = context.Background()

// fewer returns n, or a tenth where tests shall be short.
func fewer(n int) int {
	if testing.Short() || raceEnabled {
		return n / 10
	}
	return n
}

// rig is a device over simulated memory, with a queue connected to itself.
type rig struct {
	t       testing.TB
	space   *simhca.Space
	dev     *simhca.Device
	stepper *simhca.Stepper
	queue   *simhca.Queue
}

// newRig opens a device that is stepped, unless opts say async.
func newRig(tb testing.TB, opts simhca.Options, async bool) *rig {
	tb.Helper()
	g := &rig{t: tb, space: simhca.NewSpace(nil)}
	if !async {
		g.stepper = simhca.NewStepper(1)
		opts.Stepper = g.stepper
	}
	g.dev = simhca.Open(g.space, &opts)
	g.queue = g.newQueue(nil)
	tb.Cleanup(func() { g.close() })
	return g
}

// close checks that nothing is left.
func (g *rig) close() {
	g.t.Helper()
	if err := g.dev.Close(); err != nil {
		g.t.Error(err)
	}
	if err := g.space.Check(); err != nil {
		g.t.Error(err)
	}
	if s := g.space.Stats(); s.Pinned != 0 || s.Orphans != 0 {
		g.t.Errorf("pages left pinned: %+v", s)
	}
	if s := g.dev.Stats(); s.PinnedBytes != 0 || s.Registrations != 0 || s.Exposures != 0 || s.FastKeys != 0 {
		g.t.Errorf("left after close: %+v", s)
	}
}

// newQueue returns a queue connected to itself.
func (g *rig) newQueue(opts *simhca.QueueOptions) *simhca.Queue {
	g.t.Helper()
	q, err := g.dev.ProtectionDomain().NewQueue(opts)
	if err == nil {
		err = simhca.Connect(q, q)
	}
	if err != nil {
		g.t.Fatal(err)
	}
	return q
}

func (g *rig) must(err error) {
	g.t.Helper()
	if err != nil {
		g.t.Fatal(err)
	}
}

// mapped maps pages that are full of c.
func (g *rig) mapped(pages int, c byte) vm.Range {
	g.t.Helper()
	r, err := g.space.Map(pages, rw)
	g.must(err)
	g.fill(r, c)
	return r
}

func (g *rig) fill(r vm.Range, c byte) {
	g.t.Helper()
	b := make([]byte, r.Len())
	for i := range b {
		b[i] = c
	}
	g.must(g.space.Store(r.Start, b))
}

// replace gives r new pages that are full of c.
func (g *rig) replace(r vm.Range, c byte) {
	g.t.Helper()
	g.must(g.space.MapFixed(r, rw))
	g.fill(r, c)
}

// memory returns the byte that fills r, 0xff if it isn't one.
func (g *rig) memory(r vm.Range) byte {
	g.t.Helper()
	b := make([]byte, r.Len())
	g.must(g.space.Load(r.Start, b))
	return uniform(b)
}

func uniform(b []byte) byte {
	for _, c := range b {
		if c != b[0] {
			return 0xff
		}
	}
	return b[0]
}

func (g *rig) register(r vm.Range, access device.Access) device.Registration {
	g.t.Helper()
	reg, err := g.dev.Register(ctx, r, access)
	g.must(err)
	return reg
}

// scratch returns a registered buffer of the pages.
func (g *rig) scratch(pages int, c byte) device.Registration {
	g.t.Helper()
	return g.register(g.mapped(pages, c), device.LocalWrite)
}

// write is a request that writes from to the start of remote's range.
func write(id uint64, from device.Registration, addr uintptr, key uint32) simhca.WorkRequest {
	return simhca.WorkRequest{
		ID: id, Op: simhca.OpWrite, RemoteAddr: addr, RemoteKey: key,
		Local: []simhca.Segment{simhca.SegmentOf(from, from.Range)},
	}
}

func read(id uint64, to device.Registration, addr uintptr, key uint32) simhca.WorkRequest {
	wr := write(id, to, addr, key)
	wr.Op = simhca.OpRead
	return wr
}

// do posts a request and returns its status.
func (g *rig) do(q *simhca.Queue, wr simhca.WorkRequest) simhca.Status {
	g.t.Helper()
	g.must(q.Post(wr))
	c, err := q.CompletionQueue().Wait(ctx)
	g.must(err)
	if c.ID != wr.ID || c.Op != wr.Op || c.Queue != q {
		g.t.Errorf("completion %+v for request %d, %v", c, wr.ID, wr.Op)
	}
	return c.Status
}

// deviceSees returns the byte that a peer reads everywhere in r under key, and
// the status. A failed queue is connected again.
func (g *rig) deviceSees(r vm.Range, key uint32) (byte, simhca.Status) {
	g.t.Helper()
	q := g.newQueue(nil)
	defer q.Close()
	to := g.register(g.mapped(r.Pages(page), 0), device.LocalWrite)
	defer func() { g.must(g.dev.Deregister(to)) }()
	wr := read(1, to, r.Start, key)
	wr.Local[0].Length = r.Len()
	if s := g.do(q, wr); s != simhca.StatusSuccess {
		return 0, s
	}
	return g.memory(vm.Range{Start: to.Range.Start, End: to.Range.Start + r.Len()}), simhca.StatusSuccess
}

// wantSees fails unless a peer that reads r under key sees c everywhere.
func (g *rig) wantSees(what string, r vm.Range, key uint32, c byte) {
	g.t.Helper()
	if got, s := g.deviceSees(r, key); got != c || s != simhca.StatusSuccess {
		g.t.Errorf("%s: a peer sees %q, %v, want %q", what, got, s, c)
	}
}

// wantDead fails unless a peer that reads r under key is refused.
func (g *rig) wantDead(what string, r vm.Range, key uint32) {
	g.t.Helper()
	if got, s := g.deviceSees(r, key); s != simhca.StatusRemoteAccess {
		g.t.Errorf("%s: a peer sees %q, %v, want %v", what, got, s, simhca.StatusRemoteAccess)
	}
}

func (g *rig) wantError(what string, err, want error) {
	g.t.Helper()
	if !errors.Is(err, want) {
		g.t.Errorf("%s: %v, want %v", what, err, want)
	}
}

func (g *rig) wantStatus(what string, got, want simhca.Status) {
	g.t.Helper()
	if got != want {
		g.t.Errorf("%s: %v, want %v", what, got, want)
	}
}

func invalidate(id uint64, key uint32) simhca.WorkRequest {
	return simhca.WorkRequest{ID: id, Op: simhca.OpLocalInvalidate, LocalInvalidate: &device.LocalInvalidate{Key: key}}
}

func fastRegister(id uint64, key uint32, over device.Registration, r vm.Range, access device.Access) simhca.WorkRequest {
	return simhca.WorkRequest{ID: id, Op: simhca.OpFastRegister, FastRegister: &device.FastRegister{Key: key, Over: over, Range: r, Access: access}}
}

// fastKey returns a fast key that means r over reg, to peers.
func (g *rig) fastKey(r vm.Range, reg device.Registration) device.FastKey {
	g.t.Helper()
	k, err := g.dev.AllocFastKey(ctx, uint64(r.Len()))
	g.must(err)
	g.wantStatus("fast-register", g.do(g.queue, fastRegister(1, k.Key, reg, r, device.LocalWrite|device.RemoteRead|device.RemoteWrite)), simhca.StatusSuccess)
	return k
}
