package iouring

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/internal/sys"
	"github.com/pindown/pindown/internal/uring"
	"github.com/pindown/pindown/vm"
)

// Limits of the kernel.
const (
	// MaxSlots is the largest buffer table, in slots.
	MaxSlots = uring.MaxBuffers
	// MaxRange is the length of the longest registration, in bytes.
	MaxRange = uring.MaxBufferLen
)

// quarantine is how many freed slots the device keeps aside while it has fresh
// ones: a request that is posted under a key that has just died then fails
// instead of reaching another registration's memory.
const quarantine = 64

// Options configure a device. The zero value, or nil, means the defaults.
type Options struct {
	// First is the first slot of the ring's table that the device may use.
	First int
	// Slots is how many slots it may use. Zero means all from First on: to the
	// end of the table that the ring has, or to MaxSlots if it has none.
	Slots int
	// MaxPinnedBytes replaces the limit that is derived from RLIMIT_MEMLOCK,
	// for a program that pins memory elsewhere too, or that knows a ring's
	// limit better because another process created it.
	MaxPinnedBytes uint64
	// Exec runs f where the ring accepts registrations, and returns when f
	// did. A ring with IORING_SETUP_SINGLE_ISSUER (and so each with
	// IORING_SETUP_DEFER_TASKRUN) takes them from one thread only; every method
	// of the device then depends on that thread's answering, and a call on
	// that thread itself must run f at once. Nil: f runs in the caller's
	// thread.
	Exec func(f func())
	// Entries is the size of the submission queue of a ring made by Open; see
	// RingOptions.
	Entries int
}

// Device is a run of slots of an io_uring's fixed-buffer table. It implements
// [device.Updater], [device.RevokingUpdater] and, on a ring that it made itself,
// [device.Flusher]. It is safe for concurrent use; the kernel takes one registration
// of a ring at a time.
type Device struct {
	ring   *Ring         // immutable; nil unless made by Open.
	fd     int           // immutable; our own duplicate of the ring's descriptor.
	first  uint32        // immutable.
	limits device.Limits // immutable.
	exec   func(func())  // immutable; may be nil.
	tag    uint16        // immutable; tells this device's handles from others'.
	args   sync.Pool     // of *uring.Update.

	mu       sync.Mutex
	closed   bool   // guarded by mu.
	inflight int    // guarded by mu; calls that use fd now.
	slots    []slot // guarded by mu; those that were ever used.
	free     fifo   // guarded by mu; of indices into slots.
	live     int    // guarded by mu.
}

// slot is the state of one slot. A handle is valid while gen equals its own.
type slot struct {
	r    vm.Range
	gen  uint32 // odd while registered.
	next uint32 // link of the free list, plus one.
	busy bool   // a call on it is in the kernel.

	revoked bool // registered, but empty.
}

// fifo is a queue of free slots, linked through slot.next. Indices are stored
// plus one, so that zero means none.
type fifo struct {
	head, tail uint32
	n          int
}

var (
	_ device.Updater         = (*Device)(nil)
	_ device.RevokingUpdater = (*Device)(nil)
	_ device.Flusher         = (*Device)(nil)
)

// Open makes a ring and a device on all of its slots. [Device.Ring] returns
// the ring; Close closes both.
//
// It returns a wrapped [device.ErrNotSupported] with the reason if io_uring
// isn't available to the process, or if RLIMIT_MEMLOCK doesn't admit a single
// page; the latter wraps [device.ErrNoMemory] too. Options.First and
// Options.Exec make no sense here and must be zero.
func Open(opts *Options) (*Device, error) {
	var o Options
	if opts != nil {
		o = *opts
	}
	if o.First != 0 || o.Exec != nil {
		return nil, fmt.Errorf("iouring: open: first slot or exec for a ring of our own: %w", device.ErrInvalid)
	}
	ring, err := NewRing(&RingOptions{Entries: o.Entries})
	if err != nil {
		return nil, err
	}
	ring.inflight = newInflight(len(ring.sqes) + len(ring.cqes))
	d, err := newDevice(ring.Fd(), &o, uring.RegisterSparse, ring.memory())
	if err != nil {
		return nil, errors.Join(fmt.Errorf("iouring: open: %w", err), ring.Close())
	}
	d.ring = ring
	return d, nil
}

