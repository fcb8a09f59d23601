package simhca

import (
	"context"
	"errors"
	"fmt"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/vm"
)

const remoteAccess = device.RemoteRead | device.RemoteWrite | device.RemoteAtomic

// needsWrite are the permissions that take writable pages.
const needsWrite = device.LocalWrite | device.RemoteWrite | device.RemoteAtomic

// Register implements [device.Device], in the device's own protection domain.
// The local and the remote key are the same number; without remote access there
// is no remote key.
func (d *Device) Register(ctx context.Context, r vm.Range, access device.Access) (device.Registration, error) {
	return d.pd.Register(ctx, r, access)
}

// Register registers r in this domain. Deregister and the other verbs are the
// device's.
func (p *ProtectionDomain) Register(ctx context.Context, r vm.Range, access device.Access) (device.Registration, error) {
	reg, err := p.dev.register(ctx, p, r, access)
	return reg, p.dev.done(VerbRegister, r, err)
}

func (d *Device) register(ctx context.Context, pd *ProtectionDomain, r vm.Range, access device.Access) (device.Registration, error) {
	var none device.Registration
	if err := ctx.Err(); err != nil {
		return none, err
	}
	if err := r.Check(); err != nil {
		return none, errors.Join(device.ErrInvalid, err)
	}
	if !access.Valid() {
		return none, fmt.Errorf("access %v: %w", access, device.ErrAccess)
	}
	if m := d.limits.MaxRange; uint64(r.Len()) > m {
		return none, fmt.Errorf("%d bytes, at most %d: %w", r.Len(), m, device.ErrTooLarge)
	}
	if err := d.enter(); err != nil {
		return none, err
	}
	e := d.table.alloc(kindRegion, pd)
	if e == nil {
		d.leave()
		return none, fmt.Errorf("%d entries in use: %w", d.limits.MaxRegistrations, device.ErrNoSlots)
	}
	d.live[kindRegion]++
	e.r, e.access, e.busy = r, access, true
	d.mu.Unlock()

	m, err := d.pin(VerbRegister, e.key(), r, access)
	if err == nil {
		d.ledger.charge(VerbRegister, d.opts.Costs.Register, r.Pages(d.page), 0)
	}

	d.mu.Lock()
	defer d.leave()
	e.busy = false
	if err != nil {
		d.freeLocked(e)
		return none, err
	}
	e.now = m
	return e.registration(), nil
}

// registration builds what the caller gets.
func (e *entry) registration() device.Registration {
	reg := device.Registration{Range: e.r, LocalKey: e.key(), Access: e.access, Handle: e.handle()}
	if e.access&remoteAccess != 0 {
		reg.RemoteKey = reg.LocalKey
	}
	return reg
}

// pin pins r and returns what a key will mean by it. It takes Fault through
// its steps. No lock is held.
func (d *Device) pin(v Verb, key uint32, r vm.Range, access device.Access) (*meaning, error) {
	f := Fault{Verb: v, Step: StepBegin, Key: key, Range: r}
	if err := d.fault(f); err != nil {
		return nil, err
	}
	bytes := uint64(r.RoundOut(d.page).Len())
	d.mu.Lock()
	if most := d.limits.MaxPinnedBytes; most != 0 && d.bytes+bytes > most {
		err := fmt.Errorf("%d bytes pinned, at most %d: %w", d.bytes, most, device.ErrNoMemory)
		d.mu.Unlock()
		return nil, err
	}
	d.bytes += bytes
	d.mu.Unlock()

	pages, err := d.mem.Pin(r, access&needsWrite != 0)
	if err == nil {
		f.Step = StepPinned
		if err = d.fault(f); err != nil {
			err = errors.Join(err, pages.Unpin())
		}
	}
	if err != nil {
		d.mu.Lock()
		d.bytes -= bytes
		d.mu.Unlock()
		return nil, err
	}
	p := &pinned{pages: pages, r: r, bytes: bytes, holds: 1}
	return &meaning{pinned: p, r: r, access: access}, nil
}

// claimLocked finds the entry of a registration that no other verb is at work
// on.
func (d *Device) claimLocked(reg device.Registration) (*entry, error) {
	e, err := d.regionLocked(reg)
	if err == nil && e.busy {
		err = fmt.Errorf("another call on it: %w", device.ErrBusy)
	}
	return e, err
}

// regionLocked finds the entry of a registration.
func (d *Device) regionLocked(reg device.Registration) (*entry, error) {
	e := d.table.byHandle(reg.Handle, kindRegion)
	if e == nil || e.r != reg.Range {
		return nil, device.ErrNotRegistered
	}
	return e, nil
}

// Deregister implements [device.Device]. It waits for packets that are in the
// middle of a page. It returns a wrapped [device.ErrBusy], and does nothing, if
// there are exposures or windows over the registration, or if another call on
// it is under way.
func (d *Device) Deregister(reg device.Registration) error {
	return d.done(VerbDeregister, reg.Range, d.deregister(reg))
}

func (d *Device) deregister(reg device.Registration) error {
	if err := d.enter(); err != nil {
		return err
	}
	e, err := d.claimLocked(reg)
	if err == nil && e.windows > 0 {
		err = fmt.Errorf("%d windows over it: %w", e.windows, device.ErrBusy)
	}
	if err != nil {
		d.leave()
		return err
	}
	e.busy, e.ending = true, true
	d.mu.Unlock()

	err = d.fault(Fault{Verb: VerbDeregister, Step: StepBegin, Key: e.key(), Range: e.r})
	if err == nil {
		d.ledger.charge(VerbDeregister, d.opts.Costs.Deregister, e.r.Pages(d.page), d.opts.Costs.Shootdown)
	}

	d.mu.Lock()
	if err != nil {
		e.busy, e.ending = false, false
		d.leave()
		return err
	}
	e.revoked = false
	d.killLocked(e)
	d.freeLocked(e)
	d.leave()
	d.wakeSenders() // Held back by a revoked key, in vain.
	return nil
}
