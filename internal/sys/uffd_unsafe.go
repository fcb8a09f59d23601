package sys

import (
	"os"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/vm"
)

// Userfaultfd is userfaultfd(2). UFFD_USER_MODE_ONLY needs Linux 5.11.
func Userfaultfd(flags int) (int, error) {
	fd, _, errno := unix.Syscall(unix.SYS_USERFAULTFD, uintptr(flags), 0, 0)
	if errno != 0 {
		return -1, os.NewSyscallError("userfaultfd", errno)
	}
	return int(fd), nil
}

// UFFDHandshake is UFFDIO_API. It returns the features that the kernel has;
// with features zero it enables none, and the descriptor can't be used for
// another handshake.
func UFFDHandshake(fd int, features uint64) (uint64, error) {
	arg := uffdioAPIArg{API: UFFDAPI, Features: features}
	if errno := ioctl(fd, uffdioAPI, unsafe.Pointer(&arg)); errno != 0 {
		return 0, os.NewSyscallError("ioctl(UFFDIO_API)", errno)
	}
	return arg.Features, nil
}

// UFFDRegister is UFFDIO_REGISTER. It returns the set of ioctls that the range
// then allows. A hole in r is skipped in silence.
func UFFDRegister(fd int, r vm.Range, mode uint64) (uint64, error) {
	arg := uffdioRegisterArg{Range: uffdioRange{Start: uint64(r.Start), Len: uint64(r.Len())}, Mode: mode}
	if errno := ioctl(fd, uffdioRegister, unsafe.Pointer(&arg)); errno != 0 {
		return 0, os.NewSyscallError("ioctl(UFFDIO_REGISTER)", errno)
	}
	return arg.Ioctls, nil
}

// UFFDUnregister is UFFDIO_UNREGISTER.
func UFFDUnregister(fd int, r vm.Range) error {
	arg := uffdioRange{Start: uint64(r.Start), Len: uint64(r.Len())}
	if errno := ioctl(fd, uffdioUnregister, unsafe.Pointer(&arg)); errno != 0 {
		return os.NewSyscallError("ioctl(UFFDIO_UNREGISTER)", errno)
	}
	return nil
}

// UFFDWriteprotect is UFFDIO_WRITEPROTECT, with mode zero to lift protection.
// It fails with ENOENT if a mapping in r isn't registered in write-protect
// mode, or none is there, and with EAGAIN while an event is unread.
func UFFDWriteprotect(fd int, r vm.Range, mode uint64) error {
	arg := uffdioWriteprotectArg{Range: uffdioRange{Start: uint64(r.Start), Len: uint64(r.Len())}, Mode: mode}
	if errno := ioctl(fd, uffdioWriteprotect, unsafe.Pointer(&arg)); errno != 0 {
		return os.NewSyscallError("ioctl(UFFDIO_WRITEPROTECT)", errno)
	}
	return nil
}

// nothing is an argument of UFFDIO_WRITEPROTECT that asks for nothing. It is
// never written.
var nothing uffdioWriteprotectArg

// UFFDChanging reports whether a VM operation on memory registered with fd has
// an event that wasn't read yet, or isn't decided: it returns false only if
// the kernel says that there is none.
//
// It is UFFDIO_WRITEPROTECT of an empty range: userfaultfd_writeprotect
// (fs/userfaultfd.c) returns EAGAIN while ctx->mmap_changing isn't zero, and
// otherwise EINVAL for the range, before it takes any lock. (With a bad address
// for an argument it would return EFAULT, at the price of a page fault, which
// on some kernels waits for the mmap lock.) The call can't block, so it is made
// without telling Go's scheduler, which would cost more than the call.
func UFFDChanging(fd int) bool {
	_, _, errno := syscall.RawSyscall(unix.SYS_IOCTL, uintptr(fd), uffdioWriteprotect, uintptr(unsafe.Pointer(&nothing)))
	return errno != unix.EINVAL
}

func ioctl(fd int, request uintptr, arg unsafe.Pointer) unix.Errno {
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, uintptr(arg))
	return errno
}
