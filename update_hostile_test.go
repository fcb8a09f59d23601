package pindown_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pindown/pindown"
	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/simhca"
	"github.com/pindown/pindown/monitor"
	"github.com/pindown/pindown/monitor/manual"
	"github.com/pindown/pindown/vm"
)

// panics is a device that panics in one verb, before it has done anything.
type panics struct {
	*simhca.Device
	verb atomic.Uint32
}

func (d *panics) at(v simhca.Verb) {
	if simhca.Verb(d.verb.Load()) == v {
		panic(v)
	}
}

func (d *panics) Update(ctx context.Context, reg device.Registration) (device.Registration, error) {
	d.at(simhca.VerbUpdate)
	return d.Device.Update(ctx, reg)
}

func (d *panics) Revoke(ctx context.Context, reg device.Registration) error {
	d.at(simhca.VerbRevoke)
	return d.Device.Revoke(ctx, reg)
}

func (d *panics) Load(ctx context.Context, reg device.Registration) (device.Registration, error) {
	d.at(simhca.VerbLoad)
	return d.Device.Load(ctx, reg)
}

func (d *panics) Flush(ctx context.Context, reg device.Registration) error {
	d.at(simhca.VerbFlush)
	return d.Device.Flush(ctx, reg)
}

func (d *panics) Expose(ctx context.Context, reg device.Registration, r vm.Range, a device.Access) (device.Exposure, error) {
	d.at(simhca.VerbExpose)
	return d.Device.Expose(ctx, reg, r, a)
}

func (d *panics) Withdraw(ctx context.Context, x device.Exposure) error {
	d.at(simhca.VerbWithdraw)
	return d.Device.Withdraw(ctx, x)
}

// TestUpdatePanics: a device that panics leaves nothing behind: nobody waits for the
// update for ever, and the region goes with its holder.
func TestUpdatePanics(t *testing.T) {
	for _, c := range []struct {
		verb   simhca.Verb
		policy pindown.UpdatePolicy
	}{
		{simhca.VerbUpdate, pindown.UpdateAtomic},
		{simhca.VerbFlush, pindown.UpdateStrict},
		{simhca.VerbRevoke, pindown.UpdateStrict},
		{simhca.VerbLoad, pindown.UpdateStrict},
	} {
		for _, ranged := range []bool{false, true} {
			t.Run(fmt.Sprintf("%v/range=%t", c.verb, ranged), func(t *testing.T) {
				mon, err := manual.New(nil)
				if err != nil {
					t.Fatal(err)
				}
				space := simhca.NewSpace(nil)
				dev := &panics{Device: simhca.Open(space, nil)}
				cache, err := pindown.New(dev, &pindown.Options{Monitor: mon, MergeBytes: -1})
				if err != nil {
					t.Fatal(err)
				}
				rng, err := space.Map(3, simhca.ProtRead|simhca.ProtWrite)
				if err != nil {
					t.Fatal(err)
				}
				var regs []pindown.Region
				for i := range uintptr(3) {
					reg, err := cache.AcquireRange(t.Context(), vm.Range{Start: rng.Start + i*page, End: rng.Start + (i+1)*page}, allRemote)
					if err != nil {
						t.Fatal(err)
					}
					regs = append(regs, reg)
				}
				if ranged {
					// A strict update waits for users.
					for i := range regs {
						release(t, &regs[i])
					}
				}
				mon.Invalidate(rng)
				if !ranged {
					// It takes the place of the news.
					eventually(t, "the news", func() bool { return cache.Stats().Regions == 3 })
				}
				update := func() error {
					if ranged {
						_, err := cache.Update(t.Context(), rng, c.policy)
						return err
					}
					_, err := regs[0].Update(t.Context(), c.policy)
					return err
				}
				dev.verb.Store(uint32(c.verb))
				func() {
					defer func() {
						// Idle regions may have been reclaimed, as stale ones are.
						if recover() == nil && !ranged {
							t.Error("no panic")
						}
					}()
					_ = update()
				}()
				dev.verb.Store(0)
				ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
				defer cancel()
				again, err := cache.AcquireRange(ctx, rng, allRemote)
				if err != nil {
					t.Fatalf("acquire after a panic: %v", err)
				}
				release(t, &again)
				if !ranged {
					if u, err := regs[0].Update(ctx, c.policy); err != nil {
						t.Errorf("update after a panic: %+v, %v", u, err)
					}
					for i := range regs {
						release(t, &regs[i])
					}
				}
				if err := errors.Join(cache.Shutdown(ctx), dev.Close(), mon.Close(), space.Check()); err != nil {
					t.Error(err)
				}
				check(t, "registrations", dev.Stats().Registrations, 0)
				check(t, "slots of the table", mon.Table().Stats().Used, 0)
			})
		}
	}
}

