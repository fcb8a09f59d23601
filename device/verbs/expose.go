package verbs

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/verbs/internal/ibv"
	"github.com/pindown/pindown/vm"
)

// maxIdleWindows is how many windows are kept for the next exposure.
const maxIdleWindows = 64

// windowPool are the memory windows of type 1 of the device's exposures. They
// are bound by a queue of the device's own, which is connected to itself and
// carries nothing else: a window of type 1 may be bound by any queue of the
// protection domain, and used by the peers of all of them.
type windowPool struct {
	mu   sync.Mutex           // held while a window is bound. Before mu of the device.
	q    *Queue               // guarded by mu; nil until it is needed, and after an error.
	idle []*ibv.MW            // guarded by mu; bound to nothing.
	live map[uint64]*exposure // guarded by mu; by handle.
	next uint64               // guarded by mu.
}

// exposure is what an Exposure's handle stands for.
type exposure struct {
	mw  *ibv.MW
	reg *registration
	key uint32
}

// Expose implements [device.Exposer] by a memory window of type 1, where
// Info.WindowType1 says that there are any. The key serves the peers of every
// queue in the protection domain, also those of another binding. It needs an
// active port.
//
// While a registration is exposed, Deregister, Update and Revoke of it fail with
// a wrapped ErrBusy.
func (d *Device) Expose(ctx context.Context, reg device.Registration, r vm.Range, access device.Access) (device.Exposure, error) {
	x, err := d.expose(ctx, reg, r, access)
	if err != nil {
		return device.Exposure{}, fmt.Errorf("verbs: expose %v of key %#x, %v: %w", r, reg.LocalKey, reg.Range, err)
	}
	return x, nil
}

func (d *Device) expose(ctx context.Context, reg device.Registration, r vm.Range, access device.Access) (device.Exposure, error) {
	if err := ctx.Err(); err != nil {
		return device.Exposure{}, err
	}
	if err := d.begin(); err != nil {
		return device.Exposure{}, err
	}
	defer d.end()
	if !d.info.WindowType1 {
		return device.Exposure{}, notSupported(d.info.Name + " has no memory windows of type 1")
	}
	e, err := d.hold(reg, r, access)
	if err != nil {
		return device.Exposure{}, err
	}
	p := &d.exposer
	p.mu.Lock()
	defer p.mu.Unlock()
	mw, err := d.bound(e, r, access)
	if err != nil {
		d.letGo(e)
		return device.Exposure{}, err
	}
	p.next++
	if p.live == nil {
		p.live = map[uint64]*exposure{}
	}
	p.live[p.next] = &exposure{mw: mw, reg: e, key: mw.RKey}
	return device.Exposure{Range: r, Access: access, RemoteKey: mw.RKey, Handle: p.next}, nil
}

const remoteAccess = device.RemoteRead | device.RemoteWrite | device.RemoteAtomic

