package simhca_test

import (
	"sync"
	"sync/atomic"
	"testing"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/simhca"
	"github.com/pindown/pindown/vm"
)

// An exposure reaches its range with its access, and nothing once withdrawn;
// the registration stays.
func TestExpose(t *testing.T) {
	g := newRig(t, simhca.Options{}, false)
	r := g.mapped(3, 'x')
	part := vm.Range{Start: r.Start + 100, End: r.End - 100}
	// The registration itself opens nothing to peers.
	reg := g.register(r, device.LocalWrite|device.WindowBind)
	if reg.RemoteKey != 0 {
		t.Errorf("remote key %#x without remote access", reg.RemoteKey)
	}
	from := g.scratch(1, 'w')
	poke := func(addr uintptr, key uint32) simhca.Status {
		t.Helper()
		q := g.newQueue(nil)
		defer q.Close()
		wr := write(1, from, addr, key)
		wr.Local[0].Length = 1
		return g.do(q, wr)
	}
	g.wantDead("registration's key", r, reg.LocalKey)
	readers, err := g.dev.Expose(ctx, reg, part, device.RemoteRead)
	g.must(err)
	if readers.Range != part || readers.Access != device.RemoteRead || readers.RemoteKey == 0 {
		t.Errorf("exposed %+v", readers)
	}
	writers, err := g.dev.Expose(ctx, reg, part, device.RemoteWrite)
	g.must(err)
	g.wantSees("exposed", part, readers.RemoteKey, 'x')
	g.wantDead("a byte more", vm.Range{Start: part.Start, End: part.End + 1}, readers.RemoteKey)
	g.wantDead("a byte before", vm.Range{Start: part.Start - 1, End: part.End}, readers.RemoteKey)
	g.wantDead("for reading", part, writers.RemoteKey)
	g.wantStatus("write for reading", poke(part.Start, readers.RemoteKey), simhca.StatusRemoteAccess)
	g.wantStatus("write", poke(part.Start, writers.RemoteKey), simhca.StatusSuccess)
	g.wantStatus("write at the end", poke(part.End-1, writers.RemoteKey), simhca.StatusSuccess)
	g.wantStatus("write beyond the end", poke(part.End, writers.RemoteKey), simhca.StatusRemoteAccess)
	q := g.newQueue(nil)
	g.wantStatus("as a local key", g.do(q, simhca.WorkRequest{
		Op: simhca.OpWrite, RemoteAddr: from.Range.Start, Local: []simhca.Segment{{Addr: part.Start, Length: 1, Key: readers.RemoteKey}},
	}), simhca.StatusLocalProtection)

	// It follows its registration.
	g.replace(r, 'y')
	_, err = g.dev.Update(ctx, reg)
	g.must(err)
	g.wantSees("after an update", part, readers.RemoteKey, 'y')
	g.must(g.dev.Revoke(ctx, reg))
	g.wantDead("revoked", part, readers.RemoteKey)
	_, err = g.dev.Expose(ctx, reg, part, device.RemoteRead)
	g.wantError("expose what is revoked", err, device.ErrRevoked)
	_, err = g.dev.Load(ctx, reg)
	g.must(err)
	g.wantSees("loaded", part, readers.RemoteKey, 'y')

	g.wantError("deregister while exposed", g.dev.Deregister(reg), device.ErrBusy)
	g.wantSees("still exposed", part, readers.RemoteKey, 'y')
	g.must(g.dev.Withdraw(ctx, readers))
	g.wantDead("withdrawn", part, readers.RemoteKey)
	g.wantError("withdraw again", g.dev.Withdraw(ctx, readers), device.ErrNotExposed)
	g.wantStatus("the other exposure", poke(part.Start, writers.RemoteKey), simhca.StatusSuccess)
	g.must(g.dev.Withdraw(ctx, writers))
	g.must(g.dev.Deregister(reg))
	g.wantError("withdraw nothing", g.dev.Withdraw(ctx, device.Exposure{}), device.ErrNotExposed)
}

