package device

import (
	"context"

	"github.com/pindown/pindown/vm"
)

// Exposure is a remote key that reaches part of a registration.
type Exposure struct {
	// Range is what peers may reach: exactly what was asked for.
	Range vm.Range
	// Access is what they may do there: RemoteRead, RemoteWrite, RemoteAtomic.
	Access Access
	// RemoteKey is what their requests carry. Its low 8 bits change with each
	// exposure; see [NextKey].
	RemoteKey uint32
	// Handle is the device's own reference. It means nothing to others.
	Handle uint64
}

// Exposer is a device that can open part of a registration to peers under a
// key of its own, and close it while the registration stays: a memory window.
type Exposer interface {
	Device

	// Expose makes a remote key for r, which must lie in reg's range, with
	// access, which must be remote bits only. reg needs WindowBind, and
	// LocalWrite if peers shall write; it needs no remote access itself, and
	// then its own keys are of no use to peers. The key works when Expose
	// returns.
	//
	// An exposure reaches what its registration means: the new pages after an
	// Update or Load, nothing between Revoke and Load.
	//
	// On error nothing is exposed. Errors wrap ErrAccess, ErrInvalid (r isn't
	// in reg's range), ErrNotRegistered, ErrRevoked, ErrNoSlots.
	Expose(ctx context.Context, reg Registration, r vm.Range, access Access) (Exposure, error)

	// Withdraw ends an exposure. When it returns nil no peer can reach memory
	// through the key: requests under way have done what they will, later ones
	// fail with an error at the peer. The registration is as it was.
	//
	// On error the exposure is as open as before: call Withdraw again; closing
	// the device ends it too. What isn't exposed, or not any more, gives a
	// wrapped ErrNotExposed, and no peer can reach anything through it.
	//
	// Deregister of a registration with exposures fails with a wrapped ErrBusy
	// and leaves both as they were.
	Withdraw(ctx context.Context, e Exposure) error
}
