package pindown_test

import (
	"context"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pindown/pindown"
	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/simhca"
	"github.com/pindown/pindown/monitor/manual"
	"github.com/pindown/pindown/vm"
)

// The history test does at random what an owner of memory, a peer and the kernel
// do, and keeps account of it. Each page, whenever it is mapped anew, gets a tag in
// either half, which names its generation and which nobody overwrites. A request
// that reads a page does so in two packets, one for each half.
//
//   - What a request finds in the halves of a page is the same: no page is torn.
//   - It finds no generation that is older than what the key was known to mean
//     when it was posted, nor one that hasn't been. If the region was fresh then and
//     nothing has happened since, it finds what is mapped.
//   - What a request writes is then found by the owner.
//   - No request fails whose key is held, unless an update has said that it is gone.
//   - In the end nothing is registered, pinned, watched; no freed page was reached.

const (
	histRanges   = 4
	histPages    = 2
	histRequests = 8
	halfPage     = page / 2
)

// histKey is a registration or exposure, by its key.
type histKey struct {
	at    int    // its range
	known uint64 // the generation that it means at least
	gone  bool   // requests may fail
	refs  int    // regions and exposures that are held with this key
}

type histHold struct {
	reg       pindown.Region
	exposure  *pindown.Exposure // of the region, or nil
	at        int
	key, ekey *histKey
}

type histRequest struct {
	used    bool
	write   bool
	key     *histKey
	known   uint64 // what the key meant at least, when posted
	fresh   bool   // and that was what was mapped
	tag     uint64
	at      uintptr // the range's offset that it writes to
	queue   *simhca.Queue
	localOp bool
}

type history struct {
	t     *testing.T
	rng   *rand.Rand
	seed  uint64
	onuse pindown.StalePolicy

	mon     *manual.Monitor
	space   *simhca.Space // the owner's
	dev     *simhca.Device
	farMem  *simhca.Space
	far     *simhca.Device
	stepper *simhca.Stepper
	peers   [2]*simhca.Queue // the owner's end and the peer's
	loop    *simhca.Queue    // the owner's own work
	sink    device.Registration
	ownSink device.Registration

	cache  *pindown.Cache
	mem    [histRanges]vm.Range
	gen    [histRanges]uint64
	mapped [histRanges]bool
	keys   [histRanges]map[uint32]*histKey
	holds  []*histHold
	reqs   [histRequests]histRequest
	tag    uint64
	faults atomic.Uint64 // in 1024; zero is never
	frng   *rand.Rand
	fmu    chan struct{}
	counts map[string]int
}

func (h *history) fatalf(format string, args ...any) {
	h.t.Helper()
	h.t.Fatalf("seed %d: "+format, append([]any{h.seed}, args...)...)
}

// fault fails a verb at random.
func (h *history) fault(f simhca.Fault) error {
	p := h.faults.Load()
	switch f.Verb {
	case simhca.VerbRegister, simhca.VerbUpdate, simhca.VerbRevoke, simhca.VerbLoad, simhca.VerbFlush, simhca.VerbExpose, simhca.VerbWithdraw, simhca.VerbDeregister:
	default:
		return nil
	}
	if p == 0 {
		return nil
	}
	h.fmu <- struct{}{}
	defer func() { <-h.fmu }()
	if h.frng.Uint64N(1024) >= p {
		return nil
	}
	if f.Verb == simhca.VerbDeregister {
		return device.ErrBusy // else it would be leaked
	}
	if h.onuse != pindown.StaleUpdate && h.frng.IntN(4) == 0 &&
		(f.Verb == simhca.VerbUpdate || f.Verb == simhca.VerbRevoke || f.Verb == simhca.VerbLoad) {
		return device.ErrRegistrationLost
	}
	return errInjected
}

