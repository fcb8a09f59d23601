package pindown_test

import (
	"errors"
	"sync/atomic"
	"testing"

	"github.com/pindown/pindown"
	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/simhca"
	"github.com/pindown/pindown/vm"
)

// fastRig is a simRig whose device executes step by step, with a fast key.
type fastRig struct {
	*simRig
	steps *simhca.Stepper
	self  *simhca.Queue // connected with itself
	key   *pindown.FastKey
}

func newFastRig(t *testing.T, seed uint64, fault func(simhca.Fault) error) *fastRig {
	t.Helper()
	s := simhca.NewStepper(seed)
	r := &fastRig{simRig: newSimRig(t, &simhca.Options{Stepper: s, Fault: fault}, nil), steps: s}
	var err error
	if r.self, err = r.dev.ProtectionDomain().NewQueue(nil); err != nil {
		t.Fatal(err)
	}
	if err := simhca.Connect(r.self, r.self); err != nil {
		t.Fatal(err)
	}
	if r.key, err = r.NewFastKey(t.Context(), r.self, 4*page); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.Run()
		if err := r.key.Close(); err != nil {
			t.Errorf("close fast key: %v", err)
		}
	})
	return r
}

// send posts a write of one byte from memory under key to memory under peerKey, on
// the queue that changes the key.
func (r *fastRig) send(t *testing.T, from uintptr, key uint32, to uintptr, peerKey uint32) {
	t.Helper()
	err := r.self.Post(simhca.WorkRequest{
		ID: r.id.Add(1), Op: simhca.OpWrite, RemoteAddr: to, RemoteKey: peerKey,
		Local: []simhca.Segment{{Addr: from, Length: 1, Key: key}},
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestFastOrder: requests posted before an invalidation see the old pages, those
// after the registration that follows the new ones, whatever the device's order.
func TestFastOrder(t *testing.T) {
	for seed := range uint64(50) {
		r := newFastRig(t, seed, nil)
		const rounds, each = 8, 5
		rng, sink := r.alloc(t, 1), r.alloc(t, 1)
		dst, err := r.dev.Register(t.Context(), sink, device.LocalWrite|device.RemoteWrite)
		if err != nil {
			t.Fatal(err)
		}
		at := sink.Start
		for round := range rounds {
			// Other pages with other content, all before anything is executed.
			r.renew(t, rng)
			if err := r.space.Store(rng.Start, []byte{byte(round + 1)}); err != nil {
				t.Fatal(err)
			}
			reg := r.get(t, rng, pindown.LocalWrite)
			if round > 0 {
				if err := r.key.Invalidate(nil); err != nil {
					t.Fatal(err)
				}
			}
			key, err := r.key.Register(reg, rng, pindown.LocalWrite, nil)
			if err != nil {
				t.Fatal(err)
			}
			release(t, &reg)
			for range each {
				r.send(t, rng.Start, key, at, dst.RemoteKey)
				at++
			}
		}
		if err := r.key.Invalidate(nil); err != nil {
			t.Fatal(err)
		}
		r.steps.Run()
		got := make([]byte, rounds*each)
		if err := r.space.Load(sink.Start, got); err != nil {
			t.Fatal(err)
		}
		for i, b := range got {
			if int(b) != i/each+1 {
				t.Fatalf("seed %d: request %d of round %d saw the pages of round %d", seed, i, i/each+1, b)
			}
		}
		if err := r.dev.Deregister(dst); err != nil {
			t.Error(err)
		}
	}
}

// TestFastRotation: each lending has another key, an old one reaches nothing, and
// after 256 it comes back.
func TestFastRotation(t *testing.T) {
	r := newFastRig(t, 1, nil)
	rng := r.alloc(t, 1)
	reg := r.get(t, rng, pindown.LocalWrite)
	first, err := r.key.Register(reg, rng, pindown.RemoteWrite|pindown.LocalWrite, nil)
	if err != nil {
		t.Fatal(err)
	}
	r.steps.Run()
	check(t, "reaches", r.reaches(t, rng.Start, first), true)
	seen := map[uint32]bool{first: true}
	for n := 1; ; n++ {
		if err := r.key.Invalidate(nil); err != nil {
			t.Fatal(err)
		}
		key, err := r.key.Register(reg, rng, pindown.RemoteWrite|pindown.LocalWrite, nil)
		if err != nil {
			t.Fatal(err)
		}
		r.steps.Run()
		if key == first {
			check(t, "rotations", n, 256)
			check(t, "reaches under the first key again", r.reaches(t, rng.Start, first), true)
			break
		}
		if seen[key] || !device.SameKeyIndex(key, first) {
			t.Fatalf("key %#x of %#x", key, first)
		}
		seen[key] = true
		if n%16 == 0 {
			check(t, "reaches", r.reaches(t, rng.Start, key), true)
			check(t, "reaches under the first key", r.reaches(t, rng.Start, first), false)
		}
	}
	if err := r.key.Invalidate(nil); err != nil {
		t.Fatal(err)
	}
	release(t, &reg)
}

// TestFastErrors: what isn't posted, and what a failed request leaves.
func TestFastErrors(t *testing.T) {
	var fail atomic.Bool
	r := newFastRig(t, 1, func(f simhca.Fault) error {
		if f.Verb == simhca.VerbExecute && fail.Load() {
			return errInjected
		}
		return nil
	})
	rng := r.alloc(t, 2)
	reg := r.get(t, rng, pindown.LocalWrite)
	reset := func() {
		if err := simhca.Connect(r.self, r.self); err != nil {
			t.Fatal(err)
		}
	}
	register := func(rng vm.Range, done func(error)) error {
		_, err := r.key.Register(reg, rng, pindown.LocalWrite, done)
		return err
	}
	if err := r.key.Invalidate(nil); !errors.Is(err, device.ErrNotRegistered) {
		t.Error(err)
	}
	if err := register(vm.Range{Start: rng.Start, End: rng.End + 1}, nil); !errors.Is(err, device.ErrInvalid) {
		t.Error(err)
	}
	if _, err := r.key.Register(pindown.Region{}, rng, 0, nil); !errors.Is(err, pindown.ErrReleased) {
		t.Error(err)
	}
	r.renew(t, rng)
	if err := register(rng, nil); !errors.Is(err, pindown.ErrStale) {
		t.Error(err)
	}
	if _, err := reg.Update(t.Context(), pindown.UpdateAtomic); err != nil {
		t.Fatal(err)
	}
	if err := register(rng, nil); err != nil {
		t.Error(err)
	}
	if err := register(rng, nil); !errors.Is(err, device.ErrBusy) {
		t.Errorf("lent twice: %v", err)
	}
	r.steps.Run()
	if err := r.key.Close(); !errors.Is(err, device.ErrBusy) {
		t.Errorf("close while lent: %v", err)
	}
	// An invalidation that fails, with a registration behind it that is flushed:
	// the key means what it did.
	fail.Store(true)
	var outcomes []error
	note := func(err error) { outcomes = append(outcomes, err) }
	if err := r.key.Invalidate(note); err != nil {
		t.Error(err)
	}
	if err := register(rng, note); err != nil {
		t.Error(err)
	}
	r.steps.Run()
	if len(outcomes) != 2 || outcomes[0] == nil || !errors.Is(outcomes[1], device.ErrQueue) {
		t.Errorf("outcomes %v", outcomes)
	}
	fail.Store(false)
	if err := register(rng, nil); err == nil {
		t.Error("lent, though the invalidation failed")
	}
	if err := r.key.Invalidate(nil); !errors.Is(err, device.ErrQueue) {
		t.Errorf("a queue in error: %v", err)
	}
	reset()
	if err := r.key.Invalidate(nil); err != nil {
		t.Error(err)
	}
	r.steps.Run()
	// A registration that fails leaves it without meaning.
	fail.Store(true)
	if err := register(rng, nil); err != nil {
		t.Error(err)
	}
	r.steps.Run()
	fail.Store(false)
	if err := r.key.Invalidate(nil); !errors.Is(err, device.ErrNotRegistered) {
		t.Error(err)
	}
	reset()
	if err := register(rng, nil); err != nil {
		t.Error(err)
	}
	if err := r.key.Invalidate(nil); err != nil {
		t.Error(err)
	}
	r.steps.Run()
	release(t, &reg)

	fake := newRig(t, nil, nil)
	if _, err := fake.NewFastKey(t.Context(), r.queue, page); !errors.Is(err, device.ErrNotSupported) {
		t.Error(err)
	}
}

// TestFastFaults: each verb of a fast key fails once, and leaves what was.
func TestFastFaults(t *testing.T) {
	var failing atomic.Int32
	fault := func(f simhca.Fault) error {
		if v := failing.Load(); v != 0 && simhca.Verb(v) == f.Verb {
			return errInjected
		}
		return nil
	}
	r := newFastRig(t, 1, fault)
	rng := r.alloc(t, 1)
	reg := r.get(t, rng, pindown.LocalWrite)
	once := func(v simhca.Verb, f func() error) {
		t.Helper()
		failing.Store(int32(v))
		if err := f(); !errors.Is(err, errInjected) {
			t.Errorf("%v: %v", v, err)
		}
		failing.Store(0)
	}
	once(simhca.VerbAllocFastKey, func() error {
		_, err := r.NewFastKey(t.Context(), r.self, page)
		return err
	})
	check(t, "fast keys", r.dev.Stats().FastKeys, 1)
	register := func() error {
		_, err := r.key.Register(reg, rng, pindown.LocalWrite, nil)
		return err
	}
	once(simhca.VerbPost, register)
	if err := register(); err != nil {
		t.Error(err)
	}
	once(simhca.VerbPost, func() error { return r.key.Invalidate(nil) })
	if err := r.key.Invalidate(nil); err != nil {
		t.Error(err)
	}
	r.steps.Run()
	once(simhca.VerbFreeFastKey, r.key.Close)
	if err := register(); err != nil {
		t.Errorf("after a close that failed: %v", err)
	}
	if err := r.key.Invalidate(nil); err != nil {
		t.Error(err)
	}
	r.steps.Run()
	if err := r.key.Close(); err != nil {
		t.Error(err)
	}
	if err := register(); !errors.Is(err, device.ErrNotRegistered) {
		t.Errorf("after close: %v", err)
	}
	release(t, &reg)
}
