package iouring

import (
	"errors"
	"fmt"
	"math/bits"
	"os"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/internal/sys"
	"github.com/pindown/pindown/internal/uring"
	"github.com/pindown/pindown/vm"
)

// RingOptions configure a ring. The zero value, or nil, means the defaults.
type RingOptions struct {
	// Entries is the size of the submission queue, rounded up to a power of
	// two; at most 32768. Zero means 128.
	Entries int
	// CQEntries is the size of the completion queue, rounded up to a power of
	// two; at least Entries. Zero means twice Entries.
	CQEntries int
}

// Ring is a minimal io_uring: it queues reads, writes and flushes, submits them
// in batches, and hands out completions. No call but NewRing and Close
// allocates memory; on the ring of a [Device], only with more requests in flight
// than ever before and than both queues hold.
//
// A Ring is for one goroutine at a time; nothing in it locks. (The kernel's
// side of the buffer table is another matter: a [Device] on the ring may
// register from other goroutines meanwhile.)
//
// Memory is passed as ranges, not slices. The caller keeps it alive and in its
// place until the request has completed: memory that it mapped, or Go memory
// held by a [runtime.Pinner]. A short read or write is not continued. Requests
// belong to the thread that submitted them: if that thread ends, as that of a
// goroutine that exits while locked to it, the kernel cancels them.
type Ring struct {
	fd     int
	rings  []byte // both queues' mapping.
	sqeMem []byte

	sqHead, sqTail, sqFlags *atomic.Uint32
	cqHead, cqTail          *atomic.Uint32
	sqMask, cqMask          uint32
	sqEntries               uint32
	tail                    uint32 // our copy of sqTail; entries below it are filled.
	sqes                    []uring.SQE
	cqes                    []uring.CQE
	inflight                *inflight // nil unless a device asks for it.
	closed                  bool
}

// Completion is the outcome of one request.
type Completion struct {
	// UserData is what the request was queued with.
	UserData uint64
	// Res is the number of bytes, or a negative errno.
	Res int32
	// Flags are the kernel's IORING_CQE_F bits.
	Flags uint32
}

// Err returns nil if the request succeeded, else its errno.
func (c Completion) Err() error {
	if c.Res >= 0 {
		return nil
	}
	return syscall.Errno(-c.Res)
}

// NewRing opens an io_uring. It returns a wrapped [device.ErrNotSupported] with
// the reason if io_uring isn't available to the process, and a wrapped
// [device.ErrNoMemory] if the queues find no room below RLIMIT_MEMLOCK; both
// if they never could. Requires Linux 5.13.
func NewRing(opts *RingOptions) (*Ring, error) {
	r, err := newRing(opts)
	if err != nil {
		return nil, fmt.Errorf("iouring: open ring: %w", err)
	}
	return r, nil
}

func newRing(opts *RingOptions) (*Ring, error) {
	var o RingOptions
	if opts != nil {
		o = *opts
	}
	if o.Entries == 0 {
		o.Entries = 128
	}
	if o.Entries < 0 || o.CQEntries < 0 || o.Entries > 1<<15 || o.CQEntries > 1<<16 {
		return nil, fmt.Errorf("%d entries, %d completion entries: %w", o.Entries, o.CQEntries, device.ErrInvalid)
	}
	var p uring.Params
	if o.CQEntries != 0 {
		p.Flags |= uring.SetupCQSize
		p.CQEntries = uint32(o.CQEntries)
	}
	fd, err := uring.Setup(uint32(o.Entries), &p)
	if err != nil {
		if limit, limited := sys.Memlock(); limited && errnoOf(err) == unix.ENOMEM && limit < queueBytes(o.Entries, o.CQEntries) {
			return nil, noMemlock("io_uring_setup", err)
		}
		return nil, setupError(err)
	}
	const need = uring.FeatSingleMmap | uring.FeatNoDrop | uring.FeatRsrcTags
	if p.Features&need != need {
		_ = unix.Close(fd) // Nothing was done with it.
		return nil, fmt.Errorf("%w: Linux 5.13 is needed, the kernel's io_uring has features %#x", device.ErrNotSupported, p.Features)
	}
	r := &Ring{fd: fd}
	if err := r.mapQueues(&p); err != nil {
		return nil, errors.Join(err, r.Close())
	}
	return r, nil
}