// hold finds the registration for a window over r and keeps it from being
// deregistered or updated.
func (d *Device) hold(reg device.Registration, r vm.Range, access device.Access) (*registration, error) {
	if access == 0 || access&^remoteAccess != 0 {
		return nil, fmt.Errorf("access %v, only remote access can be given: %w", access, device.ErrAccess)
	}
	if err := r.Check(); err != nil {
		return nil, fmt.Errorf("%w: %w", device.ErrInvalid, err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	e := d.regs[reg.Handle]
	switch {
	case e == nil || e.mr.LKey != reg.LocalKey || e.r != reg.Range:
		return nil, device.ErrNotRegistered
	case e.busy:
		return nil, fmt.Errorf("another call on the registration is under way: %w", device.ErrBusy)
	case e.revoked:
		return nil, device.ErrRevoked
	case !e.r.Contains(r):
		return nil, fmt.Errorf("not in the registration: %w", device.ErrInvalid)
	case e.access&device.WindowBind == 0:
		return nil, fmt.Errorf("registered without %v: %w", device.WindowBind, device.ErrAccess)
	case access&(device.RemoteWrite|device.RemoteAtomic) != 0 && e.access&device.LocalWrite == 0:
		return nil, fmt.Errorf("access %v of a registration without %v: %w", access, device.LocalWrite, device.ErrAccess)
	case access&device.RemoteAtomic != 0 && !d.atomics:
		return nil, fmt.Errorf("access %v, the adapter has no atomic operations: %w", access, device.ErrAccess)
	}
	e.windows++
	return e, nil
}

func (d *Device) letGo(e *registration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	e.windows--
}

// bound returns a window bound to r. The pool is locked.
func (d *Device) bound(e *registration, r vm.Range, access device.Access) (*ibv.MW, error) {
	p := &d.exposer
	if len(p.live)+len(p.idle) >= d.info.MaxWindows && len(p.idle) == 0 {
		return nil, fmt.Errorf("%d windows: %w", len(p.live), device.ErrNoSlots)
	}
	var mw *ibv.MW
	if n := len(p.idle); n > 0 {
		mw, p.idle = p.idle[n-1], p.idle[:n-1]
	} else {
		var err error
		if mw, err = d.lib.AllocMW(d.pd, ibv.MWType1); err != nil {
			return nil, allocError(err)
		}
	}
	err := d.bind(mw, ibv.MWBindInfo{MR: e.mr, Addr: uint64(r.Start), Length: uint64(r.Len()), Access: windowFlags(access)})
	if err != nil {
		return nil, errors.Join(err, d.lib.DeallocMW(mw))
	}
	return mw, nil
}

func allocError(err error) error {
	if errnoOf(err) == unix.ENOMEM {
		return joinCall(device.ErrNoSlots, "ibv_alloc_mw", err)
	}
	return callError("ibv_alloc_mw", err)
}

// bind binds a window of type 1, to nothing if info is zero, and waits for it.
// The pool is locked.
func (d *Device) bind(mw *ibv.MW, info ibv.MWBindInfo) error {
	p := &d.exposer
	if p.q == nil {
		q, err := d.newQueue(&QueueOptions{Depth: 4})
		if err == nil {
			err = q.connect(q.local)
			if err != nil {
				err = errors.Join(err, q.Close())
			}
		}
		if err != nil {
			return fmt.Errorf("make a queue that binds windows: %w", err)
		}
		p.q = q
	}
	err := p.q.bind(mw, info)
	if err != nil {
		err = errors.Join(err, p.q.Close())
		p.q = nil
	}
	return err
}

func (q *Queue) bind(mw *ibv.MW, info ibv.MWBindInfo) error {
	if err := q.begin(); err != nil {
		return err
	}
	b := &ibv.MWBind{SendFlags: ibv.SendSignaled, Info: info}
	err := q.d.lib.BindMW(q.qp, mw, b)
	if err == nil {
		q.sends++
	}
	q.mu.Unlock()
	if err != nil {
		return callError("ibv_bind_mw", err)
	}
	// The adapter does it at once; a caller's context could only leave it half
	// done.
	if err := q.Do(context.Background()); err != nil {
		return fmt.Errorf("%w: %w", device.ErrInvalid, err)
	}
	return nil
}

// Withdraw implements [device.Exposer]. A long write of a peer that was under way
// may, on adapters in software, still be carried out to its end.
func (d *Device) Withdraw(ctx context.Context, x device.Exposure) error {
	if err := d.withdraw(ctx, x); err != nil {
		return fmt.Errorf("verbs: withdraw %v, key %#x: %w", x.Range, x.RemoteKey, err)
	}
	return nil
}

func (d *Device) withdraw(ctx context.Context, x device.Exposure) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := d.begin(); err != nil {
		return err
	}
	defer d.end()
	p := &d.exposer
	p.mu.Lock()
	defer p.mu.Unlock()
	live := p.live[x.Handle]
	if live == nil || live.key != x.RemoteKey {
		return device.ErrNotExposed
	}
	if err := d.unbind(live.mw); err != nil {
		return err
	}
	delete(p.live, x.Handle)
	d.letGo(live.reg)
	return nil
}

// unbind takes a window's meaning away, and keeps it if that is worth while.
// The pool is locked.
func (d *Device) unbind(mw *ibv.MW) error {
	p := &d.exposer
	if len(p.idle) < maxIdleWindows && d.bind(mw, ibv.MWBindInfo{}) == nil {
		p.idle = append(p.idle, mw)
		return nil
	}
	// Freeing it does it, too.
	if err := d.lib.DeallocMW(mw); err != nil {
		return callError("ibv_dealloc_mw", err)
	}
	return nil
}

// closeWindows frees all windows. Nobody else uses the device any more.
func (d *Device) closeWindows() error {
	p := &d.exposer
	p.mu.Lock()
	defer p.mu.Unlock()
	var errs []error
	free := func(mw *ibv.MW) {
		if err := d.lib.DeallocMW(mw); err != nil {
			errs = append(errs, callError("ibv_dealloc_mw", err))
		}
	}
	for _, x := range p.live {
		free(x.mw)
	}
	for _, mw := range p.idle {
		free(mw)
	}
	p.q, p.live, p.idle = nil, nil, nil
	for _, k := range d.fast {
		free(k.mw)
	}
	clear(d.fast)
	return errors.Join(errs...)
}
