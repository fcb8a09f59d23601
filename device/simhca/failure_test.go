package simhca_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/simhca"
	"github.com/pindown/pindown/vm"
)

var errInjected = errors.New("injected")

// failing is a rig whose device fails where armed, once.
type failing struct {
	*rig
	verb  simhca.Verb
	step  simhca.Step
	op    simhca.Opcode
	err   error
	count int // how often it failed.
}

func newFailing(t *testing.T) *failing {
	t.Helper()
	f := &failing{}
	f.rig = newRig(t, simhca.Options{Fault: func(at simhca.Fault) error {
		if f.err == nil || at.Verb != f.verb || at.Step != f.step || f.op != 0 && f.op != at.Op {
			return nil
		}
		err := f.err
		f.err = nil
		f.count++
		return err
	}}, false)
	return f
}

// arm has the next call of verb fail at step.
func (f *failing) arm(verb simhca.Verb, step simhca.Step, err error) {
	f.verb, f.step, f.op, f.err, f.count = verb, step, 0, err, 0
}

func (f *failing) wantFailed(what string, err, want error) {
	f.t.Helper()
	f.wantError(what, err, want)
	if f.count != 1 {
		f.t.Errorf("%s: failed %d times, want once", what, f.count)
	}
}

// state is what must be as it was.
type state struct {
	registrations, exposures, keys int
	bytes                          uint64
	pinned                         int
}

func (f *failing) state() state {
	s := f.dev.Stats()
	return state{s.Registrations, s.Exposures, s.FastKeys, s.PinnedBytes, f.space.Stats().Pinned}
}

func (f *failing) wantState(want state) {
	f.t.Helper()
	if got := f.state(); got != want {
		f.t.Errorf("state %+v, want %+v", got, want)
	}
}

var errLost = fmt.Errorf("injected: %w", device.ErrRegistrationLost)

