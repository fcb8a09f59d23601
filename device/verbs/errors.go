package verbs

import (
	"errors"
	"fmt"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/device"
)

// sentinel maps what the library answers to an error of package device.
func sentinel(errno syscall.Errno) error {
	switch errno {
	case unix.ENOMEM, unix.ENOBUFS:
		return device.ErrNoMemory
	case unix.EAGAIN, unix.EBUSY, unix.EINTR:
		return device.ErrBusy
	case unix.EFAULT:
		return device.ErrFault
	case unix.EPERM, unix.EACCES:
		return device.ErrPermission
	case unix.ENOSPC:
		return device.ErrNoSlots
	case unix.EFBIG, unix.E2BIG:
		return device.ErrTooLarge
	case unix.EOPNOTSUPP:
		return device.ErrUnsupportedMemory
	case unix.ENOSYS, unix.ENODEV, unix.ENXIO:
		return device.ErrNotSupported
	case unix.EIO, unix.EBADF:
		// The adapter was unplugged, or has failed for good.
		return device.ErrClosed
	default:
		return device.ErrInvalid
	}
}

// callError is a failed call beside the sentinel that it maps to.
func callError(call string, err error) error {
	return joinCall(sentinel(errnoOf(err)), call, err)
}

// joinCall puts a sentinel before a call's error.
func joinCall(sentinel error, call string, err error) error {
	return fmt.Errorf("%w: %w", sentinel, os.NewSyscallError(call, err))
}

func errnoOf(err error) syscall.Errno {
	errno, _ := errors.AsType[syscall.Errno](err)
	return errno
}

func notSupported(reason string) error {
	return fmt.Errorf("%w: %s", device.ErrNotSupported, reason)
}