// TestExposePanics: a device that panics leaves no share in the region, nor a lock.
func TestExposePanics(t *testing.T) {
	mon, err := manual.New(nil)
	if err != nil {
		t.Fatal(err)
	}
	space := simhca.NewSpace(nil)
	dev := &panics{Device: simhca.Open(space, nil)}
	cache, err := pindown.New(dev, &pindown.Options{Monitor: mon})
	if err != nil {
		t.Fatal(err)
	}
	rng, err := space.Map(1, simhca.ProtRead|simhca.ProtWrite)
	if err != nil {
		t.Fatal(err)
	}
	reg, err := cache.AcquireRange(t.Context(), rng, windowed)
	if err != nil {
		t.Fatal(err)
	}
	panicked := func(f func()) {
		t.Helper()
		defer func() {
			dev.verb.Store(0)
			if recover() == nil {
				t.Error("no panic")
			}
		}()
		f()
	}
	dev.verb.Store(uint32(simhca.VerbExpose))
	panicked(func() { _, _ = reg.Expose(t.Context(), rng, pindown.RemoteRead) })
	x, err := reg.Expose(t.Context(), rng, pindown.RemoteRead)
	if err != nil {
		t.Fatal(err)
	}
	dev.verb.Store(uint32(simhca.VerbWithdraw))
	panicked(func() { _ = x.Revoke(t.Context()) })
	if err := x.Revoke(t.Context()); err != nil {
		t.Error(err)
	}
	release(t, &reg)
	if err := errors.Join(cache.Close(), dev.Close(), mon.Close(), space.Check()); err != nil {
		t.Error(err)
	}
}

// TestUpdateFindsDying: a stale region that is held, and whose holders nobody has
// looked for yet, is updated like others.
func TestUpdateFindsDying(t *testing.T) {
	blocked, proceed := make(chan struct{}), make(chan struct{})
	var once sync.Once
	mon, err := manual.New(nil)
	if err != nil {
		t.Fatal(err)
	}
	space := simhca.NewSpace(&simhca.SpaceOptions{
		Before: func(e vm.Event) { mon.Before(e.Range) },
		After:  func(e vm.Event) { mon.After(e.Range) },
	})
	dev := simhca.Open(space, nil)
	cache, err := pindown.New(dev, &pindown.Options{Monitor: mon, MergeBytes: -1, OnEvent: func(pindown.Event) {
		once.Do(func() {
			close(blocked)
			<-proceed
		})
	}})
	if err != nil {
		t.Fatal(err)
	}
	const prot = simhca.ProtRead | simhca.ProtWrite
	rng, err := space.Map(4, prot)
	if err != nil {
		t.Fatal(err)
	}
	other := vm.Range{Start: rng.Start + 3*page, End: rng.End}
	rng.End = rng.Start + 2*page
	part := vm.Range{Start: rng.Start, End: rng.Start + page}
	lane, err := cache.NewLane() // Now whoever registers anew leaves it to the reaper to find holders.
	if err != nil {
		t.Fatal(err)
	}
	first, err := cache.AcquireRange(t.Context(), other, allRemote)
	if err != nil {
		t.Fatal(err)
	}
	held, err := cache.AcquireRange(t.Context(), rng, allRemote)
	if err != nil {
		t.Fatal(err)
	}
	release(t, &first)
	if _, err := cache.Invalidate(other); err != nil { // The reaper tells, and stays there.
		t.Fatal(err)
	}
	<-blocked
	if err := errors.Join(space.Unmap(rng), space.MapFixed(rng, prot)); err != nil {
		t.Fatal(err)
	}
	anew, err := cache.AcquireRange(t.Context(), part, allRemote)
	if err != nil {
		t.Fatal(err)
	}
	list, err := cache.Update(t.Context(), vm.Range{Start: part.End, End: rng.End}, pindown.UpdateAtomic)
	if err != nil || len(list) != 1 || list[0].Outcome != pindown.UpdateDone || list[0].RemoteKey != held.RemoteKey() {
		t.Errorf("%+v, %v", list, err)
	}
	check(t, "stale", held.Stale(), false)
	close(proceed)
	release(t, &anew)
	release(t, &held)
	if err := errors.Join(lane.Close(), cache.Close(), dev.Close(), mon.Close(), space.Check()); err != nil {
		t.Error(err)
	}
}

