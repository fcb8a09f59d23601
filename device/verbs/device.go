package verbs

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"sync"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/verbs/internal/ibv"
	"github.com/pindown/pindown/vm"
)

// Device registers memory in one protection domain of an adapter. It is safe
// for concurrent use.
type Device struct {
	lib     *ibv.Lib      // immutable.
	pd      *ibv.PD       // immutable.
	limbo   *ibv.PD       // immutable; of what is revoked, nil if nothing can be.
	own     bool          // immutable; pd and its context were made by Open.
	opts    Options       // immutable.
	info    Info          // immutable.
	atomics bool          // immutable.
	limits  device.Limits // immutable.

	exposer windowPool

	closing  sync.Mutex // held by Close.
	released bool       // guarded by closing; Close has nothing left to do.

	mu       sync.Mutex
	idle     sync.Cond                // of mu: inflight became zero.
	closed   bool                     // guarded by mu.
	inflight int                      // guarded by mu; calls that use the library now.
	taken    int                      // guarded by mu; registrations, also those being made.
	next     uint64                   // guarded by mu; the last handle.
	regs     map[uint64]*registration // guarded by mu; by handle.
	queues   map[*Queue]struct{}      // guarded by mu.
	fast     map[uint64]*fastKey      // guarded by mu; by handle.
}

// registration is what a handle stands for. While it is busy, one call has it.
type registration struct {
	mr      *ibv.MR       // immutable.
	r       vm.Range      // immutable.
	access  device.Access // guarded by mu of the device.
	busy    bool          // guarded by mu of the device.
	revoked bool          // guarded by mu of the device.
	windows int           // guarded by mu of the device; exposures over it.
}

var (
	_ device.Updater         = (*Device)(nil)
	_ device.RevokingUpdater = (*Device)(nil)
	_ device.Exposer         = (*Device)(nil)
	_ device.FastRegistrar   = (*Device)(nil)
)

// Name implements [device.Device].
func (d *Device) Name() string { return "verbs" }

// Limits implements [device.Device]. MaxRegistrations and MaxRange are the
// adapter's, shared by all its users; MaxPinnedBytes is RLIMIT_MEMLOCK as it was
// when the device was opened, zero if the process has CAP_IPC_LOCK.
func (d *Device) Limits() device.Limits { return d.limits }

// Info returns what the adapter can do.
func (d *Device) Info() Info { return d.info }

// PD returns the address of the protection domain (struct ibv_pd), for another
// binding. It is valid until Close.
func (d *Device) PD() uintptr { return d.pd.Addr() }

// Live returns how many registrations there are now; none after Close.
func (d *Device) Live() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.regs)
}

// flags translates access for the library.
func (d *Device) flags(access device.Access) uint32 {
	f := windowFlags(access)
	if access&device.LocalWrite != 0 {
		f |= ibv.AccessLocalWrite
	}
	if access&device.WindowBind != 0 {
		f |= ibv.AccessMWBind
	}
	if access&device.RelaxedOrdering != 0 {
		f |= ibv.AccessRelaxedOrdering
	}
	if d.opts.OnDemand {
		f |= ibv.AccessOnDemand
	}
	return f
}

// windowFlags translates the part of access that concerns peers.
func windowFlags(access device.Access) uint32 {
	var f uint32
	if access&device.RemoteRead != 0 {
		f |= ibv.AccessRemoteRead
	}
	if access&device.RemoteWrite != 0 {
		f |= ibv.AccessRemoteWrite
	}
	if access&device.RemoteAtomic != 0 {
		f |= ibv.AccessRemoteAtomic
	}
	return f
}

// checkAccess refuses what the adapter can't grant.
func (d *Device) checkAccess(access device.Access) error {
	switch {
	case !access.Valid():
		return fmt.Errorf("access %v: %w", access, device.ErrAccess)
	case access&device.RemoteAtomic != 0 && !d.atomics:
		return fmt.Errorf("access %v, the adapter has no atomic operations: %w", access, device.ErrAccess)
	case access&device.WindowBind != 0 && !d.info.WindowType1 && !d.info.WindowType2:
		return fmt.Errorf("access %v, the adapter has no memory windows: %w", access, device.ErrAccess)
	}
	return nil
}

// begin counts a call in that uses the library.
func (d *Device) begin() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.beginLocked()
}

func (d *Device) beginLocked() error {
	if d.closed {
		return device.ErrClosed
	}
	d.inflight++
	return nil
}

func (d *Device) end() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.endLocked()
}

func (d *Device) endLocked() {
	d.inflight--
	if d.inflight == 0 {
		d.idle.Broadcast()
	}
}

