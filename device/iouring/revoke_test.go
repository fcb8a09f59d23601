package iouring_test

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/vm"
)

// TestRevoke: an emptied slot serves nothing, stays the registration's, and serves
// the pages mapped when it is loaded.
func TestRevoke(t *testing.T) {
	d := open(t, nil)
	fd := memfd(t)
	mem := mapAnon(t, 1)
	r := vm.RangeOf(mem)
	fill(mem, 'x')
	reg, err := d.Register(t.Context(), r, 0)
	if err != nil {
		t.Fatal(err)
	}
	write := func(off int64) error {
		if err := d.Ring().WriteFixed(fd, r, off, reg.LocalKey, 0); err != nil {
			t.Fatal(err)
		}
		return do(t, d.Ring(), 1)[0].Err()
	}
	if _, err := d.Load(t.Context(), reg); !errors.Is(err, device.ErrNotRevoked) {
		t.Errorf("load of what isn't revoked: %v", err)
	}
	for range 2 {
		if err := d.Revoke(t.Context(), reg); err != nil {
			t.Fatal(err)
		}
		if err := write(0); !errors.Is(err, unix.EFAULT) {
			t.Errorf("write from a revoked slot: %v", err)
		}
	}
	if _, err := d.Update(t.Context(), reg); !errors.Is(err, device.ErrRevoked) {
		t.Errorf("update of what is revoked: %v", err)
	}
	other, err := d.Register(t.Context(), r, 0)
	if err != nil {
		t.Fatal(err)
	}
	if other.LocalKey == reg.LocalKey {
		t.Error("the slot was given away")
	}
	mapFixed(t, r, -1)
	fill(mem, 'y')
	got, err := d.Load(t.Context(), reg)
	if err != nil || got != reg {
		t.Fatalf("load: %v, %v, want %v", got, err, reg)
	}
	if err := write(0); err != nil {
		t.Error(err)
	}
	if !fileHas(t, fd, 0, len(mem), 'y') {
		t.Error("the loaded slot doesn't have the new pages")
	}
	if err := d.Revoke(t.Context(), reg); err != nil {
		t.Fatal(err)
	}
	if n := d.Live(); n != 2 {
		t.Errorf("%d live, want 2", n)
	}
	for _, reg := range []device.Registration{reg, other} {
		if err := d.Deregister(reg); err != nil {
			t.Error(err)
		}
	}
	if err := d.Revoke(t.Context(), reg); !errors.Is(err, device.ErrNotRegistered) {
		t.Errorf("revoke of what is deregistered: %v", err)
	}
}