// New makes a device on a ring that the caller has. If the ring has a buffer
// table, the slots from Options.First on must be the device's alone; if it has
// none, New gives it a sparse one.
//
// The device keeps a duplicate of the descriptor: the ring lives until the
// caller and the device have closed theirs, so that a descriptor's number that
// comes back for another ring is no danger. The caller must not unregister the
// table while the device is open.
//
// It returns a wrapped [device.ErrInvalid] if fd isn't an io_uring or the table
// is too short, [device.ErrPermission] if the ring is restricted or
// IORING_SETUP_SINGLE_ISSUER (see Options.Exec), and what Open returns.
func New(fd int, opts *Options) (*Device, error) {
	d, err := newDevice(fd, opts, uring.RegisterSparse, 0)
	if err != nil {
		return nil, fmt.Errorf("iouring: new device on descriptor %d: %w", fd, err)
	}
	return d, nil
}

// newDevice is New with a choice of how to register a table, and with the
// memory that the ring itself takes of RLIMIT_MEMLOCK.
func newDevice(fd int, opts *Options, register func(fd int, n uint32) error, queues uint64) (*Device, error) {
	var o Options
	if opts != nil {
		o = *opts
	}
	if o.First < 0 || o.Slots < 0 || o.First+o.Slots > MaxSlots || o.First >= MaxSlots {
		return nil, fmt.Errorf("slots [%d,%d+%d) of at most %d: %w", o.First, o.First, o.Slots, MaxSlots, device.ErrInvalid)
	}
	dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, joinCall(device.ErrInvalid, "fcntl", err)
	}
	d := &Device{fd: dup, first: uint32(o.First), exec: o.Exec, tag: uint16(rand.Uint32())}
	d.args.New = func() any { return uring.NewUpdate() }
	slots, err := d.table(&o, register)
	if err != nil {
		return nil, errors.Join(err, unix.Close(dup))
	}
	d.limits = device.Limits{
		MaxRegistrations: slots,
		MaxPinnedBytes:   o.MaxPinnedBytes,
		MaxRange:         MaxRange,
		PageSize:         uintptr(os.Getpagesize()),
	}
	if err := d.limitPinned(&o, queues); err != nil {
		return nil, errors.Join(err, unix.Close(dup))
	}
	return d, nil
}

// table finds out what table the ring has, or gives it one, and returns how
// many slots of it are the device's.
func (d *Device) table(o *Options, register func(fd int, n uint32) error) (int, error) {
	last := uint32(o.First + max(o.Slots, 1) - 1)
	switch errno := d.probe(last); errno {
	case unix.EFAULT:
		if o.Slots != 0 {
			return o.Slots, nil
		}
		// The table's end by bisection: slot lo exists, slot hi doesn't.
		lo, hi := last, uint32(MaxSlots)
		for hi-lo > 1 {
			if mid := lo + (hi-lo)/2; d.probe(mid) == unix.EFAULT {
				lo = mid
			} else {
				hi = mid
			}
		}
		return int(hi) - o.First, nil
	case unix.EINVAL:
		if d.probe(0) == unix.EINVAL { // A table has at least one slot.
			return 0, notSupported("the kernel can't update registered buffers; Linux 5.13 is needed", "io_uring_register", errno)
		}
		return 0, joinCall(fmt.Errorf("the ring's table has no slot %d: %w", last, device.ErrInvalid), "io_uring_register", errno)
	case unix.ENXIO:
		slots := o.Slots
		if slots == 0 {
			slots = MaxSlots - o.First
		}
		return slots, d.newTable(uint32(o.First+slots), register)
	case unix.EOPNOTSUPP, unix.EBADF:
		return 0, joinCall(fmt.Errorf("not an io_uring: %w", device.ErrInvalid), "io_uring_register", errno)
	case unix.EEXIST:
		return 0, joinCall(fmt.Errorf("the ring takes registrations from one thread only (IORING_SETUP_SINGLE_ISSUER), set Options.Exec: %w", device.ErrPermission), "io_uring_register", errno)
	case unix.EACCES:
		return 0, joinCall(fmt.Errorf("the ring's restrictions forbid to update buffers: %w", device.ErrPermission), "io_uring_register", errno)
	case unix.ENOSYS, unix.EPERM:
		return 0, notSupported("a seccomp filter or security module forbids io_uring_register", "io_uring_register", errno)
	default:
		return 0, callError("io_uring_register", errno)
	}
}

// probe asks for a slot from a thread that the caller isn't bound to, since
// any goroutine may call the device later.
func (d *Device) probe(slot uint32) (errno syscall.Errno) {
	if d.exec != nil {
		d.exec(func() { errno = uring.ProbeSlot(d.fd, slot) })
		return errno
	}
	runtime.LockOSThread() // So that the other goroutine gets another thread.
	defer runtime.UnlockOSThread()
	done := make(chan syscall.Errno)
	go func() { done <- uring.ProbeSlot(d.fd, slot) }()
	return <-done
}

