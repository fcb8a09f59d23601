package vmops

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/vm"
)

// processMadvise gives advice on r in the process pid.
func processMadvise(pid int, r vm.Range, advice int) error {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return os.NewSyscallError("pidfd_open", err)
	}
	defer func() { _ = unix.Close(fd) }()
	iov := [2]uintptr{r.Start, r.Len()}
	n, err := call("process_madvise", unix.SYS_PROCESS_MADVISE,
		uintptr(fd), uintptr(unsafe.Pointer(&iov)), 1, uintptr(advice), 0, 0)
	runtime.KeepAlive(&iov)
	if err == nil && n != r.Len() {
		err = fmt.Errorf("process_madvise: %d of %d bytes: %w", n, r.Len(), unix.EAGAIN)
	}
	return err
}

// sqe is struct io_uring_sqe of <linux/io_uring.h>.
type sqe struct {
	opcode   uint8
	flags    uint8
	ioprio   uint16
	fd       int32
	off      uint64
	addr     uint64
	len      uint32
	opFlags  uint32
	userData uint64
	_        [3]uint64
}

// Operations of <linux/io_uring.h>.
const (
	ringOpFallocate = 17 // Linux 5.6
	ringOpMadvise   = 25 // Linux 5.6
	ringOpFtruncate = 55 // Linux 6.9

	ringFeatSingleMmap = 1
	ringEnterGetevents = 1
	ringOffSQEs        = 0x10000000
)

// ringParams is struct io_uring_params.
type ringParams struct {
	sqEntries, cqEntries, flags, cpu, idle, features, wqFD uint32
	_                                                      [3]uint32
	sq                                                     struct {
		head, tail, mask, entries, flags, dropped, array, _ uint32
		_                                                   uint64
	}
	cq struct {
		head, tail, mask, entries, overflow, cqes, flags, _ uint32
		_                                                   uint64
	}
}

// ringDo carries out one request on an io_uring of its own and returns its
// result. The kernel hands requests such as MADVISE to a worker thread, so
// that the operation is made by no system call of this process.
func ringDo(req sqe) error {
	var p ringParams
	n, err := call("io_uring_setup", unix.SYS_IO_URING_SETUP, 1, uintptr(unsafe.Pointer(&p)), 0, 0, 0, 0)
	if err != nil {
		return err
	}
	fd := int(n)
	defer func() { _ = unix.Close(fd) }()
	if p.features&ringFeatSingleMmap == 0 {
		return fmt.Errorf("io_uring without single mmap: %w", ErrUnavailable)
	}
	size := max(int(p.sq.array)+4*int(p.sqEntries), int(p.cq.cqes)+16*int(p.cqEntries))
	const prot, flags = unix.PROT_READ | unix.PROT_WRITE, unix.MAP_SHARED | unix.MAP_POPULATE
	ring, err := unix.Mmap(fd, 0, size, prot, flags)
	if err != nil {
		return os.NewSyscallError("mmap", err)
	}
	defer func() { _ = unix.Munmap(ring) }()
	sqes, err := unix.Mmap(fd, ringOffSQEs, int(unsafe.Sizeof(req))*int(p.sqEntries), prot, flags)
	if err != nil {
		return os.NewSyscallError("mmap", err)
	}
	defer func() { _ = unix.Munmap(sqes) }()
	word := func(off uint32) *uint32 { return (*uint32)(unsafe.Pointer(&ring[off])) }

	*(*sqe)(unsafe.Pointer(&sqes[0])) = req
	*word(p.sq.array) = 0
	*word(p.sq.tail) = 1 // the system call orders it
	// A signal may end the wait early, after the request was taken.
	for submit := uintptr(1); atomic.LoadUint32(word(p.cq.tail)) == 0; {
		n, err = call("io_uring_enter", unix.SYS_IO_URING_ENTER, uintptr(fd), submit, 1, ringEnterGetevents, 0, 0)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return err
		}
		submit -= min(n, submit)
	}
	res := int32(*word(p.cq.cqes + 8))
	if res < 0 {
		return os.NewSyscallError("io_uring request", unix.Errno(-res))
	}
	return nil
}

// alignedBlock returns n bytes that start at a multiple of align, for direct
// writes.
func alignedBlock(n, align int) []byte {
	b := make([]byte, n+align)
	off := align - int(uintptr(unsafe.Pointer(&b[0])))&(align-1)
	return b[off : off+n : off+n]
}
