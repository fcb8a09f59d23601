package pindown

import (
	"errors"
	"testing"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/simhca"
	"github.com/pindown/pindown/monitor/manual"
)

// TestStaleAgain: what was given up because another took its place isn't stale.
func TestStaleAgain(t *testing.T) {
	mon, err := manual.New(nil)
	if err != nil {
		t.Fatal(err)
	}
	space := simhca.NewSpace(nil)
	dev := simhca.Open(space, nil)
	c, err := New(dev, &Options{Monitor: mon})
	if err != nil {
		t.Fatal(err)
	}
	all, err := space.Map(4, simhca.ProtRead|simhca.ProtWrite)
	if err != nil {
		t.Fatal(err)
	}
	page := space.PageSize()
	acquire := func(r Range) Region {
		t.Helper()
		reg, err := c.AcquireRange(t.Context(), r, device.LocalWrite)
		if err != nil {
			t.Fatal(err)
		}
		return reg
	}
	want := func(what string, reg Region, dead, stale bool) {
		t.Helper()
		if reg.e.dead() != dead || c.staleAgain(reg.e) != stale {
			t.Errorf("%s: dead %t, want %t, stale again %t, want %t", what, reg.e.dead(), dead, c.staleAgain(reg.e), stale)
		}
	}
	part := acquire(Range{Start: all.Start, End: all.Start + page})
	want("published", part, false, false)
	wide := acquire(all)
	want("another has taken its place", part, true, false)
	if _, err := c.Invalidate(all); err != nil {
		t.Fatal(err)
	}
	want("invalidated", wide, true, true)
	last := acquire(all)
	mon.Invalidate(all)
	want("overtaken", part, true, true)
	fresh := acquire(all)
	want("overtaken, and found so", last, true, true)
	if err := c.Close(); !errors.Is(err, ErrInUse) {
		t.Error(err)
	}
	want("closed", fresh, true, false)
	for _, reg := range []*Region{&part, &wide, &last, &fresh} {
		if err := reg.Release(); err != nil {
			t.Error(err)
		}
	}
	if err := errors.Join(c.Close(), dev.Close(), mon.Close(), space.Check()); err != nil {
		t.Error(err)
	}
}
