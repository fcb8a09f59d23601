package simhca_test

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/simhca"
	"github.com/pindown/pindown/vm"
)

// An update reaches the new pages under the same key; the old ones are freed,
// and what was written to them before is what a stale registration loses.
func TestUpdate(t *testing.T) {
	g := newRig(t, simhca.Options{}, false)
	r := g.mapped(2, 'x')
	reg := g.register(r, allAcc)
	from := g.scratch(2, 'w')
	g.replace(r, 'y')
	if s := g.space.Stats(); s.Orphans != 2 {
		t.Errorf("%d orphans of a stale registration, want 2", s.Orphans)
	}
	g.wantStatus("write", g.do(g.queue, write(1, from, r.Start, reg.RemoteKey)), simhca.StatusSuccess)
	if s := g.space.Stats(); s.OrphanWrites != 2 || g.memory(r) != 'y' {
		t.Errorf("%d writes to orphans, want 2; memory has %q", s.OrphanWrites, g.memory(r))
	}
	got, err := g.dev.Update(ctx, reg)
	g.must(err)
	if got != reg {
		t.Errorf("updated %+v, want %+v", got, reg)
	}
	if s := g.space.Stats(); s.Orphans != 0 {
		t.Errorf("%d orphans after the update", s.Orphans)
	}
	g.wantSees("after the update", r, reg.RemoteKey, 'y')
	g.wantStatus("write", g.do(g.queue, write(2, from, r.Start, reg.RemoteKey)), simhca.StatusSuccess)
	if s := g.space.Stats(); s.OrphanWrites != 2 || g.memory(r) != 'w' {
		t.Errorf("%d writes to orphans, want 2; memory has %q", s.OrphanWrites, g.memory(r))
	}
}

// A request in flight during an update: each page is all old or all new, even
// where several packets meet in it; no page of the old after one of the new; no
// invalid key. With KeepPages it is the old throughout.
func TestUpdateInFlight(t *testing.T) {
	const pages = 5
	for _, keep := range []bool{false, true} {
		mixed := 0
		for seed := range uint64(fewer(300)) {
			g := newRigSeed(t, simhca.Options{KeepPages: keep}, seed)
			r := g.mapped(pages, 'x')
			reg := g.register(r, allAcc)
			to := g.scratch(pages+1, 0)
			// The reader's pages and the owner's don't line up, so that there
			// are two packets to each page.
			wr := read(1, to, r.Start, reg.RemoteKey)
			wr.Local[0].Addr += 1000
			wr.Local[0].Length = r.Len()
			g.must(g.queue.Post(wr))
			for range seed % (2*pages + 1) {
				g.stepper.Step()
			}
			g.replace(r, 'y')
			_, err := g.dev.Update(ctx, reg)
			g.must(err)
			g.stepper.Run()
			var done [1]simhca.Completion
			if g.queue.CompletionQueue().Poll(done[:]) != 1 || done[0].Status != simhca.StatusSuccess {
				t.Fatalf("seed %d: %+v", seed, done[0])
			}
			b := make([]byte, r.Len())
			g.must(g.space.Load(to.Range.Start+1000, b))
			old := 0
			for i := range pages {
				c := uniform(b[i*page : (i+1)*page])
				if c != 'x' && c != 'y' {
					t.Fatalf("seed %d, keep %v: page %d is torn", seed, keep, i)
				}
				if c == 'x' && old != i {
					t.Errorf("seed %d: old page %d after a new one", seed, i)
				}
				if c == 'x' {
					old++
				}
			}
			if old != 0 && old != pages {
				mixed++
			}
			if s := g.space.Stats(); s.Orphans != 0 {
				t.Errorf("seed %d: %d old pages are still pinned", seed, s.Orphans)
			}
			g.close()
		}
		if keep == (mixed > 0) {
			t.Errorf("keep %v: %d requests saw old and new pages", keep, mixed)
		}
	}
}