func newHistory(t *testing.T, seed uint64, onStale pindown.StalePolicy) *history {
	t.Helper()
	h := &history{
		t: t, seed: seed, onuse: onStale, rng: rand.New(rand.NewPCG(seed, 1)), frng: rand.New(rand.NewPCG(seed, 2)),
		stepper: simhca.NewStepper(seed), fmu: make(chan struct{}, 1), counts: make(map[string]int),
	}
	var err error
	must := func(err error) {
		t.Helper()
		if err != nil {
			h.fatalf("%v", err)
		}
	}
	h.mon, err = manual.New(nil)
	must(err)
	h.space = simhca.NewSpace(&simhca.SpaceOptions{
		Before: func(e vm.Event) { h.mon.Before(e.Range) },
		After:  func(e vm.Event) { h.mon.After(e.Range) },
	})
	h.farMem = simhca.NewSpace(nil)
	h.dev = simhca.Open(h.space, &simhca.Options{Stepper: h.stepper, HoldRevoked: true, Fault: h.fault})
	h.far = simhca.Open(h.farMem, &simhca.Options{Stepper: h.stepper, Name: "far"})
	for i, d := range []*simhca.Device{h.dev, h.far} {
		h.peers[i], err = d.ProtectionDomain().NewQueue(nil)
		must(err)
	}
	h.loop, err = h.dev.ProtectionDomain().NewQueue(nil)
	must(err)
	h.reconnect()
	sink := func(s *simhca.Space, d *simhca.Device) device.Registration {
		r, err := s.Map(histRequests*(histPages+1), simhca.ProtRead|simhca.ProtWrite)
		must(err)
		reg, err := d.Register(t.Context(), r, device.LocalWrite|device.RemoteWrite|device.RemoteRead)
		must(err)
		return reg
	}
	h.sink, h.ownSink = sink(h.farMem, h.far), sink(h.space, h.dev)
	for i := range h.mem {
		h.mem[i], err = h.space.Map(histPages, simhca.ProtRead|simhca.ProtWrite)
		must(err)
		h.mapped[i] = true
		h.keys[i] = make(map[uint32]*histKey)
		h.tagPages(i)
	}
	h.open()
	return h
}

func (h *history) open() {
	var err error
	h.cache, err = pindown.New(h.dev, &pindown.Options{
		Monitor: h.mon, OnStale: h.onuse, RegisterTimeout: 20 * time.Second, MergeBytes: -1, MaxRegions: 8,
	})
	if err != nil {
		h.fatalf("%v", err)
	}
}

func (h *history) reconnect() {
	if h.peers[0].Failed() && h.peers[1].Failed() {
		if err := simhca.Connect(h.peers[0], h.peers[1]); err != nil {
			h.fatalf("%v", err)
		}
	}
	if h.loop.Failed() {
		if err := simhca.Connect(h.loop, h.loop); err != nil {
			h.fatalf("%v", err)
		}
	}
}

// tagPages gives the pages of range i, which are new, their tags.
func (h *history) tagPages(i int) {
	h.gen[i]++
	var b [8]byte
	binary.LittleEndian.PutUint64(b[:], h.gen[i])
	for p := range histPages {
		for _, off := range []uintptr{0, halfPage} {
			if err := h.space.Store(h.mem[i].Start+uintptr(p)*page+off, b[:]); err != nil {
				h.fatalf("%v", err)
			}
		}
	}
}

// operate is a VM operation.
func (h *history) operate() {
	i := h.rng.IntN(histRanges)
	const prot = simhca.ProtRead | simhca.ProtWrite
	var err error
	switch n := h.rng.IntN(4); {
	case !h.mapped[i] || n == 0:
		err = h.space.MapFixed(h.mem[i], prot)
		h.mapped[i] = true
	case n == 1:
		err = h.space.Unmap(h.mem[i])
		h.mapped[i] = false
		h.gen[i]++ // nothing is mapped; no page has this one
	case n == 2:
		err = errors.Join(h.space.Unmap(h.mem[i]), h.space.MapFixed(h.mem[i], prot))
	default:
		err = h.space.Dontneed(h.mem[i])
	}
	if err != nil {
		h.fatalf("%v", err)
	}
	if h.mapped[i] {
		h.tagPages(i)
	}
}

