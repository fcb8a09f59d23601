package pindown

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/pindown/pindown/device"
)

// Exposure is a remote key that lets peers at part of a cached region, for one
// transfer, say. Make it with [Region.Expose] and end it with Revoke. Its methods
// may be called from many goroutines.
//
// An exposure counts as a holder of its region: the registration stays, though
// the Region from which it was made may be released first. It goes along when the
// region is updated; if the update can't keep the registration, it reaches the old
// pages until it is revoked, or nothing if the region is gone. After the cache's
// Close an exposure works on until it is revoked, and is counted in ErrInUse.
type Exposure struct {
	c   *Cache
	dev device.Exposer

	mu    sync.Mutex // held while the device is called.
	e     *entry     // nil once revoked; guarded by mu.
	state device.Exposure
}

// Expose makes a remote key for rng, which must lie in the region's range, with
// access, which must be remote bits only. The region must have WindowBind, and
// LocalWrite if peers shall write. It needs no remote access of its own: then
// exposures are the only way for peers to reach it, and a registration that stays in
// the cache leaves nothing open.
//
// The key works when Expose returns. On error nothing is exposed. Errors:
// ErrReleased, ErrForked, the context's, and the device's, wrapped:
// device.ErrNotSupported if it isn't a device.Exposer, device.ErrAccess,
// device.ErrInvalid for a range elsewhere, device.ErrNoSlots, device.ErrRevoked
// after an update that has left the region without meaning; ErrStale if a VM operation
// has overtaken the region, since what peers would reach is not what is mapped: update
// it, or acquire anew. While an update is under way it waits, for the context's time.
func (r Region) Expose(ctx context.Context, rng Range, access Access) (*Exposure, error) {
	if r.entry() == nil {
		return nil, fmt.Errorf("expose: %w", ErrReleased)
	}
	c := r.c
	if c.guard.Forked() {
		return nil, fmt.Errorf("expose %v: %w", rng, ErrForked)
	}
	if !r.Range().Contains(rng) {
		return nil, fmt.Errorf("expose %v of %v: %w", rng, r.Range(), device.ErrInvalid)
	}
	dev, ok := c.dev.(device.Exposer)
	if !ok {
		return nil, fmt.Errorf("expose %v: %s: %w", rng, c.dev.Name(), device.ErrNotSupported)
	}
	if ctx == nil {
		ctx = context.Background()
	}
	if r.entry().mode != modeCached {
		return nil, fmt.Errorf("expose %v: registered per use, which ends with its holder: %w", rng, device.ErrNotSupported)
	}
	c.lock()
	c.lend(r.entry())
	c.exposed[r.entry()]++
	c.mu.Unlock()
	x := &Exposure{c: c, dev: dev, e: r.entry()}
	made := false
	defer func() {
		if !made {
			x.end()
		}
	}()
	var err error
	for last := false; ; {
		if r.Stale() {
			err = ErrStale
		} else {
			x.state, err = dev.Expose(ctx, c.registration(r.entry()), rng, access)
		}
		if !errors.Is(err, ErrStale) && !errors.Is(err, device.ErrRevoked) && !errors.Is(err, device.ErrBusy) || last {
			break
		}
		// An update is under way, or was.
		last = !c.awaitUpdate(ctx, r.entry())
	}
	if err != nil {
		return nil, fmt.Errorf("expose %v: %w", rng, err)
	}
	made = true
	return x, nil
}

// awaitUpdate waits for an update of e, or another registration of its range, and
// reports whether there was one.
func (c *Cache) awaitUpdate(ctx context.Context, e *entry) bool {
	c.lock()
	f := c.overlappingFlight(c.set(e.granted()), e.rng())
	if f == nil {
		c.mu.Unlock()
		return false
	}
	done := f.landed()
	c.mu.Unlock()
	select {
	case <-done:
		return true
	case <-ctx.Done():
		return false // the device says so too
	}
}

// RemoteKey returns the key that peers' requests carry.
func (x *Exposure) RemoteKey() uint32 { return x.state.RemoteKey }

// Range returns what peers may reach.
func (x *Exposure) Range() Range { return x.state.Range }

// Access returns what peers may do.
func (x *Exposure) Access() Access { return x.state.Access }

// Revoke ends the exposure. When it returns nil no peer can reach memory through
// the key, though the registration stays cached: requests under way have done what
// they will, later ones fail at the peer. It is idempotent. On error (the context's,
// the device's) the exposure is as open as before, and still counts as a holder; call
// Revoke again.
func (x *Exposure) Revoke(ctx context.Context) error {
	if x.c.guard.Forked() {
		return fmt.Errorf("revoke exposure of %v: %w", x.state.Range, ErrForked)
	}
	if ctx == nil {
		ctx = context.Background()
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.e == nil {
		return nil
	}
	// What the device doesn't know is closed: it went with its registration.
	if err := x.dev.Withdraw(ctx, x.state); err != nil && !errors.Is(err, device.ErrNotExposed) {
		return fmt.Errorf("revoke exposure: %w", err)
	}
	x.end()
	return nil
}

// end takes the exposure's share in the region back.
func (x *Exposure) end() {
	c, e := x.c, x.e
	x.e = nil
	c.lock()
	if c.exposed[e]--; c.exposed[e] == 0 {
		delete(c.exposed, e)
	}
	c.mu.Unlock()
	c.giveBack(e)
}
