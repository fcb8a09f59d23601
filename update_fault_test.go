package pindown_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/pindown/pindown"
	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/devicetest"
	"github.com/pindown/pindown/device/simhca"
	"github.com/pindown/pindown/monitor"
	"github.com/pindown/pindown/monitor/manual"
	"github.com/pindown/pindown/vm"
)

var errInjected = errors.New("injected")

// keysMean is what a region's keys mean after an update.
type keysMean int

const (
	meanNew keysMean = iota + 1
	meanOld
	meanNothing // until they are loaded
	meanDead
)

// TestUpdateFailures: a row of the package comment's table each, at every step at
// which the device can fail.
func TestUpdateFailures(t *testing.T) {
	const strict, atomically = pindown.UpdateStrict, pindown.UpdateAtomic
	lost := fmt.Errorf("%w: %w", device.ErrRegistrationLost, errInjected)
	for _, c := range []struct {
		policy  pindown.UpdatePolicy
		verb    simhca.Verb
		step    simhca.Step
		err     error
		outcome pindown.UpdateOutcome
		keys    keysMean
	}{
		{strict, simhca.VerbFlush, simhca.StepBegin, errInjected, pindown.UpdateFailed, meanOld},
		{strict, simhca.VerbRevoke, simhca.StepBegin, errInjected, pindown.UpdateFailed, meanOld},
		{strict, simhca.VerbRevoke, simhca.StepBegin, lost, pindown.UpdateGone, meanDead},
		{strict, simhca.VerbLoad, simhca.StepBegin, errInjected, pindown.UpdateGone, meanNothing},
		{strict, simhca.VerbLoad, simhca.StepPinned, errInjected, pindown.UpdateGone, meanNothing},
		{strict, simhca.VerbLoad, simhca.StepBegin, lost, pindown.UpdateGone, meanDead},
		{strict, simhca.VerbLoad, simhca.StepPinned, lost, pindown.UpdateGone, meanDead},
		{atomically, simhca.VerbUpdate, simhca.StepBegin, errInjected, pindown.UpdateFailed, meanOld},
		{atomically, simhca.VerbUpdate, simhca.StepPinned, errInjected, pindown.UpdateFailed, meanOld},
		{atomically, simhca.VerbUpdate, simhca.StepBegin, lost, pindown.UpdateGone, meanDead},
		{atomically, simhca.VerbUpdate, simhca.StepPinned, lost, pindown.UpdateGone, meanDead},
	} {
		for _, held := range []bool{true, false} {
			t.Run(fmt.Sprintf("%v/%v/%v/%v/held=%t", c.policy, c.verb, c.step, c.err, held), func(t *testing.T) {
				var armed atomic.Bool
				r := newSimRig(t, &simhca.Options{Fault: func(f simhca.Fault) error {
					if armed.Load() && f.Verb == c.verb && f.Step == c.step {
						return c.err
					}
					return nil
				}}, nil)
				rng := r.alloc(t, 2)
				reg := r.get(t, rng, allRemote)
				key := reg.RemoteKey()
				other := r.get(t, rng, allRemote)
				release(t, &other)
				r.renew(t, rng)
				armed.Store(true)
				u, err := reg.Update(t.Context(), c.policy)
				if u.Outcome != c.outcome || !errors.Is(err, errInjected) || !errors.Is(u.Err, errInjected) {
					t.Fatalf("%+v, %v", u, err)
				}
				check(t, "keys gone by the result", u.KeyChanged(), c.outcome == pindown.UpdateGone)
				r.expectKey(t, rng, key, c.keys)
				check(t, "stale", reg.Stale(), true)
				armed.Store(false)
				// The next one registers anew.
				next := r.get(t, rng, allRemote)
				check(t, "key of the next reaches", r.reaches(t, rng.Start, next.RemoteKey()), true)
				if next.RemoteKey() == key {
					t.Error("the next one got the old key")
				}
				release(t, &next)
				if !held {
					release(t, &reg)
					return
				}
				r.updateAgain(t, reg, c.policy, key, c.keys)
				release(t, &reg)
			})
		}
	}
}

// updateAgain updates what a failed update has left, whose keys mean this.
func (r *simRig) updateAgain(t *testing.T, reg pindown.Region, policy pindown.UpdatePolicy, key uint32, keys keysMean) {
	t.Helper()
	u, err := reg.Update(t.Context(), policy)
	switch {
	case keys == meanDead:
		if u.Outcome != pindown.UpdateGone || !errors.Is(err, device.ErrRegistrationLost) {
			t.Errorf("update of what is lost: %+v, %v", u, err)
		}
	case u.Outcome != pindown.UpdateDone || err != nil:
		t.Errorf("second update: %+v, %v", u, err)
	default:
		r.expectKey(t, reg.Range(), key, meanNew)
	}
}