// learn notes that key means what is mapped in range i now, or still does.
func (h *history) learn(i int, key uint32) *histKey {
	k := h.keys[i][key]
	if k == nil || k.gone || k.refs == 0 {
		k = &histKey{at: i}
		h.keys[i][key] = k
	}
	k.known = h.gen[i]
	return k
}

func (h *history) acquire() {
	if len(h.holds) >= 10 {
		return
	}
	i := h.rng.IntN(histRanges)
	reg, err := h.cache.AcquireRange(h.t.Context(), h.mem[i], allRemote)
	if err != nil {
		if h.mapped[i] && !errors.Is(err, errInjected) && !errors.Is(err, device.ErrNoSlots) {
			h.fatalf("acquire: %v", err)
		}
		h.counts["acquire failed"]++
		return
	}
	if !h.mapped[i] {
		h.fatalf("acquired what isn't mapped")
	}
	if reg.Cached() && reg.Stale() {
		h.fatalf("acquired what is stale")
	}
	k := h.learn(i, reg.RemoteKey())
	k.refs++
	h.holds = append(h.holds, &histHold{reg: reg, at: i, key: k})
}

// pick returns a hold at random, or nil.
func (h *history) pick() *histHold {
	if len(h.holds) == 0 {
		return nil
	}
	return h.holds[h.rng.IntN(len(h.holds))]
}

// quiet has the requests under k complete, as far as they will.
func (h *history) quiet(k *histKey) {
	for slices.ContainsFunc(h.reqs[:], func(r histRequest) bool { return r.used && r.key == k }) {
		more := h.stepper.Step()
		h.complete()
		if !more && slices.ContainsFunc(h.reqs[:], func(r histRequest) bool { return r.used && r.key == k }) {
			// One before it, under a key that is gone, waits for the key's end.
			if !slices.ContainsFunc(h.reqs[:], func(r histRequest) bool { return r.used && r.key.gone }) {
				h.fatalf("a request under a good key doesn't complete")
			}
			k.gone = true
			h.counts["blocked"]++
			return
		}
	}
}

func (h *history) release(x *histHold) {
	h.quiet(x.key)
	if x.exposure != nil {
		h.revoke(x)
	}
	x.key.refs--
	if err := x.reg.Release(); err != nil && !errors.Is(err, device.ErrBusy) {
		h.fatalf("release: %v", err)
	}
	at := slices.Index(h.holds, x)
	h.holds = slices.Delete(h.holds, at, at+1)
}

func (h *history) expose(x *histHold) {
	if x.exposure != nil || !x.reg.Cached() {
		return
	}
	stale := x.reg.Stale() && h.onuse != pindown.StaleUpdate // else it may be updated meanwhile
	e, err := x.reg.Expose(h.t.Context(), h.mem[x.at], pindown.RemoteRead|pindown.RemoteWrite)
	if err != nil {
		if !errors.Is(err, errInjected) && !x.key.gone && !errors.Is(err, pindown.ErrStale) {
			h.fatalf("expose: %v", err)
		}
		return
	}
	if stale {
		h.fatalf("exposed what is stale")
	}
	x.exposure = e
	x.ekey = &histKey{at: x.at, known: x.key.known, refs: 1}
	h.counts["exposed"]++
}

func (h *history) revoke(x *histHold) {
	h.quiet(x.ekey)
	faults := h.faults.Swap(0)
	if err := x.exposure.Revoke(h.t.Context()); err != nil {
		h.fatalf("revoke: %v", err)
	}
	h.faults.Store(faults)
	// Its key is dead at once.
	h.deadKey(x.at, x.exposure.RemoteKey())
	x.exposure, x.ekey = nil, nil
}

// deadKey has the peer try a key that must reach nothing, now and then.
func (h *history) deadKey(at int, key uint32) {
	if h.rng.IntN(8) != 0 || h.busy() {
		return
	}
	err := h.peers[1].Post(simhca.WorkRequest{
		ID: histRequests, Op: simhca.OpRead, RemoteAddr: h.mem[at].Start, RemoteKey: key,
		Local: []simhca.Segment{{Addr: h.sink.Range.Start, Length: 8, Key: h.sink.LocalKey}},
	})
	if err != nil {
		h.fatalf("%v", err)
	}
	c, err := h.peers[1].CompletionQueue().Wait(h.t.Context())
	if err != nil || c.Status != simhca.StatusRemoteAccess {
		h.fatalf("a dead key: %v, %v", c.Status, err)
	}
	h.counts["dead keys tried"]++
	h.reconnect()
}