// TestFailures has a test for each row of the table in the package comment.
func TestFailures(t *testing.T) {
	const begin, pinned = simhca.StepBegin, simhca.StepPinned
	// Each starts with two pages of 'x' that are registered, and replaced by
	// pages of 'y' where it says so.
	for _, c := range []struct {
		name string
		f    func(f *failing, r vm.Range, reg device.Registration)
	}{
		{"register/begin", func(f *failing, r vm.Range, _ device.Registration) { f.failRegister(r, begin) }},
		{"register/pinned", func(f *failing, r vm.Range, _ device.Registration) { f.failRegister(r, pinned) }},
		{"deregister/begin", func(f *failing, r vm.Range, reg device.Registration) {
			before := f.state()
			f.arm(simhca.VerbDeregister, begin, errInjected)
			f.wantFailed("deregister", f.dev.Deregister(reg), errInjected)
			f.wantState(before)
			f.wantSees("after a failed deregister", r, reg.RemoteKey, 'x')
			f.must(f.dev.Deregister(reg))
		}},
		{"update/begin", func(f *failing, r vm.Range, reg device.Registration) { f.failUpdate(r, reg, begin) }},
		{"update/pinned", func(f *failing, r vm.Range, reg device.Registration) { f.failUpdate(r, reg, pinned) }},
		{"update/begin, lost", func(f *failing, r vm.Range, reg device.Registration) { f.loseInUpdate(r, reg, begin) }},
		{"update/pinned, lost", func(f *failing, r vm.Range, reg device.Registration) { f.loseInUpdate(r, reg, pinned) }},
		{"revoke/begin", func(f *failing, r vm.Range, reg device.Registration) {
			before := f.state()
			f.arm(simhca.VerbRevoke, begin, errInjected)
			f.wantFailed("revoke", f.dev.Revoke(ctx, reg), errInjected)
			f.wantState(before)
			f.wantSees("after a failed revoke", r, reg.RemoteKey, 'x')
			_, err := f.dev.Load(ctx, reg)
			f.wantError("load of what isn't revoked", err, device.ErrNotRevoked)
			f.must(f.dev.Revoke(ctx, reg))
		}},
		{"revoke/begin, lost", func(f *failing, r vm.Range, reg device.Registration) {
			f.arm(simhca.VerbRevoke, begin, errLost)
			f.wantFailed("revoke", f.dev.Revoke(ctx, reg), device.ErrRegistrationLost)
			f.wantGone(r, reg)
		}},
		{"load/begin", func(f *failing, r vm.Range, reg device.Registration) { f.failLoad(r, reg, begin) }},
		{"load/pinned", func(f *failing, r vm.Range, reg device.Registration) { f.failLoad(r, reg, pinned) }},
		{"load/begin, lost", func(f *failing, r vm.Range, reg device.Registration) { f.loseInLoad(r, reg, begin) }},
		{"load/pinned, lost", func(f *failing, r vm.Range, reg device.Registration) { f.loseInLoad(r, reg, pinned) }},
		{"flush/begin", func(f *failing, r vm.Range, reg device.Registration) {
			from := f.scratch(1, 'w')
			f.must(f.queue.Post(write(1, from, r.Start, reg.RemoteKey)))
			before := f.state()
			f.arm(simhca.VerbFlush, begin, errInjected)
			f.wantFailed("flush", f.dev.Flush(ctx, reg), errInjected)
			f.wantState(before)
			if n := f.queue.Pending(); n != 1 {
				f.t.Errorf("%d requests pending, want 1", n)
			}
			f.must(f.dev.Flush(ctx, reg))
			if n := f.queue.Pending(); n != 0 {
				f.t.Errorf("%d requests pending after flush", n)
			}
		}},
		{"expose/begin", func(f *failing, r vm.Range, reg device.Registration) {
			before := f.state()
			f.arm(simhca.VerbExpose, begin, errInjected)
			_, err := f.dev.Expose(ctx, reg, r, device.RemoteRead)
			f.wantFailed("expose", err, errInjected)
			f.wantState(before)
			f.must(f.dev.Deregister(reg)) // No window is bound.
		}},
		{"withdraw/begin", func(f *failing, r vm.Range, reg device.Registration) {
			x, err := f.dev.Expose(ctx, reg, r, device.RemoteRead)
			f.must(err)
			before := f.state()
			f.arm(simhca.VerbWithdraw, begin, errInjected)
			f.wantFailed("withdraw", f.dev.Withdraw(ctx, x), errInjected)
			f.wantState(before)
			f.wantSees("after a failed withdraw", r, x.RemoteKey, 'x')
			f.must(f.dev.Withdraw(ctx, x))
			f.wantDead("after withdraw", r, x.RemoteKey)
		}},
		{"alloc-fast-key/begin", func(f *failing, _ vm.Range, _ device.Registration) {
			before := f.state()
			f.arm(simhca.VerbAllocFastKey, begin, errInjected)
			_, err := f.dev.AllocFastKey(ctx, page)
			f.wantFailed("alloc fast key", err, errInjected)
			f.wantState(before)
		}},
		{"free-fast-key/begin", func(f *failing, _ vm.Range, _ device.Registration) {
			k, err := f.dev.AllocFastKey(ctx, page)
			f.must(err)
			before := f.state()
			f.arm(simhca.VerbFreeFastKey, begin, errInjected)
			f.wantFailed("free fast key", f.dev.FreeFastKey(k), errInjected)
			f.wantState(before)
			f.must(f.dev.FreeFastKey(k))
		}},
		{"post/begin", func(f *failing, r vm.Range, reg device.Registration) {
			from := f.scratch(1, 'w')
			k, err := f.dev.AllocFastKey(ctx, 2*page)
			f.must(err)
			before := f.state()
			f.arm(simhca.VerbPost, begin, errInjected)
			f.wantFailed("post", f.queue.Post(write(1, from, r.Start, reg.RemoteKey)), errInjected)
			f.arm(simhca.VerbPost, begin, errInjected)
			err = f.queue.PostFastRegister(device.FastRegister{
				Key: k.Key, Over: reg, Range: r, Access: device.RemoteRead, Done: func(error) { f.t.Error("done of what wasn't posted") },
			})
			f.wantFailed("post fast-register", err, errInjected)
			if f.stepper.Step() || f.queue.Failed() {
				f.t.Errorf("something was posted, or the queue failed: %v", f.queue.Failed())
			}
			f.wantState(before)
			f.must(f.dev.FreeFastKey(k))
		}},
		{"execute data/begin", func(f *failing, r vm.Range, reg device.Registration) {
			f.failWrite(r, reg, begin, 2, page) // The second packet: the first page has moved.
		}},
		{"execute data/moving", func(f *failing, r vm.Range, reg device.Registration) {
			f.failWrite(r, reg, simhca.StepMoving, 1, 0)
		}},
		{"execute fast-register", func(f *failing, r vm.Range, reg device.Registration) {
			k, err := f.dev.AllocFastKey(ctx, 2*page)
			f.must(err)
			before := f.state()
			f.arm(simhca.VerbExecute, begin, errInjected)
			f.op = simhca.OpFastRegister
			var done []error
			f.must(f.queue.PostFastRegister(device.FastRegister{
				Key: k.Key, Over: reg, Range: r, Access: device.RemoteRead, Done: func(err error) { done = append(done, err) },
			}))
			f.must(f.queue.PostFastRegister(device.FastRegister{
				Key: k.Key, Over: reg, Range: r, Access: device.RemoteRead, Done: func(err error) { done = append(done, err) },
			}))
			f.stepper.Run()
			if len(done) != 2 || done[0] == nil || errors.Is(done[0], device.ErrQueue) || !errors.Is(done[1], device.ErrQueue) || !f.queue.Failed() {
				f.t.Errorf("done %v, queue failed %v", done, f.queue.Failed())
			}
			f.wantState(before)
			f.wantDead("after a failed fast-register", r, k.Key)
			f.wantError("post to a queue in error", f.queue.PostLocalInvalidate(device.LocalInvalidate{Key: k.Key}), device.ErrQueue)
			f.must(f.dev.FreeFastKey(k))
		}},
		{"execute local-invalidate", func(f *failing, r vm.Range, reg device.Registration) {
			k := f.fastKey(r, reg)
			before := f.state()
			f.arm(simhca.VerbExecute, begin, errInjected)
			f.op = simhca.OpLocalInvalidate
			f.wantStatus("local-invalidate", f.do(f.queue, invalidate(1, k.Key)), simhca.StatusGeneral)
			f.wantState(before)
			f.wantSees("after a failed local-invalidate", r, k.Key, 'x')
			f.wantStatus("flushed", f.do(f.queue, invalidate(2, k.Key)), simhca.StatusFlushed)
			f.wantSees("after a flushed local-invalidate", r, k.Key, 'x')
			f.wantError("free of a key in use", f.dev.FreeFastKey(k), device.ErrBusy)
			f.must(simhca.Connect(f.queue, f.queue))
			f.wantStatus("again", f.do(f.queue, invalidate(3, k.Key)), simhca.StatusSuccess)
			f.wantDead("after local-invalidate", r, k.Key)
		}},
		{"execute bind", func(f *failing, r vm.Range, reg device.Registration) {
			w, err := f.dev.ProtectionDomain().AllocWindow(ctx)
			f.must(err)
			bind := simhca.WorkRequest{ID: 1, Op: simhca.OpBind, Bind: &simhca.Bind{Key: w.Key, Over: reg, Range: r, Access: device.RemoteRead}}
			f.arm(simhca.VerbExecute, begin, errInjected)
			f.op = simhca.OpBind
			f.wantStatus("bind", f.do(f.queue, bind), simhca.StatusGeneral)
			f.wantDead("after a failed bind", r, w.Key)
			f.must(simhca.Connect(f.queue, f.queue))
			f.wantStatus("again", f.do(f.queue, bind), simhca.StatusSuccess)
			f.wantSees("after bind", r, w.Key, 'x')
			f.wantError("deregister under a window", f.dev.Deregister(reg), device.ErrBusy)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newFailing(t)
			r := f.mapped(2, 'x')
			c.f(f, r, f.register(r, allAcc))
		})
	}
}