// Register implements [device.Device]. It covers exactly r, from byte to byte,
// although whole pages are pinned. The context is checked before the call into
// the library, which can't be interrupted.
//
// RelaxedOrdering is granted, and left out, if the library or the kernel doesn't
// know it: ordering that is stricter than asked for harms nobody.
func (d *Device) Register(ctx context.Context, r vm.Range, access device.Access) (device.Registration, error) {
	reg, err := d.register(ctx, r, access, func() (*ibv.MR, error) {
		mr, err := d.lib.RegMR(d.pd, r.Start, r.Len(), d.flags(access))
		if err != nil {
			return nil, callError("ibv_reg_mr", err)
		}
		return mr, nil
	})
	if err != nil {
		return device.Registration{}, fmt.Errorf("verbs: register %v: %w", r, err)
	}
	return reg, nil
}

func (d *Device) register(ctx context.Context, r vm.Range, access device.Access, call func() (*ibv.MR, error)) (device.Registration, error) {
	if err := ctx.Err(); err != nil {
		return device.Registration{}, err
	}
	if err := r.Check(); err != nil {
		return device.Registration{}, fmt.Errorf("%w: %w", device.ErrInvalid, err)
	}
	if err := d.checkAccess(access); err != nil {
		return device.Registration{}, err
	}
	if m := d.limits.MaxRange; m != 0 && uint64(r.Len()) > m {
		return device.Registration{}, fmt.Errorf("%d bytes, at most %d: %w", r.Len(), m, device.ErrTooLarge)
	}
	if err := d.take(); err != nil {
		return device.Registration{}, err
	}
	mr, err := call()
	return d.record(mr, r, access, err)
}

// record ends what take began: it keeps the registration that was made, unless
// err says that there is none.
func (d *Device) record(mr *ibv.MR, r vm.Range, access device.Access, err error) (device.Registration, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	defer d.endLocked()
	if err != nil {
		d.taken--
		return device.Registration{}, err
	}
	// If the device was closed meanwhile, Close waits for us and then finds it.
	d.next++
	d.regs[d.next] = &registration{mr: mr, r: r, access: access}
	if d.closed {
		return device.Registration{}, device.ErrClosed
	}
	return device.Registration{Range: r, LocalKey: mr.LKey, RemoteKey: mr.RKey, Access: access, Handle: d.next}, nil
}

// take counts a registration in, and the call that makes it.
func (d *Device) take() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if m := d.limits.MaxRegistrations; m != 0 && d.taken >= m && !d.closed {
		return fmt.Errorf("%d registrations: %w", d.taken, device.ErrNoSlots)
	}
	if err := d.beginLocked(); err != nil {
		return err
	}
	d.taken++
	return nil
}

// RegisterImplicit registers the whole address space at once, with On-Demand
// Paging: its keys reach everything that is mapped, now and later, within access.
// Give a remote key of it to nobody whom you wouldn't trust with all memory. It
// returns a wrapped ErrNotSupported unless Info.OnDemandImplicit.
func (d *Device) RegisterImplicit(ctx context.Context, access device.Access) (device.Registration, error) {
	r := vm.Range{Start: 0, End: ^uintptr(0)}
	if !d.info.OnDemandImplicit {
		return device.Registration{}, fmt.Errorf("verbs: register everything: %w", notSupported(d.info.Name+" has no implicit On-Demand Paging"))
	}
	if err := ctx.Err(); err != nil {
		return device.Registration{}, fmt.Errorf("verbs: register everything: %w", err)
	}
	if err := d.checkAccess(access); err != nil {
		return device.Registration{}, fmt.Errorf("verbs: register everything: %w", err)
	}
	if err := d.take(); err != nil {
		return device.Registration{}, fmt.Errorf("verbs: register everything: %w", err)
	}
	mr, err := d.lib.RegMR(d.pd, 0, ^uintptr(0), d.flags(access)|ibv.AccessOnDemand)
	if err != nil {
		err = callError("ibv_reg_mr", err)
	}
	reg, err := d.record(mr, r, access, err)
	if err != nil {
		return device.Registration{}, fmt.Errorf("verbs: register everything: %w", err)
	}
	return reg, nil
}