// The strict order, flush, revoke, load: what was posted before succeeds on the
// old pages, between the two nothing is reached.
func TestStrictUpdate(t *testing.T) {
	g := newRig(t, simhca.Options{}, false)
	r := g.mapped(3, 'x')
	reg := g.register(r, allAcc)
	to := g.scratch(3, 0)
	g.must(g.queue.Post(read(1, to, r.Start, reg.RemoteKey)))
	g.stepper.Step()
	g.replace(r, 'y')
	g.must(g.dev.Flush(ctx, reg))
	if c := g.memory(to.Range); c != 'x' {
		t.Errorf("work of before the flush saw %q", c)
	}
	g.must(g.dev.Revoke(ctx, reg))
	if s := g.space.Stats(); s.Orphans != 0 {
		t.Errorf("%d old pages are pinned after revoke", s.Orphans)
	}
	g.wantDead("between revoke and load", r, reg.RemoteKey)
	q := g.newQueue(nil)
	g.wantStatus("local use between the two", g.do(q, write(2, reg, to.Range.Start, 0)), simhca.StatusLocalProtection)
	got, err := g.dev.Load(ctx, reg)
	g.must(err)
	if got != reg {
		t.Errorf("loaded %+v, want %+v", got, reg)
	}
	g.wantSees("after load", r, reg.RemoteKey, 'y')
	// Revoked for good.
	g.must(g.dev.Revoke(ctx, reg))
	g.must(g.dev.Deregister(reg))
	_, err = g.dev.Load(ctx, reg)
	g.wantError("load of what is deregistered", err, device.ErrNotRegistered)
}

// A request that is in the middle of a page when its key is revoked: it goes no
// further, whether revoked or deregistered, with KeepPages too.
func TestRevokeInFlight(t *testing.T) {
	for _, keep := range []bool{false, true} {
		for _, deregister := range []bool{false, true} {
			g := newRig(t, simhca.Options{KeepPages: keep}, false)
			r := g.mapped(2, 'x')
			reg := g.register(r, allAcc)
			from := g.scratch(3, 'w')
			wr := write(1, from, r.Start, reg.RemoteKey)
			wr.Local[0].Addr += 1000
			wr.Local[0].Length = r.Len()
			g.must(g.queue.Post(wr))
			g.stepper.Step()
			if deregister {
				g.must(g.dev.Deregister(reg))
			} else {
				g.must(g.dev.Revoke(ctx, reg))
			}
			if s := g.space.Stats(); s.Pinned != 3 {
				t.Errorf("%d pages pinned, want only the writer's 3", s.Pinned)
			}
			g.stepper.Run()
			var done [1]simhca.Completion
			g.queue.CompletionQueue().Poll(done[:])
			g.wantStatus("write", done[0].Status, simhca.StatusRemoteAccess)
			head := vm.Range{Start: r.Start, End: r.Start + page - 1000}
			if a, b := g.memory(head), g.memory(vm.Range{Start: head.End, End: r.End}); a != 'w' || b != 'x' {
				t.Errorf("memory has %q, then %q", a, b)
			}
		}
	}
}

