package device

import (
	"context"

	"github.com/pindown/pindown/vm"
)

// keyIndexMask selects the part of a key that the device chooses; the rest is
// the consumer's.
const keyIndexMask = ^uint32(0xff)

// NextKey returns key with the next consumer part: the upper 24 bits, which
// name an entry of the device's table, stay, the lower 8 are incremented, and
// wrap. A request that carries the old key fails once the entry has the new
// one; after 256 rotations the same key comes back. It is ibv_inc_rkey(3).
func NextKey(key uint32) uint32 { return key&keyIndexMask | (key+1)&^keyIndexMask }

// SameKeyIndex reports whether a and b name the same entry of a device's table,
// whatever their consumer parts are.
func SameKeyIndex(a, b uint32) bool { return a&keyIndexMask == b&keyIndexMask }

// FastKey is a table entry whose meaning is given and taken away by work
// requests, in the order of a work queue.
type FastKey struct {
	// Key is the entry's first key; later ones come from [NextKey].
	Key uint32
	// MaxBytes is the length of the longest range it can mean, in whole pages.
	MaxBytes uint64
	// Handle is the device's own reference. It means nothing to others.
	Handle uint64
}

// FastRegistrar is a device whose work queues take [FastRegister] and
// [LocalInvalidate].
type FastRegistrar interface {
	Device

	// AllocFastKey reserves an entry for ranges of at most maxBytes. Its key
	// means nothing yet. On error nothing is reserved.
	AllocFastKey(ctx context.Context, maxBytes uint64) (FastKey, error)

	// FreeFastKey gives the entry back. It fails with a wrapped ErrBusy, and
	// the entry stays as it is, while the key means something or requests
	// that change it are posted; with ErrNotRegistered if there is no such
	// entry, or not any more.
	FreeFastKey(k FastKey) error
}

// FastRegister is a work request that gives a key a meaning.
type FastRegister struct {
	// Key is the key from now on: a FastKey's entry with any consumer part.
	// The entry must mean nothing when the request is executed.
	Key uint32
	// Over is an enabled registration whose pages the key shall mean. The
	// pages are those that it has when the request is posted; they stay pinned
	// for the key until it is invalidated, whatever becomes of Over.
	Over Registration
	// Range lies in Over's range; the key reaches it and nothing else.
	Range vm.Range
	// Access is what the key allows: nothing that needs LocalWrite (LocalWrite
	// itself, RemoteWrite, RemoteAtomic) unless Over has it. It may have
	// remote bits that Over hasn't.
	Access Access
	// Done, if set, is called once with the request's outcome, from a
	// goroutine of the device. It must not block nor post.
	Done func(error)
}

// LocalInvalidate is a work request that takes a key's meaning away.
type LocalInvalidate struct {
	// Key is the present key of a FastKey's entry, consumer part included.
	Key uint32
	// Done is as in FastRegister.
	Done func(error)
}

// WorkQueue is a queue whose requests are executed in order. The device's
// queue types implement it.
//
// Order: a FastRegister or LocalInvalidate is executed when all requests posted
// earlier to the same queue have completed, and before any posted later has
// begun. Requests posted before a LocalInvalidate see the old pages to their
// end, those after the FastRegister which follows see only the new pages, and
// what carries the key between the two fails. So the queue's order does what
// Flush does elsewhere. There is no order between queues, and none with peers:
// what a peer sends under the old key between the two fails; if the consumer
// part has changed, for ever (see NextKey).
type WorkQueue interface {
	// PostFastRegister posts wr. An error means that nothing was posted, and
	// Done isn't called: ErrNotRegistered or ErrRevoked for Over, ErrInvalid,
	// ErrAccess, ErrTooLarge for the rest, ErrBusy if the queue is full,
	// ErrQueue if it is in error.
	//
	// A request that fails when executed (the entry isn't a FastKey's, or
	// means something) gives the key no meaning, and the queue goes into error.
	PostFastRegister(wr FastRegister) error

	// PostLocalInvalidate posts wr; errors as above. A request that fails when
	// executed (the key isn't the entry's present one) leaves the entry as it
	// was, and the queue goes into error.
	PostLocalInvalidate(wr LocalInvalidate) error
}