// RegisterDMABuf registers length bytes at offset of the dma-buf fd; work
// requests address them from iova on. The registration keeps the buffer, not
// the descriptor. It returns a wrapped ErrNotSupported if the library, the
// adapter or the kernel (Linux 5.12) can't.
func (d *Device) RegisterDMABuf(ctx context.Context, fd int, offset, length, iova uint64, access device.Access) (device.Registration, error) {
	r := vm.Range{Start: uintptr(iova), End: uintptr(iova + length)}
	if !d.info.DMABuf {
		return device.Registration{}, fmt.Errorf("verbs: register dma-buf: %w", notSupported("libibverbs is older than version 34"))
	}
	if length > math.MaxInt64 || fd < 0 {
		return device.Registration{}, fmt.Errorf("verbs: register dma-buf %d, %d bytes: %w", fd, length, device.ErrInvalid)
	}
	reg, err := d.register(ctx, r, access, func() (*ibv.MR, error) {
		mr, err := d.lib.RegDMABufMR(d.pd, offset, uintptr(length), iova, fd, d.flags(access)&^ibv.AccessOnDemand)
		if err != nil && errors.Is(sentinel(errnoOf(err)), device.ErrUnsupportedMemory) {
			return nil, joinCall(device.ErrNotSupported, "ibv_reg_dmabuf_mr", err)
		}
		if err != nil {
			return nil, callError("ibv_reg_dmabuf_mr", err)
		}
		return mr, nil
	})
	if err != nil {
		return device.Registration{}, fmt.Errorf("verbs: register dma-buf %d: %w", fd, err)
	}
	return reg, nil
}

// enter finds a live registration, marks it as busy and counts the caller in.
func (d *Device) enter(reg device.Registration) (*registration, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil, device.ErrClosed
	}
	e := d.regs[reg.Handle]
	if e == nil || e.mr.LKey != reg.LocalKey || e.r != reg.Range {
		return nil, device.ErrNotRegistered
	}
	if e.busy {
		return nil, fmt.Errorf("another call on the registration is under way: %w", device.ErrBusy)
	}
	e.busy = true
	d.inflight++
	return e, nil
}

// leave ends what enter began. gone says that the registration is no more.
func (d *Device) leave(reg device.Registration, e *registration, gone bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	e.busy = false
	if gone {
		delete(d.regs, reg.Handle)
		d.taken--
	}
	d.endLocked()
}

// Deregister implements [device.Device]. It returns a wrapped ErrBusy, and
// changes nothing, if another call on the same registration is under way or
// memory windows are bound to it.
func (d *Device) Deregister(reg device.Registration) error {
	if err := d.deregister(reg); err != nil {
		return fmt.Errorf("verbs: deregister key %#x, %v: %w", reg.LocalKey, reg.Range, err)
	}
	return nil
}

func (d *Device) deregister(reg device.Registration) error {
	e, err := d.enter(reg)
	if err != nil {
		return err
	}
	if n := d.exposures(e); n > 0 {
		d.leave(reg, e, false)
		return fmt.Errorf("%d exposures: %w", n, device.ErrBusy)
	}
	err = d.lib.DeregMR(e.mr)
	d.leave(reg, e, err == nil)
	if err != nil {
		return callError("ibv_dereg_mr", err)
	}
	return nil
}

func (d *Device) exposures(e *registration) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return e.windows
}

// Close deregisters what is left, closes the device's queues and gives back the
// protection domain and the adapter, if Open made them. It waits for calls that
// are under way; later ones fail with ErrClosed. It is idempotent; if it fails
// because another binding still uses the protection domain, it can be called
// again.
func (d *Device) Close() error {
	d.closing.Lock()
	defer d.closing.Unlock()
	d.mu.Lock()
	d.closed = true
	for d.inflight > 0 {
		d.idle.Wait()
	}
	queues := slices.Collect(maps.Keys(d.queues))
	d.mu.Unlock()
	if d.released {
		return nil
	}
	// From here on nobody else uses the library on this device.
	var errs []error
	for _, q := range queues {
		errs = append(errs, q.destroy())
		delete(d.queues, q)
	}
	errs = append(errs, d.closeWindows())
	for h, e := range d.regs {
		if err := d.lib.DeregMR(e.mr); err != nil {
			errs = append(errs, fmt.Errorf("deregister %v: %w", e.r, callError("ibv_dereg_mr", err)))
			continue
		}
		delete(d.regs, h)
	}
	release := func(call string, err error) bool {
		if err != nil {
			errs = append(errs, callError(call, err))
		}
		return err == nil
	}
	if d.limbo != nil && release("ibv_dealloc_pd", d.lib.DeallocPD(d.limbo)) {
		d.limbo = nil
	}
	if len(d.regs) == 0 {
		ctx := d.pd.Context
		d.released = !d.own || release("ibv_dealloc_pd", d.lib.DeallocPD(d.pd)) && release("ibv_close_device", d.lib.CloseDevice(ctx))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("verbs: close: %w", err)
	}
	return nil
}
