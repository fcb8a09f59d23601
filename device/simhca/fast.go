package simhca

import (
	"context"
	"fmt"

	"github.com/pindown/pindown/device"
)

// AllocFastKey implements [device.FastRegistrar], in the device's own
// protection domain.
func (d *Device) AllocFastKey(ctx context.Context, maxBytes uint64) (device.FastKey, error) {
	return d.pd.AllocFastKey(ctx, maxBytes)
}

// AllocFastKey reserves a fast key in this domain.
func (p *ProtectionDomain) AllocFastKey(ctx context.Context, maxBytes uint64) (device.FastKey, error) {
	k, err := p.dev.allocKey(ctx, kindFast, CanFastRegister, p, maxBytes)
	return k, p.dev.done(VerbAllocFastKey, maxBytes, err)
}

// AllocWindow reserves a window in this domain: a key for [Bind]. It is
// counted as a fast key, and given back by FreeFastKey.
func (p *ProtectionDomain) AllocWindow(ctx context.Context) (device.FastKey, error) {
	k, err := p.dev.allocKey(ctx, kindWindow, CanExpose, p, 0)
	return k, p.dev.done(VerbAllocFastKey, "window", err)
}

func (d *Device) allocKey(ctx context.Context, k kind, c Capability, pd *ProtectionDomain, maxBytes uint64) (device.FastKey, error) {
	var none device.FastKey
	if err := ctx.Err(); err != nil {
		return none, err
	}
	if err := d.can(c); err != nil {
		return none, err
	}
	if k == kindFast && maxBytes == 0 {
		return none, device.ErrInvalid
	}
	if maxBytes > d.limits.MaxRange {
		return none, fmt.Errorf("%d bytes, at most %d: %w", maxBytes, d.limits.MaxRange, device.ErrTooLarge)
	}
	if err := d.fault(Fault{Verb: VerbAllocFastKey, Step: StepBegin}); err != nil {
		return none, err
	}
	if err := d.enter(); err != nil {
		return none, err
	}
	defer d.leave()
	e := d.table.alloc(k, pd)
	if e == nil {
		return none, fmt.Errorf("%d entries in use: %w", d.limits.MaxRegistrations, device.ErrNoSlots)
	}
	d.live[k]++
	e.maxPages = int((maxBytes + uint64(d.page) - 1) / uint64(d.page))
	return device.FastKey{Key: e.key(), MaxBytes: uint64(e.maxPages) * uint64(d.page), Handle: e.handle()}, nil
}

// FreeFastKey implements [device.FastRegistrar].
func (d *Device) FreeFastKey(k device.FastKey) error {
	return d.done(VerbFreeFastKey, fmt.Sprintf("%#x", k.Key), d.freeKey(k))
}

func (d *Device) freeKey(k device.FastKey) error {
	if err := d.fault(Fault{Verb: VerbFreeFastKey, Step: StepBegin, Key: k.Key}); err != nil {
		return err
	}
	if err := d.enter(); err != nil {
		return err
	}
	defer d.leave()
	e := d.table.byHandle(k.Handle, kindFast)
	if e == nil {
		e = d.table.byHandle(k.Handle, kindWindow)
	}
	switch {
	case e == nil:
		return device.ErrNotRegistered
	case e.now != nil || e.posted > 0 || e.busy:
		return fmt.Errorf("key %#x means something, or a request will change it: %w", e.key(), device.ErrBusy)
	}
	d.freeLocked(e)
	return nil
}

