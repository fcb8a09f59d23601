package iouring

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/device"
)

// Errors of a Ring.
var (
	// ErrQueueFull: the submission queue has no free entry; submit first.
	ErrQueueFull = errors.New("iouring: submission queue full")
)

// sentinel maps what io_uring_register answers to an error of package device.
func sentinel(errno syscall.Errno) error {
	switch errno {
	case unix.ENOMEM, unix.ENOBUFS:
		return device.ErrNoMemory
	case unix.EAGAIN, unix.EBUSY, unix.EINTR:
		return device.ErrBusy
	case unix.EFAULT:
		return device.ErrFault
	case unix.EPERM, unix.EACCES, unix.EEXIST:
		// EEXIST: the ring is IORING_SETUP_SINGLE_ISSUER, and this isn't its
		// thread.
		return device.ErrPermission
	case unix.EOPNOTSUPP:
		return device.ErrUnsupportedMemory
	case unix.ENXIO, unix.EBADF:
		// The table, or the ring, went away under the device.
		return device.ErrClosed
	case unix.ENOSYS:
		return device.ErrNotSupported
	default:
		return device.ErrInvalid
	}
}

// callError is a failed system call beside the sentinel that it maps to.
func callError(call string, err error) error {
	return joinCall(sentinel(errnoOf(err)), call, err)
}

// joinCall puts a sentinel before a system call's error.
func joinCall(sentinel error, call string, err error) error {
	return fmt.Errorf("%w: %w", sentinel, os.NewSyscallError(call, err))
}

func errnoOf(err error) syscall.Errno {
	errno, _ := errors.AsType[syscall.Errno](err)
	return errno
}

// setupError explains why no ring can be made.
func setupError(err error) error {
	switch errnoOf(err) {
	case unix.ENOSYS:
		return notSupported("the kernel has no io_uring, or a seccomp filter hides it", "io_uring_setup", err)
	case unix.EPERM:
		// The sysctl exists since Linux 6.6; no value is as good as zero.
		sysctl, _ := os.ReadFile("/proc/sys/kernel/io_uring_disabled")
		return notSupported(permReason(string(sysctl)), "io_uring_setup", err)
	case unix.EACCES:
		return notSupported("a security module denies io_uring", "io_uring_setup", err)
	case unix.EMFILE, unix.ENFILE:
		return joinCall(device.ErrBusy, "io_uring_setup", err)
	default:
		return callError("io_uring_setup", err)
	}
}

// noMemlock says that RLIMIT_MEMLOCK is too low for any use, so that waiting
// for others to give memory back is no help.
func noMemlock(call string, err error) error {
	return fmt.Errorf("%w: RLIMIT_MEMLOCK has no room for a ring and a page, and there is no CAP_IPC_LOCK: %w", device.ErrNotSupported, callError(call, err))
}

func notSupported(reason, call string, err error) error {
	return fmt.Errorf("%w: %s: %w", device.ErrNotSupported, reason, os.NewSyscallError(call, err))
}

// permReason says what answers EPERM to io_uring_setup, by the value of the
// sysctl kernel.io_uring_disabled.
func permReason(sysctl string) string {
	switch strings.TrimSpace(sysctl) {
	case "2":
		return "sysctl kernel.io_uring_disabled is 2, for everybody"
	case "1":
		return "sysctl kernel.io_uring_disabled is 1, for processes without CAP_SYS_ADMIN outside the group kernel.io_uring_group"
	default:
		return "a seccomp filter or security module forbids io_uring"
	}
}
