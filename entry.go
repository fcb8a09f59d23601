package pindown

import (
	"sync/atomic"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/epoch"
	"github.com/pindown/pindown/vm"
)

// entry is the cache's record of one registration: what Region points to.
//
// Life: made by a miss, published (listed in index and tree), retired (taken
// off both and marked dead, so that no hit can succeed any more), and
// deregistered by whoever finds it dead and without holders.
//
// The fields that a hit reads or writes stand first; an entry has cache lines
// of its own (its size class is a multiple of 64 bytes), so hits on different
// entries share no line.
type entry struct {
	// refs: dead<<63 | alarm<<62 | hits<<24 | holders. One addition counts
	// both the holder and the hit.
	refs atomic.Int64

	start, end uintptr       // immutable after publication
	seen       atomic.Uint64 // the table's word at the last check
	access     device.Access // immutable after publication
	localKey   uint32        // immutable after publication
	remoteKey  uint32        // immutable after publication

	mode    entryMode   // immutable after publication
	settled atomic.Bool // deregistration has been claimed

	stamp  uint64 // immutable after publication
	handle uint64 // immutable after publication
	// By how much the device registered more than was asked for; immutable
	// after publication.
	lead, tail uint32
	watch      epoch.Watch

	queue      queueID // guarded by mu
	lastHits   uint32  // hits, modulo 2^32, when eviction last looked; guarded by mu
	prev, next *entry  // guarded by mu
}

// entryMode says what an entry is registered for.
type entryMode uint8

const (
	modeInvalid entryMode = iota
	modeCached            // listed, may be hit
	modePerUse            // for one holder only, deregistered at its release
)

const (
	refHolder   = int64(1)
	refHolders  = int64(1)<<24 - 1
	refHit      = int64(1) << 24
	refHitShift = 24
	refAlarm    = int64(1) << 62 // hits are about to overflow
	refDead     = -1 << 63
	refAcquire  = refHit | refHolder
)

func (e *entry) rng() vm.Range { return vm.Range{Start: e.start, End: e.end} }

func (e *entry) registration() device.Registration {
	r := vm.Range{Start: e.start - uintptr(e.lead), End: e.end + uintptr(e.tail)}
	return device.Registration{Range: r, LocalKey: e.localKey, RemoteKey: e.remoteKey, Access: e.access, Handle: e.handle}
}

func (e *entry) holders() int { return int(e.refs.Load() & refHolders) }

// hits returns the hits since they were last harvested.
func (e *entry) hits() uint64 {
	return uint64(e.refs.Load()&^refDead) >> refHitShift
}

// undo takes back an acquire of a live entry that turned out to be stale.
func (c *Cache) undo(e *entry) { c.dropped(e, c.uncount(e, refAcquire)) }

// uncount subtracts a hit that isn't one, and n's holders, and returns refs.
func (c *Cache) uncount(e *entry, n int64) int64 {
	refs := e.refs.Add(-n)
	if refs < 0 {
		// kill came in between and has counted it.
		c.stats.hits.Add(^uint64(0))
	}
	return refs
}

// dropped is called with the value of refs after a holder left. The last one to
// leave a dead entry hands it over for deregistration.
func (c *Cache) dropped(e *entry, refs int64) {
	if refs < 0 && refs&refHolders == 0 && e.settled.CompareAndSwap(false, true) {
		c.bury(e)
	}
}

// kill marks e dead, so that no later acquire succeeds, adds its hits to total,
// and reports whether the caller now has to deregister it. mu must be held, and
// e be alive and just have been unlisted.
func (e *entry) kill(total *atomic.Uint64) (mine bool) {
	refs := e.refs.Or(refDead)
	total.Add(uint64(refs) >> refHitShift)
	return refs&refHolders == 0 && e.settled.CompareAndSwap(false, true)
}

// killIdle is kill for an entry without holders. It reports whether e was one,
// and whether the caller now has to deregister it (else a hit that came too late
// has handed it over). mu must be held; the caller unlists a dead entry.
func (e *entry) killIdle(total *atomic.Uint64) (dead, mine bool) {
	for {
		refs := e.refs.Load()
		if refs&refHolders != 0 || refs < 0 {
			return false, false
		}
		if e.refs.CompareAndSwap(refs, refs|refDead) {
			total.Add(uint64(refs) >> refHitShift)
			return true, e.settled.CompareAndSwap(false, true)
		}
	}
}
