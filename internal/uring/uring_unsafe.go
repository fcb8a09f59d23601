package uring

import (
	"runtime"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Setup calls io_uring_setup(2). The descriptor is close-on-exec.
func Setup(entries uint32, p *Params) (int, error) {
	fd, _, errno := unix.Syscall(unix.SYS_IO_URING_SETUP, uintptr(entries), uintptr(unsafe.Pointer(p)), 0)
	if errno != 0 {
		return -1, errno
	}
	return int(fd), nil
}

// Enter calls io_uring_enter(2) without a signal mask. It doesn't retry.
func Enter(fd int, toSubmit, minComplete, flags uint32) (int, error) {
	n, _, errno := unix.Syscall6(unix.SYS_IO_URING_ENTER, uintptr(fd), uintptr(toSubmit), uintptr(minComplete), uintptr(flags), 0, 0)
	if errno != 0 {
		return 0, errno
	}
	return int(n), nil
}

// register calls io_uring_register(2) again until it isn't interrupted.
func register(fd int, op uint32, arg unsafe.Pointer, nr uint32) (int, error) {
	for {
		n, _, errno := unix.Syscall6(unix.SYS_IO_URING_REGISTER, uintptr(fd), uintptr(op), uintptr(arg), uintptr(nr), 0, 0)
		if errno == 0 {
			return int(n), nil
		}
		if errno != unix.EINTR {
			return 0, errno
		}
	}
}

// RegisterSparse gives the ring a buffer table of n empty slots, by
// IORING_RSRC_REGISTER_SPARSE. Requires Linux 5.19; EINVAL before.
func RegisterSparse(fd int, n uint32) error {
	rr := RsrcRegister{Nr: n, Flags: RsrcRegisterSparse}
	_, err := register(fd, RegisterBuffers2, unsafe.Pointer(&rr), uint32(unsafe.Sizeof(rr)))
	return err
}

// RegisterEmpty is RegisterSparse in the manner of older kernels: by an array
// of n null vectors. Requires Linux 5.13.
func RegisterEmpty(fd int, n uint32) error {
	var pin runtime.Pinner
	defer pin.Unpin()
	iov := make([]Iovec, n)
	// Pinning keeps a short slice off the stack, which may move.
	pin.Pin(unsafe.SliceData(iov))
	rr := RsrcRegister{Nr: n, Data: uint64(uintptr(unsafe.Pointer(unsafe.SliceData(iov))))}
	_, err := register(fd, RegisterBuffers2, unsafe.Pointer(&rr), uint32(unsafe.Sizeof(rr)))
	return err
}

// ClearBuffers empties n slots from first on in one call. It returns the number
// emptied, which is less than n only with an error or if a slot failed.
func ClearBuffers(fd int, first, n uint32) (int, error) {
	var pin runtime.Pinner
	defer pin.Unpin()
	iov := make([]Iovec, n)
	pin.Pin(unsafe.SliceData(iov))
	up := RsrcUpdate2{Offset: first, Nr: n, Data: uint64(uintptr(unsafe.Pointer(unsafe.SliceData(iov))))}
	return register(fd, RegisterBuffersUpdate, unsafe.Pointer(&up), uint32(unsafe.Sizeof(up)))
}

// ProbeSlot asks without side effect whether the ring's buffer table has a slot
// of that number: it tries an update from an address that no process can read.
// The answer is EFAULT if there is one, EINVAL if the table is shorter, ENXIO
// if there is no table, another errno if the ring can't be used for
// registrations by this thread.
func ProbeSlot(fd int, slot uint32) syscall.Errno {
	up := RsrcUpdate2{Offset: slot, Nr: 1, Data: ^uint64(15)}
	_, err := register(fd, RegisterBuffersUpdate, unsafe.Pointer(&up), uint32(unsafe.Sizeof(up)))
	errno, _ := err.(syscall.Errno) //nolint:errorlint // register returns plain errnos.
	return errno
}

// Update is the argument block of an update of one slot. It must live on the
// heap, because the kernel reads one part through an address in the other:
// [NewUpdate] makes one. It is for one goroutine at a time.
type Update struct {
	up  RsrcUpdate2
	iov Iovec
}

// NewUpdate returns a block on the heap.
//
//go:noinline
func NewUpdate() *Update { return new(Update) }

// Do points the slot at length bytes from addr; none at all if both are zero.
func (u *Update) Do(fd int, slot uint32, addr, length uint64) error {
	u.iov = Iovec{Base: addr, Len: length}
	u.up = RsrcUpdate2{Offset: slot, Nr: 1, Data: uint64(uintptr(unsafe.Pointer(&u.iov)))}
	_, err := register(fd, RegisterBuffersUpdate, unsafe.Pointer(&u.up), uint32(unsafe.Sizeof(u.up)))
	runtime.KeepAlive(u) // The kernel read iov through up.Data.
	return err
}