func (r *Ring) mapQueues(p *uring.Params) (err error) {
	size := max(
		int(p.SQOff.Array+p.SQEntries*uint32(unsafe.Sizeof(uint32(0)))),
		int(p.CQOff.CQEs+p.CQEntries*uint32(unsafe.Sizeof(uring.CQE{}))),
	)
	const prot, flags = unix.PROT_READ | unix.PROT_WRITE, unix.MAP_SHARED | unix.MAP_POPULATE
	if r.rings, err = unix.Mmap(r.fd, uring.OffSQRing, size, prot, flags); err != nil {
		return joinCall(device.ErrNoMemory, "mmap", err)
	}
	if r.sqeMem, err = unix.Mmap(r.fd, uring.OffSQEs, int(p.SQEntries)*int(unsafe.Sizeof(uring.SQE{})), prot, flags); err != nil {
		return joinCall(device.ErrNoMemory, "mmap", err)
	}
	word := func(off uint32) *atomic.Uint32 { return (*atomic.Uint32)(unsafe.Pointer(&r.rings[off])) }
	r.sqHead, r.sqTail, r.sqFlags = word(p.SQOff.Head), word(p.SQOff.Tail), word(p.SQOff.Flags)
	r.cqHead, r.cqTail = word(p.CQOff.Head), word(p.CQOff.Tail)
	r.sqMask, r.cqMask = word(p.SQOff.RingMask).Load(), word(p.CQOff.RingMask).Load()
	r.sqEntries = p.SQEntries
	r.sqes = unsafe.Slice((*uring.SQE)(unsafe.Pointer(unsafe.SliceData(r.sqeMem))), p.SQEntries)
	r.cqes = unsafe.Slice((*uring.CQE)(unsafe.Pointer(&r.rings[p.CQOff.CQEs])), p.CQEntries)
	// The indirection from queue to entries is the identity, once and for all.
	array := unsafe.Slice((*uint32)(unsafe.Pointer(&r.rings[p.SQOff.Array])), p.SQEntries)
	for i := range array {
		array[i] = uint32(i)
	}
	r.tail = r.sqTail.Load()
	return nil
}

// memory returns what the queues take of RLIMIT_MEMLOCK since Linux 6.14.
func (r *Ring) memory() uint64 {
	page := uint64(os.Getpagesize())
	return (uint64(len(r.rings))+page-1)&^(page-1) + (uint64(len(r.sqeMem))+page-1)&^(page-1)
}

// queueBytes is about what the queues of a ring take before it is made; too
// much rather than too little.
func queueBytes(entries, cqEntries int) uint64 {
	n := uint64(1) << bits.Len(uint(entries)) // Rounded up, or more.
	cq := max(2*n, uint64(1)<<bits.Len(uint(cqEntries)))
	return n*64 + n*4 + cq*16 + 4*uint64(os.Getpagesize())
}

// Fd returns the ring's descriptor. It stays the ring's.
func (r *Ring) Fd() int { return r.fd }

// Entries returns the size of the submission queue and of the completion queue.
func (r *Ring) Entries() (submission, completion int) { return len(r.sqes), len(r.cqes) }

// Queued returns how many requests are queued and not yet submitted.
func (r *Ring) Queued() int {
	if r.closed {
		return 0
	}
	return int(r.tail - r.sqHead.Load())
}

// next returns the next free entry, emptied, for a request that uses a slot of the
// buffer table, or noSlot.
func (r *Ring) next(op uint8, userData uint64, slot int32) (*uring.SQE, error) {
	if r.closed {
		return nil, fmt.Errorf("iouring: queue request: %w", device.ErrClosed)
	}
	if r.tail-r.sqHead.Load() >= r.sqEntries {
		return nil, fmt.Errorf("iouring: queue request: %w", ErrQueueFull)
	}
	e := &r.sqes[r.tail&r.sqMask]
	if r.inflight != nil {
		userData = r.inflight.begin(userData, slot)
	}
	*e = uring.SQE{Opcode: op, UserData: userData}
	r.tail++
	return e, nil
}

