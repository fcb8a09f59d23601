package device

import "errors"

// Errors of Register and Update. Implementations return them wrapped, with the
// device's own error beside.
var (
	// ErrNoMemory: a limit on pinned memory was met (ENOMEM, RLIMIT_MEMLOCK).
	// Deregistering may help, with delay: unpinning can be asynchronous.
	ErrNoMemory = errors.New("device: no memory to pin")
	// ErrNoSlots: the device's number of registrations is used up.
	ErrNoSlots = errors.New("device: no registration left")
	// ErrBusy: the device asks to try again (EAGAIN, EBUSY, EINTR).
	ErrBusy = errors.New("device: busy")
	// ErrFault: part of the range isn't mapped or lacks the permission
	// (EFAULT).
	ErrFault = errors.New("device: memory not accessible")
	// ErrPermission: the caller may not register (EPERM, EACCES).
	ErrPermission = errors.New("device: not permitted")
	// ErrTooLarge: the range is longer than the device takes.
	ErrTooLarge = errors.New("device: range too large")
	// ErrUnsupportedMemory: the device can't pin this kind of mapping
	// (EOPNOTSUPP), such as a file on a file system with write-back.
	ErrUnsupportedMemory = errors.New("device: kind of mapping not supported")
	// ErrAccess: the access can't be granted by this device, or isn't valid.
	ErrAccess = errors.New("device: access not supported")
	// ErrInvalid: the device rejects the request for another reason.
	ErrInvalid = errors.New("device: invalid request")
)

// Errors of Deregister and Update.
var (
	// ErrNotRegistered: no such registration, or not any more.
	ErrNotRegistered = errors.New("device: not registered")
	// ErrRegistrationLost: an update failed and took the registration with it.
	ErrRegistrationLost = errors.New("device: registration lost")
)

// Errors of every operation.
var (
	// ErrClosed: the device is closed.
	ErrClosed = errors.New("device: closed")
	// ErrNotSupported: the device isn't available on this machine.
	ErrNotSupported = errors.New("device: not supported here")
)