// Peers are held back by a revoked key, and never notice.
func TestHoldRevoked(t *testing.T) {
	for _, async := range []bool{false, true} {
		g := newRig(t, simhca.Options{HoldRevoked: true}, async)
		run := func() {
			if !async {
				g.stepper.Run()
			}
		}
		r := g.mapped(2, 'x')
		reg := g.register(r, allAcc)
		x, err := g.dev.Expose(ctx, reg, r, device.RemoteWrite)
		g.must(err)
		from := g.scratch(2, 'w')
		g.replace(r, 'y')
		g.must(g.dev.Revoke(ctx, reg))
		byWindow := g.newQueue(nil)
		g.must(g.queue.Post(write(1, from, r.Start, reg.RemoteKey)))
		g.must(byWindow.Post(write(2, from, r.Start, x.RemoteKey)))
		impatient := g.newQueue(&simhca.QueueOptions{FailNotReady: true})
		g.wantStatus("impatient peer", g.do(impatient, write(3, from, r.Start, reg.RemoteKey)), simhca.StatusNotReady)
		// A receive into revoked memory holds its sender back as well.
		byReceive := g.newQueue(nil)
		g.must(byReceive.PostReceive(4, simhca.SegmentOf(reg, r)))
		g.must(byReceive.Post(simhca.WorkRequest{ID: 5, Op: simhca.OpSend, Local: []simhca.Segment{simhca.SegmentOf(from, from.Range)}}))
		// The queue's own use isn't held back.
		own := g.newQueue(nil)
		g.wantStatus("own use", g.do(own, write(6, reg, from.Range.Start, from.LocalKey)), simhca.StatusLocalProtection)
		run()
		if g.memory(r) != 'y' || g.queue.Pending() != 1 || byWindow.Pending() != 1 || byReceive.Pending() != 1 {
			t.Error("a revoked key let something through, or failed")
		}
		_, err = g.dev.Load(ctx, reg)
		g.must(err)
		for _, q := range []*simhca.Queue{g.queue, byWindow, byReceive} {
			c, err := q.CompletionQueue().Wait(ctx)
			g.must(err)
			g.wantStatus("held back", c.Status, simhca.StatusSuccess)
		}
		if g.memory(r) != 'w' || g.space.Stats().OrphanWrites != 0 {
			t.Errorf("memory has %q, %d writes lost", g.memory(r), g.space.Stats().OrphanWrites)
		}
		// What is deregistered holds nobody.
		g.must(g.dev.Withdraw(ctx, x))
		g.must(g.dev.Revoke(ctx, reg))
		g.must(g.queue.Post(write(7, from, r.Start, reg.RemoteKey)))
		run()
		g.must(g.dev.Deregister(reg))
		c, err := g.queue.CompletionQueue().Wait(ctx)
		g.must(err)
		g.wantStatus("deregistered while held", c.Status, simhca.StatusRemoteAccess)
	}
}

// What Flush waits for, and what it doesn't.
func TestFlush(t *testing.T) {
	g := newRig(t, simhca.Options{}, false)
	r := g.mapped(1, 'x')
	reg, other := g.register(r, allAcc), g.register(g.mapped(1, 'o'), allAcc)
	x, err := g.dev.Expose(ctx, reg, r, device.RemoteWrite)
	g.must(err)
	from := g.scratch(1, 'w')
	recv := func(q *simhca.Queue) { g.must(q.PostReceive(9, simhca.SegmentOf(reg, r))) }
	send := simhca.WorkRequest{Op: simhca.OpSend, Local: []simhca.Segment{simhca.SegmentOf(from, from.Range)}}
	for _, c := range []struct {
		name string
		post func(q *simhca.Queue)
		want int // requests that Flush leaves pending.
	}{
		{"nothing", func(*simhca.Queue) {}, 0},
		{"remote key", func(q *simhca.Queue) { g.must(q.Post(write(1, from, r.Start, reg.RemoteKey))) }, 0},
		{"local key", func(q *simhca.Queue) { g.must(q.Post(write(1, reg, other.Range.Start, other.RemoteKey))) }, 0},
		{"exposure", func(q *simhca.Queue) { g.must(q.Post(write(1, from, r.Start, x.RemoteKey))) }, 0},
		{"something else", func(q *simhca.Queue) { g.must(q.Post(write(1, from, other.Range.Start, other.RemoteKey))) }, 1},
		{"something else behind it", func(q *simhca.Queue) {
			g.must(q.Post(write(1, from, r.Start, reg.RemoteKey)))
			g.must(q.Post(write(1, from, other.Range.Start, other.RemoteKey)))
		}, 1},
		{"receive that waits", recv, 0},
		{"receive that is being filled", func(q *simhca.Queue) {
			half := simhca.Segment{Addr: r.Start, Length: page / 2, Key: reg.LocalKey}
			g.must(q.PostReceive(9, half, half))
			g.must(q.Post(send))
			g.stepper.Step()
			if n := q.Pending(); n != 1 {
				t.Errorf("%d sends pending in the middle of one", n)
			}
		}, 0},
	} {
		q := g.newQueue(nil)
		c.post(q)
		if err := g.dev.Flush(ctx, reg); err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
		if n := q.Pending(); n != c.want {
			t.Errorf("%s: %d requests pending, want %d", c.name, n, c.want)
		}
		g.must(q.Close())
	}
	// A send that nobody receives.
	q := g.newQueue(nil)
	send.Local[0] = simhca.SegmentOf(reg, r)
	g.must(q.Post(send))
	g.wantError("stuck", g.dev.Flush(ctx, reg), device.ErrBusy)
	g.must(q.Close())
	g.must(g.dev.Flush(ctx, reg))
	g.must(g.dev.Withdraw(ctx, x))
	g.must(g.dev.Deregister(reg))
	g.wantError("dead", g.dev.Flush(ctx, reg), device.ErrNotRegistered)
}