func (r *Ring) transfer(op uint8, fd int, mem vm.Range, off int64, slot uint32, userData uint64) error {
	if mem.Len() > 1<<31-1 || slot >= MaxSlots {
		return fmt.Errorf("iouring: queue request for %v, slot %d: %w", mem, slot, device.ErrInvalid)
	}
	uses := int32(noSlot)
	if op == uring.OpReadFixed || op == uring.OpWriteFixed {
		uses = int32(slot)
	}
	e, err := r.next(op, userData, uses)
	if err != nil {
		return err
	}
	e.Fd = int32(fd)
	e.Off = uint64(off)
	e.Addr = uint64(mem.Start)
	e.Len = uint32(mem.Len())
	e.BufIndex = uint16(slot)
	return nil
}

// ReadFixed queues a read from fd at off into mem, which must lie in the buffer
// of the slot (a registration's local key). The data goes to the pages that the
// slot points at, which are those mapped at mem only while the registration
// isn't stale. Off is -1 for a descriptor without position, such as a pipe.
//
// Like all methods that queue, it returns a wrapped [ErrQueueFull] if the
// submission queue is full, and fills the queue only: see [Ring.Submit].
func (r *Ring) ReadFixed(fd int, mem vm.Range, off int64, slot uint32, userData uint64) error {
	return r.transfer(uring.OpReadFixed, fd, mem, off, slot, userData)
}

// WriteFixed queues a write to fd at off from mem through the slot; see
// ReadFixed.
func (r *Ring) WriteFixed(fd int, mem vm.Range, off int64, slot uint32, userData uint64) error {
	return r.transfer(uring.OpWriteFixed, fd, mem, off, slot, userData)
}

// Read queues a read from fd at off into mem, which needs no registration.
func (r *Ring) Read(fd int, mem vm.Range, off int64, userData uint64) error {
	return r.transfer(uring.OpRead, fd, mem, off, 0, userData)
}

// Write queues a write to fd at off from mem, which needs no registration.
func (r *Ring) Write(fd int, mem vm.Range, off int64, userData uint64) error {
	return r.transfer(uring.OpWrite, fd, mem, off, 0, userData)
}

// Fsync queues an fsync(2) of fd, or an fdatasync(2) if dataOnly. It isn't
// ordered after writes queued before it: wait for those first.
func (r *Ring) Fsync(fd int, dataOnly bool, userData uint64) error {
	e, err := r.next(uring.OpFsync, userData, noSlot)
	if err != nil {
		return err
	}
	e.Fd = int32(fd)
	if dataOnly {
		e.OpFlags = uring.FsyncDatasync
	}
	return nil
}

// Nop queues a request that does nothing.
func (r *Ring) Nop(userData uint64) error {
	e, err := r.next(uring.OpNop, userData, noSlot)
	if err != nil {
		return err
	}
	e.Fd = -1
	return nil
}

// Submit hands all queued requests to the kernel and returns how many it took.
// It returns a wrapped [device.ErrBusy] if the kernel takes no more for now
// (EAGAIN, EBUSY): the rest stays queued; take completions and submit again.
func (r *Ring) Submit() (int, error) { return r.submit(0) }

// SubmitAndWait is Submit, followed by waiting until at least n completions can
// be taken.
func (r *Ring) SubmitAndWait(n int) (int, error) {
	if n < 0 || n > len(r.cqes) {
		return 0, fmt.Errorf("iouring: wait for %d completions of at most %d: %w", n, len(r.cqes), device.ErrInvalid)
	}
	return r.submit(uint32(n))
}

