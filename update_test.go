package pindown_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pindown/pindown"
	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/simhca"
	"github.com/pindown/pindown/monitor"
	"github.com/pindown/pindown/monitor/manual"
	"github.com/pindown/pindown/vm"
)

// simRig is a cache over a simulated adapter with simulated memory, and a peer
// that is connected to it.
type simRig struct {
	*pindown.Cache
	mon   *manual.Monitor
	space *simhca.Space
	dev   *simhca.Device
	queue *simhca.Queue // the owner's
	peer  *simhca.Queue
	peers device.Registration // the peer's own memory, one page
	id    atomic.Uint64

	log    *bytes.Buffer
	mu     sync.Mutex
	events []pindown.Event
}

const allRemote = pindown.LocalWrite | pindown.RemoteRead | pindown.RemoteWrite | pindown.WindowBind

func newSimRig(tb testing.TB, do *simhca.Options, o *pindown.Options, wrap ...func(*manual.Monitor) monitor.Monitor) *simRig {
	tb.Helper()
	mon, err := manual.New(nil)
	if err != nil {
		tb.Fatal(err)
	}
	r := &simRig{mon: mon, log: new(bytes.Buffer)}
	r.space = simhca.NewSpace(&simhca.SpaceOptions{
		Before: func(e vm.Event) { mon.Before(e.Range) },
		After:  func(e vm.Event) { mon.After(e.Range) },
	})
	r.dev = simhca.Open(r.space, do)
	opts := pindown.Options{MergeBytes: -1}
	if o != nil {
		opts = *o
	}
	opts.Monitor = mon
	for _, w := range wrap {
		opts.Monitor = w(mon)
	}
	opts.Logger = slog.New(slog.NewTextHandler(r.log, nil))
	opts.OnEvent = func(e pindown.Event) {
		r.mu.Lock()
		r.events = append(r.events, e)
		r.mu.Unlock()
	}
	if r.Cache, err = pindown.New(r.dev, &opts); err != nil {
		tb.Fatal(err)
	}
	pd := r.dev.ProtectionDomain()
	for _, q := range []**simhca.Queue{&r.queue, &r.peer} {
		if *q, err = pd.NewQueue(nil); err != nil {
			tb.Fatal(err)
		}
	}
	r.connect(tb)
	own := r.alloc(tb, 1)
	if r.peers, err = r.dev.Register(tb.Context(), own, device.LocalWrite); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := r.Close(); err != nil {
			tb.Errorf("close: %v", err)
		}
		if err := r.dev.Deregister(r.peers); err != nil {
			tb.Error(err)
		}
		s := r.dev.Stats()
		if s.Registrations != 0 || s.Exposures != 0 || s.FastKeys != 0 || s.PinnedBytes != 0 {
			tb.Errorf("left on the device: %d registrations, %d exposures, %d fast keys, %d bytes", s.Registrations, s.Exposures, s.FastKeys, s.PinnedBytes)
		}
		if n := mon.Table().Stats().Used; n != 0 {
			tb.Errorf("%d slots of the table in use", n)
		}
		st := r.Stats()
		check(tb, "regions", st.Regions, 0)
		check(tb, "bytes", st.PinnedBytes, 0)
		if err := errors.Join(r.dev.Close(), mon.Close(), r.space.Check()); err != nil {
			tb.Error(err)
		}
	})
	return r
}

// connect makes the queues ready again.
func (r *simRig) connect(tb testing.TB) {
	tb.Helper()
	for _, q := range []*simhca.Queue{r.queue, r.peer} {
		if !q.Failed() {
			return
		}
	}
	if err := simhca.Connect(r.queue, r.peer); err != nil {
		tb.Fatal(err)
	}
}

func (r *simRig) alloc(tb testing.TB, pages int) vm.Range {
	tb.Helper()
	rng, err := r.space.Map(pages, simhca.ProtRead|simhca.ProtWrite)
	if err != nil {
		tb.Fatal(err)
	}
	return rng
}

func (r *simRig) get(tb testing.TB, rng vm.Range, a pindown.Access) pindown.Region {
	tb.Helper()
	reg, err := r.AcquireRange(tb.Context(), rng, a)
	if err != nil {
		tb.Fatalf("acquire: %v", err)
	}
	return reg
}