func TestFlushContext(t *testing.T) {
	g := newRig(t, simhca.Options{}, true)
	reg := g.register(g.mapped(1, 'x'), allAcc)
	g.must(g.queue.Post(simhca.WorkRequest{Op: simhca.OpSend, Local: []simhca.Segment{simhca.SegmentOf(reg, reg.Range)}}))
	c, cancel := context.WithCancel(ctx)
	errs := make(chan error)
	go func() { errs <- g.dev.Flush(c, reg) }()
	cancel()
	g.wantError("flush", <-errs, context.Canceled)
	// The work completes after all, and so does a flush.
	go func() { errs <- g.dev.Flush(ctx, reg) }()
	to := g.scratch(1, 0)
	g.must(g.queue.PostReceive(1, simhca.SegmentOf(to, to.Range)))
	g.must(<-errs)
}

// Queue order replaces the flush: what was posted before the invalidation sees
// the old pages, what was posted after the fast-register the new ones, what
// carries the key between the two fails.
func TestFastRegisterOrder(t *testing.T) {
	for seed := range uint64(fewer(100)) {
		for _, rotate := range []bool{false, true} {
			g := newRigSeed(t, simhca.Options{}, seed)
			r := g.mapped(3, 'x')
			old := g.register(r, allAcc)
			k := g.fastKey(r, old)
			g.must(g.dev.Deregister(old)) // The key holds the pages itself.
			before, after := g.scratch(3, 0), g.scratch(3, 0)
			g.replace(r, 'y')
			fresh := g.register(r, allAcc)
			key := k.Key
			if rotate {
				key = device.NextKey(key)
			}
			g.must(g.queue.Post(read(1, before, r.Start, k.Key)))
			g.must(g.queue.Post(write(2, after, before.Range.Start, 0))) // Something else.
			g.must(g.queue.Post(invalidate(3, k.Key)))
			g.must(g.queue.Post(fastRegister(4, key, fresh, r, device.RemoteRead)))
			g.must(g.queue.Post(read(5, after, r.Start, key)))
			g.must(g.queue.Post(read(6, after, r.Start, key)))
			g.stepper.Run()
			if g.queue.Failed() {
				// Request 2 has a bad key: everything after it is flushed and
				// the old key still means the old pages.
				g.wantSees("old key of a flushed invalidation", r, k.Key, 'x')
			} else {
				t.Error("a request with key zero didn't fail")
			}
			g.must(simhca.Connect(g.fresh(), g.queue))
			g.must(g.queue.Post(read(1, before, r.Start, k.Key)))
			g.must(g.queue.Post(invalidate(3, k.Key)))
			g.must(g.queue.Post(fastRegister(4, key, fresh, r, device.RemoteRead)))
			g.must(g.queue.Post(read(5, after, r.Start, key)))
			g.stepper.Run()
			if b, a := g.memory(before.Range), g.memory(after.Range); b != 'x' || a != 'y' || g.queue.Failed() {
				t.Fatalf("seed %d: before the change a peer sees %q, after it %q", seed, b, a)
			}
			if s := g.space.Stats(); s.Orphans != 0 {
				t.Errorf("%d old pages are still pinned", s.Orphans)
			}
			if rotate {
				g.wantDead("a late peer's old key", r, k.Key)
			}
			// Between the two the key means nothing.
			g.must(g.queue.Post(invalidate(6, key)))
			g.must(g.queue.Post(read(7, after, r.Start, key)))
			g.must(g.queue.Post(fastRegister(8, key, fresh, r, device.RemoteRead)))
			g.stepper.Run()
			var done [16]simhca.Completion
			n := g.queue.CompletionQueue().Poll(done[:])
			last := done[n-2 : n]
			if last[0].Status != simhca.StatusRemoteAccess || last[1].Status != simhca.StatusFlushed {
				t.Errorf("seed %d: between invalidation and fast-register: %v, then %v", seed, last[0].Status, last[1].Status)
			}
			g.close()
		}
	}
}