// prepareLocked readies a request that changes a key, when it is posted: the
// key's entry counts it, and a fast-register holds the pages.
func (d *Device) prepareLocked(r *request) error {
	key, ok := r.changes()
	if !ok {
		return nil
	}
	e := d.table.byKey(key)
	if e == nil || e.kind != kindFast && e.kind != kindWindow {
		return fmt.Errorf("key %#x isn't a fast key or window: %w", key, device.ErrInvalid)
	}
	switch r.Op {
	case OpFastRegister:
		pages, err := d.pagesForLocked(e, r.FastRegister)
		if err != nil {
			return err
		}
		pages.holds++
		r.pages = pages
	case OpBind:
		if e.kind != kindWindow {
			return fmt.Errorf("key %#x isn't a window: %w", key, device.ErrInvalid)
		}
		region, err := d.regionLocked(r.Bind.Over)
		if err != nil {
			return err
		}
		if err := region.windowLocked(r.Bind.Range, r.Bind.Access); err != nil {
			return err
		}
	default:
	}
	e.posted++
	r.changing = e
	return nil
}

// pagesForLocked returns the pages that a fast-register of e will mean.
func (d *Device) pagesForLocked(e *entry, wr *device.FastRegister) (*pinned, error) {
	region, err := d.regionLocked(wr.Over)
	switch {
	case err != nil:
		return nil, err
	case e.kind != kindFast:
		return nil, fmt.Errorf("key %#x isn't a fast key: %w", wr.Key, device.ErrInvalid)
	case region.ending:
		return nil, fmt.Errorf("another call on it: %w", device.ErrBusy)
	case region.now == nil:
		return nil, device.ErrRevoked
	case wr.Range.Empty() || !region.r.Contains(wr.Range):
		return nil, fmt.Errorf("%v isn't in %v: %w", wr.Range, region.r, device.ErrInvalid)
	case wr.Range.Pages(d.page) > e.maxPages:
		return nil, fmt.Errorf("%d pages, at most %d: %w", wr.Range.Pages(d.page), e.maxPages, device.ErrTooLarge)
	case !wr.Access.Valid(), wr.Access&needsWrite != 0 && region.access&device.LocalWrite == 0:
		return nil, fmt.Errorf("%v over %v: %w", wr.Access, region.access, device.ErrAccess)
	}
	return region.now.pinned, nil
}

// unprepareLocked ends what prepareLocked began. A fast-register that was
// executed has given its hold to the key.
func (d *Device) unprepareLocked(r *request) {
	if r.pages != nil {
		d.dropHoldLocked(r.pages)
		r.pages = nil
	}
	if r.changing != nil {
		r.changing.posted--
		r.changing = nil
	}
}

// changeKey executes a request that changes a key.
func (d *Device) changeKey(pd *ProtectionDomain, r *request) Status {
	cost, shootdown, pages := d.opts.Costs.FastRegister, d.opts.Costs.Shootdown, 0
	switch r.Op {
	case OpFastRegister:
		pages, shootdown = r.FastRegister.Range.Pages(d.page), 0
	case OpLocalInvalidate:
		cost = d.opts.Costs.LocalInvalidate
	default:
		shootdown = 0
	}
	d.ledger.charge(VerbExecute, cost, pages, shootdown)

	d.mu.Lock()
	defer d.unlock()
	e := r.changing
	if d.closed || e.pd != pd {
		return StatusMemoryManagement
	}
	switch r.Op {
	case OpFastRegister:
		wr := r.FastRegister
		if e.now != nil {
			return StatusMemoryManagement
		}
		e.consumer, e.r, e.access = uint8(wr.Key), wr.Range, wr.Access
		e.now = &meaning{pinned: r.pages, r: wr.Range, access: wr.Access}
		r.pages = nil
	case OpBind:
		wr := r.Bind
		region, err := d.regionLocked(wr.Over)
		if e.now != nil || err != nil || region.pd != pd || region.windowLocked(wr.Range, wr.Access) != nil {
			return StatusMemoryManagement
		}
		e.consumer = uint8(wr.Key)
		bindLocked(e, region, wr.Range, wr.Access)
	default:
		if e.now == nil || e.key() != r.LocalInvalidate.Key {
			return StatusMemoryManagement
		}
		d.unbindLocked(e)
	}
	return StatusSuccess
}