// renew puts other pages behind rng.
func (r *simRig) renew(tb testing.TB, rng vm.Range) {
	tb.Helper()
	if err := errors.Join(r.space.Unmap(rng), r.space.MapFixed(rng, simhca.ProtRead|simhca.ProtWrite)); err != nil {
		tb.Fatal(err)
	}
}

// write has the peer write b to addr under key.
func (r *simRig) write(tb testing.TB, addr uintptr, key uint32, b byte) simhca.Status {
	tb.Helper()
	if err := r.space.Store(r.peers.Range.Start, []byte{b}); err != nil {
		tb.Fatal(err)
	}
	id := r.id.Add(1)
	err := r.peer.Post(simhca.WorkRequest{
		ID: id, Op: simhca.OpWrite, RemoteAddr: addr, RemoteKey: key,
		Local: []simhca.Segment{{Addr: r.peers.Range.Start, Length: 1, Key: r.peers.LocalKey}},
	})
	if err != nil {
		tb.Fatal(err)
	}
	c, err := r.peer.CompletionQueue().Wait(tb.Context())
	if err != nil || c.ID != id {
		tb.Fatalf("completion %v, %v", c, err)
	}
	return c.Status
}

// reaches reports whether a peer's write under key arrives in what is mapped now.
func (r *simRig) reaches(tb testing.TB, addr uintptr, key uint32) bool {
	tb.Helper()
	b := byte(r.id.Load() + 1)
	if s := r.write(tb, addr, key, b); s != simhca.StatusSuccess {
		r.connect(tb)
		return false
	}
	var got [1]byte
	if err := r.space.Load(addr, got[:]); err != nil {
		tb.Fatal(err)
	}
	return got[0] == b
}

func (r *simRig) told(kind pindown.EventKind) (list []pindown.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, e := range r.events {
		if e.Kind == kind {
			list = append(list, e)
		}
	}
	return list
}

func policies() []pindown.UpdatePolicy {
	return []pindown.UpdatePolicy{pindown.UpdateStrict, pindown.UpdateAtomic}
}

// TestUpdate: the keys stay, mean the new pages, the region is hit again, and
// holders from before are at the end what keeps it.
func TestUpdate(t *testing.T) {
	for _, policy := range policies() {
		t.Run(policy.String(), func(t *testing.T) {
			r := newSimRig(t, nil, nil)
			rng := r.alloc(t, 3)
			reg := r.get(t, rng, allRemote)
			key := reg.RemoteKey()
			check(t, "reached at first", r.reaches(t, rng.Start, key), true)
			u, err := reg.Update(t.Context(), policy)
			if err != nil || u.Outcome != pindown.UpdateFresh {
				t.Errorf("update of a fresh region: %+v, %v", u, err)
			}
			for range 5 {
				r.renew(t, rng)
				check(t, "stale", reg.Stale(), true)
				check(t, "reached when stale", r.reaches(t, rng.Start, key), false)
				u, err = reg.Update(t.Context(), policy)
				if err != nil || u.Outcome != pindown.UpdateDone || u.RemoteKey != key || u.KeyChanged() {
					t.Errorf("%+v, %v", u, err)
				}
				check(t, "stale after update", reg.Stale(), false)
				check(t, "reached after update", r.reaches(t, rng.End-1, key), true)
			}
			hits := r.Stats().Hits
			again := r.get(t, rng, allRemote)
			check(t, "hits", r.Stats().Hits, hits+1)
			check(t, "key of a hit", again.RemoteKey(), key)
			release(t, &reg)
			eventually(t, "aliases' end", func() bool { return r.Stats().InUse == 1 })
			check(t, "reached by the second holder", r.reaches(t, rng.Start, key), true)
			r.renew(t, rng)
			list, err := r.Update(t.Context(), rng, pindown.UpdateAtomic)
			if err != nil || len(list) != 1 || list[0].Outcome != pindown.UpdateDone {
				t.Errorf("%+v, %v", list, err)
			}
			release(t, &again)
			check(t, "registrations made", r.Stats().Register.Count, 1)
			check(t, "updates", r.Stats().Updates[pindown.UpdateDone], 6)
			eventually(t, "events", func() bool { return len(r.told(pindown.EventUpdated)) == 6 })
			check(t, "warnings", r.log.Len(), 0)
		})
	}
}