func (d *Device) newTable(n uint32, register func(fd int, n uint32) error) (err error) {
	d.run(func() {
		err = register(d.fd, n)
		if errnoOf(err) == unix.EINVAL {
			err = uring.RegisterEmpty(d.fd, n) // Before Linux 5.19.
		}
	})
	if err != nil {
		return fmt.Errorf("register a table of %d slots: %w", n, callError("io_uring_register", err))
	}
	return nil
}

// limitPinned derives MaxPinnedBytes from RLIMIT_MEMLOCK. A limit below one
// page would read as "no limit", so then a page must prove that the ring isn't
// subject to it.
func (d *Device) limitPinned(o *Options, queues uint64) error {
	if o.MaxPinnedBytes != 0 {
		return nil
	}
	limit, limited := sys.Memlock()
	limit -= min(limit, queues)
	if !limited || limit > 0 {
		d.limits.MaxPinnedBytes = limit
		return nil
	}
	page, err := unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return joinCall(device.ErrNoMemory, "mmap", err)
	}
	defer func() { _ = unix.Munmap(page) }() // It can't fail on what mmap returned.
	err = d.call(d.first, vm.RangeOf(page))
	d.clear(1)
	if err != nil {
		return noMemlock("io_uring_register", err)
	}
	return nil
}

// run runs f where the ring takes registrations.
func (d *Device) run(f func()) {
	if d.exec != nil {
		d.exec(f)
		return
	}
	f()
}

// call points slot at r, or at nothing if r is zero.
func (d *Device) call(slot uint32, r vm.Range) error {
	u := d.args.Get().(*uring.Update)
	defer d.args.Put(u)
	if d.exec == nil {
		return u.Do(d.fd, slot, uint64(r.Start), uint64(r.Len()))
	}
	var err error
	d.exec(func() { err = u.Do(d.fd, slot, uint64(r.Start), uint64(r.Len())) })
	return err
}

// clear empties the device's first n slots.
func (d *Device) clear(n int) {
	if n == 0 {
		return
	}
	// An error means that table or ring are gone, and their pins with them.
	d.run(func() { _, _ = uring.ClearBuffers(d.fd, d.first, uint32(n)) })
}

// Name implements [device.Device].
func (d *Device) Name() string { return "iouring" }

// Limits implements [device.Device]. MaxPinnedBytes is RLIMIT_MEMLOCK as it was
// when the device was opened, less the queues of a ring that Open made; other
// rings and processes of the same user share it. It is zero if the process has
// CAP_IPC_LOCK.
func (d *Device) Limits() device.Limits { return d.limits }

// Ring returns the ring that Open made; nil for a device made by New. It is
// for one goroutine at a time, unlike the device.
func (d *Device) Ring() *Ring { return d.ring }

// Live returns how many registrations there are now; none after Close.
func (d *Device) Live() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return 0
	}
	return d.live
}

// Register implements [device.Device]. The registration covers exactly r, from
// byte to byte, although whole pages are pinned; its access is LocalWrite,
// whatever was asked for, since the kernel pins for writing only. Access beyond
// that is refused with ErrAccess. The context is checked before the system
// call, which can't be interrupted.
func (d *Device) Register(ctx context.Context, r vm.Range, access device.Access) (device.Registration, error) {
	reg, err := d.register(ctx, r, access)
	if err != nil {
		return device.Registration{}, fmt.Errorf("iouring: register %v: %w", r, err)
	}
	return reg, nil
}

func (d *Device) register(ctx context.Context, r vm.Range, access device.Access) (device.Registration, error) {
	if err := ctx.Err(); err != nil {
		return device.Registration{}, err
	}
	if err := r.Check(); err != nil {
		return device.Registration{}, fmt.Errorf("%w: %w", device.ErrInvalid, err)
	}
	if !access.Valid() || access&^device.LocalWrite != 0 {
		return device.Registration{}, fmt.Errorf("access %v, local read and write only: %w", access, device.ErrAccess)
	}
	if r.Len() > MaxRange {
		return device.Registration{}, fmt.Errorf("%d bytes, at most %d: %w", r.Len(), MaxRange, device.ErrTooLarge)
	}
	if r.Start == 0 {
		// A null address means "no buffer" to the kernel.
		return device.Registration{}, fmt.Errorf("null address: %w", device.ErrFault)
	}
	i, err := d.take()
	if err != nil {
		return device.Registration{}, err
	}
	err = d.call(d.first+i, r)

	d.mu.Lock()
	defer d.mu.Unlock()
	defer d.doneLocked()
	s := &d.slots[i]
	s.busy = false
	if err != nil {
		d.pushLocked(i)
		return device.Registration{}, callError("io_uring_register", err)
	}
	if d.closed {
		return device.Registration{}, device.ErrClosed // The slot is cleared with the others.
	}
	s.gen++
	s.r = r
	d.live++
	return device.Registration{
		Range:    r,
		LocalKey: d.first + i,
		Access:   device.LocalWrite,
		Handle:   d.handle(i, s.gen),
	}, nil
}