// submit loops, since one call takes only a part if a request is malformed (it
// then completes with an error) or if a signal comes, as the Go runtime sends
// them all the time.
func (r *Ring) submit(wait uint32) (total int, err error) {
	if r.closed {
		return 0, fmt.Errorf("iouring: submit: %w", device.ErrClosed)
	}
	r.sqTail.Store(r.tail)
	for {
		pending := r.tail - r.sqHead.Load()
		if pending == 0 && r.ready() >= wait {
			return total, nil
		}
		var flags uint32
		if wait > 0 {
			flags = uring.EnterGetEvents
		}
		n, err := uring.Enter(r.fd, pending, wait, flags)
		total += n
		switch errnoOf(err) {
		case 0:
			if n == 0 && pending > 0 {
				return total, fmt.Errorf("iouring: submit %d requests: %w", pending, device.ErrBusy)
			}
		case unix.EINTR:
		case unix.EAGAIN, unix.EBUSY:
			return total, fmt.Errorf("iouring: submit %d requests: %w", pending, joinCall(device.ErrBusy, "io_uring_enter", err))
		default:
			return total, fmt.Errorf("iouring: submit %d requests: %w", pending, joinCall(device.ErrInvalid, "io_uring_enter", err))
		}
	}
}

// overflowed reports whether the kernel holds completions that didn't fit into
// the queue.
func (r *Ring) overflowed() bool { return r.sqFlags.Load()&uring.SQCQOverflow != 0 }

// ready returns how many completions are in the queue.
func (r *Ring) ready() uint32 { return r.cqTail.Load() - r.cqHead.Load() }

// Completions moves completions into dst without waiting and returns how many;
// completions that the kernel kept because the queue was full are included.
func (r *Ring) Completions(dst []Completion) (int, error) {
	if r.closed {
		return 0, fmt.Errorf("iouring: take completions: %w", device.ErrClosed)
	}
	n := 0
	for n < len(dst) {
		head := r.cqHead.Load()
		avail := min(r.cqTail.Load()-head, uint32(len(dst)-n))
		for i := range avail {
			e := &r.cqes[(head+i)&r.cqMask]
			dst[n] = Completion{UserData: e.UserData, Res: e.Res, Flags: e.Flags}
			if r.inflight != nil {
				dst[n].UserData = r.inflight.end(e.UserData)
			}
			n++
		}
		r.cqHead.Store(head + avail)
		if avail > 0 {
			continue
		}
		if !r.overflowed() {
			break
		}
		if _, err := uring.Enter(r.fd, 0, 0, uring.EnterGetEvents); err != nil && errnoOf(err) != unix.EINTR {
			return n, fmt.Errorf("iouring: flush completions: %w", joinCall(device.ErrBusy, "io_uring_enter", err))
		}
	}
	return n, nil
}

// Wait submits what is queued, waits until there is a completion, and moves up
// to len(dst) of them into dst. It returns how many. It waits for ever if no
// request is in flight.
func (r *Ring) Wait(dst []Completion) (int, error) {
	if len(dst) == 0 {
		return 0, nil
	}
	_, busy := r.submit(1)
	if busy != nil && !errors.Is(busy, device.ErrBusy) {
		return 0, busy
	}
	n, err := r.Completions(dst)
	if n == 0 && err == nil {
		err = busy
	}
	return n, err
}

// Do submits what is queued and collects exactly len(dst) completions. It is
// for programs that queue a batch, and want it done.
func (r *Ring) Do(dst []Completion) error {
	for n := 0; n < len(dst); {
		m, err := r.Wait(dst[n:])
		if err != nil {
			return err
		}
		n += m
	}
	return nil
}

// Close unmaps the queues and closes the descriptor; the kernel cancels or
// completes what is in flight, after Close returned. It is idempotent.
func (r *Ring) Close() error {
	if r.closed {
		return nil
	}
	r.closed = true
	var errs []error
	for _, m := range [][]byte{r.rings, r.sqeMem} {
		if m != nil {
			errs = append(errs, os.NewSyscallError("munmap", unix.Munmap(m)))
		}
	}
	r.rings, r.sqeMem, r.sqes, r.cqes = nil, nil, nil, nil
	errs = append(errs, os.NewSyscallError("close", unix.Close(r.fd)))
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("iouring: close ring: %w", err)
	}
	return nil
}
