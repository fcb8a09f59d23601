package pindown

import (
	"sync/atomic"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/epoch"
	"github.com/pindown/pindown/vm"
)

// entry is the cache's record of one registration: what Region points to.
//
// Life: made by a miss, published (listed in index and spans), retired (taken
// off both, and dead: no hit can succeed any more), settled (dead and found
// without holders) and deregistered. See holds.go for how holders are found.
//
// It is 64 bytes without pointers, a size class of the allocator. A hit reads its listing in the
// index instead.
type entry struct {
	start, end uintptr // immutable after publication
	stamp      uint64  // immutable after publication
	watch      epoch.Watch

	localKey  uint32 // immutable after publication
	remoteKey uint32 // immutable after publication
	handle    uint64 // immutable after publication

	// refs: dead<<31 | other flags | holders that aren't in a hold.
	refs   atomic.Uint32
	access uint16    // immutable after publication
	mode   entryMode // immutable after publication
	queue  queueID   // guarded by mu
}

// entryMode says what an entry is registered for.
type entryMode uint8

const (
	modeInvalid entryMode = iota
	modeCached            // listed, may be hit
	modePerUse            // for one holder only, deregistered at its release
)

const (
	refDead  = uint32(1) << 31
	refGrown = uint32(1) << 30 // extends one that was there before: see gather
	refWider = uint32(1) << 29 // the device registered more: see Cache.wider

	// What an update leaves behind; see update.go.
	refMoved   = uint32(1) << 28 // another entry has the registration: see Cache.moved
	refLost    = uint32(1) << 27 // the device has lost the registration
	refRevoked = uint32(1) << 26 // the keys mean nothing until they are loaded
	refVoid    = uint32(1) << 25 // stale because Invalidate says so

	refHolders = refVoid - 1
)

func (e *entry) rng() vm.Range { return vm.Range{Start: e.start, End: e.end} }

func (e *entry) covers(r Range) bool { return e.start <= r.Start && r.End <= e.end }

func (e *entry) granted() device.Access { return device.Access(e.access) }

// dead reports whether e serves no hits any more.
func (e *entry) dead() bool { return e.refs.Load()&refDead != 0 }

// listed reports whether e is live. mu must be held.
func (e *entry) listed() bool { return e.queue == queueSmall || e.queue == queueMain }

// drop takes a holder off refs and returns what is left; false if there was
// none.
func (e *entry) drop() (refs uint32, ok bool) {
	for {
		refs := e.refs.Load()
		if refs&refHolders == 0 {
			return refs, false
		}
		if e.refs.CompareAndSwap(refs, refs-1) {
			return refs - 1, true
		}
	}
}