// handle packs a slot's index, its generation and the device's tag.
func (d *Device) handle(i, gen uint32) uint64 {
	return uint64(gen)<<32 | uint64(d.tag)<<16 | uint64(i)
}

// take marks a free slot as busy and counts the caller in.
func (d *Device) take() (uint32, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return 0, device.ErrClosed
	}
	var i uint32
	switch {
	case len(d.slots) < d.limits.MaxRegistrations && d.free.n < quarantine:
		i = uint32(len(d.slots))
		d.slots = append(d.slots, slot{})
	case d.free.n > 0:
		i = d.popLocked()
	default:
		return 0, fmt.Errorf("%d slots in use: %w", len(d.slots), device.ErrNoSlots)
	}
	d.slots[i].busy = true
	d.inflight++
	return i, nil
}

func (d *Device) popLocked() uint32 {
	i := d.free.head - 1
	d.free.head = d.slots[i].next
	if d.free.head == 0 {
		d.free.tail = 0
	}
	d.free.n--
	return i
}

func (d *Device) pushLocked(i uint32) {
	d.slots[i].next = 0
	if d.free.tail == 0 {
		d.free.head = i + 1
	} else {
		d.slots[d.free.tail-1].next = i + 1
	}
	d.free.tail = i + 1
	d.free.n++
}

// findLocked finds the slot of a live registration.
func (d *Device) findLocked(reg device.Registration) (uint32, error) {
	if d.closed {
		return 0, device.ErrClosed
	}
	i, gen := uint32(reg.Handle&0xffff), uint32(reg.Handle>>32)
	if gen&1 == 0 || int(i) >= len(d.slots) || reg.Handle != d.handle(i, d.slots[i].gen) ||
		reg.LocalKey != d.first+i || reg.Range != d.slots[i].r {
		return 0, device.ErrNotRegistered
	}
	return i, nil
}

// enter finds the slot of a live registration, marks it as busy and counts the
// caller in.
func (d *Device) enter(reg device.Registration) (uint32, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	i, err := d.findLocked(reg)
	if err != nil {
		return 0, err
	}
	s := &d.slots[i]
	if s.busy {
		return 0, fmt.Errorf("another call on the registration is under way: %w", device.ErrBusy)
	}
	s.busy = true
	d.inflight++
	return i, nil
}

// doneLocked counts a caller out. The last one out of a closed device closes
// the descriptor.
func (d *Device) doneLocked() {
	d.inflight--
	if d.closed && d.inflight == 0 {
		// Not under the lock: Options.Exec is the caller's code.
		n := len(d.slots)
		d.mu.Unlock()
		_ = d.release(n) // Close has returned already.
		d.mu.Lock()
	}
}

// release clears the slots and closes the descriptor. Only the caller that
// found the device closed and unused may call it.
func (d *Device) release(slots int) error {
	d.clear(slots)
	return os.NewSyscallError("close", unix.Close(d.fd))
}

// Deregister implements [device.Device]: it empties the slot. Requests in
// flight keep the pages; those posted later fail with EFAULT. If another call
// on the same registration is under way, it returns a wrapped ErrBusy and does
// nothing.
func (d *Device) Deregister(reg device.Registration) error {
	i, err := d.enter(reg)
	if err != nil {
		return fmt.Errorf("iouring: deregister slot %d, %v: %w", reg.LocalKey, reg.Range, err)
	}
	err = d.call(d.first+i, vm.Range{})

	d.mu.Lock()
	defer d.mu.Unlock()
	defer d.doneLocked()
	s := &d.slots[i]
	s.busy = false
	if err != nil && errnoOf(err) != unix.ENXIO {
		return fmt.Errorf("iouring: deregister slot %d, %v: %w", reg.LocalKey, reg.Range, callError("io_uring_register", err))
	}
	// ENXIO: the ring's owner unregistered the table, the key is dead.
	s.gen++
	s.r, s.revoked = vm.Range{}, false
	d.live--
	d.pushLocked(i)
	return nil
}

