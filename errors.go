package pindown

import "errors"

// Errors of New.
var (
	// ErrOptions is returned for options that contradict themselves or the
	// device. The message lists every problem.
	ErrOptions = errors.New("pindown: bad options")
)

// Errors of Acquire, AcquireRange, Invalidate and Release, always returned
// wrapped. Errors of the device are wrapped too; see package device.
var (
	// ErrClosed: the cache is closed.
	ErrClosed = errors.New("pindown: closed")
	// ErrForked: this process is a fork of the one that made the cache. The
	// cache and its registrations belong to the parent.
	ErrForked = errors.New("pindown: cache belongs to the parent process")
	// ErrRange: the range is empty, negative or wraps around.
	ErrRange = errors.New("pindown: bad range")
	// ErrAccess: the access is not a valid combination.
	ErrAccess = errors.New("pindown: bad access")
	// ErrReleased: the region was released before, or is the zero Region.
	ErrReleased = errors.New("pindown: region already released")
)

// Errors of Update and of a FastKey.
var (
	// ErrStale: a VM operation has overtaken the region, so that its pages may not
	// be those that are mapped.
	ErrStale = errors.New("pindown: region is stale")
	// ErrPolicy: no such update policy.
	ErrPolicy = errors.New("pindown: bad update policy")
)

// Errors of Close.
var (
	// ErrInUse: regions were in use when the cache was closed. Each is
	// deregistered at its last release.
	ErrInUse = errors.New("pindown: regions in use")
)