func (h *history) busy() bool {
	return slices.ContainsFunc(h.reqs[:], func(r histRequest) bool { return r.used })
}

// update updates one region, or a range.
func (h *history) update() {
	policy := policies()[h.rng.IntN(2)]
	if x := h.pick(); x != nil && h.rng.IntN(2) == 0 {
		users := 0
		for _, y := range h.holds {
			if y.at == x.at {
				users++
			}
		}
		ctx := h.t.Context()
		if policy == pindown.UpdateStrict {
			if users > 1 {
				// It would wait for ever.
				var cancel context.CancelFunc
				ctx, cancel = context.WithCancel(ctx)
				cancel()
			}
			// The caller has no work in flight.
			h.quiet(x.key)
		}
		u, err := x.reg.Update(ctx, policy)
		if !x.reg.Cached() {
			switch u.Outcome {
			case pindown.UpdateDone:
				x.key.known = h.gen[x.at]
			case pindown.UpdateGone:
				x.key.gone = true
			default:
			}
			return
		}
		h.updated(x.at, u, err)
		return
	}
	i := h.rng.IntN(histRanges)
	ctx := h.t.Context()
	if policy == pindown.UpdateStrict && slices.ContainsFunc(h.holds, func(x *histHold) bool { return x.at == i }) {
		var cancel context.CancelFunc
		ctx, cancel = context.WithCancel(ctx)
		cancel()
	}
	list, err := h.cache.Update(ctx, h.mem[i], policy)
	for _, u := range list {
		h.updated(i, u, err)
	}
}

// updated takes what an update says to account.
func (h *history) updated(i int, u pindown.Updated, err error) {
	h.counts[u.Outcome.String()]++
	k := h.keys[i][u.OldRemoteKey]
	if k == nil {
		// Of an idle region that nobody has a key of any more.
		k = &histKey{at: i}
	}
	switch u.Outcome {
	case pindown.UpdateDone, pindown.UpdateFresh:
		if u.RemoteKey != u.OldRemoteKey {
			h.fatalf("another key: %+v", u)
		}
		if !h.mapped[i] && u.Outcome == pindown.UpdateDone {
			h.fatalf("updated what isn't mapped: %+v", u)
		}
		if h.mapped[i] {
			k.known = h.gen[i]
			for _, x := range h.holds {
				if x.key == k && x.ekey != nil {
					x.ekey.known = h.gen[i]
				}
			}
		}
	case pindown.UpdateFailed:
		if err == nil {
			h.fatalf("failed without an error: %+v", u)
		}
	case pindown.UpdateGone:
		k.gone = true
		for _, x := range h.holds {
			if x.key == k && x.ekey != nil {
				x.ekey.gone = true
			}
		}
	default:
		h.fatalf("%+v, %v", u, err)
	}
	if err != nil && h.mapped[i] && !errors.Is(err, errInjected) && !errors.Is(err, device.ErrRegistrationLost) && !errors.Is(err, context.Canceled) {
		h.fatalf("update: %v", err)
	}
}

// place is where request n writes: a word in either half of each page.
func place(n int) uintptr { return uintptr(64 + 8*n) }