// TestUpdateRange: every stale region in a range, in use or not, and no other.
func TestUpdateRange(t *testing.T) {
	r := newSimRig(t, nil, nil)
	rng := r.alloc(t, 8)
	at := func(i int) vm.Range {
		return vm.Range{Start: rng.Start + uintptr(i)*page, End: rng.Start + uintptr(i+1)*page}
	}
	var regs []pindown.Region
	for i := range 8 {
		regs = append(regs, r.get(t, at(i), allRemote))
	}
	r.renew(t, vm.Range{Start: at(2).Start, End: at(4).End})
	list, err := r.Update(t.Context(), rng, pindown.UpdateAtomic)
	if err != nil {
		t.Fatal(err)
	}
	check(t, "updated", len(list), 3)
	for i, u := range list {
		check(t, "range", u.Range, at(i+2))
		check(t, "outcome", u.Outcome, pindown.UpdateDone)
		check(t, "key", u.RemoteKey, regs[i+2].RemoteKey())
	}
	// What Invalidate gave up is updated, and found again.
	if n, err := r.Invalidate(at(6)); n != 1 || err != nil {
		t.Error(n, err)
	}
	if list, err = r.Update(t.Context(), rng, pindown.UpdateAtomic); err != nil || len(list) != 1 || list[0].Range != at(6) {
		t.Errorf("%+v, %v", list, err)
	}
	if reg, ok := r.TryAcquireRange(at(6), allRemote); !ok {
		t.Error("not found after update")
	} else {
		check(t, "key", reg.RemoteKey(), regs[6].RemoteKey())
		release(t, &reg)
	}
	for i := range regs {
		release(t, &regs[i])
	}
	check(t, "registrations made", r.Stats().Register.Count, 8)
}

// TestUpdateBadInput: what is refused before anything is done.
func TestUpdateBadInput(t *testing.T) {
	r := newSimRig(t, nil, nil)
	rng := r.alloc(t, 1)
	reg := r.get(t, rng, allRemote)
	for _, p := range []pindown.UpdatePolicy{pindown.UpdateInvalid, 17} {
		if _, err := r.Update(t.Context(), rng, p); !errors.Is(err, pindown.ErrPolicy) {
			t.Errorf("policy %d: %v", p, err)
		}
		if _, err := reg.Update(t.Context(), p); !errors.Is(err, pindown.ErrPolicy) {
			t.Errorf("policy %d: %v", p, err)
		}
	}
	if _, err := r.Update(t.Context(), vm.Range{}, pindown.UpdateAtomic); !errors.Is(err, pindown.ErrRange) {
		t.Error(err)
	}
	if _, err := (pindown.Region{}).Update(t.Context(), pindown.UpdateAtomic); !errors.Is(err, pindown.ErrReleased) {
		t.Error(err)
	}
	r.renew(t, rng)
	if err := r.Close(); !errors.Is(err, pindown.ErrInUse) {
		t.Error(err)
	}
	if _, err := r.Update(t.Context(), rng, pindown.UpdateAtomic); !errors.Is(err, pindown.ErrClosed) {
		t.Error(err)
	}
	u, err := reg.Update(t.Context(), pindown.UpdateAtomic)
	if !errors.Is(err, pindown.ErrClosed) || u.Outcome != pindown.UpdateFailed {
		t.Error(u, err)
	}
	release(t, &reg)
}

