package iouring_test

import (
	"context"
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/iouring"
	"github.com/pindown/pindown/vm"
)

// TestFlush: requests that use the slot are counted from the time they are queued
// until their completions are taken, others aren't; user data comes back.
func TestFlush(t *testing.T) {
	d := open(t, nil)
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	defer func() { _, _ = unix.Close(p[0]), unix.Close(p[1]) }()
	mem := mapAnon(t, 1)
	r := vm.RangeOf(mem[:1])
	reg, err := d.Register(t.Context(), vm.RangeOf(mem), 0)
	if err != nil {
		t.Fatal(err)
	}
	other, err := d.Register(t.Context(), vm.RangeOf(mem), 0)
	if err != nil {
		t.Fatal(err)
	}
	check := func(what string, reg device.Registration, want error) {
		t.Helper()
		if err := d.Flush(t.Context(), reg); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", what, err, want)
		}
	}
	ring := d.Ring()
	check("nothing queued", reg, nil)
	// More than the table of requests has room for at first.
	entries, completions := ring.Entries()
	n := 0
	for range (entries+completions)/entries + 1 {
		for range entries {
			if err := ring.ReadFixed(p[0], r, -1, reg.LocalKey, ^uint64(n)); err != nil {
				t.Fatal(err)
			}
			n++
		}
		check("queued", reg, device.ErrBusy)
		if m, err := ring.Submit(); m != entries || err != nil {
			t.Fatal(m, err)
		}
	}
	check("in flight", reg, device.ErrBusy)
	check("another registration", other, nil)
	if err := ring.Read(p[0], r, -1, 7); err != nil {
		t.Fatal(err)
	}
	if _, err := unix.Write(p[1], make([]byte, n+1)); err != nil {
		t.Fatal(err)
	}
	seen := map[uint64]bool{}
	for _, c := range do(t, ring, n+1) {
		if c.Res != 1 || seen[c.UserData] || c.UserData != 7 && ^c.UserData >= uint64(n) {
			t.Fatalf("completion %+v, of %d requests", c, n)
		}
		seen[c.UserData] = true
	}
	check("all over", reg, nil)
	// A request that fails is over too; so is one under a revoked slot.
	if err := d.Revoke(t.Context(), reg); err != nil {
		t.Fatal(err)
	}
	if err := ring.ReadFixed(p[0], r, -1, reg.LocalKey, 1); err != nil {
		t.Fatal(err)
	}
	check("queued under a revoked slot", reg, device.ErrBusy)
	if c := do(t, ring, 1)[0]; !errors.Is(c.Err(), unix.EFAULT) {
		t.Errorf("%+v", c)
	}
	check("failed", reg, nil)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := d.Flush(ctx, reg); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if err := errors.Join(d.Deregister(reg), d.Deregister(other)); err != nil {
		t.Error(err)
	}
	check("deregistered", reg, device.ErrNotRegistered)
}

// TestFlushCallersRing: what is posted to somebody else's ring isn't known.
func TestFlushCallersRing(t *testing.T) {
	ring := newRing(t, nil)
	d, err := iouring.New(ring.Fd(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	reg, err := d.Register(t.Context(), vm.RangeOf(mapAnon(t, 1)), 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Flush(t.Context(), reg); !errors.Is(err, device.ErrNotSupported) {
		t.Error(err)
	}
	if err := d.Deregister(reg); err != nil {
		t.Error(err)
	}
}