// post posts a request under the key of something held.
func (h *history) post() {
	n := slices.IndexFunc(h.reqs[:], func(r histRequest) bool { return !r.used })
	x := h.pick()
	if n < 0 || x == nil || x.key.gone {
		return
	}
	i, key, k := x.at, x.reg.RemoteKey(), x.key
	fresh := x.reg.Cached() && !x.reg.Stale()
	if x.exposure != nil && h.rng.IntN(2) == 0 {
		key, k = x.exposure.RemoteKey(), x.ekey
		if k.gone {
			return
		}
	}
	r := histRequest{used: true, key: k, known: k.known, queue: h.peers[1]}
	r.fresh = fresh && k.known == h.gen[i]
	local := h.sink
	mem, write := h.farMem, h.rng.IntN(2) == 0
	// The far side's memory begins in the middle of a page, so that each page of
	// ours takes two packets.
	base := local.Range.Start + uintptr(n*(histPages+1))*page + halfPage
	wr := simhca.WorkRequest{ID: uint64(n), Op: simhca.OpRead, RemoteAddr: h.mem[i].Start, RemoteKey: key}
	size := uintptr(histPages * page)
	switch {
	case write:
		// Two words, one in either half of a page.
		h.tag++
		r.write, r.tag = true, h.tag
		r.at = uintptr(h.rng.IntN(histPages))*page + place(n)
		var b [8]byte
		binary.LittleEndian.PutUint64(b[:], h.tag)
		if err := mem.Store(base, b[:]); err != nil {
			h.fatalf("%v", err)
		}
		wr.Op, wr.RemoteAddr, size = simhca.OpWrite, h.mem[i].Start+r.at, 8
		wr.Local = []simhca.Segment{{Addr: base, Length: size, Key: local.LocalKey}}
	case k == x.key && h.rng.IntN(2) == 0:
		// The owner's own work: it reads the region under its local key.
		r.queue, r.localOp = h.loop, true
		own := h.ownSink.Range.Start + uintptr(n*(histPages+1))*page + halfPage
		wr = simhca.WorkRequest{
			ID: uint64(n), Op: simhca.OpWrite, RemoteAddr: own, RemoteKey: h.ownSink.RemoteKey,
			Local: []simhca.Segment{{Addr: h.mem[i].Start, Length: size, Key: x.reg.LocalKey()}},
		}
	default:
		wr.Local = []simhca.Segment{{Addr: base, Length: size, Key: local.LocalKey}}
	}
	if r.queue.Failed() {
		return
	}
	if err := r.queue.Post(wr); err != nil {
		h.fatalf("post: %v", err)
	}
	h.reqs[n] = r
}

// complete judges what has completed.
func (h *history) complete() {
	for _, q := range []*simhca.Queue{h.peers[1], h.loop} {
		var got [4]simhca.Completion
		for {
			n := q.CompletionQueue().Poll(got[:])
			if n == 0 {
				break
			}
			for _, c := range got[:n] {
				h.judge(int(c.ID), c.Status)
			}
		}
	}
	if !h.busy() {
		h.reconnect()
	}
}

func (h *history) judge(n int, status simhca.Status) {
	r := h.reqs[n]
	h.reqs[n] = histRequest{}
	i := r.key.at
	if status != simhca.StatusSuccess {
		if status == simhca.StatusFlushed {
			return
		}
		if !r.key.gone {
			h.fatalf("a request under a good key: %v", status)
		}
		h.counts["requests under keys that went"]++
		return
	}
	now := r.fresh && r.known == h.gen[i] && h.mapped[i]
	if r.write {
		h.counts["writes"]++
		if !now {
			return
		}
		var b [8]byte
		if err := h.space.Load(h.mem[i].Start+r.at, b[:]); err != nil {
			h.fatalf("%v", err)
		}
		if binary.LittleEndian.Uint64(b[:]) != r.tag {
			h.fatalf("a write is lost: range %d", i)
		}
		h.counts["writes found"]++
		return
	}
	h.counts["reads"]++
	mem, base := h.farMem, h.sink.Range.Start
	if r.localOp {
		mem, base = h.space, h.ownSink.Range.Start
	}
	base += uintptr(n*(histPages+1))*page + halfPage
	for p := range histPages {
		var tag [2]uint64
		for half := range tag {
			var b [8]byte
			if err := mem.Load(base+uintptr(p)*page+uintptr(half)*halfPage, b[:]); err != nil {
				h.fatalf("%v", err)
			}
			tag[half] = binary.LittleEndian.Uint64(b[:])
		}
		switch {
		case tag[0] != tag[1]:
			h.fatalf("torn page: generations %d and %d", tag[0], tag[1])
		case tag[0] < r.known || tag[0] > h.gen[i]:
			h.fatalf("generation %d, known to be %d at least, now %d", tag[0], r.known, h.gen[i])
		case now && tag[0] != h.gen[i]:
			h.fatalf("generation %d of a fresh region, now %d", tag[0], h.gen[i])
		}
		if now {
			h.counts["pages found"]++
		}
	}
}

