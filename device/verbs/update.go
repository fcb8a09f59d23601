package verbs

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/verbs/internal/ibv"
)

// Update implements [device.Updater] by ibv_rereg_mr(3), where Info.Update says
// that it keeps the keys; elsewhere it returns a wrapped ErrNotSupported. To
// libibverbs a re-registration is a deregistration followed by a registration:
// work in flight under the keys may fail, so finish it first, or use Revoke.
//
// What the man page says of failures holds: where the old registration is still
// valid (an error in the input, or of the fork protection of the new pages) it is
// intact. Where it must not be used any more, it is deregistered, and the error
// wraps ErrRegistrationLost. So it is if the adapter gave it other keys.
//
// A registration that is exposed is left alone, with a wrapped ErrBusy: adapters
// don't re-register under bound windows.
func (d *Device) Update(ctx context.Context, reg device.Registration) (device.Registration, error) {
	return d.rereg(ctx, "update", d.info.Update, reg, reg.Access, func(e *registration) (int, error) {
		if e.revoked {
			return 0, device.ErrRevoked
		}
		return d.lib.ReregMR(e.mr, ibv.ReregTranslation, nil, e.r.Start, e.r.Len(), 0)
	}, nil)
}

// ChangeAccess changes what a registration allows, under the same keys and
// without pinning again. It fails like Update; Info.ChangeAccess says whether
// the adapter can.
func (d *Device) ChangeAccess(ctx context.Context, reg device.Registration, access device.Access) (device.Registration, error) {
	if err := d.checkAccess(access); err != nil {
		return device.Registration{}, fmt.Errorf("verbs: change access of key %#x: %w", reg.LocalKey, err)
	}
	return d.rereg(ctx, "change access of", d.info.ChangeAccess, reg, access, func(e *registration) (int, error) {
		if e.revoked {
			return 0, device.ErrRevoked
		}
		return d.lib.ReregMR(e.mr, ibv.ReregAccess, nil, 0, 0, d.flags(access))
	}, func(e *registration) { e.access = access })
}

// Revoke implements [device.RevokingUpdater], where Info.Revoke says that it can
// be done: the registration moves to a protection domain that no queue has. It
// fails like Update.
func (d *Device) Revoke(ctx context.Context, reg device.Registration) error {
	_, err := d.rereg(ctx, "revoke", d.info.Revoke, reg, reg.Access, func(e *registration) (int, error) {
		if e.revoked {
			return 0, nil
		}
		return d.lib.ReregMR(e.mr, ibv.ReregPD, d.limbo, 0, 0, 0)
	}, func(e *registration) { e.revoked = true })
	return err
}

// Load implements [device.RevokingUpdater].
func (d *Device) Load(ctx context.Context, reg device.Registration) (device.Registration, error) {
	return d.rereg(ctx, "load", d.info.Revoke, reg, reg.Access, func(e *registration) (int, error) {
		if !e.revoked {
			return 0, device.ErrNotRevoked
		}
		return d.lib.ReregMR(e.mr, ibv.ReregPD|ibv.ReregTranslation, d.pd, e.r.Start, e.r.Len(), 0)
	}, func(e *registration) { e.revoked = false })
}

// rereg carries out call on reg and sorts out what is left of it. done records
// a success, under the lock.
func (d *Device) rereg(ctx context.Context, verb string, able bool, reg device.Registration, access device.Access, call func(*registration) (int, error), done func(*registration)) (device.Registration, error) {
	fail := func(err error) (device.Registration, error) {
		return device.Registration{}, fmt.Errorf("verbs: %s key %#x, %v: %w", verb, reg.LocalKey, reg.Range, err)
	}
	if err := ctx.Err(); err != nil {
		return fail(err)
	}
	e, err := d.enter(reg)
	if err != nil {
		return fail(err)
	}
	if !able {
		d.leave(reg, e, false)
		return fail(notSupported(d.info.Name + " can't re-register this way"))
	}
	if n := d.exposures(e); n > 0 {
		d.leave(reg, e, false)
		return fail(fmt.Errorf("%d exposures: %w", n, device.ErrBusy))
	}
	rc, err := call(e)
	switch rc {
	case 0:
		if err != nil { // of ours: nothing was called.
			d.leave(reg, e, false)
			return fail(err)
		}
		if e.mr.LKey != reg.LocalKey || e.mr.RKey != reg.RemoteKey {
			return fail(d.lost(reg, e, fmt.Errorf("the adapter gave it other keys, %#x and %#x", e.mr.LKey, e.mr.RKey)))
		}
	case ibv.ReregErrDoForkOld:
		// The new registration is valid; the old pages stay out of children.
	case ibv.ReregErrInput, ibv.ReregErrDontForkNew:
		d.leave(reg, e, false)
		return fail(callError("ibv_rereg_mr", err))
	default:
		return fail(d.lost(reg, e, callError("ibv_rereg_mr", err)))
	}
	if done != nil {
		d.mu.Lock()
		done(e)
		d.mu.Unlock()
	}
	d.leave(reg, e, false)
	reg.Access = access
	return reg, nil
}

// lost gives back what a failed re-registration has left, and says so. If even
// that fails, Close will try again.
func (d *Device) lost(reg device.Registration, e *registration, cause error) error {
	err := d.lib.DeregMR(e.mr)
	d.mu.Lock()
	if err != nil {
		// Nobody may use it any more, so it goes where no handle leads.
		d.next++
		d.regs[d.next] = &registration{mr: e.mr, r: e.r, busy: true}
		d.taken++
	}
	d.mu.Unlock()
	d.leave(reg, e, true)
	return errors.Join(fmt.Errorf("%w: %w", device.ErrRegistrationLost, cause), os.NewSyscallError("ibv_dereg_mr", err))
}
