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
// It is 96 bytes, a size class of the allocator. What a look-up and a hit read
// stands in the first 32, which never straddle two cache lines. A hit writes
// nothing here, but for the mark when it is clear.
type entry struct {
	// seen is the table's word at the last check; zero once the entry is dead,
	// which no table's word is.
	seen       atomic.Uint64
	start, end uintptr // immutable after publication
	// refs: dead<<31 | marked<<30 | wider<<29 | holders that aren't in a hold.
	refs   atomic.Uint32
	access uint16 // immutable after publication

	mode  entryMode // immutable after publication
	queue queueID   // guarded by mu

	localKey  uint32 // immutable after publication
	remoteKey uint32 // immutable after publication
	stamp     uint64 // immutable after publication
	handle    uint64 // immutable after publication
	watch     epoch.Watch

	prev, next *entry // guarded by mu
}

// entryMode says what an entry is registered for.
type entryMode uint8

const (
	modeInvalid entryMode = iota
	modeCached            // listed, may be hit
	modePerUse            // for one holder only, deregistered at its release
)

const (
	refDead    = uint32(1) << 31
	refMarked  = uint32(1) << 30 // hit since eviction last looked
	refWider   = uint32(1) << 29 // the device registered more: see Cache.wider
	refHolders = refWider - 1
)

func (e *entry) rng() vm.Range { return vm.Range{Start: e.start, End: e.end} }

func (e *entry) granted() device.Access { return device.Access(e.access) }

// dead reports whether e serves no hits any more.
func (e *entry) dead() bool { return e.refs.Load()&refDead != 0 }

// listed reports whether e is live. mu must be held.
func (e *entry) listed() bool { return e.queue == queueSmall || e.queue == queueMain }

// mark notes a hit for eviction. It writes only if nothing is noted yet.
func (e *entry) mark() {
	if e.refs.Load()&refMarked == 0 {
		e.refs.Or(refMarked)
	}
}

// used reports whether e was hit since the last look. mu must be held.
func (e *entry) used() bool {
	return e.refs.Load()&refMarked != 0 && e.refs.And(^refMarked)&refMarked != 0
}

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

// kill makes every later hit on e fail. Holders found after it are all there
// are, if Cache.fence was called between. mu must be held.
func (e *entry) kill() {
	e.refs.Or(refDead)
	e.seen.Store(0)
}
