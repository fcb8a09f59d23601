package simhca_test

import (
	"testing"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/simhca"
	"github.com/pindown/pindown/vm"
)

// What a key doesn't allow is refused at the end that it belongs to.
func TestKeyChecks(t *testing.T) {
	g := newRig(t, simhca.Options{}, false)
	r := g.mapped(4, 'x')
	mid := vm.Range{Start: r.Start + 100, End: r.End - 100}
	full := g.register(mid, allAcc)
	readOnly := g.register(mid, device.RemoteRead)
	localOnly := g.register(mid, device.LocalWrite)
	buf := g.scratch(4, 'b')
	constant := g.register(buf.Range, device.LocalRead)
	other, err := g.dev.NewProtectionDomain().Register(ctx, mid, allAcc)
	g.must(err)
	gone := g.register(mid, allAcc)
	g.must(g.dev.Deregister(gone))

	req := func(op simhca.Opcode, addr uintptr, key uint32, n uintptr, local device.Registration) simhca.WorkRequest {
		return simhca.WorkRequest{Op: op, RemoteAddr: addr, RemoteKey: key, Local: []simhca.Segment{{Addr: local.Range.Start, Length: n, Key: local.LocalKey}}}
	}
	const w, rd = simhca.OpWrite, simhca.OpRead
	const ok, remote, local = simhca.StatusSuccess, simhca.StatusRemoteAccess, simhca.StatusLocalProtection
	n := mid.Len()
	for _, c := range []struct {
		name string
		wr   simhca.WorkRequest
		want simhca.Status
	}{
		{"whole range", req(w, mid.Start, full.RemoteKey, n, buf), ok},
		{"read whole range", req(rd, mid.Start, full.RemoteKey, n, buf), ok},
		{"last byte", req(w, mid.End-1, full.RemoteKey, 1, buf), ok},
		{"nothing, under no key", req(w, 0, 0, 0, buf), ok},
		{"byte before", req(w, mid.Start-1, full.RemoteKey, 1, buf), remote},
		{"byte after", req(w, mid.End, full.RemoteKey, 1, buf), remote},
		{"one too long", req(w, mid.Start, full.RemoteKey, n+1, buf), remote},
		{"far away", req(w, 1<<60, full.RemoteKey, 1, buf), remote},
		{"end of the address space", req(w, ^uintptr(0)-2, full.RemoteKey, 2, buf), remote},
		{"write by a key for reading", req(w, mid.Start, readOnly.RemoteKey, 1, buf), remote},
		{"read by a key for reading", req(rd, mid.Start, readOnly.RemoteKey, 1, buf), ok},
		{"local key as a remote key", req(rd, mid.Start, localOnly.LocalKey, 1, buf), remote},
		{"other protection domain", req(rd, mid.Start, other.RemoteKey, 1, buf), remote},
		{"local key of another domain", req(w, mid.Start, full.RemoteKey, 1, other), local},
		{"other consumer part", req(rd, mid.Start, device.NextKey(full.RemoteKey), 1, buf), remote},
		{"dead key", req(rd, mid.Start, gone.RemoteKey, 1, buf), remote},
		{"dead local key", req(w, mid.Start, full.RemoteKey, 1, gone), local},
		{"key zero", req(rd, mid.Start, 0, 1, buf), remote},
		{"key that was never used", req(rd, mid.Start, 1<<31, 1, buf), remote},
		{"local too long", req(w, mid.Start, full.RemoteKey, buf.Range.Len()+1, buf), remote},
		{"read into memory for reading", req(rd, mid.Start, full.RemoteKey, 1, constant), local},
		{"write from memory for reading", req(w, mid.Start, full.RemoteKey, 1, constant), ok},
	} {
		q := g.newQueue(nil)
		g.wantStatus(c.name, g.do(q, c.wr), c.want)
		if q.Failed() != (c.want != ok) {
			t.Errorf("%s: queue in error: %v", c.name, q.Failed())
		}
		if c.want != ok {
			g.wantStatus(c.name+", next", g.do(q, req(rd, mid.Start, full.RemoteKey, 1, buf)), simhca.StatusFlushed)
		}
		g.must(q.Close())
	}
}