// The pages of a fast-register are those of its posting, whatever becomes of
// the registration.
func TestFastRegisterPages(t *testing.T) {
	g := newRig(t, simhca.Options{}, false)
	r := g.mapped(2, 'x')
	reg := g.register(r, device.LocalWrite)
	k, err := g.dev.AllocFastKey(ctx, page)
	g.must(err)
	half := vm.Range{Start: r.Start + page, End: r.End}
	g.must(g.queue.Post(fastRegister(1, k.Key, reg, half, device.RemoteRead)))
	g.replace(r, 'y')
	_, err = g.dev.Update(ctx, reg)
	g.must(err)
	g.must(g.dev.Deregister(reg))
	g.stepper.Run()
	g.wantSees("fast key", half, k.Key, 'x')
	g.wantDead("beyond its range", vm.Range{Start: r.Start, End: half.End}, k.Key)
	if s := g.space.Stats(); s.Orphans != 2 {
		t.Errorf("%d orphans, want 2", s.Orphans)
	}
}

// Updates under load, with real concurrency: strict never lets a request see
// new pages while one on old pages is under way; atomic never fails a request.
func TestUpdateConcurrent(t *testing.T) {
	rounds := fewer(400)
	for _, strict := range []bool{false, true} {
		g := newRig(t, simhca.Options{HoldRevoked: true}, true)
		const pages, peers = 4, 3
		r := g.mapped(pages, 0)
		reg := g.register(r, allAcc)
		var stop atomic.Bool
		var reads atomic.Int64
		var wg sync.WaitGroup
		for range peers {
			q, to := g.newQueue(nil), g.scratch(pages, 0)
			wg.Go(func() {
				last := byte(0)
				for !stop.Load() {
					if s := g.do(q, read(1, to, r.Start, reg.RemoteKey)); s != simhca.StatusSuccess {
						t.Errorf("strict %v: %v", strict, s)
						return
					}
					b := make([]byte, to.Range.Len())
					if err := g.space.Load(to.Range.Start, b); err != nil {
						t.Error(err)
						return
					}
					for i := range pages {
						c := uniform(b[i*page : (i+1)*page])
						// A version never goes back: modulo 100, by less than half.
						if c == 0xff || (c+100-last)%100 > 50 {
							t.Errorf("strict %v: page %d has version %d after %d", strict, i, c, last)
							return
						}
						last = c
					}
					reads.Add(1)
				}
			})
		}
		for i := range rounds {
			var err error
			if strict {
				if err = g.dev.Revoke(ctx, reg); err == nil {
					// The processor writes the new version while nobody can
					// reach either.
					g.replace(r, byte(i%100))
					_, err = g.dev.Load(ctx, reg)
				}
			} else {
				g.replaceAtOnce(r, byte(i%100))
				_, err = g.dev.Update(ctx, reg)
			}
			g.must(err)
			// Each version is seen by somebody, or the test shows little.
			for seen := reads.Load(); reads.Load() < seen+1 && !t.Failed(); {
				runtime.Gosched()
			}
		}
		stop.Store(true)
		wg.Wait()
		if t.Failed() {
			return
		}
		g.must(g.dev.Flush(ctx, reg))
		if s := g.space.Stats(); s.Orphans != 0 {
			t.Errorf("strict %v: %d old pages are still pinned", strict, s.Orphans)
		}
	}
}

