package simhca_test

import (
	"runtime"
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

// 100 000 times a key is withdrawn while peers' writes under it are in flight.
// They arrive or are refused; once Withdraw has returned nothing arrives, and
// whoever tries gets an error. The registration isn't disturbed.
func TestWithdrawConcurrent(t *testing.T) {
	tries := fewer(100_000)
	g := newRig(t, simhca.Options{}, true)
	r := g.mapped(1, 0)
	reg := g.register(r, device.LocalWrite|device.WindowBind)
	const workers, early = 4, 3
	var arrived, refused atomic.Int64
	var wg sync.WaitGroup
	for w := range uintptr(workers) {
		part := vm.Range{Start: r.Start + w*page/workers, End: r.Start + (w+1)*page/workers}
		q := g.newQueue(nil)
		from := g.register(g.mapped(1, 'w'), device.LocalRead)
		wg.Go(func() {
			for i := range tries / workers {
				x, err := g.dev.Expose(ctx, reg, part, device.RemoteWrite)
				if err != nil {
					t.Error(err)
					return
				}
				wr := write(1, from, part.Start, x.RemoteKey)
				wr.Local[0].Length = part.Len()
				for range early {
					if err := q.Post(wr); err != nil {
						t.Error(err)
						return
					}
				}
				for range i % 4 { // Not always before the first has begun.
					runtime.Gosched()
				}
				if err := g.dev.Withdraw(ctx, x); err != nil {
					t.Error(err)
					return
				}
				if err := g.space.Store(part.Start, make([]byte, part.Len())); err != nil {
					t.Error(err)
					return
				}
				for range early {
					c, err := q.CompletionQueue().Wait(ctx)
					if err != nil {
						t.Error(err)
						return
					}
					switch c.Status {
					case simhca.StatusSuccess:
						arrived.Add(1)
					case simhca.StatusRemoteAccess, simhca.StatusFlushed:
						refused.Add(1)
					default:
						t.Errorf("try %d: %v", i, c.Status)
						return
					}
				}
				if q.Failed() {
					if err := simhca.Connect(q, q); err != nil {
						t.Error(err)
						return
					}
				}
				if s := g.do(q, wr); s != simhca.StatusRemoteAccess {
					t.Errorf("try %d: a peer that comes late gets %v", i, s)
				}
				if err := simhca.Connect(q, q); err != nil {
					t.Error(err)
				}
				if c := g.memory(part); c != 0 {
					t.Errorf("try %d: memory has %q after Withdraw", i, c)
				}
				if t.Failed() {
					return
				}
			}
		})
	}
	wg.Wait()
	t.Logf("%d tries: %d writes arrived, %d were refused", tries, arrived.Load(), refused.Load())
	if few := int64(tries / 100); arrived.Load() < few || refused.Load() < few {
		t.Error("withdrawals don't meet writes in flight")
	}
}