// The consumer part changes with each use of an entry, so that an old key
// fails; after 256 uses it is back.
func TestKeyRotation(t *testing.T) {
	a := newRig(t, simhca.Options{}, false)
	b := newRig(t, simhca.Options{Stepper: a.stepper, Limits: device.Limits{MaxRegistrations: 1}}, true)
	to := a.scratch(1, 0)
	sees := func(r vm.Range, key uint32) simhca.Status {
		t.Helper()
		qa, err := a.dev.ProtectionDomain().NewQueue(nil)
		a.must(err)
		qb, err := b.dev.ProtectionDomain().NewQueue(nil)
		b.must(err)
		a.must(simhca.Connect(qa, qb))
		status := a.do(qa, read(1, to, r.Start, key))
		a.must(qa.Close())
		b.must(qb.Close())
		return status
	}
	r := b.mapped(1, 'x')
	first := b.register(r, allAcc)
	b.must(b.dev.Deregister(first))
	for i := 1; i <= 256; i++ {
		reg := b.register(r, allAcc)
		if reg.LocalKey == 0 || !device.SameKeyIndex(reg.LocalKey, first.LocalKey) || (reg.LocalKey == first.LocalKey) != (i == 256) {
			t.Fatalf("key %#x after %d uses of the entry, the first was %#x", reg.LocalKey, i, first.LocalKey)
		}
		b.wantStatus("present key", sees(r, reg.RemoteKey), simhca.StatusSuccess)
		if i < 256 {
			b.wantStatus("old key", sees(r, first.RemoteKey), simhca.StatusRemoteAccess)
		}
		b.wantError("old handle", b.dev.Deregister(first), device.ErrNotRegistered)
		b.must(b.dev.Deregister(reg))
	}
	// With entries to spare, one that was freed rests.
	old := a.register(a.mapped(1, 0), 0)
	a.must(a.dev.Deregister(old))
	for range 32 {
		reg := a.register(old.Range, 0)
		if device.SameKeyIndex(reg.LocalKey, old.LocalKey) {
			t.Error("an entry that has just been freed is used again")
		}
		a.must(a.dev.Deregister(reg))
	}
}

// The same for a key that the consumer rotates, request by request.
func TestFastKeyRotation(t *testing.T) {
	g := newRig(t, simhca.Options{}, false)
	r := g.mapped(1, 'x')
	reg := g.register(r, allAcc)
	k, err := g.dev.AllocFastKey(ctx, page)
	g.must(err)
	key := k.Key
	for i := range 257 {
		g.wantStatus("fast-register", g.do(g.queue, fastRegister(1, key, reg, r, device.RemoteRead)), simhca.StatusSuccess)
		if i%32 == 0 || i > 254 {
			g.wantSees("present key", r, key, 'x')
			if key != k.Key {
				g.wantDead("first key", r, k.Key)
			}
		}
		g.wantStatus("local-invalidate", g.do(g.queue, invalidate(2, key)), simhca.StatusSuccess)
		if i%32 == 0 {
			g.wantDead("invalidated key", r, key)
		}
		if next := device.NextKey(key); !device.SameKeyIndex(next, key) || next == key {
			t.Fatalf("next of %#x is %#x", key, next)
		} else if i != 256 {
			key = next
		}
	}
	if key != k.Key {
		t.Errorf("key %#x after 256 rotations, want %#x again", key, k.Key)
	}
	g.must(g.dev.FreeFastKey(k))
	g.wantError("free again", g.dev.FreeFastKey(k), device.ErrNotRegistered)
}