// TestUpdateStrictWaits: a strict update waits for other holders, holds acquires
// off meanwhile, and gives up with its context; an atomic one doesn't wait.
func TestUpdateStrictWaits(t *testing.T) {
	revoking, proceed := make(chan struct{}), make(chan struct{})
	var stop atomic.Bool
	r := newSimRig(t, &simhca.Options{Fault: func(f simhca.Fault) error {
		if f.Verb == simhca.VerbRevoke && stop.Swap(false) {
			close(revoking)
			<-proceed
		}
		return nil
	}}, nil)
	rng := r.alloc(t, 2)
	mine, other := r.get(t, rng, allRemote), r.get(t, rng, allRemote)
	r.renew(t, rng)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	u, err := mine.Update(ctx, pindown.UpdateStrict)
	if !errors.Is(err, context.Canceled) || u.Outcome != pindown.UpdateFailed {
		t.Errorf("%+v, %v", u, err)
	}
	check(t, "revocations", r.dev.Stats().Verbs[simhca.VerbRevoke].Calls, 0)
	stop.Store(true)
	waits := r.Stats().Waits
	done := make(chan error)
	go func() {
		u, err := mine.Update(t.Context(), pindown.UpdateStrict)
		if u.Outcome != pindown.UpdateDone {
			err = errors.Join(err, fmt.Errorf("outcome %v", u.Outcome))
		}
		done <- err
	}()
	eventually(t, "an update that waits", func() bool { return r.Stats().Waits > waits })
	select {
	case <-revoking:
		t.Error("revoked before the other holder has released")
	default:
	}
	release(t, &other)
	<-revoking
	waits = r.Stats().Waits
	acquired := make(chan pindown.Region)
	go func() {
		reg, err := r.AcquireRange(t.Context(), rng, allRemote)
		if err != nil {
			t.Error(err)
		}
		acquired <- reg
	}()
	eventually(t, "an acquire that waits", func() bool { return r.Stats().Waits > waits })
	close(proceed)
	if err := <-done; err != nil {
		t.Error(err)
	}
	reg := <-acquired
	check(t, "key", reg.RemoteKey(), mine.RemoteKey())
	check(t, "revocations", r.dev.Stats().Verbs[simhca.VerbRevoke].Calls, 1)
	// Two holders who both update don't wait for each other.
	r.renew(t, rng)
	var wg sync.WaitGroup
	for _, h := range []pindown.Region{reg, mine} {
		wg.Go(func() {
			if _, err := h.Update(t.Context(), pindown.UpdateStrict); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	check(t, "revocations", r.dev.Stats().Verbs[simhca.VerbRevoke].Calls, 2)
	// Nor does an atomic one wait.
	r.renew(t, rng)
	if u, err := mine.Update(t.Context(), pindown.UpdateAtomic); err != nil || u.Outcome != pindown.UpdateDone {
		t.Error(u, err)
	}
	release(t, &reg)
	release(t, &mine)
}

// TestUpdateStrictFlushes: work posted before a strict update completes on the old
// pages, on the owner's queue, and only then is the key revoked.
func TestUpdateStrictFlushes(t *testing.T) {
	for seed := range uint64(20) {
		steps := simhca.NewStepper(seed)
		r := newSimRig(t, &simhca.Options{Stepper: steps}, nil)
		rng, sink := r.alloc(t, 1), r.alloc(t, 1)
		own, err := r.dev.Register(t.Context(), sink, device.LocalWrite|device.RemoteWrite)
		if err != nil {
			t.Fatal(err)
		}
		if err := r.space.Store(rng.Start, []byte{1}); err != nil {
			t.Fatal(err)
		}
		reg := r.get(t, rng, allRemote)
		for i := range uintptr(8) {
			err := r.queue.Post(simhca.WorkRequest{
				ID: uint64(i), Op: simhca.OpWrite, RemoteAddr: sink.Start + i, RemoteKey: own.RemoteKey,
				Local: []simhca.Segment{{Addr: rng.Start, Length: 1, Key: reg.LocalKey()}},
			})
			if err != nil {
				t.Fatal(err)
			}
		}
		r.renew(t, rng)
		if u, err := reg.Update(t.Context(), pindown.UpdateStrict); u.Outcome != pindown.UpdateDone {
			t.Fatal(u, err)
		}
		check(t, "pending", r.queue.Pending(), 0)
		var got [8]byte
		if err := r.space.Load(sink.Start, got[:]); err != nil {
			t.Fatal(err)
		}
		check(t, "read", got, [8]byte{1, 1, 1, 1, 1, 1, 1, 1})
		for range got {
			if c, err := r.queue.CompletionQueue().Wait(t.Context()); err != nil || c.Status != simhca.StatusSuccess {
				t.Fatal(c, err)
			}
		}
		release(t, &reg)
		if err := r.dev.Deregister(own); err != nil {
			t.Error(err)
		}
	}
}

// TestUpdateContextEndsInQueue: a context that ends while the update waits for work
// in flight leaves everything as it was.
func TestUpdateContextEndsInQueue(t *testing.T) {
	moving, proceed := make(chan struct{}), make(chan struct{})
	var stop atomic.Bool
	r := newSimRig(t, &simhca.Options{Fault: func(f simhca.Fault) error {
		if f.Verb == simhca.VerbExecute && f.Step == simhca.StepMoving && stop.Swap(false) {
			close(moving)
			<-proceed
		}
		return nil
	}}, nil)
	rng, sink := r.alloc(t, 1), r.alloc(t, 1)
	own, err := r.dev.Register(t.Context(), sink, device.LocalWrite|device.RemoteWrite)
	if err != nil {
		t.Fatal(err)
	}
	reg := r.get(t, rng, allRemote)
	stop.Store(true)
	err = r.queue.Post(simhca.WorkRequest{
		Op: simhca.OpWrite, RemoteAddr: sink.Start, RemoteKey: own.RemoteKey,
		Local: []simhca.Segment{{Addr: rng.Start, Length: 1, Key: reg.LocalKey()}},
	})
	if err != nil {
		t.Fatal(err)
	}
	<-moving
	r.renew(t, rng)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() {
		u, err := reg.Update(ctx, pindown.UpdateStrict)
		if u.Outcome != pindown.UpdateFailed {
			t.Errorf("%+v", u)
		}
		done <- err
	}()
	// An atomic one of another region needs no drain, whatever is in flight.
	other := r.get(t, r.alloc(t, 1), allRemote)
	r.renew(t, other.Range())
	if u, err := other.Update(t.Context(), pindown.UpdateAtomic); u.Outcome != pindown.UpdateDone {
		t.Error(u, err)
	}
	release(t, &other)
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	check(t, "revocations", r.dev.Stats().Verbs[simhca.VerbRevoke].Calls, 0)
	// Nor of this one: the request finishes the page that it is in.
	if u, err := reg.Update(t.Context(), pindown.UpdateAtomic); u.Outcome != pindown.UpdateDone {
		t.Error(u, err)
	}
	close(proceed)
	if c, err := r.queue.CompletionQueue().Wait(t.Context()); err != nil || c.Status != simhca.StatusSuccess {
		t.Error(c, err)
	}
	check(t, "reaches", r.reaches(t, rng.Start, reg.RemoteKey()), true)
	release(t, &reg)
	if err := r.dev.Deregister(own); err != nil {
		t.Error(err)
	}
}

// TestUpdateAtLimit: an atomic update needs room for the new pages beside the old.
// Idle regions make room; if there are none it fails, and the registration is as it
// was. A strict one gives the old ones back first.
func TestUpdateAtLimit(t *testing.T) {
	r := newSimRig(t, &simhca.Options{Limits: device.Limits{MaxPinnedBytes: 5 * page}},
		&pindown.Options{MaxBytes: 4 * page, MergeBytes: -1, RegisterTimeout: 20 * time.Millisecond})
	idle, used := r.alloc(t, 2), r.alloc(t, 2)
	first := r.get(t, idle, allRemote)
	release(t, &first)
	reg := r.get(t, used, allRemote)
	check(t, "regions", r.Stats().Regions, 2)
	r.renew(t, used)
	if u, err := reg.Update(t.Context(), pindown.UpdateAtomic); u.Outcome != pindown.UpdateDone {
		t.Error(u, err)
	}
	check(t, "evicted", r.Stats().Evictions[pindown.EvictDevice], 1)
	again := r.get(t, idle, allRemote)
	r.renew(t, used)
	u, err := reg.Update(t.Context(), pindown.UpdateAtomic)
	if u.Outcome != pindown.UpdateFailed || !errors.Is(err, device.ErrNoMemory) {
		t.Errorf("%+v, %v", u, err)
	}
	r.expectKey(t, used, reg.RemoteKey(), meanOld)
	if u, err := reg.Update(t.Context(), pindown.UpdateStrict); u.Outcome != pindown.UpdateDone {
		t.Error(u, err)
	}
	r.expectKey(t, used, reg.RemoteKey(), meanNew)
	release(t, &reg)
	release(t, &again)
}

// TestUpdateUnable: on a device that can't, the range is registered anew, the
// result and an event say so, and one warning is logged.
func TestUpdateUnable(t *testing.T) {
	for _, policy := range policies() {
		t.Run(policy.String(), func(t *testing.T) {
			r := newSimRig(t, &simhca.Options{Without: simhca.CanUpdate | simhca.CanRevoke}, nil)
			rng := r.alloc(t, 2)
			for range 3 {
				reg := r.get(t, rng, allRemote)
				key := reg.RemoteKey()
				r.renew(t, rng)
				u, err := reg.Update(t.Context(), policy)
				if err != nil || u.Outcome != pindown.UpdateKeyChanged || !u.KeyChanged() || u.OldRemoteKey != key || u.RemoteKey == key {
					t.Errorf("%+v, %v", u, err)
				}
				check(t, "new key reaches", r.reaches(t, rng.Start, u.RemoteKey), true)
				check(t, "old key reaches", r.reaches(t, rng.Start, key), false)
				check(t, "holder's key", reg.RemoteKey(), key)
				check(t, "holder's region is stale", reg.Stale(), true)
				next := r.get(t, rng, allRemote)
				check(t, "key of the next", next.RemoteKey(), u.RemoteKey)
				release(t, &reg)
				release(t, &next)
			}
			check(t, "warnings", strings.Count(r.log.String(), "level=WARN"), 1)
			eventually(t, "events", func() bool { return len(r.told(pindown.EventKeyChanged)) == 3 })
			for _, e := range r.told(pindown.EventKeyChanged) {
				if e.NewRemoteKey == 0 || e.NewRemoteKey == e.RemoteKey || !strings.Contains(e.String(), "key-changed") {
					t.Errorf("event %v", e)
				}
			}
		})
	}
}

// TestUpdatePerUse: a registration per use is updated for its holder.
func TestUpdatePerUse(t *testing.T) {
	for _, policy := range policies() {
		r := newSimRig(t, nil, &pindown.Options{MaxRegions: 1, MergeBytes: -1})
		rng := r.alloc(t, 4)
		first := r.get(t, vm.Range{Start: rng.Start, End: rng.Start + page}, allRemote)
		rest := vm.Range{Start: rng.Start + 2*page, End: rng.End}
		reg := r.get(t, rest, allRemote)
		check(t, "cached", reg.Cached(), false)
		r.renew(t, rest)
		u, err := reg.Update(t.Context(), policy)
		if err != nil || u.Outcome != pindown.UpdateDone {
			t.Error(u, err)
		}
		check(t, "reached", r.reaches(t, rest.Start, reg.RemoteKey()), true)
		release(t, &reg)
		release(t, &first)
	}
}

// TestOnStaleUpdate: a region in use is updated without anybody's asking, once it
// is mapped again, and one that nobody uses is dropped.
func TestOnStaleUpdate(t *testing.T) {
	r := newSimRig(t, nil, &pindown.Options{MergeBytes: -1, OnStale: pindown.StaleUpdate})
	used, idle := r.alloc(t, 2), r.alloc(t, 2)
	reg, other := r.get(t, used, allRemote), r.get(t, idle, allRemote)
	release(t, &other)
	for i := range 3 {
		if err := r.space.Unmap(used); err != nil {
			t.Fatal(err)
		}
		eventually(t, "a try", func() bool { return r.Stats().Updates[pindown.UpdateFailed] > uint64(i) })
		if err := r.space.MapFixed(used, simhca.ProtRead|simhca.ProtWrite); err != nil {
			t.Fatal(err)
		}
		eventually(t, "an update", func() bool { return !reg.Stale() })
		check(t, "reached", r.reaches(t, used.Start, reg.RemoteKey()), true)
	}
	r.renew(t, idle)
	eventually(t, "the idle one's end", func() bool { return r.Stats().Regions == 1 })
	// One that is exposed and not held.
	x, err := reg.Expose(t.Context(), used, pindown.RemoteWrite)
	if err != nil {
		t.Fatal(err)
	}
	release(t, &reg)
	r.renew(t, used)
	eventually(t, "an update", func() bool { return r.reaches(t, used.Start, x.RemoteKey()) })
	if err := x.Revoke(t.Context()); err != nil {
		t.Error(err)
	}
	check(t, "registrations made", r.Stats().Register.Count, 2)
}

// TestOnStaleUpdateUnable: where the device can't, the region is dropped.
func TestOnStaleUpdateUnable(t *testing.T) {
	r := newSimRig(t, &simhca.Options{Without: simhca.CanUpdate}, &pindown.Options{OnStale: pindown.StaleUpdate})
	rng := r.alloc(t, 2)
	reg := r.get(t, rng, allRemote)
	r.renew(t, rng)
	eventually(t, "a try", func() bool { return r.Stats().Updates[pindown.UpdateFailed] == 1 })
	check(t, "stale", reg.Stale(), true)
	release(t, &reg)
	eventually(t, "its end", func() bool { return r.Stats().Regions == 0 })
	check(t, "warnings", strings.Count(r.log.String(), "level=WARN"), 1)
}
