package pindown_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/pindown/pindown"
	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/devicetest"
	"github.com/pindown/pindown/vm"
)

func (r *rig) requests(n int) []pindown.Request {
	reqs := make([]pindown.Request, n)
	for i := range reqs {
		reqs[i].Range = vm.RangeOf(r.buf(2*i*page, page))
	}
	return reqs
}

func TestBatch(t *testing.T) {
	r := newRig(t, nil, &pindown.Options{MergeBytes: -1})
	reqs := r.requests(8)
	regions := make([]pindown.Region, len(reqs))
	if r.TryAcquireBatch(reqs, regions) {
		t.Error("hit in an empty cache")
	}
	if err := r.AcquireBatch(t.Context(), reqs, regions); err != nil {
		t.Fatal(err)
	}
	for i, reg := range regions {
		check(t, "covers", reg.Range().Contains(reqs[i].Range), true)
	}
	check(t, "in use", r.Stats().InUse, 8)
	if err := pindown.ReleaseAll(regions); err != nil {
		t.Error(err)
	}
	check(t, "zeroed", regions[3], pindown.Region{})
	if err := pindown.ReleaseAll(regions); !errors.Is(err, pindown.ErrReleased) {
		t.Errorf("second release: %v", err)
	}
	allocs := testing.AllocsPerRun(100, func() {
		if !r.TryAcquireBatch(reqs, regions) || pindown.ReleaseAll(regions) != nil {
			t.Error("miss")
		}
		if r.AcquireBatch(t.Context(), reqs, regions) != nil || pindown.ReleaseAll(regions) != nil {
			t.Error("miss")
		}
	})
	check(t, "allocations", allocs, 0)

	// One item that isn't there: nothing is held.
	if _, err := r.Invalidate(reqs[5].Range); err != nil {
		t.Fatal(err)
	}
	if r.TryAcquireBatch(reqs, regions) {
		t.Error("hit on what was invalidated")
	}
	eventually(t, "no holder", func() bool { return r.Stats().InUse == 0 })
	if err := r.AcquireBatch(t.Context(), reqs, regions[:3]); !errors.Is(err, pindown.ErrRange) {
		t.Errorf("too few regions: %v", err)
	}
}

// TestBatchFails: item k fails, the first k are released and stay cached.
func TestBatchFails(t *testing.T) {
	fo := &devicetest.FakeOptions{Limits: device.Limits{PageSize: page}}
	fo.OnRegister = func(n int, _ vm.Range, _ device.Access) error {
		if n == 5 {
			return fmt.Errorf("injected: %w", device.ErrFault)
		}
		return nil
	}
	r := newRig(t, fo, &pindown.Options{MergeBytes: -1})
	reqs := r.requests(8)
	regions := make([]pindown.Region, len(reqs))
	if err := r.AcquireBatch(t.Context(), reqs, regions); !errors.Is(err, device.ErrFault) {
		t.Fatalf("got %v", err)
	}
	for _, reg := range regions {
		check(t, "region", reg, pindown.Region{})
	}
	s := r.Stats()
	check(t, "in use", s.InUse, 0)
	check(t, "registered", uint64(s.Regions), s.Register.Count)
	if s.Regions < 4 {
		t.Errorf("%d regions stay", s.Regions)
	}
}

func TestPrefetch(t *testing.T) {
	r := newRig(t, nil, nil)
	b := r.buf(0, 3*page)
	cached, err := r.Prefetch(t.Context(), vm.RangeOf(b), pindown.LocalWrite)
	if err != nil || !cached {
		t.Fatalf("got %v, %v", cached, err)
	}
	check(t, "in use", r.Stats().InUse, 0)
	reg, ok := r.TryAcquire(b, pindown.LocalWrite)
	check(t, "hit", ok, true)
	release(t, &reg)
	if _, err := r.Prefetch(t.Context(), pindown.Range{}, 0); !errors.Is(err, pindown.ErrRange) {
		t.Errorf("nothing: %v", err)
	}
}
