package device

import (
	"context"
	"strings"

	"github.com/pindown/pindown/vm"
)

// Access is what a registration lets the device and its peers do with the
// memory. Local read is always allowed. The zero Access is local read only.
type Access uint32

// Access bits, as in ibv_reg_mr(3).
const (
	// LocalWrite lets the local device write: receives, RDMA reads, READ_FIXED.
	LocalWrite Access = 1 << iota
	// RemoteRead lets peers read. Requires nothing else.
	RemoteRead
	// RemoteWrite lets peers write. Requires LocalWrite.
	RemoteWrite
	// RemoteAtomic lets peers use atomic operations. Requires LocalWrite.
	RemoteAtomic
	// WindowBind lets memory windows be bound to the registration.
	WindowBind
	// RelaxedOrdering lets the device reorder its accesses. It changes what the
	// key means, so a registration with it never serves a request without it.
	RelaxedOrdering

	accessEnd
)

const (
	// LocalRead is the zero Access, for readability.
	LocalRead Access = 0

	// accessAttributes are bits that must match exactly; the others are
	// permissions, of which more includes less.
	accessAttributes = RelaxedOrdering
)

// Attributes returns the bits of a that are not permissions: they must be the
// same in a registration and in the request that it serves.
func (a Access) Attributes() Access { return a & accessAttributes }

// Covers reports whether a registration with access a serves a request for b:
// every permission of b, and the same attributes.
func (a Access) Covers(b Access) bool {
	return b&^a == 0 && a.Attributes() == b.Attributes()
}

// Valid reports whether a holds only known bits in a combination that verbs
// allow: RemoteWrite and RemoteAtomic require LocalWrite.
func (a Access) Valid() bool {
	return a < accessEnd && (a&(RemoteWrite|RemoteAtomic) == 0 || a&LocalWrite != 0)
}

var accessNames = [...]string{"local-write", "remote-read", "remote-write", "remote-atomic", "window-bind", "relaxed-ordering"}

// String returns the names of the bits, joined by "|"; "local-read" for none.
func (a Access) String() string {
	if a == 0 {
		return "local-read"
	}
	var names []string
	for i, name := range accessNames {
		if a&(1<<i) != 0 {
			names = append(names, name)
		}
	}
	if a >= accessEnd {
		names = append(names, "unknown")
	}
	return strings.Join(names, "|")
}

// Registration is one pinning of a range by a device.
type Registration struct {
	// Range is what was registered: at least the range asked for.
	Range vm.Range
	// LocalKey is what local work requests carry: the buffer index of an
	// io_uring, the lkey of verbs.
	LocalKey uint32
	// RemoteKey is what peers' requests carry; zero where the device has none.
	RemoteKey uint32
	// Access is what was granted: at least what was asked for.
	Access Access
	// Handle is the device's own reference. It means nothing to others.
	Handle uint64
}

// Limits are what a device can hold. Zero means that the device knows no limit
// of its own.
type Limits struct {
	// MaxRegistrations is the number of registrations at a time.
	MaxRegistrations int
	// MaxPinnedBytes is how much memory may be pinned at a time, in whole
	// pages. It may be shared with other users of the machine, so Register can
	// fail below it.
	MaxPinnedBytes uint64
	// MaxRange is the length of the longest registration, in bytes.
	MaxRange uint64
	// PageSize is what a registration may be rounded outward to, in bytes, a
	// power of two. Zero: the device registers exactly what it is asked for
	// and the cache must not round.
	PageSize uintptr
}

// Device registers memory. Methods may be called from many goroutines.
//
// A device never registers less than it is asked for: not a shorter range, not
// less access. Errors wrap the sentinels of this package.
type Device interface {
	// Name returns a short name for logs and reports, such as "iouring".
	Name() string

	// Limits returns the device's limits, fixed when it was opened.
	Limits() Limits

	// Register pins the pages that back r now and returns their keys. It may
	// block, and may return early with the context's error. The caller keeps
	// the memory mapped until Register returns.
	Register(ctx context.Context, r vm.Range, access Access) (Registration, error)

	// Deregister gives back what Register returned. When it returns nil the
	// key is dead for work posted later. A registration whose memory is long
	// unmapped is deregistered like any other. It returns a wrapped
	// ErrNotRegistered for what isn't registered, or not any more.
	Deregister(reg Registration) error
}

// Updater is a device that can point a registration at the pages now mapped
// under the same keys.
type Updater interface {
	Device

	// Update re-registers reg's range under reg's keys, in one step: work
	// posted later sees the new pages, work in flight the old or the new, page
	// by page. On error the old registration is intact, unless the error wraps
	// ErrRegistrationLost.
	Update(ctx context.Context, reg Registration) (Registration, error)
}