// Update implements [device.Updater]: it pins the pages that back reg's range
// now and points the slot at them in one step. Requests in flight keep the old
// pages, later ones see the new. On error the old registration is intact.
//
// The new pages are charged before the old are given back, so at the limit
// Update fails with ErrNoMemory where Deregister and Register would work.
func (d *Device) Update(ctx context.Context, reg device.Registration) (device.Registration, error) {
	err := d.point(ctx, reg, reg.Range, false)
	if err != nil {
		return device.Registration{}, fmt.Errorf("iouring: update slot %d, %v: %w", reg.LocalKey, reg.Range, err)
	}
	reg.Access = device.LocalWrite
	return reg, nil
}

// Revoke implements [device.RevokingUpdater]: it empties the slot. Requests in
// flight keep their pages, as a request takes hold of them when it begins: who has
// to know that they are over waits for their completions. Those posted later fail
// with EFAULT.
func (d *Device) Revoke(ctx context.Context, reg device.Registration) error {
	if err := d.point(ctx, reg, vm.Range{}, false); err != nil && !errors.Is(err, device.ErrRevoked) {
		return fmt.Errorf("iouring: revoke slot %d, %v: %w", reg.LocalKey, reg.Range, err)
	}
	return nil
}

// Flush implements [device.Flusher]. It doesn't wait: requests that use reg's slot,
// queued by the [Ring] that Open made or in flight there, whose completions nobody
// has taken, give a wrapped ErrBusy with their number. What has been handed to the
// kernel past that Ring isn't known. A device that New made on somebody else's
// ring knows nothing of requests and returns a wrapped ErrNotSupported.
func (d *Device) Flush(ctx context.Context, reg device.Registration) error {
	if err := d.flush(ctx, reg); err != nil {
		return fmt.Errorf("iouring: flush slot %d, %v: %w", reg.LocalKey, reg.Range, err)
	}
	return nil
}

func (d *Device) flush(ctx context.Context, reg device.Registration) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, err := d.findLocked(reg); err != nil {
		return err
	}
	if d.ring == nil {
		return fmt.Errorf("the ring is somebody else's: %w", device.ErrNotSupported)
	}
	if n := d.ring.inflight.of(reg.LocalKey); n > 0 {
		return fmt.Errorf("%d requests are queued or in flight, or their completions not taken: %w", n, device.ErrBusy)
	}
	return nil
}

// Load implements [device.RevokingUpdater]: it fills the slot again.
func (d *Device) Load(ctx context.Context, reg device.Registration) (device.Registration, error) {
	if err := d.point(ctx, reg, reg.Range, true); err != nil {
		return device.Registration{}, fmt.Errorf("iouring: load slot %d, %v: %w", reg.LocalKey, reg.Range, err)
	}
	reg.Access = device.LocalWrite
	return reg, nil
}

// point points the slot of a live registration, which is revoked or not, at r, or
// at nothing if r is empty.
func (d *Device) point(ctx context.Context, reg device.Registration, r vm.Range, revoked bool) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	i, err := d.enter(reg)
	if err != nil {
		return err
	}
	d.mu.Lock()
	is := d.slots[i].revoked
	d.mu.Unlock()
	switch {
	case is && !revoked:
		err = device.ErrRevoked
	case !is && revoked:
		err = device.ErrNotRevoked
	default:
		if err = d.call(d.first+i, r); err != nil {
			err = callError("io_uring_register", err)
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	defer d.doneLocked()
	s := &d.slots[i]
	s.busy = false
	if err == nil {
		s.revoked = r.Empty()
	}
	return err
}

// Close empties the device's slots, whatever is still registered, and closes
// what the device opened. It waits for nothing: requests in flight keep their
// pages, and a call that is in the kernel ends normally, the last such call
// doing what Close would have done. Later calls fail with ErrClosed. It is
// idempotent. The ring that Open made is closed too, so its user must have
// stopped.
func (d *Device) Close() error {
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		return nil
	}
	d.closed = true
	idle, slots := d.inflight == 0, len(d.slots)
	d.mu.Unlock()
	var err error
	if idle {
		err = d.release(slots)
	}
	if d.ring != nil {
		err = errors.Join(err, d.ring.Close())
	}
	if err != nil {
		return fmt.Errorf("iouring: close: %w", err)
	}
	return nil
}