// replaceAtOnce moves filled pages to r, so that nobody sees them half filled.
func (g *rig) replaceAtOnce(r vm.Range, c byte) {
	g.t.Helper()
	from := g.mapped(r.Pages(page), c)
	g.must(g.space.Remap(from, r))
}

// Other calls on a registration while one is in the middle of its work.
func TestBusy(t *testing.T) {
	var g *rig
	var reg device.Registration
	var verb simhca.Verb
	calls := 0
	g = newRig(t, simhca.Options{Fault: func(f simhca.Fault) error {
		if f.Verb != verb {
			return nil
		}
		calls++
		verb = simhca.VerbInvalid
		_, update := g.dev.Update(ctx, reg)
		for _, err := range []error{g.dev.Deregister(reg), update, g.dev.Revoke(ctx, reg)} {
			g.wantError(f.Verb.String(), err, device.ErrBusy)
		}
		if f.Verb == simhca.VerbDeregister {
			_, err := g.dev.Expose(ctx, reg, reg.Range, device.RemoteRead)
			g.wantError("expose", err, device.ErrBusy)
			k, err := g.dev.AllocFastKey(ctx, page)
			g.must(err)
			g.wantError("fast-register", g.queue.Post(fastRegister(1, k.Key, reg, reg.Range, device.RemoteRead)), device.ErrBusy)
		}
		return nil
	}}, false)
	reg = g.register(g.mapped(1, 'x'), allAcc)
	verb = simhca.VerbUpdate
	_, err := g.dev.Update(ctx, reg)
	g.must(err)
	verb = simhca.VerbRevoke
	g.must(g.dev.Revoke(ctx, reg))
	verb = simhca.VerbLoad
	_, err = g.dev.Load(ctx, reg)
	g.must(err)
	verb = simhca.VerbDeregister
	g.must(g.dev.Deregister(reg))
	if calls != 4 {
		t.Errorf("%d verbs looked into, want 4", calls)
	}
}

// A device without a capability says so and does nothing.
func TestWithout(t *testing.T) {
	g := newRig(t, simhca.Options{Without: simhca.CanUpdate | simhca.CanRevoke | simhca.CanFlush | simhca.CanExpose | simhca.CanFastRegister}, false)
	r := g.mapped(1, 'x')
	reg := g.register(r, allAcc)
	_, update := g.dev.Update(ctx, reg)
	_, load := g.dev.Load(ctx, reg)
	_, expose := g.dev.Expose(ctx, reg, r, device.RemoteRead)
	_, alloc := g.dev.AllocFastKey(ctx, page)
	_, window := g.dev.ProtectionDomain().AllocWindow(ctx)
	for i, err := range []error{
		update, load, expose, alloc, window, g.dev.Revoke(ctx, reg), g.dev.Flush(ctx, reg), g.dev.Withdraw(ctx, device.Exposure{}),
		g.queue.PostLocalInvalidate(device.LocalInvalidate{Key: reg.LocalKey}),
		g.queue.PostFastRegister(device.FastRegister{Key: 1, Over: reg, Range: r}),
	} {
		if !errors.Is(err, device.ErrNotSupported) {
			t.Errorf("call %d: %v, want %v", i, err, device.ErrNotSupported)
		}
	}
	g.wantSees("after all", r, reg.RemoteKey, 'x')
	g.must(g.dev.Deregister(reg))
}