func (f *failing) failRegister(r vm.Range, step simhca.Step) {
	f.t.Helper()
	before := f.state()
	f.arm(simhca.VerbRegister, step, errInjected)
	reg, err := f.dev.Register(ctx, r, allAcc)
	f.wantFailed("register", err, errInjected)
	if reg != (device.Registration{}) {
		f.t.Errorf("%+v with an error", reg)
	}
	f.wantState(before)
}

func (f *failing) failUpdate(r vm.Range, reg device.Registration, step simhca.Step) {
	f.t.Helper()
	f.replace(r, 'y')
	before := f.state()
	f.arm(simhca.VerbUpdate, step, errInjected)
	_, err := f.dev.Update(ctx, reg)
	f.wantFailed("update", err, errInjected)
	f.wantState(before)
	f.wantSees("after a failed update", r, reg.RemoteKey, 'x')
	_, err = f.dev.Update(ctx, reg)
	f.must(err)
	f.wantSees("after an update", r, reg.RemoteKey, 'y')
	f.wantState(before)
}

// wantGone fails unless reg is lost, with all that hangs on it.
func (f *failing) wantGone(r vm.Range, reg device.Registration) {
	f.t.Helper()
	f.wantState(state{})
	f.wantDead("after the loss", r, reg.RemoteKey)
	f.wantError("deregister of what is lost", f.dev.Deregister(reg), device.ErrNotRegistered)
}