// reopen closes the cache, with everything held or not, and opens another.
func (h *history) reopen() {
	err := h.cache.Close()
	if held := len(h.holds) > 0; held != errors.Is(err, pindown.ErrInUse) {
		h.fatalf("close with %d holds: %v", len(h.holds), err)
	}
	// What is held works on.
	for range 20 {
		h.post()
		h.stepper.Step()
		h.complete()
	}
	for len(h.holds) > 0 {
		h.release(h.holds[0])
	}
	faults := h.faults.Swap(0)
	if err := h.cache.Shutdown(h.t.Context()); err != nil {
		h.fatalf("shut down: %v", err)
	}
	h.faults.Store(faults)
	h.stepper.Run()
	h.complete()
	if s := h.dev.Stats(); s.Registrations != 1 || s.Exposures != 0 || s.PinnedBytes != uint64(h.ownSink.Range.Len()) {
		h.fatalf("left after close: %d registrations, %d exposures, %d bytes; %v", s.Registrations, s.Exposures, s.PinnedBytes, h.cache.Stats())
	}
	if n := h.mon.Table().Stats().Used; n != 0 {
		h.fatalf("%d slots of the table in use after close", n)
	}
	if err := h.space.Check(); err != nil {
		h.fatalf("%v", err)
	}
	h.counts["closed"]++
	for i := range h.keys {
		clear(h.keys[i])
	}
	h.open()
}

func (h *history) step() {
	switch n := h.rng.IntN(100); {
	case n < 45:
		h.stepper.Step()
		h.complete()
	case n < 65:
		h.post()
	case n < 75:
		h.acquire()
	case n < 82:
		if x := h.pick(); x != nil {
			h.release(x)
		}
	case n < 89:
		h.operate()
	case n < 96:
		h.update()
	case n < 98:
		if x := h.pick(); x != nil {
			h.expose(x)
		}
	case n < 99:
		if x := h.pick(); x != nil && x.exposure != nil {
			h.revoke(x)
		}
	default:
		if h.rng.IntN(10) == 0 {
			h.faults.Store(uint64(h.rng.IntN(3) * 60))
		}
		if h.rng.IntN(30) == 0 {
			h.reopen()
		}
	}
}

func (h *history) end() {
	h.faults.Store(0)
	h.reopen()
	if err := h.cache.Close(); err != nil {
		h.fatalf("%v", err)
	}
	h.stepper.Run()
	if err := errors.Join(h.dev.Deregister(h.ownSink), h.far.Deregister(h.sink)); err != nil {
		h.fatalf("%v", err)
	}
	if s := h.space.Stats(); s.Pinned != 0 || s.Orphans != 0 {
		h.fatalf("%d pages pinned, %d orphans", s.Pinned, s.Orphans)
	}
	if err := errors.Join(h.dev.Close(), h.far.Close(), h.mon.Close(), h.space.Check(), h.farMem.Check()); err != nil {
		h.fatalf("%v", err)
	}
}

// TestUpdateHistory: update × work × VM operation × close, at random.
func TestUpdateHistory(t *testing.T) {
	n := steps(1_000_000, 30_000)
	seed, _ := randomSeed(t)
	for _, onStale := range []pindown.StalePolicy{pindown.StaleDrop, pindown.StaleUpdate} {
		t.Run(onStale.String(), func(t *testing.T) {
			h := newHistory(t, seed, onStale)
			for range n / 2 {
				h.step()
			}
			h.end()
			t.Logf("%v", h.counts)
			for _, what := range []string{"updated", "failed", "writes found", "pages found", "closed", "dead keys tried", "exposed"} {
				if h.counts[what] == 0 {
					t.Errorf("never happened: %s", what)
				}
			}
		})
	}
}