func (r *simRig) expectKey(t *testing.T, rng vm.Range, key uint32, want keysMean) {
	t.Helper()
	lost := r.space.Stats().OrphanWrites
	status := r.write(t, rng.Start, key, 0xa5)
	r.connect(t)
	check(t, "write under the key succeeds", status == simhca.StatusSuccess, want == meanNew || want == meanOld)
	check(t, "write goes to an old page", r.space.Stats().OrphanWrites > lost, want == meanOld)
}

// TestUpdateUnableFailures: the device can't update, and then can't register.
func TestUpdateUnableFailures(t *testing.T) {
	for _, policy := range policies() {
		var armed atomic.Bool
		r := newSimRig(t, &simhca.Options{Without: simhca.CanUpdate | simhca.CanRevoke, Fault: func(f simhca.Fault) error {
			if armed.Load() && f.Verb == simhca.VerbRegister {
				return errInjected
			}
			return nil
		}}, nil)
		rng := r.alloc(t, 1)
		reg := r.get(t, rng, allRemote)
		r.renew(t, rng)
		armed.Store(true)
		u, err := reg.Update(t.Context(), policy)
		if u.Outcome != pindown.UpdateFailed || !errors.Is(err, errInjected) || u.KeyChanged() {
			t.Errorf("%+v, %v", u, err)
		}
		r.expectKey(t, rng, reg.RemoteKey(), meanOld)
		armed.Store(false)
		u, err = reg.Update(t.Context(), policy)
		if u.Outcome != pindown.UpdateKeyChanged || err != nil {
			t.Errorf("%+v, %v", u, err)
		}
		release(t, &reg)
	}
}

// refusing is a monitor that refuses to cover at will.
type refusing struct {
	*manual.Monitor
	cover func() error
}

func (m *refusing) Cover(r vm.Range) error {
	if err := m.cover(); err != nil {
		return err
	}
	return m.Monitor.Cover(r)
}

// TestUpdateUncovered: the monitor refuses before the device acts, or only after it
// has revoked.
func TestUpdateUncovered(t *testing.T) {
	for _, c := range []struct {
		policy  pindown.UpdatePolicy
		refuse  int64 // this call of Cover and later ones
		err     error
		outcome pindown.UpdateOutcome
	}{
		{pindown.UpdateAtomic, 1, monitor.ErrUncovered, pindown.UpdateFailed},
		{pindown.UpdateAtomic, 1, monitor.ErrPending, pindown.UpdateFailed},
		{pindown.UpdateStrict, 1, monitor.ErrUncovered, pindown.UpdateFailed},
		{pindown.UpdateStrict, 2, monitor.ErrUncovered, pindown.UpdateGone},
		{pindown.UpdateStrict, 2, monitor.ErrPending, pindown.UpdateGone},
	} {
		mon, err := manual.New(nil)
		if err != nil {
			t.Fatal(err)
		}
		var calls atomic.Int64
		calls.Store(-1 << 40)
		space := simhca.NewSpace(nil)
		dev := simhca.Open(space, nil)
		cache, err := pindown.New(dev, &pindown.Options{RegisterTimeout: -1, Monitor: &refusing{mon, func() error {
			if calls.Add(1) >= c.refuse {
				return c.err
			}
			return nil
		}}})
		if err != nil {
			t.Fatal(err)
		}
		rng, err := space.Map(2, simhca.ProtRead|simhca.ProtWrite)
		if err != nil {
			t.Fatal(err)
		}
		reg, err := cache.AcquireRange(t.Context(), rng, allRemote)
		if err != nil {
			t.Fatal(err)
		}
		mon.Invalidate(rng)
		calls.Store(0)
		u, err := reg.Update(t.Context(), c.policy)
		if u.Outcome != c.outcome || !errors.Is(err, c.err) {
			t.Errorf("%v refused at %d: %+v, %v", c.policy, c.refuse, u, err)
		}
		calls.Store(-1 << 40)
		if u, err = reg.Update(t.Context(), c.policy); u.Outcome != pindown.UpdateDone || err != nil {
			t.Errorf("afterwards: %+v, %v", u, err)
		}
		release(t, &reg)
		if err := errors.Join(cache.Close(), dev.Close(), mon.Close(), space.Check()); err != nil {
			t.Error(err)
		}
	}
}