func (f *failing) loseInUpdate(r vm.Range, reg device.Registration, step simhca.Step) {
	f.t.Helper()
	x, err := f.dev.Expose(ctx, reg, r, device.RemoteRead)
	f.must(err)
	f.replace(r, 'y')
	f.arm(simhca.VerbUpdate, step, errLost)
	_, err = f.dev.Update(ctx, reg)
	f.wantFailed("update", err, device.ErrRegistrationLost)
	f.wantGone(r, reg)
	f.wantDead("exposure after the loss", r, x.RemoteKey)
	f.wantError("withdraw after the loss", f.dev.Withdraw(ctx, x), device.ErrNotExposed)
}

func (f *failing) failLoad(r vm.Range, reg device.Registration, step simhca.Step) {
	f.t.Helper()
	f.replace(r, 'y')
	f.must(f.dev.Revoke(ctx, reg))
	before := f.state()
	if before.pinned != 0 || before.registrations != 1 {
		f.t.Errorf("revoked: %+v", before)
	}
	f.arm(simhca.VerbLoad, step, errInjected)
	_, err := f.dev.Load(ctx, reg)
	f.wantFailed("load", err, errInjected)
	f.wantState(before)
	f.wantDead("after a failed load", r, reg.RemoteKey)
	_, err = f.dev.Update(ctx, reg)
	f.wantError("update of what is revoked", err, device.ErrRevoked)
	f.must(f.dev.Revoke(ctx, reg)) // Idempotent.
	_, err = f.dev.Load(ctx, reg)
	f.must(err)
	f.wantSees("after load", r, reg.RemoteKey, 'y')
}

func (f *failing) loseInLoad(r vm.Range, reg device.Registration, step simhca.Step) {
	f.t.Helper()
	f.must(f.dev.Revoke(ctx, reg))
	f.arm(simhca.VerbLoad, step, errLost)
	_, err := f.dev.Load(ctx, reg)
	f.wantFailed("load", err, device.ErrRegistrationLost)
	f.wantGone(r, reg)
}

// failWrite has packet number n of a write of two pages fail at step, when the
// first moved bytes have arrived.
func (f *failing) failWrite(r vm.Range, reg device.Registration, step simhca.Step, n int, moved uintptr) {
	f.t.Helper()
	from := f.scratch(2, 'w')
	f.must(f.queue.Post(write(1, from, r.Start, reg.RemoteKey)))
	f.must(f.queue.Post(write(2, from, r.Start, reg.RemoteKey)))
	for range n - 1 {
		f.stepper.Step()
	}
	f.arm(simhca.VerbExecute, step, fmt.Errorf("injected: %w", simhca.StatusRemoteOperation.Err()))
	f.stepper.Run()
	var got [3]simhca.Completion
	if n := f.queue.CompletionQueue().Poll(got[:]); n != 2 || got[0].Status != simhca.StatusRemoteOperation || got[1].Status != simhca.StatusFlushed {
		f.t.Errorf("completions %+v", got[:n])
	}
	if !f.queue.Failed() || f.count != 1 {
		f.t.Errorf("queue failed: %v, after %d faults", f.queue.Failed(), f.count)
	}
	if moved > 0 && f.memory(vm.Range{Start: r.Start, End: r.Start + moved}) != 'w' {
		f.t.Error("what was moved before is gone")
	}
	if f.memory(vm.Range{Start: r.Start + moved, End: r.End}) != 'x' {
		f.t.Error("bytes of the failed packet, or of the flushed request, arrived")
	}
}
