package pindown_test

import (
	"errors"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/pindown/pindown"
	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/simhca"
	"github.com/pindown/pindown/vm"
)

const windowed = pindown.LocalWrite | pindown.WindowBind

func (r *simRig) expose(tb testing.TB, reg pindown.Region, rng vm.Range, a pindown.Access) *pindown.Exposure {
	tb.Helper()
	x, err := reg.Expose(tb.Context(), rng, a)
	if err != nil {
		tb.Fatal(err)
	}
	return x
}

// TestExpose: an exposure reaches its part and nothing else, as long as it isn't
// revoked, and keeps its region.
func TestExpose(t *testing.T) {
	r := newSimRig(t, nil, nil)
	rng := r.alloc(t, 3)
	reg := r.get(t, rng, windowed)
	check(t, "remote key of the region", reg.RemoteKey(), 0)
	part := vm.Range{Start: rng.Start + page, End: rng.Start + page + 100}
	x := r.expose(t, reg, part, pindown.RemoteWrite)
	check(t, "range", x.Range(), part)
	check(t, "access", x.Access(), pindown.RemoteWrite)
	for _, c := range []struct {
		addr uintptr
		want bool
	}{{part.Start, true}, {part.End - 1, true}, {part.End, false}, {part.Start - 1, false}, {rng.Start, false}} {
		check(t, "reaches", r.reaches(t, c.addr, x.RemoteKey()), c.want)
	}
	release(t, &reg)
	// It holds the region.
	if n, err := r.Invalidate(rng); n != 1 || err != nil {
		t.Error(n, err)
	}
	check(t, "reaches after the holder", r.reaches(t, part.Start, x.RemoteKey()), true)
	check(t, "regions", r.Stats().Regions, 1)
	if err := x.Revoke(t.Context()); err != nil {
		t.Error(err)
	}
	check(t, "reaches after revoke", r.reaches(t, part.Start, x.RemoteKey()), false)
	if err := x.Revoke(t.Context()); err != nil {
		t.Errorf("second revoke: %v", err)
	}
	eventually(t, "the region's end", func() bool { return r.Stats().Regions == 0 })
}

// TestExposeStaysCached: after the last exposure the registration is still there
// for the next, and no key of before works.
func TestExposeStaysCached(t *testing.T) {
	r := newSimRig(t, nil, nil)
	rng := r.alloc(t, 1)
	var keys []uint32
	for range 300 {
		reg := r.get(t, rng, windowed)
		x := r.expose(t, reg, rng, pindown.RemoteRead|pindown.RemoteWrite)
		release(t, &reg)
		if n := len(keys); n > 0 && keys[n-1] == x.RemoteKey() {
			t.Fatal("the same key twice running")
		}
		keys = append(keys, x.RemoteKey())
		check(t, "reaches", r.reaches(t, rng.Start, x.RemoteKey()), true)
		if err := x.Revoke(t.Context()); err != nil {
			t.Error(err)
		}
		check(t, "reaches", r.reaches(t, rng.Start, x.RemoteKey()), false)
	}
	check(t, "registrations made", r.Stats().Register.Count, 1)
}

// TestExposeErrors: nothing is exposed, and nothing held.
func TestExposeErrors(t *testing.T) {
	var fail atomic.Bool
	r := newSimRig(t, &simhca.Options{Fault: func(f simhca.Fault) error {
		if fail.Load() && (f.Verb == simhca.VerbExpose || f.Verb == simhca.VerbWithdraw) {
			return errInjected
		}
		return nil
	}}, nil)
	rng := r.alloc(t, 2)
	reg := r.get(t, rng, windowed)
	outside := vm.Range{Start: rng.Start, End: rng.End + 1}
	for _, c := range []struct {
		rng    vm.Range
		access pindown.Access
		want   error
	}{
		{outside, pindown.RemoteRead, device.ErrInvalid},
		{vm.Range{}, pindown.RemoteRead, device.ErrInvalid},
		{rng, pindown.LocalWrite, device.ErrAccess},
		{rng, 0, device.ErrAccess},
	} {
		if _, err := reg.Expose(t.Context(), c.rng, c.access); !errors.Is(err, c.want) {
			t.Errorf("expose %v with %v: %v, want %v", c.rng, c.access, err, c.want)
		}
	}
	if _, err := (pindown.Region{}).Expose(t.Context(), rng, pindown.RemoteRead); !errors.Is(err, pindown.ErrReleased) {
		t.Error(err)
	}
	fail.Store(true)
	if _, err := reg.Expose(t.Context(), rng, pindown.RemoteRead); !errors.Is(err, errInjected) {
		t.Error(err)
	}
	check(t, "exposures", r.dev.Stats().Exposures, 0)
	fail.Store(false)
	x := r.expose(t, reg, rng, pindown.RemoteWrite)
	fail.Store(true)
	if err := x.Revoke(t.Context()); !errors.Is(err, errInjected) {
		t.Error(err)
	}
	check(t, "reaches after a failed revoke", r.reaches(t, rng.Start, x.RemoteKey()), true)
	fail.Store(false)
	// A device without: the region isn't registered with window binding.
	plain := r.get(t, r.alloc(t, 1), pindown.LocalWrite)
	if _, err := plain.Expose(t.Context(), plain.Range(), pindown.RemoteRead); !errors.Is(err, device.ErrAccess) {
		t.Error(err)
	}
	release(t, &plain)
	release(t, &reg)
	if err := r.Close(); !errors.Is(err, pindown.ErrInUse) {
		t.Errorf("close while exposed: %v", err)
	}
	check(t, "reaches after close", r.reaches(t, rng.Start, x.RemoteKey()), true)
	if err := x.Revoke(t.Context()); err != nil {
		t.Error(err)
	}
	check(t, "registrations but the peer's", r.dev.Stats().Registrations, 1)

	fake := newRig(t, nil, nil)
	freg := fake.acquire(t, fake.buf(0, page), 0)
	if _, err := freg.Expose(t.Context(), freg.Range(), pindown.RemoteRead); !errors.Is(err, device.ErrNotSupported) {
		t.Error(err)
	}
	release(t, &freg)

	without := newSimRig(t, &simhca.Options{Without: simhca.CanExpose}, nil)
	wreg := without.get(t, without.alloc(t, 1), windowed)
	if _, err := wreg.Expose(t.Context(), wreg.Range(), pindown.RemoteRead); !errors.Is(err, device.ErrNotSupported) {
		t.Error(err)
	}
	release(t, &wreg)
}