// TestRevivalWaitsForNothing: an update that nobody has asked for doesn't keep the
// reaper from its work while the monitor can't cover the range.
func TestRevivalWaitsForNothing(t *testing.T) {
	var pending atomic.Bool
	r := newSimRig(t, nil, &pindown.Options{MergeBytes: -1, OnStale: pindown.StaleUpdate, RegisterTimeout: time.Hour},
		func(m *manual.Monitor) monitor.Monitor {
			return &refusing{m, func() error {
				if pending.Load() {
					return monitor.ErrPending
				}
				return nil
			}}
		})
	rng, idle := r.alloc(t, 2), r.alloc(t, 1)
	reg, other := r.get(t, rng, allRemote), r.get(t, idle, allRemote)
	release(t, &other)
	pending.Store(true)
	r.renew(t, rng)
	eventually(t, "a try", func() bool { return r.Stats().Updates[pindown.UpdateFailed] > 0 })
	r.renew(t, idle)
	eventually(t, "the idle one's end", func() bool { return r.Stats().Regions == 1 })
	pending.Store(false)
	eventually(t, "an update", func() bool { return !reg.Stale() })
	release(t, &reg)
}

// TestExposeStale: a stale region isn't exposed: peers would reach pages that nobody
// sees. While it is being updated Expose waits.
func TestExposeStale(t *testing.T) {
	for _, policy := range policies() {
		var r *simRig
		var stop atomic.Bool
		inside, proceed := make(chan struct{}), make(chan struct{})
		r = newSimRig(t, &simhca.Options{Fault: func(f simhca.Fault) error {
			if f.Step == simhca.StepPinned && f.Verb != simhca.VerbRegister && stop.Swap(false) {
				close(inside)
				<-proceed
			}
			return nil
		}}, nil)
		rng := r.alloc(t, 2)
		reg := r.get(t, rng, windowed)
		r.renew(t, rng)
		if _, err := reg.Expose(t.Context(), rng, pindown.RemoteWrite); !errors.Is(err, pindown.ErrStale) {
			t.Errorf("expose of a stale region: %v", err)
		}
		check(t, "exposures", r.dev.Stats().Exposures, 0)
		stop.Store(true)
		var wg sync.WaitGroup
		wg.Go(func() {
			if u, err := reg.Update(t.Context(), policy); u.Outcome != pindown.UpdateDone {
				t.Error(u, err)
			}
		})
		<-inside
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := reg.Expose(ctx, rng, pindown.RemoteWrite); err == nil {
			t.Error("exposed in the middle of an update, with a context that has ended")
		}
		wg.Go(func() {
			x, err := reg.Expose(t.Context(), rng, pindown.RemoteWrite)
			if err != nil {
				t.Error(err)
				return
			}
			check(t, "reaches", r.reaches(t, rng.Start, x.RemoteKey()), true)
			if err := x.Revoke(t.Context()); err != nil {
				t.Error(err)
			}
		})
		close(proceed)
		wg.Wait()
		release(t, &reg)
	}
}