// TestUpdateOvertaken: a VM operation between stamp and publication has the update
// start again; if that happens each time the region is stale again.
func TestUpdateOvertaken(t *testing.T) {
	for _, policy := range policies() {
		for _, times := range []int64{1, 3, 1 << 40} {
			var r *simRig
			var left atomic.Int64
			var rng vm.Range
			r = newSimRig(t, &simhca.Options{Fault: func(f simhca.Fault) error {
				if f.Step == simhca.StepPinned && f.Verb != simhca.VerbRegister && left.Add(-1) >= 0 {
					return errors.Join(r.space.Unmap(rng), r.space.MapFixed(rng, simhca.ProtRead|simhca.ProtWrite))
				}
				return nil
			}}, nil)
			rng = r.alloc(t, 2)
			reg := r.get(t, rng, allRemote)
			r.renew(t, rng)
			left.Store(times)
			u, err := reg.Update(t.Context(), policy)
			want := pindown.UpdateDone
			if times > 100 {
				want = pindown.UpdateAgain
			}
			check(t, "outcome", u.Outcome, want)
			check(t, "error", err != nil, times > 100)
			check(t, "stale", reg.Stale(), times > 100)
			left.Store(0)
			if times > 100 {
				if u, err := reg.Update(t.Context(), policy); u.Outcome != pindown.UpdateDone || err != nil {
					t.Errorf("%+v, %v", u, err)
				}
			}
			r.expectKey(t, rng, reg.RemoteKey(), meanNew)
			release(t, &reg)
		}
	}
}

// TestUpdateOvertakenFails: a VM operation overtakes the first try, and the second
// fails. The keys mean the pages of the first try, unless the second has revoked them.
func TestUpdateOvertakenFails(t *testing.T) {
	const strict, atomically = pindown.UpdateStrict, pindown.UpdateAtomic
	lost := fmt.Errorf("%w: %w", device.ErrRegistrationLost, errInjected)
	for _, c := range []struct {
		name    string
		policy  pindown.UpdatePolicy
		verb    simhca.Verb // that fails; none: cover
		err     error
		cover   int64 // the call that fails
		end     bool  // the context ends instead
		outcome pindown.UpdateOutcome
		keys    keysMean
	}{
		{"update", atomically, simhca.VerbUpdate, errInjected, 0, false, pindown.UpdateAgain, meanOld},
		{"update, lost", atomically, simhca.VerbUpdate, lost, 0, false, pindown.UpdateGone, meanDead},
		{"update, not supported", atomically, simhca.VerbUpdate, device.ErrNotSupported, 0, false, pindown.UpdateAgain, meanOld},
		{"cover", atomically, 0, monitor.ErrUncovered, 2, false, pindown.UpdateAgain, meanOld},
		{"cover, pending", atomically, 0, monitor.ErrPending, 2, false, pindown.UpdateAgain, meanOld},
		{"context", atomically, 0, context.Canceled, 0, true, pindown.UpdateAgain, meanOld},
		{"flush", strict, simhca.VerbFlush, errInjected, 0, false, pindown.UpdateAgain, meanOld},
		{"revoke", strict, simhca.VerbRevoke, errInjected, 0, false, pindown.UpdateAgain, meanOld},
		{"revoke, lost", strict, simhca.VerbRevoke, lost, 0, false, pindown.UpdateGone, meanDead},
		{"load", strict, simhca.VerbLoad, errInjected, 0, false, pindown.UpdateGone, meanNothing},
		{"load, lost", strict, simhca.VerbLoad, lost, 0, false, pindown.UpdateGone, meanDead},
		{"cover before revoke", strict, 0, monitor.ErrUncovered, 3, false, pindown.UpdateAgain, meanOld},
		{"cover after revoke", strict, 0, monitor.ErrUncovered, 4, false, pindown.UpdateGone, meanNothing},
		{"context", strict, 0, context.Canceled, 0, true, pindown.UpdateAgain, meanOld},
	} {
		t.Run(fmt.Sprintf("%v/%s", c.policy, c.name), func(t *testing.T) {
			var armed, overtaken atomic.Bool
			var covers atomic.Int64
			var r *simRig
			var rng vm.Range
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			r = newSimRig(t, &simhca.Options{Fault: func(f simhca.Fault) error {
				if !armed.Load() {
					return nil
				}
				if overtaken.Load() {
					if f.Verb == c.verb && f.Step == simhca.StepBegin {
						return c.err
					}
					return nil
				}
				if f.Step != simhca.StepPinned || f.Verb == simhca.VerbRegister {
					return nil
				}
				overtaken.Store(true)
				if c.end {
					cancel()
				}
				return errors.Join(r.space.Unmap(rng), r.space.MapFixed(rng, simhca.ProtRead|simhca.ProtWrite))
			}}, &pindown.Options{MergeBytes: -1, RegisterTimeout: -1}, func(m *manual.Monitor) monitor.Monitor {
				return &refusing{m, func() error {
					if armed.Load() && covers.Add(1) == c.cover {
						return c.err
					}
					return nil
				}}
			})
			rng = r.alloc(t, 2)
			reg := r.get(t, rng, allRemote)
			key := reg.RemoteKey()
			r.renew(t, rng)
			armed.Store(true)
			u, err := reg.Update(ctx, c.policy)
			armed.Store(false)
			if u.Outcome != c.outcome || !errors.Is(err, c.err) || !errors.Is(u.Err, c.err) {
				t.Errorf("%+v, %v", u, err)
			}
			check(t, "keys gone by the result", u.KeyChanged(), c.outcome == pindown.UpdateGone)
			check(t, "stale", reg.Stale(), true)
			if _, ok := r.TryAcquireRange(rng, allRemote); ok {
				t.Error("found though it is stale")
			}
			// Old pages here are those of the first try, which the operation unmapped.
			r.expectKey(t, rng, key, c.keys)
			r.updateAgain(t, reg, c.policy, key, c.keys)
			if c.keys != meanDead {
				check(t, "registrations", r.Stats().Register.Count, 1)
			}
			release(t, &reg)
		})
	}
}

