package simhca

import (
	"context"
	"errors"

	"github.com/pindown/pindown/device"
)

// Update implements [device.Updater]: the keys mean the pages now mapped, from
// one packet to the next.
//
// A request that has begun finishes the page that it is in the middle of where
// it began it, so that no page is torn, and goes on with the new pages; with
// Options.KeepPages it goes on with the old. They stay pinned until then. The
// new pages are pinned before the old are given back, so at the limit Update
// fails with ErrNoMemory.
func (d *Device) Update(ctx context.Context, reg device.Registration) (device.Registration, error) {
	got, err := d.change(ctx, VerbUpdate, reg)
	return got, d.done(VerbUpdate, reg.Range, err)
}

// Load implements [device.RevokingUpdater].
func (d *Device) Load(ctx context.Context, reg device.Registration) (device.Registration, error) {
	got, err := d.change(ctx, VerbLoad, reg)
	return got, d.done(VerbLoad, reg.Range, err)
}

// change gives a registration's keys the pages now mapped: from other pages
// (update) or from nothing (load).
func (d *Device) change(ctx context.Context, v Verb, reg device.Registration) (device.Registration, error) {
	var none device.Registration
	capability, cost, shootdown := CanUpdate, d.opts.Costs.Update, d.opts.Costs.Shootdown
	if v == VerbLoad {
		capability, cost, shootdown = CanRevoke, d.opts.Costs.Load, 0
	}
	e, err := d.begin(ctx, capability, reg)
	if err != nil {
		return none, err
	}
	switch {
	case v == VerbUpdate && e.revoked:
		err = device.ErrRevoked
	case v == VerbLoad && !e.revoked:
		err = device.ErrNotRevoked
	}
	if err != nil {
		e.busy = false
		d.leave()
		return none, err
	}
	d.mu.Unlock()

	m, err := d.pin(v, e.key(), e.r, e.access)
	if err == nil {
		d.ledger.charge(v, cost, e.r.Pages(d.page), shootdown)
	}

	d.mu.Lock()
	if err != nil {
		d.failedLocked(e, err)
		d.leave()
		d.wakeSenders()
		return none, err
	}
	e.busy = false
	if v == VerbUpdate {
		d.replaceLocked(e, m)
	} else {
		e.now, e.revoked = m, false
	}
	got := e.registration()
	d.leave()
	d.wakeSenders() // Held back by a revoked key.
	return got, nil
}

// Revoke implements [device.RevokingUpdater]. It waits for packets that are in
// the middle of a page; when it returns, nothing reaches the old pages under
// the registration's keys, and they are unpinned unless a fast key holds them.
//
// Peers' requests under the key fail, or wait for Load with
// Options.HoldRevoked. The queues' own requests fail.
func (d *Device) Revoke(ctx context.Context, reg device.Registration) error {
	return d.done(VerbRevoke, reg.Range, d.revoke(ctx, reg))
}

func (d *Device) revoke(ctx context.Context, reg device.Registration) error {
	e, err := d.begin(ctx, CanRevoke, reg)
	if err != nil {
		return err
	}
	d.mu.Unlock()

	err = d.fault(Fault{Verb: VerbRevoke, Step: StepBegin, Key: e.key(), Range: e.r})

	if err == nil {
		d.ledger.charge(VerbRevoke, d.opts.Costs.Revoke, e.r.Pages(d.page), d.opts.Costs.Shootdown)
	}

	d.mu.Lock()
	defer d.leave()
	if err != nil {
		d.failedLocked(e, err)
		return err
	}
	e.revoked = true
	d.killLocked(e)
	e.busy = false
	return nil
}

// begin enters a verb on a registration and claims it. It returns with mu held
// if there is no error.
func (d *Device) begin(ctx context.Context, c Capability, reg device.Registration) (*entry, error) {
	if err := errors.Join(ctx.Err(), d.can(c)); err != nil {
		return nil, err
	}
	if err := d.enter(); err != nil {
		return nil, err
	}
	e, err := d.claimLocked(reg)
	if err != nil {
		d.leave()
		return nil, err
	}
	e.busy = true
	return e, nil
}

// failedLocked ends a verb that failed: the registration is as it was, unless
// the injected error says that it is lost. Then it is gone, with the exposures
// over it, and windows lose their meaning.
func (d *Device) failedLocked(e *entry, err error) {
	if !errors.Is(err, device.ErrRegistrationLost) {
		e.busy = false
		return
	}
	e.ending, e.revoked = true, false
	d.killLocked(e)
	for _, w := range d.table.entries {
		if w == nil || !w.kind.isWindow() || w.over != e {
			continue
		}
		d.unbindLocked(w)
		if w.kind == kindExposure && !w.busy {
			d.freeLocked(w)
		}
	}
	d.freeLocked(e)
}
