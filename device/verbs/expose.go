package verbs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/verbs/internal/ibv"
	"github.com/pindown/pindown/vm"
)

// windowPool are the memory windows of type 1 of the device's exposures. They
// are bound by a queue of the device's own, which is connected to itself and
// carries nothing else: a window of type 1 may be bound by any queue of the
// protection domain, and used by the peers of all of them.
type windowPool struct {
	mu     sync.Mutex           // held while a window is bound. Before mu of the device.
	q      *Queue               // guarded by mu; nil until it is needed, and after an error.
	live   map[uint64]*exposure // guarded by mu; by handle.
	next   uint64               // guarded by mu.
	bounds bounds               // guarded by mu.
}

// bindPatience is how long a binding may take before the adapter counts as
// broken.
const bindPatience = 30 * time.Second

// bounds is what is known of whether the adapter holds windows to their range.
type bounds int

const (
	_         bounds = iota // not asked yet
	bounded                 // it does
	unbounded               // the range of the registration is what counts
)

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
// An adapter that doesn't hold a window to its range (soft-RoCE checks that of
// the registration) is found out by a trial, and exposes registrations as a whole
// only: a narrower range is refused with a wrapped ErrNotSupported. See
// [Device.WindowsBounded].
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
	err = d.checkBounds(e, r)
	var mw *ibv.MW
	if err == nil {
		mw, err = d.bound(e.mr, r, access)
	}
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

// WindowsBounded reports whether a key of an exposure reaches exactly the range
// that was exposed. If not, it reaches the whole registration, and Expose and
// PostFastRegister refuse narrower ranges. The first call tries it on memory of
// its own; it needs an active port.
func (d *Device) WindowsBounded(ctx context.Context) (bool, error) {
	if err := ctx.Err(); err != nil {
		return false, fmt.Errorf("verbs: try windows: %w", err)
	}
	if err := d.begin(); err != nil {
		return false, fmt.Errorf("verbs: try windows: %w", err)
	}
	defer d.end()
	if !d.info.WindowType1 {
		return false, fmt.Errorf("verbs: try windows: %w", notSupported(d.info.Name+" has no memory windows of type 1"))
	}
	d.exposer.mu.Lock()
	defer d.exposer.mu.Unlock()
	if err := d.tryBounds(); err != nil {
		return false, fmt.Errorf("verbs: try windows: %w", err)
	}
	return d.exposer.bounds == bounded, nil
}

// checkBounds refuses a window that would reach more than r. The pool is
// locked.
func (d *Device) checkBounds(e *registration, r vm.Range) error {
	if r == e.r {
		return nil
	}
	if err := d.tryBounds(); err != nil {
		return err
	}
	if d.exposer.bounds == unbounded {
		return notSupported(d.info.Name + " holds windows only to the range of their registration, so only all of it can be exposed")
	}
	return nil
}

// tryBounds finds out, once, whether a write to the byte before a window
// arrives. The pool is locked.
func (d *Device) tryBounds() (err error) {
	p := &d.exposer
	if p.bounds != 0 {
		return nil
	}
	page := os.Getpagesize()
	b, err := unix.Mmap(-1, 0, 2*page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return joinCall(device.ErrNoMemory, "mmap", err)
	}
	defer func() { _ = unix.Munmap(b) }() // It can't fail on what mmap returned.
	r := vm.RangeOf(b)
	mr, err := d.lib.RegMR(d.pd, r.Start, r.Len(), d.flags(device.LocalWrite|device.WindowBind))
	if err != nil {
		return callError("ibv_reg_mr", err)
	}
	defer func() { err = errors.Join(err, os.NewSyscallError("ibv_dereg_mr", d.lib.DeregMR(mr))) }()
	window := vm.Range{Start: r.Start + uintptr(page), End: r.End}
	mw, err := d.bound(mr, window, device.RemoteWrite)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.NewSyscallError("ibv_dealloc_mw", d.lib.DeallocMW(mw))) }()
	b[0] = 1
	if err := p.q.Write(0, vm.Range{Start: r.Start, End: r.Start + 1}, mr.LKey, uint64(window.Start)-1, mw.RKey); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), bindPatience)
	defer cancel()
	switch err := p.q.Do(ctx); {
	case err == nil:
		p.bounds = unbounded
	case errors.Is(err, ErrCompletion):
		// The queue is in error now, as it should be.
		p.bounds = bounded
		q := p.q
		p.q = nil
		return q.Close()
	default:
		return err
	}
	return nil
}

// bound returns a window bound to r. The pool is locked.
func (d *Device) bound(mr *ibv.MR, r vm.Range, access device.Access) (*ibv.MW, error) {
	if n := len(d.exposer.live); n >= d.info.MaxWindows {
		return nil, fmt.Errorf("%d windows: %w", n, device.ErrNoSlots)
	}
	mw, err := d.lib.AllocMW(d.pd, ibv.MWType1)
	if err != nil {
		return nil, allocError(err)
	}
	err = d.bind(mw, ibv.MWBindInfo{MR: mr, Addr: uint64(r.Start), Length: uint64(r.Len()), Access: windowFlags(access)})
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

// bind binds a window of type 1 and waits for it. The pool is locked.
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
	ctx, cancel := context.WithTimeout(context.Background(), bindPatience)
	defer cancel()
	if err := q.Do(ctx); err != nil {
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
	// A binding to nothing would do it as well, but crashes in the provider of
	// soft-RoCE (rdma-core 44).
	if err := d.lib.DeallocMW(live.mw); err != nil {
		return callError("ibv_dealloc_mw", err)
	}
	delete(p.live, x.Handle)
	d.letGo(live.reg)
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
	p.q, p.live = nil, nil
	for _, k := range d.fast {
		free(k.mw)
	}
	clear(d.fast)
	return errors.Join(errs...)
}