// Keys don't fit whatever is asked of them.
func TestFastKeyMisuse(t *testing.T) {
	const mm, flushed = simhca.StatusMemoryManagement, simhca.StatusFlushed
	g := newRig(t, simhca.Options{}, false)
	r := g.mapped(2, 'x')
	half := vm.Range{Start: r.Start, End: r.Start + page}
	reg := g.register(r, allAcc)
	constant := g.register(r, device.RemoteRead)
	k, err := g.dev.AllocFastKey(ctx, page)
	g.must(err)
	w, err := g.dev.ProtectionDomain().AllocWindow(ctx)
	g.must(err)
	dead := g.register(r, allAcc)
	g.must(g.dev.Deregister(dead))
	revoked := g.register(r, allAcc)
	g.must(g.dev.Revoke(ctx, revoked))

	// Refused when posted: nothing happens to the queue.
	bind := func(key uint32, over device.Registration, r vm.Range, a device.Access) simhca.WorkRequest {
		return simhca.WorkRequest{Op: simhca.OpBind, Bind: &simhca.Bind{Key: key, Over: over, Range: r, Access: a}}
	}
	for _, c := range []struct {
		name string
		wr   simhca.WorkRequest
		want error
	}{
		{"no opcode", simhca.WorkRequest{}, device.ErrInvalid},
		{"receive", simhca.WorkRequest{Op: simhca.OpReceive}, device.ErrInvalid},
		{"no arguments", simhca.WorkRequest{Op: simhca.OpFastRegister}, device.ErrInvalid},
		{"segment that wraps", simhca.WorkRequest{Op: simhca.OpWrite, Local: []simhca.Segment{{Addr: ^uintptr(0), Length: 2}}}, device.ErrInvalid},
		{"fast-register too long", fastRegister(1, k.Key, reg, r, device.RemoteRead), device.ErrTooLarge},
		{"fast-register of another range", fastRegister(1, k.Key, reg, vm.Range{Start: r.End, End: r.End + 1}, 0), device.ErrInvalid},
		{"fast-register for writing over reading", fastRegister(1, k.Key, constant, half, device.LocalWrite), device.ErrAccess},
		{"fast-register, invalid access", fastRegister(1, k.Key, reg, half, device.RemoteWrite), device.ErrAccess},
		{"fast-register of a registration's key", fastRegister(1, reg.LocalKey, reg, half, 0), device.ErrInvalid},
		{"fast-register of a window", fastRegister(1, w.Key, reg, half, 0), device.ErrInvalid},
		{"fast-register of no key", fastRegister(1, 0, reg, half, 0), device.ErrInvalid},
		{"fast-register over the dead", fastRegister(1, k.Key, dead, half, 0), device.ErrNotRegistered},
		{"fast-register over the revoked", fastRegister(1, k.Key, revoked, half, 0), device.ErrRevoked},
		{"invalidate a registration", invalidate(1, reg.LocalKey), device.ErrInvalid},
		{"bind a fast key", bind(k.Key, reg, half, device.RemoteRead), device.ErrInvalid},
		{"bind over the dead", bind(w.Key, dead, half, device.RemoteRead), device.ErrNotRegistered},
		{"bind over what has no bind access", bind(w.Key, constant, half, device.RemoteRead), device.ErrAccess},
		{"bind with local access", bind(w.Key, reg, half, device.LocalWrite), device.ErrAccess},
	} {
		g.wantError(c.name, g.queue.Post(c.wr), c.want)
	}
	if g.queue.Failed() || g.stepper.Step() {
		t.Error("something was posted")
	}

	// Refused when executed: the key is as it was.
	other, err := g.dev.NewProtectionDomain().AllocFastKey(ctx, page)
	g.must(err)
	refused := func(name string, wr simhca.WorkRequest) {
		t.Helper()
		g.must(simhca.Connect(g.fresh(), g.queue))
		g.wantStatus(name, g.do(g.queue, wr), mm)
		g.wantStatus(name+", next", g.do(g.queue, wr), flushed)
	}
	refused("invalidate what means nothing", invalidate(1, k.Key))
	refused("fast-register in another domain", fastRegister(1, other.Key, reg, half, device.RemoteRead))
	g.must(simhca.Connect(g.fresh(), g.queue))
	g.wantStatus("fast-register", g.do(g.queue, fastRegister(1, k.Key, reg, half, device.RemoteRead)), simhca.StatusSuccess)
	g.must(g.fail())
	refused("fast-register what means something", fastRegister(1, device.NextKey(k.Key), reg, half, device.RemoteRead))
	refused("invalidate with another consumer part", invalidate(1, device.NextKey(k.Key)))
	g.wantSees("fast key after misuse", half, k.Key, 'x')
	g.wantError("free in use", g.dev.FreeFastKey(k), device.ErrBusy)
}

// fresh closes the rig's queue if it is in error, and returns a new peer for
// another in its place.
func (g *rig) fresh() *simhca.Queue {
	g.t.Helper()
	g.must(g.queue.Close())
	var err error
	g.queue, err = g.dev.ProtectionDomain().NewQueue(nil)
	g.must(err)
	p, err := g.dev.ProtectionDomain().NewQueue(nil)
	g.must(err)
	return p
}

// fail replaces the rig's queue by one in error.
func (g *rig) fail() error {
	g.t.Helper()
	err := g.queue.Close()
	g.queue = g.newQueue(nil)
	return err
}