// TestExposeGoesAlong: an exposure reaches what its region means after an update,
// by any policy and however often, and a strict update doesn't wait for it.
func TestExposeGoesAlong(t *testing.T) {
	for _, policy := range policies() {
		r := newSimRig(t, nil, nil)
		rng := r.alloc(t, 2)
		reg := r.get(t, rng, windowed)
		var list []*pindown.Exposure
		for range 5 {
			list = append(list, r.expose(t, reg, rng, pindown.RemoteWrite))
			r.renew(t, rng)
			if u, err := reg.Update(t.Context(), policy); u.Outcome != pindown.UpdateDone {
				t.Fatal(u, err)
			}
			for _, x := range list {
				check(t, "reaches", r.reaches(t, rng.Start, x.RemoteKey()), true)
			}
		}
		release(t, &reg)
		r.renew(t, rng)
		if l, err := r.Update(t.Context(), rng, policy); len(l) != 1 || l[0].Outcome != pindown.UpdateDone {
			t.Fatal(l, err)
		}
		for _, x := range list {
			check(t, "reaches", r.reaches(t, rng.Start, x.RemoteKey()), true)
			if err := x.Revoke(t.Context()); err != nil {
				t.Error(err)
			}
		}
		check(t, "registrations made", r.Stats().Register.Count, 1)
	}
}

// TestExposedKeyAfterRevoke: peers try a key all the time; what they try after
// Revoke has returned fails, while the owner acquires, exposes and updates.
func TestExposedKeyAfterRevoke(t *testing.T) {
	tries := int64(100_000)
	if testing.Short() || raceDetector {
		tries = 5_000
	}
	r := newSimRig(t, nil, nil)
	const peers = 3
	var key atomic.Uint64 // revoked<<32 | key
	var after, stop atomic.Int64
	var wg sync.WaitGroup
	rng := r.alloc(t, 1)
	pd := r.dev.ProtectionDomain()
	for range peers {
		mine := r.alloc(t, 1)
		reg, err := r.dev.Register(t.Context(), mine, device.LocalWrite)
		if err != nil {
			t.Fatal(err)
		}
		var q [2]*simhca.Queue
		for i := range q {
			if q[i], err = pd.NewQueue(nil); err != nil {
				t.Fatal(err)
			}
		}
		if err := simhca.Connect(q[0], q[1]); err != nil {
			t.Fatal(err)
		}
		wg.Go(func() {
			defer func() {
				if err := r.dev.Deregister(reg); err != nil {
					t.Error(err)
				}
			}()
			for stop.Load() == 0 {
				w := key.Load()
				revoked := w>>32&1 != 0
				err := q[0].Post(simhca.WorkRequest{
					Op: simhca.OpWrite, RemoteAddr: rng.Start, RemoteKey: uint32(w),
					Local: []simhca.Segment{{Addr: mine.Start, Length: 1, Key: reg.LocalKey}},
				})
				if err != nil {
					t.Error(err)
					return
				}
				c, err := q[0].CompletionQueue().Wait(t.Context())
				if err != nil {
					t.Error(err)
					return
				}
				if revoked {
					after.Add(1)
					if c.Status != simhca.StatusRemoteAccess {
						t.Errorf("a key that was revoked: %v", c.Status)
						return
					}
				}
				if c.Status != simhca.StatusSuccess {
					if err := simhca.Connect(q[0], q[1]); err != nil {
						t.Error(err)
						return
					}
				}
			}
		})
	}
	for n := 0; after.Load() < tries && !t.Failed(); n++ {
		reg := r.get(t, rng, windowed)
		x := r.expose(t, reg, rng, pindown.RemoteWrite)
		release(t, &reg)
		key.Store(uint64(x.RemoteKey()))
		if n%4 == 0 {
			r.renew(t, rng)
			if _, err := r.Update(t.Context(), rng, policies()[n/4%2]); err != nil {
				t.Error(err)
			}
		}
		if err := x.Revoke(t.Context()); err != nil {
			t.Error(err)
		}
		before := after.Load()
		key.Store(uint64(x.RemoteKey()) | 1<<32)
		// Until the entry is used again, 256 keys later, the key stays dead.
		eventually(t, "tries", func() bool { return after.Load() > before+200 || t.Failed() })
	}
	stop.Store(1)
	wg.Wait()
	t.Logf("%d tries after a revocation", after.Load())
	check(t, "registrations made", r.Stats().Register.Count, 1)
}
