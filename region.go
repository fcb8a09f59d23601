package pindown

import (
	"fmt"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/internal/forkguard"
)

// Region is the holder's handle on a registration. It is returned by Acquire
// and must be released exactly once. It is a small value; pass it by value or
// keep it in a variable, but release only one copy: a second one takes another
// holder's share, and the mistake shows only there. The zero Region, which a
// failed Acquire and Release leave behind, holds nothing; its accessors panic.
type Region struct {
	c    *Cache
	e    *entry
	h    *hold  // where the holder is noted; nil: in e.refs
	word uint64 // what h holds as long as the region is held
}

// LocalKey returns the key that local work requests carry: the buffer index of
// an io_uring, the lkey of verbs.
func (r Region) LocalKey() uint32 { return r.e.localKey }

// RemoteKey returns the key that peers' requests carry; zero where the device
// has none.
func (r Region) RemoteKey() uint32 { return r.e.remoteKey }

// Range returns the registered range: at least the range that was asked for.
func (r Region) Range() Range { return r.e.rng() }

// Access returns the registered access: at least what was asked for.
func (r Region) Access() Access { return r.e.granted() }

// Registration returns the registration as the device made it, for devices
// with calls of their own. It must not be deregistered or updated through the
// device.
func (r Region) Registration() device.Registration { return r.c.registration(r.e) }

// Cached reports whether the registration stays for later hits; otherwise it
// was made for this holder alone and is deregistered by Release.
func (r Region) Cached() bool { return r.e.mode == modeCached }

// Stale reports whether a VM operation has touched the range since it was
// registered, so that the device may be working on pages that are no longer
// mapped. It reads memory only. A region registered per use isn't watched and
// never reports true.
//
// An operation that has returned before the call is always seen.
func (r Region) Stale() bool {
	if r.e.mode != modeCached {
		return false
	}
	if r.e.refs.Load()&refMoved != 0 {
		return r.c.staleAlias(r.e)
	}
	return !r.c.valid(r.e)
}

// Release gives the registration back to the cache. No work that uses its keys
// may be in flight. Release is safe to call from any goroutine; it returns a
// wrapped [ErrReleased] on a second call through the same variable or on the
// zero Region, a wrapped [ErrForked] in a forked child, and the device's error
// if a registration that ends with it (one per use, or after the cache's Close)
// couldn't be deregistered and won't be tried again.
func (r *Region) Release() error {
	h, word := r.h, r.word
	if h == nil || h.load() != word {
		return r.releaseSlow()
	}
	// In a forked child this releases the copy's hold, which harms nothing.
	h.put(word & holdCount)
	c, e := r.c, r.e
	*r = Region{}
	if c.state.Load() != forkguard.Alive {
		return c.released(e)
	}
	return nil
}

// releaseSlow is Release for whoever isn't in a hold.
func (r *Region) releaseSlow() error {
	switch e := r.e; {
	case e == nil:
		return fmt.Errorf("release: %w", ErrReleased)
	case r.c.guard.Forked():
		return fmt.Errorf("release %v: %w", e.rng(), ErrForked)
	case r.h != nil:
		return fmt.Errorf("release %v: %w", e.rng(), ErrReleased)
	default:
		r.e = nil
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