// TestExposureRevokedTwice: of many who revoke, with failures among them, each that
// gets nil may rely on it, and the region loses one holder.
func TestExposureRevokedTwice(t *testing.T) {
	var left atomic.Int64
	r := newSimRig(t, &simhca.Options{Fault: func(f simhca.Fault) error {
		if f.Verb == simhca.VerbWithdraw && left.Add(-1) >= 0 {
			return errInjected
		}
		return nil
	}}, nil)
	rng := r.alloc(t, 1)
	for range 50 {
		reg := r.get(t, rng, windowed)
		x := r.expose(t, reg, rng, pindown.RemoteWrite)
		y := r.expose(t, reg, rng, pindown.RemoteWrite)
		left.Store(2)
		var failed atomic.Int64
		var wg sync.WaitGroup
		for range 6 {
			wg.Go(func() {
				if err := x.Revoke(t.Context()); errors.Is(err, errInjected) {
					failed.Add(1)
				} else if err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		check(t, "failures", failed.Load(), 2)
		check(t, "reaches", r.reaches(t, rng.Start, x.RemoteKey()), false)
		check(t, "the other one reaches", r.reaches(t, rng.Start, y.RemoteKey()), true)
		check(t, "exposures", r.dev.Stats().Exposures, 1)
		// Once more, for the one after it has the entry.
		if err := errors.Join(y.Revoke(t.Context()), x.Revoke(t.Context()), y.Revoke(t.Context())); err != nil {
			t.Error(err)
		}
		check(t, "in use", r.Stats().InUse, 1)
		release(t, &reg)
	}
	check(t, "registrations made", r.Stats().Register.Count, 1)
}

// heldQueue is a queue that tells no outcome until it is asked to.
type heldQueue struct{ told []func(error) }

func (q *heldQueue) PostFastRegister(wr device.FastRegister) error {
	q.told = append(q.told, wr.Done)
	return nil
}

func (q *heldQueue) PostLocalInvalidate(wr device.LocalInvalidate) error {
	q.told = append(q.told, wr.Done)
	return nil
}

func (q *heldQueue) tell(err error) {
	q.told[0](err)
	q.told = q.told[1:]
}

// TestFastAfterFailure: between a request's failure and the outcomes of those behind
// it nothing is known of the key, and nothing is posted.
func TestFastAfterFailure(t *testing.T) {
	r := newSimRig(t, nil, nil)
	rng := r.alloc(t, 1)
	reg := r.get(t, rng, pindown.LocalWrite)
	q := &heldQueue{}
	key, err := r.NewFastKey(t.Context(), q, page)
	if err != nil {
		t.Fatal(err)
	}
	register := func() (uint32, error) { return key.Register(reg, rng, pindown.LocalWrite, nil) }
	first, err := register()
	if err != nil {
		t.Fatal(err)
	}
	if err := key.Invalidate(nil); err != nil {
		t.Fatal(err)
	}
	if _, err := register(); err != nil {
		t.Fatal(err)
	}
	q.tell(nil)         // it is lent
	q.tell(errInjected) // and wasn't taken back
	if _, err := register(); !errors.Is(err, device.ErrQueue) {
		t.Errorf("register before all outcomes are told: %v", err)
	}
	if err := key.Invalidate(nil); !errors.Is(err, device.ErrQueue) {
		t.Errorf("invalidate before all outcomes are told: %v", err)
	}
	check(t, "requests posted", len(q.told), 1)
	q.tell(device.ErrQueue)
	if _, err := register(); !errors.Is(err, device.ErrBusy) {
		t.Errorf("register what is lent: %v", err)
	}
	if err := key.Invalidate(nil); err != nil {
		t.Error(err)
	}
	q.tell(nil)
	again, err := register()
	if err != nil || again != device.NextKey(first) {
		t.Errorf("key %#x after %#x, %v", again, first, err)
	}
	q.tell(errInjected)
	if again, err := register(); err != nil || again != device.NextKey(first) {
		t.Errorf("key %#x after a failed %#x, %v", again, device.NextKey(first), err)
	}
	q.tell(errInjected)
	release(t, &reg)
	if err := key.Close(); err != nil {
		t.Error(err)
	}
}

// TestUpdateUnableAtLimit: a device that can't update, and no room for a registration
// beside the one that is held.
func TestUpdateUnableAtLimit(t *testing.T) {
	for _, policy := range policies() {
		for _, waits := range []bool{false, true} {
			r := newSimRig(t, &simhca.Options{Without: simhca.CanUpdate | simhca.CanRevoke},
				&pindown.Options{MaxRegions: 1, MergeBytes: -1, WaitForBudget: waits})
			rng := r.alloc(t, 2)
			reg := r.get(t, rng, allRemote)
			r.renew(t, rng)
			ctx, cancel := context.WithCancel(t.Context())
			before := r.Stats().Waits
			var wg sync.WaitGroup
			if waits {
				wg.Go(func() {
					eventually(t, "a wait for budget", func() bool { return r.Stats().Waits > before })
					cancel()
				})
			}
			u, err := reg.Update(ctx, policy)
			wg.Wait()
			cancel()
			if u.Outcome != pindown.UpdateFailed || err == nil || u.KeyChanged() {
				t.Errorf("%+v, %v", u, err)
			}
			if waits && !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
			r.expectKey(t, rng, reg.RemoteKey(), meanOld)
			check(t, "registrations but the peer's", r.dev.Stats().Registrations, 2)
			release(t, &reg)
			next := r.get(t, rng, allRemote)
			check(t, "reaches", r.reaches(t, rng.Start, next.RemoteKey()), true)
			release(t, &next)
		}
	}
}

// TestUpdateMerges: a region is updated while a request for more is registering it
// anew, and the other way round.
func TestUpdateMerges(t *testing.T) {
	for _, policy := range policies() {
		var stop atomic.Uint32 // the verb
		inside, proceed := make(chan struct{}), make(chan struct{})
		r := newSimRig(t, &simhca.Options{Fault: func(f simhca.Fault) error {
			if f.Step == simhca.StepPinned && stop.CompareAndSwap(uint32(f.Verb), 0) {
				inside <- struct{}{}
				<-proceed
			}
			return nil
		}}, &pindown.Options{})
		all := r.alloc(t, 4)
		part := vm.Range{Start: all.Start + page, End: all.Start + 2*page}
		reg := r.get(t, part, allRemote)
		key := reg.RemoteKey()

		// A request for all is under way when the region goes stale and is updated.
		stop.Store(uint32(simhca.VerbRegister))
		var wide, wide2 pindown.Region
		var wg sync.WaitGroup
		wg.Go(func() { wide = r.get(t, all, allRemote) })
		<-inside
		r.renew(t, all)
		wg.Go(func() {
			if u, err := reg.Update(t.Context(), policy); u.Outcome != pindown.UpdateDone || u.RemoteKey != key {
				t.Errorf("%+v, %v", u, err)
			}
		})
		proceed <- struct{}{}
		wg.Wait()
		check(t, "stale", reg.Stale(), false)
		check(t, "reaches", r.reaches(t, part.Start, key), true)
		check(t, "the wide one is stale", wide.Stale(), true)
		release(t, &wide)

		// An update is under way when all is asked for.
		r.renew(t, all)
		verb := simhca.VerbUpdate
		if policy == pindown.UpdateStrict {
			verb = simhca.VerbLoad
		}
		stop.Store(uint32(verb))
		waits := r.Stats().Waits
		wg.Go(func() {
			if u, err := reg.Update(t.Context(), policy); u.Outcome != pindown.UpdateDone || u.RemoteKey != key {
				t.Errorf("%+v, %v", u, err)
			}
		})
		<-inside
		wg.Go(func() { wide2 = r.get(t, all, allRemote) })
		eventually(t, "an acquire that waits", func() bool { return r.Stats().Waits > waits })
		proceed <- struct{}{}
		wg.Wait()
		for _, x := range []pindown.Region{reg, wide2} {
			check(t, "stale", x.Stale(), false)
			check(t, "reaches", r.reaches(t, part.Start, x.RemoteKey()), true)
		}
		release(t, &wide2)
		release(t, &reg)
	}
}

// TestUpdateForked: in a forked child nothing of this works, nor hangs.
func TestUpdateForked(t *testing.T) {
	if raceDetector {
		t.Skip("the race detector doesn't survive a fork without exec")
	}
	r := newSimRig(t, nil, nil)
	rng := r.alloc(t, 1)
	reg := r.get(t, rng, windowed)
	x := r.expose(t, reg, rng, pindown.RemoteRead)
	q := &heldQueue{}
	key, err := r.NewFastKey(t.Context(), q, page)
	if err != nil {
		t.Fatal(err)
	}
	ctx := context.Background()
	status, ok := forked(t, func() (bits uintptr) {
		for i, f := range []func() error{
			func() error { _, err := r.Update(ctx, rng, pindown.UpdateAtomic); return err },
			func() error { _, err := reg.Update(ctx, pindown.UpdateAtomic); return err },
			func() error { _, err := reg.Expose(ctx, rng, pindown.RemoteRead); return err },
			func() error { return x.Revoke(ctx) },
			func() error { _, err := r.NewFastKey(ctx, q, page); return err },
			func() error { _, err := key.Register(reg, rng, 0, nil); return err },
			func() error { return key.Invalidate(nil) },
			func() error { return key.Close() },
		} {
			if !errors.Is(f(), pindown.ErrForked) {
				bits |= 1 << i
			}
		}
		return bits
	})
	if !ok {
		t.Skip("the child met a lock of the runtime's")
	}
	check(t, "what didn't say that it was forked", status, 0)
	if err := errors.Join(x.Revoke(ctx), key.Close()); err != nil {
		t.Error(err)
	}
	release(t, &reg)
}

// turmoil is a cache that many use at the same time in every way there is, while
// anything may fail.
type turmoil struct {
	*simRig
	t     *testing.T
	seed  uint64
	ctx   context.Context
	rngs  []vm.Range
	fails atomic.Int64 // in 1024
	frnd  struct {
		sync.Mutex
		*rand.Rand
	}
	counts [16]atomic.Uint64
}

func (s *turmoil) fault(f simhca.Fault) error {
	p := s.fails.Load()
	if p == 0 {
		return nil
	}
	s.frnd.Lock()
	defer s.frnd.Unlock()
	if s.frnd.Int64N(1024) >= p {
		return nil
	}
	switch f.Verb {
	case simhca.VerbUpdate, simhca.VerbRevoke, simhca.VerbLoad:
		return []error{errInjected, device.ErrBusy, device.ErrNoMemory, device.ErrRegistrationLost}[s.frnd.IntN(4)]
	case simhca.VerbDeregister, simhca.VerbExecute:
		return nil // It would be leaked, or no fault of ours.
	default:
	}
	return []error{errInjected, device.ErrBusy, device.ErrNoMemory}[s.frnd.IntN(3)]
}

// context returns one that is alive, has ended, or ends at any time.
func (s *turmoil) context(rnd *rand.Rand) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(s.ctx)
	switch rnd.IntN(8) {
	case 0:
		cancel()
	case 1:
		n := rnd.IntN(50)
		go func() {
			for range n {
				runtime.Gosched()
			}
			cancel()
		}()
	}
	return ctx, cancel
}

// expected reports whether an error may come out of the turmoil.
func expected(err error) bool {
	return slices.ContainsFunc([]error{
		errInjected, context.Canceled, device.ErrBusy, device.ErrNoMemory, device.ErrNoSlots, device.ErrRegistrationLost,
		device.ErrRevoked, device.ErrNotRegistered, device.ErrFault, device.ErrNotSupported, pindown.ErrClosed, pindown.ErrStale,
	}, func(want error) bool { return errors.Is(err, want) })
}

func (s *turmoil) check(what string, err error) bool {
	s.t.Helper()
	if err != nil && !expected(err) {
		s.t.Errorf("seed %d: %s: %v", s.seed, what, err)
	}
	return err == nil
}

// user acquires, updates, exposes, revokes and releases until the cache is closed.
func (s *turmoil) user(rnd *rand.Rand) {
	var regs []pindown.Region
	var open []*pindown.Exposure
	defer func() {
		for _, x := range open {
			s.end(x)
		}
		for i := range regs {
			s.check("release", regs[i].Release())
		}
	}()
	for {
		ctx, cancel := s.context(rnd)
		rng := s.rngs[rnd.IntN(len(s.rngs))]
		if rnd.IntN(2) == 0 {
			at := uintptr(rnd.IntN(int(rng.Len()/page))) * page
			rng = vm.Range{Start: rng.Start + at, End: rng.Start + at + page}
		}
		switch n := rnd.IntN(12); {
		case n < 4 && len(regs) < 3:
			reg, err := s.AcquireRange(ctx, rng, allRemote)
			if errors.Is(err, pindown.ErrClosed) {
				cancel()
				return
			}
			if s.check("acquire", err) {
				regs = append(regs, reg)
				s.counts[0].Add(1)
			}
		case n < 6 && len(regs) > 0:
			i := rnd.IntN(len(regs))
			s.check("release", regs[i].Release())
			regs = slices.Delete(regs, i, i+1)
		case n < 8 && len(regs) > 0:
			policy := pindown.UpdateAtomic
			if len(regs) == 1 && rnd.IntN(2) == 0 {
				policy = pindown.UpdateStrict
			}
			if policy == pindown.UpdateStrict {
				// Others may hold on to it, and wait for the likes of us.
				ctx, cancel = context.WithTimeout(ctx, time.Millisecond)
			}
			u, err := regs[rnd.IntN(len(regs))].Update(ctx, policy)
			s.outcome(u, err)
		case n == 8:
			ctx, stop := context.WithTimeout(ctx, time.Millisecond)
			list, err := s.Update(ctx, rng, policies()[rnd.IntN(2)])
			stop()
			if err != nil && len(list) == 0 {
				s.check("update of a range", err)
			}
			for _, u := range list {
				s.outcome(u, u.Err)
			}
		case n == 9 && len(regs) > 0 && len(open) < 3:
			reg := regs[rnd.IntN(len(regs))]
			if x, err := reg.Expose(ctx, reg.Range(), pindown.RemoteWrite); err == nil {
				open = append(open, x)
				s.counts[1].Add(1)
			} else {
				s.check("expose", err)
			}
		case n == 10 && len(open) > 0:
			i := rnd.IntN(len(open))
			if s.check("revoke", open[i].Revoke(ctx)) {
				open = slices.Delete(open, i, i+1)
			}
		default:
			if _, err := s.Invalidate(rng); errors.Is(err, pindown.ErrClosed) {
				cancel()
				return
			}
		}
		cancel()
	}
}

func (s *turmoil) outcome(u pindown.Updated, err error) {
	s.t.Helper()
	s.counts[2+u.Outcome].Add(1)
	switch {
	case u.Outcome == pindown.UpdateUnknown:
		if err == nil {
			s.t.Errorf("seed %d: %+v", s.seed, u)
		}
	case (u.Err == nil) != (u.Outcome == pindown.UpdateFresh || u.Outcome == pindown.UpdateDone || u.Outcome == pindown.UpdateKeyChanged || u.Outcome == pindown.UpdateAnew):
		s.t.Errorf("seed %d: %+v", s.seed, u)
	case u.Outcome == pindown.UpdateGone && (u.LocalKey != 0 || u.RemoteKey != 0):
		s.t.Errorf("seed %d: %+v", s.seed, u)
	case u.Outcome == pindown.UpdateDone && (u.LocalKey != u.OldLocalKey || u.RemoteKey != u.OldRemoteKey):
		s.t.Errorf("seed %d: %+v", s.seed, u)
	}
}

// end revokes an exposure, which a fault may put off.
func (s *turmoil) end(x *pindown.Exposure) {
	for range 1000 {
		if x.Revoke(context.Background()) == nil {
			return
		}
	}
	s.t.Errorf("seed %d: an exposure that can't be revoked", s.seed)
}

// TestUpdateTurmoil: updates, exposures, revocations, acquires, invalidations, VM
// operations, contexts that end and a device that fails, at last a Close, all at the
// same time and on devices of all abilities. Nothing hangs, and nothing is left.
func TestUpdateTurmoil(t *testing.T) {
	rounds := 40
	if testing.Short() || raceDetector {
		rounds = 8
	}
	seed, _ := randomSeed(t)
	var counts [16]uint64
	for round := range rounds {
		rnd := rand.New(rand.NewPCG(seed, uint64(round)))
		s := &turmoil{t: t, seed: seed}
		s.frnd.Rand = rand.New(rand.NewPCG(seed, uint64(round)+1<<32))
		o := &pindown.Options{
			MaxRegions: 3 + rnd.IntN(20), RegisterTimeout: time.Duration(rnd.IntN(2)) * time.Millisecond,
			MergeBytes: rnd.Int64N(2) - 1, OnStale: []pindown.StalePolicy{pindown.StaleDrop, pindown.StaleUpdate}[rnd.IntN(2)],
			WaitForBudget: rnd.IntN(3) == 0,
		}
		if o.RegisterTimeout == 0 {
			o.RegisterTimeout = -1
		}
		without := []simhca.Capability{0, simhca.CanUpdate, simhca.CanRevoke, simhca.CanUpdate | simhca.CanRevoke, simhca.CanFlush}[rnd.IntN(5)]
		s.simRig = newSimRig(t, &simhca.Options{
			Fault: s.fault, Without: without, HoldRevoked: rnd.IntN(2) == 0,
			Limits: device.Limits{MaxPinnedBytes: uint64(20+rnd.IntN(100)) * page},
		}, o)
		var stop context.CancelFunc
		s.ctx, stop = context.WithCancel(t.Context())
		for range 3 {
			s.rngs = append(s.rngs, s.alloc(t, 4))
		}
		s.fails.Store([]int64{0, 30, 200}[rnd.IntN(3)])
		var users sync.WaitGroup
		for u := range uint64(4) {
			users.Go(func() { s.user(rand.New(rand.NewPCG(seed, uint64(round)<<8|u+1))) })
		}
		for range 1000 {
			rng := s.rngs[rnd.IntN(len(s.rngs))]
			var err error
			if rnd.IntN(2) == 0 {
				err = s.space.Dontneed(rng)
			} else {
				err = errors.Join(s.space.Unmap(rng), s.space.MapFixed(rng, simhca.ProtRead|simhca.ProtWrite))
			}
			if err != nil {
				t.Fatal(err)
			}
			for range rnd.IntN(100) {
				runtime.Gosched()
			}
		}
		_ = s.Close() // with whatever is held at the moment
		stop()
		users.Wait()
		s.fails.Store(0)
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		if err := s.Shutdown(ctx); errors.Is(err, pindown.ErrInUse) {
			t.Errorf("seed %d: %v; %+v", seed, err, s.Stats())
		}
		cancel()
		check(t, "registrations but the peer's", s.dev.Stats().Registrations, 1)
		for i := range counts {
			counts[i] += s.counts[i].Load()
		}
		if t.Failed() {
			t.Fatalf("round %d: %+v", round, o)
		}
	}
	t.Logf("acquired %d, exposed %d, outcomes %d", counts[0], counts[1], counts[2:])
}