func TestExposeErrors(t *testing.T) {
	g := newRig(t, simhca.Options{Limits: device.Limits{MaxRegistrations: 4}}, false)
	r := g.mapped(2, 'x')
	reg := g.register(r, device.WindowBind)
	plain := g.register(r, device.LocalWrite)
	dead := g.register(r, device.WindowBind)
	g.must(g.dev.Deregister(dead))
	for _, c := range []struct {
		name   string
		reg    device.Registration
		r      vm.Range
		access device.Access
		want   error
	}{
		{"empty", reg, vm.Range{}, device.RemoteRead, device.ErrInvalid},
		{"too long", reg, vm.Range{Start: r.Start, End: r.End + 1}, device.RemoteRead, device.ErrInvalid},
		{"no access", reg, r, 0, device.ErrAccess},
		{"local access", reg, r, device.LocalWrite, device.ErrAccess},
		{"write to memory for reading", reg, r, device.RemoteWrite, device.ErrAccess},
		{"no window access", plain, r, device.RemoteRead, device.ErrAccess},
		{"dead", dead, r, device.RemoteRead, device.ErrNotRegistered},
	} {
		_, err := g.dev.Expose(ctx, c.reg, c.r, c.access)
		g.wantError(c.name, err, c.want)
	}
	for range 2 {
		_, err := g.dev.Expose(ctx, reg, r, device.RemoteRead)
		g.must(err)
	}
	_, err := g.dev.Expose(ctx, reg, r, device.RemoteRead)
	g.wantError("table full", err, device.ErrNoSlots)
}

// Windows that work requests bind: in the queue's order, with keys that the
// consumer rotates.
func TestBind(t *testing.T) {
	g := newRig(t, simhca.Options{}, false)
	r := g.mapped(2, 'x')
	reg := g.register(r, allAcc)
	w, err := g.dev.ProtectionDomain().AllocWindow(ctx)
	g.must(err)
	to := g.scratch(2, 0)
	key := w.Key
	for range 3 {
		g.must(g.queue.Post(simhca.WorkRequest{ID: 1, Op: simhca.OpBind, Bind: &simhca.Bind{Key: key, Over: reg, Range: r, Access: device.RemoteRead}}))
		g.must(g.queue.Post(read(2, to, r.Start, key)))
		g.must(g.queue.Post(invalidate(3, key)))
		g.stepper.Run()
		if g.queue.Failed() || g.memory(to.Range) != 'x' {
			t.Fatalf("queue failed %v, read %q", g.queue.Failed(), g.memory(to.Range))
		}
		g.wantDead("unbound", r, key)
		key = device.NextKey(key)
	}
	g.must(g.dev.Deregister(reg)) // Nothing is bound to it.
	g.must(g.dev.FreeFastKey(w))
}

// 100 000 times a peer reads and writes as fast as it can through a key that is
// withdrawn under it. Once Withdraw has returned nothing arrives, and the peer
// gets an error; the registration is never disturbed.
func TestWithdrawConcurrent(t *testing.T) {
	tries := 100_000
	if testing.Short() || raceEnabled {
		tries = 5_000
	}
	g := newRig(t, simhca.Options{}, true)
	r := g.mapped(1, 0)
	reg := g.register(r, device.LocalWrite|device.WindowBind)
	type peer struct {
		q    *simhca.Queue
		from device.Registration
	}
	const peers = 2
	var key atomic.Uint32
	var round, refused, accepted atomic.Int64
	var stop atomic.Bool
	var wg sync.WaitGroup
	for range peers {
		p := peer{g.newQueue(nil), g.scratch(1, 'w')}
		wg.Go(func() {
			for !stop.Load() {
				at := round.Load()
				wr := write(1, p.from, r.Start, key.Load())
				switch s := g.do(p.q, wr); s {
				case simhca.StatusSuccess:
					accepted.Add(1)
				case simhca.StatusRemoteAccess:
					refused.Add(1)
					if err := simhca.Connect(p.q, p.q); err != nil {
						t.Error(err)
						return
					}
				default:
					t.Errorf("round %d: %v", at, s)
					return
				}
			}
		})
	}
	zero := make([]byte, page)
	got := make([]byte, page)
	for i := range tries {
		x, err := g.dev.Expose(ctx, reg, r, device.RemoteWrite)
		g.must(err)
		key.Store(x.RemoteKey)
		round.Add(1)
		if i%16 == 0 { // Let somebody through.
			for n := accepted.Load(); accepted.Load() == n && !t.Failed(); {
			}
		}
		g.must(g.dev.Withdraw(ctx, x))
		// From here on nothing may arrive.
		g.must(g.space.Store(r.Start, zero))
		if i%16 == 8 { // Let somebody be refused.
			for n := refused.Load(); refused.Load() == n && !t.Failed(); {
			}
		}
		g.must(g.space.Load(r.Start, got))
		if uniform(got) != 0 {
			t.Fatalf("try %d: something arrived after Withdraw", i)
		}
		if t.Failed() {
			break
		}
	}
	stop.Store(true)
	wg.Wait()
	t.Logf("%d tries, %d writes accepted, %d refused", tries, accepted.Load(), refused.Load())
	if accepted.Load() < int64(tries/16) || refused.Load() < int64(tries/16) {
		t.Error("too few for the test to mean anything")
	}
}
