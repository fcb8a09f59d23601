package device

import "context"

// The optional interfaces in this file and the next are found by a type
// assertion on a Device. A device may have the methods and learn only when it
// calls the adapter that this one can't: then the method returns a wrapped
// [ErrNotSupported], has changed nothing, and the caller treats the device as
// one without the interface.

// RevokingUpdater is a device that can take the meaning away from a
// registration's keys and give them another later: revoke, load, enable. A key
// never means the old pages and the new without having meant nothing between.
//
// A registration is enabled or revoked. Register and Load make it enabled,
// Revoke makes it revoked, and Deregister ends either. What is revoked still
// occupies its keys: no other registration gets them.
//
// On verbs this is a re-registration under a protection domain that no queue
// has, and one back with the new translation (ibv_rereg_mr(3)); on an io_uring
// it is an emptied slot that is filled again.
type RevokingUpdater interface {
	Device

	// Revoke takes the meaning away from reg's keys, and from the exposures
	// over reg (see [Exposer]). It is idempotent. When it returns nil:
	//   - work posted later under the keys doesn't reach any page. It fails,
	//     or the device holds it back until Load, as an adapter does that
	//     answers "receiver not ready";
	//   - work posted earlier that had begun reaches the old pages no more. What
	//     is left of it fails; if Load comes first it may go on, or start over,
	//     with the new pages. To have all of it succeed on the old pages, wait
	//     for it before Revoke: see [Flusher]. A device may document that work which has
	//     begun keeps its pages; then only Flusher tells when it is over.
	//
	// The pages may stay pinned until Load or Deregister.
	//
	// On error the registration is enabled, as if Revoke hadn't been called;
	// unless the error wraps ErrRegistrationLost: then the keys are dead and
	// there is nothing to deregister. An expired context is an error like any
	// other. There is no third state: a device that can't tell reports the
	// registration lost after it made it so.
	Revoke(ctx context.Context, reg Registration) error

	// Load pins the pages that back reg's range now and enables reg's keys for
	// them. It returns reg, with the same range, keys and access. The caller
	// keeps the memory mapped until Load returns.
	//
	// On error the registration is still revoked: call Load again, or
	// Deregister; unless the error wraps ErrRegistrationLost, as above. A
	// registration that isn't revoked is left alone, with a wrapped
	// ErrNotRevoked.
	Load(ctx context.Context, reg Registration) (Registration, error)
}

// Flusher is a device that can tell when a registration's work is over.
type Flusher interface {
	Device

	// Flush waits until all work that was posted before the call to the
	// device's own queues, and that may use reg or an exposure over it, has
	// completed, successfully or not. Work posted later isn't waited for, so
	// that Flush ends under load; nor is a receive that no send has begun to
	// fill; nor is the work of peers, which no adapter knows of. Completions
	// may be waiting in a completion queue still.
	//
	// Flush changes nothing. On error (the context's; ErrNotRegistered; ErrBusy
	// if the device can see that the work won't proceed by itself, such as a
	// send that nobody receives) some of the work may be in flight.
	Flush(ctx context.Context, reg Registration) error
}
