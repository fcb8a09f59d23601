package pindown

import (
	"fmt"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/internal/forkguard"
)

// Region is the holder's handle on a registration. It is returned by Acquire
// and must be released exactly once. It is a small value; pass it by value or
// keep it in a variable, but release only one copy: a second one takes another
// holder's share, and the mistake shows only there. One that was released holds
// nothing, like the zero Region, which a failed Acquire returns: its accessors
// panic.
type Region struct {
	c    *Cache
	e    *entry
	h    *hold  // where the holder is noted; nil: in e.refs
	word uint64 // what h holds as long as the region is held, or released
}

// released is the word of a Region that was released, and of no hold: entries
// don't lie in the first page. To mark it so costs one store; to clear its
// pointers would involve the garbage collector (its write barrier).
const released = uint64(1) << 16

// entry returns what r holds; nil if nothing.
func (r Region) entry() *entry {
	if r.word == released {
		return nil
	}
	return r.e
}

// LocalKey returns the key that local work requests carry: the buffer index of
// an io_uring, the lkey of verbs.
func (r Region) LocalKey() uint32 { return r.entry().localKey }

// RemoteKey returns the key that peers' requests carry; zero where the device
// has none.
func (r Region) RemoteKey() uint32 { return r.entry().remoteKey }

// Range returns the registered range: at least the range that was asked for.
func (r Region) Range() Range { return r.entry().rng() }

// Access returns the registered access: at least what was asked for.
func (r Region) Access() Access { return r.entry().granted() }

// Registration returns the registration as the device made it, for devices
// with calls of their own. It must not be deregistered or updated through the
// device.
func (r Region) Registration() device.Registration { return r.c.registration(r.entry()) }

// Cached reports whether the registration stays for later hits; otherwise it
// was made for this holder alone and is deregistered by Release.
func (r Region) Cached() bool { return r.entry().mode == modeCached }

// Stale reports whether a VM operation has touched the range since it was
// registered, so that the device may be working on pages that are no longer
// mapped. It reads memory only. A region registered per use isn't watched and
// never reports true.
//
// An operation that has returned before the call is always seen.
func (r Region) Stale() bool {
	e := r.entry()
	if e.mode != modeCached {
		return false
	}
	if e.refs.Load()&refMoved != 0 {
		return r.c.staleAlias(e)
	}
	return !r.c.valid(e)
}

// Release gives the registration back to the cache. No work that uses its keys
// may be in flight. Release is safe to call from any goroutine; it returns a
// wrapped [ErrReleased] on a second call through the same variable or on the
// zero Region, a wrapped [ErrForked] in a forked child, and the device's error
// if a registration that ends with it (one per use, or after the cache's Close)
// couldn't be deregistered and won't be tried again.
//
//go:nosplit // what it calls looks at the stack's limit
func (r *Region) Release() error {
	h, word := r.h, r.word
	if h == nil || h.load() != word {
		return r.releaseSlow()
	}
	// In a forked child this releases the copy's hold, which harms nothing.
	h.put(word & holdCount)
	r.word = released
	if r.c.state.Load() != forkguard.Alive {
		return r.c.released(r.e)
	}
	return nil
}

// releaseSlow is Release for whoever isn't in a hold.
func (r *Region) releaseSlow() error {
	switch e := r.entry(); {
	case e == nil:
		return fmt.Errorf("release: %w", ErrReleased)
	case r.c.guard.Forked():
		return fmt.Errorf("release %v: %w", e.rng(), ErrForked)
	case r.h != nil:
		return fmt.Errorf("release %v: %w", e.rng(), ErrReleased)
	default:
		r.word = released
		return r.c.releaseUnnoted(e)
	}
}

// releaseUnnoted is Release for a holder who isn't in a hold.
func (c *Cache) releaseUnnoted(e *entry) error {
	if e.mode == modePerUse {
		return c.releasePerUse(e)
	}
	refs, ok := e.drop()
	if !ok {
		return fmt.Errorf("release %v: %w", e.rng(), ErrReleased)
	}
	if refs&refHolders == 0 {
		return c.released(e)
	}
	return nil
}
