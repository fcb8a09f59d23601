package device

import "errors"

// Errors of the optional interfaces.
var (
	// ErrRevoked: the registration is revoked, its keys mean nothing until Load.
	// Update of such a registration fails with it and changes nothing.
	ErrRevoked = errors.New("device: registration revoked")
	// ErrNotRevoked: Load of a registration that isn't revoked.
	ErrNotRevoked = errors.New("device: registration not revoked")
	// ErrNotExposed: no such exposure, or not any more.
	ErrNotExposed = errors.New("device: not exposed")
	// ErrQueue: the work queue is in error, and takes no work; or a request
	// was in it when that happened.
	ErrQueue = errors.New("device: work queue in error")
)
