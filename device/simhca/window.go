package simhca

import (
	"context"
	"errors"
	"fmt"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/vm"
)

// Expose implements [device.Exposer]: it takes a window and binds it at once.
func (d *Device) Expose(ctx context.Context, reg device.Registration, r vm.Range, access device.Access) (device.Exposure, error) {
	x, err := d.expose(ctx, reg, r, access)
	return x, d.done(VerbExpose, r, err)
}

func (d *Device) expose(ctx context.Context, reg device.Registration, r vm.Range, access device.Access) (device.Exposure, error) {
	var none device.Exposure
	if err := errors.Join(ctx.Err(), d.can(CanExpose)); err != nil {
		return none, err
	}
	if err := d.fault(Fault{Verb: VerbExpose, Step: StepBegin, Key: reg.LocalKey, Range: r}); err != nil {
		return none, err
	}
	d.ledger.charge(VerbExpose, Cost{Call: d.opts.Costs.Expose}, 0, 0)
	if err := d.enter(); err != nil {
		return none, err
	}
	defer d.leave()
	e, err := d.regionLocked(reg)
	if err != nil {
		return none, err
	}
	if err := e.windowLocked(r, access); err != nil {
		return none, err
	}
	w := d.table.alloc(kindExposure, e.pd)
	if w == nil {
		return none, fmt.Errorf("%d entries in use: %w", d.limits.MaxRegistrations, device.ErrNoSlots)
	}
	d.live[kindExposure]++
	bindLocked(w, e, r, access)
	return device.Exposure{Range: r, Access: access, RemoteKey: w.key(), Handle: w.handle()}, nil
}

// windowLocked checks whether a window can be bound to a registration.
func (e *entry) windowLocked(r vm.Range, access device.Access) error {
	switch {
	case e.ending:
		return fmt.Errorf("another call on it: %w", device.ErrBusy)
	case e.now == nil:
		return device.ErrRevoked
	case r.Empty() || !e.r.Contains(r):
		return fmt.Errorf("not in %v: %w", e.r, device.ErrInvalid)
	case access == 0 || access&^remoteAccess != 0:
		return fmt.Errorf("%v for a window: %w", access, device.ErrAccess)
	case e.access&device.WindowBind == 0:
		return fmt.Errorf("registered without %v: %w", device.WindowBind, device.ErrAccess)
	case access&needsWrite != 0 && e.access&device.LocalWrite == 0:
		return fmt.Errorf("%v on memory registered for reading: %w", access, device.ErrAccess)
	}
	return nil
}

// bindLocked has w's key reach r of e.
func bindLocked(w, e *entry, r vm.Range, access device.Access) {
	w.r, w.access = r, access
	w.now = &meaning{r: r, access: access}
	w.over = e
	e.windows++
}

// unbindLocked takes w's meaning away, and waits for packets that use it.
func (d *Device) unbindLocked(w *entry) {
	d.killLocked(w)
	if w.over != nil {
		w.over.windows--
		w.over = nil
	}
}

// Withdraw implements [device.Exposer]. It waits for packets that are in the
// middle of a page.
func (d *Device) Withdraw(ctx context.Context, x device.Exposure) error {
	return d.done(VerbWithdraw, x.Range, d.withdraw(ctx, x))
}

func (d *Device) withdraw(ctx context.Context, x device.Exposure) error {
	if err := errors.Join(ctx.Err(), d.can(CanExpose)); err != nil {
		return err
	}
	if err := d.fault(Fault{Verb: VerbWithdraw, Step: StepBegin, Key: x.RemoteKey, Range: x.Range}); err != nil {
		return err
	}
	d.ledger.charge(VerbWithdraw, Cost{Call: d.opts.Costs.Withdraw}, 0, d.opts.Costs.Shootdown)
	if err := d.enter(); err != nil {
		return err
	}
	w := d.table.byHandle(x.Handle, kindExposure)
	switch {
	case w == nil:
		d.leave()
		return device.ErrNotExposed
	case w.busy:
		d.leave()
		return fmt.Errorf("another call on it: %w", device.ErrBusy)
	}
	w.busy = true
	d.unbindLocked(w)
	d.freeLocked(w)
	d.leave()
	d.wakeSenders() // Held back by a revoked registration's key, in vain.
	return nil
}