// TestUpdateTransient: what the device refuses for the moment is tried again.
func TestUpdateTransient(t *testing.T) {
	for _, verb := range []simhca.Verb{simhca.VerbUpdate, simhca.VerbRevoke, simhca.VerbLoad} {
		var left atomic.Int64
		r := newSimRig(t, &simhca.Options{Fault: func(f simhca.Fault) error {
			if f.Verb == verb && left.Add(-1) >= 0 {
				return device.ErrNoMemory
			}
			return nil
		}}, nil)
		policy := pindown.UpdateStrict
		if verb == simhca.VerbUpdate {
			policy = pindown.UpdateAtomic
		}
		rng := r.alloc(t, 2)
		reg := r.get(t, rng, allRemote)
		r.renew(t, rng)
		left.Store(3)
		if u, err := reg.Update(t.Context(), policy); u.Outcome != pindown.UpdateDone || err != nil {
			t.Errorf("%+v, %v", u, err)
		}
		release(t, &reg)
	}
}

// TestUpdateOnFake: the same on devicetest's fake, which notices any misuse.
func TestUpdateOnFake(t *testing.T) {
	for _, c := range []struct {
		err     error
		outcome pindown.UpdateOutcome
	}{
		{nil, pindown.UpdateDone},
		{device.ErrFault, pindown.UpdateFailed},
		{device.ErrRegistrationLost, pindown.UpdateGone},
		{device.ErrNotSupported, pindown.UpdateKeyChanged},
	} {
		fake := devicetest.NewFake(&devicetest.FakeOptions{
			Limits:   device.Limits{PageSize: page},
			OnUpdate: func(int, device.Registration) error { return c.err },
		})
		mon, err := manual.New(nil)
		if err != nil {
			t.Fatal(err)
		}
		cache, err := pindown.New(fake.Updater(), &pindown.Options{Monitor: mon})
		if err != nil {
			t.Fatal(err)
		}
		mem := mapMem(t, 4*page)
		for range 3 {
			reg, err := cache.Acquire(t.Context(), mem, pindown.LocalWrite)
			if err != nil {
				t.Fatal(err)
			}
			mon.Invalidate(vm.RangeOf(mem))
			u, err := reg.Update(t.Context(), pindown.UpdateAtomic)
			check(t, "outcome", u.Outcome, c.outcome)
			if c.err != nil && c.outcome != pindown.UpdateKeyChanged && !errors.Is(err, c.err) {
				t.Error(err)
			}
			release(t, &reg)
		}
		if err := errors.Join(cache.Close(), mon.Close()); err != nil {
			t.Error(err)
		}
		fake.AssertEmpty(t)
		check(t, "slots of the table", mon.Table().Stats().Used, 0)
	}
}

// TestUpdateContextEndsAfterRevoke: between revoke and load the context's end
// changes nothing.
func TestUpdateContextEndsAfterRevoke(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	r := newSimRig(t, &simhca.Options{Fault: func(f simhca.Fault) error {
		if f.Verb == simhca.VerbRevoke {
			cancel()
		}
		return nil
	}}, nil)
	rng := r.alloc(t, 2)
	reg := r.get(t, rng, allRemote)
	r.renew(t, rng)
	if u, err := reg.Update(ctx, pindown.UpdateStrict); u.Outcome != pindown.UpdateDone || err != nil {
		t.Errorf("%+v, %v", u, err)
	}
	r.expectKey(t, rng, reg.RemoteKey(), meanNew)
	release(t, &reg)
}
