package pindown

import (
	"context"
	"fmt"
	"sync"

	"github.com/pindown/pindown/device"
)

// FastKey is a key whose meaning changes in the order of a work queue
// (device.WorkQueue), without a call to the device that waits: it is lent to a
// cached region's pages, and taken back, by work requests. Each time it is lent its
// consumer part is another, so that a late peer reaches nothing through an old key
// until it has come round after 256 times.
//
// Requests posted before an invalidation see the old pages to their end; those
// after the registration that follows see the new ones alone. The pages stay
// pinned for the key until it is invalidated, whatever becomes of the region: the
// Region may be released once Register has returned, but a VM operation on the
// range is then the program's own concern.
//
// A request that fails, or is flushed since one before it failed, leaves the key as
// it was; when all outcomes have been told, the key goes on from there. Until then
// nothing can be posted for it (device.ErrQueue).
//
// Its methods may be called from many goroutines, and what is posted is in the
// order of the calls.
type FastKey struct {
	c   *Cache
	dev device.FastRegistrar
	q   device.WorkQueue
	key device.FastKey

	post  sync.Mutex // keeps posts in the order of what is noted of them.
	freed bool       // guarded by post.

	// mu is never held while something is posted: a queue may tell of outcomes at
	// any time.
	mu      sync.Mutex
	posted  fastState // when everything posted has been carried out; guarded by mu.
	present fastState // as far as outcomes have been told; guarded by mu.
	pending int       // requests without an outcome; guarded by mu.
	failed  bool      // one of them, or an earlier one, has failed; guarded by mu.
}

// fastState is what a key is, and whether it means something.
type fastState struct {
	key  uint32
	lent bool
}

// NewFastKey reserves a key for ranges of at most maxBytes, to be used on q, a
// queue of the cache's device. Close gives it back. Errors: ErrForked, and the
// device's, wrapped: device.ErrNotSupported if it isn't a device.FastRegistrar.
func (c *Cache) NewFastKey(ctx context.Context, q device.WorkQueue, maxBytes uint64) (*FastKey, error) {
	if c.guard.Forked() {
		return nil, fmt.Errorf("new fast key: %w", ErrForked)
	}
	dev, ok := c.dev.(device.FastRegistrar)
	if !ok || q == nil {
		return nil, fmt.Errorf("new fast key: %s: %w", c.dev.Name(), device.ErrNotSupported)
	}
	if ctx == nil {
		ctx = context.Background()
	}
	key, err := dev.AllocFastKey(ctx, maxBytes)
	if err != nil {
		return nil, fmt.Errorf("new fast key: %w", err)
	}
	k := &FastKey{c: c, dev: dev, q: q, key: key}
	k.posted.key, k.present.key = key.Key, key.Key
	return k, nil
}

// Register posts a request that lends the key to rng, which lies in r's range,
// and returns the key's next value, which means rng for what is posted later. done,
// if not nil, is told the request's outcome, from a goroutine of the device; it
// must not block nor post.
//
// On error nothing was posted. Errors: ErrReleased; ErrForked; ErrStale if a VM operation has
// overtaken r (update it, or acquire anew); device.ErrBusy if the key is lent, or
// the queue is full; and what device.WorkQueue says, all wrapped.
func (k *FastKey) Register(r Region, rng Range, access Access, done func(error)) (key uint32, err error) {
	fail := func(err error) (uint32, error) {
		return 0, fmt.Errorf("fast-register %v: %w", rng, err)
	}
	switch {
	case k.c.guard.Forked():
		return fail(ErrForked)
	case r.entry() == nil:
		return fail(ErrReleased)
	case r.c != k.c:
		return fail(fmt.Errorf("region of another cache: %w", device.ErrInvalid))
	case r.Stale():
		return fail(ErrStale)
	}
	k.post.Lock()
	defer k.post.Unlock()
	before, err := k.state()
	switch {
	case err != nil:
		return fail(err)
	case before.lent:
		return fail(fmt.Errorf("key %#x means something: %w", before.key, device.ErrBusy))
	}
	after := fastState{key: device.NextKey(before.key), lent: true}
	err = k.posts(before, after, func() error {
		return k.q.PostFastRegister(device.FastRegister{
			Key: after.key, Over: r.Registration(), Range: rng, Access: access, Done: k.outcome(after, done),
		})
	})
	if err != nil {
		return fail(err)
	}
	return after.key, nil
}

// Invalidate posts a request that takes the key's meaning away; done is as for
// Register. When it has completed, nobody reaches anything through the key. It
// returns a wrapped device.ErrNotRegistered if the key isn't lent.
func (k *FastKey) Invalidate(done func(error)) error {
	if k.c.guard.Forked() {
		return fmt.Errorf("invalidate fast key: %w", ErrForked)
	}
	k.post.Lock()
	defer k.post.Unlock()
	before, err := k.state()
	if err == nil && !before.lent {
		err = device.ErrNotRegistered
	}
	if err == nil {
		after := fastState{key: before.key}
		err = k.posts(before, after, func() error {
			return k.q.PostLocalInvalidate(device.LocalInvalidate{Key: before.key, Done: k.outcome(after, done)})
		})
	}
	if err != nil {
		return fmt.Errorf("invalidate key %#x: %w", before.key, err)
	}
	return nil
}

// state returns what the key will be when everything posted has been carried out, or
// why nothing can be posted for it. post must be held.
func (k *FastKey) state() (fastState, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	switch {
	case k.freed:
		return k.posted, device.ErrNotRegistered
	case k.failed:
		return k.posted, fmt.Errorf("a request has failed, and %d outcomes are to be told: %w", k.pending, device.ErrQueue)
	}
	return k.posted, nil
}

// posts posts a request that leads from one state to another.
func (k *FastKey) posts(before, after fastState, post func() error) (err error) {
	posted := false
	defer func() {
		if !posted {
			k.withdraw(before)
		}
	}()
	k.note(after)
	err = post()
	posted = err == nil
	return err
}

// note notes a request that is about to be posted.
func (k *FastKey) note(after fastState) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.posted = after
	k.pending++
}

// withdraw takes back what note noted.
func (k *FastKey) withdraw(before fastState) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.posted = before
	k.pending--
	k.recover()
}

// recover has the key go on from what it really is, once all outcomes are told.
// mu must be held.
func (k *FastKey) recover() {
	if k.failed && k.pending == 0 {
		k.posted, k.failed = k.present, false
	}
}

// outcome returns what is told a request's outcome. One that fails changes nothing.
func (k *FastKey) outcome(after fastState, done func(error)) func(error) {
	return func(err error) {
		k.mu.Lock()
		k.pending--
		if err != nil {
			k.failed = true
		} else {
			k.present = after
		}
		k.recover()
		k.mu.Unlock()
		if done != nil {
			done(err)
		}
	}
}

// Close gives the key back. It fails with a wrapped device.ErrBusy, and does
// nothing, while the key means something or requests for it are under way. It is
// idempotent.
func (k *FastKey) Close() error {
	if k.c.guard.Forked() {
		return fmt.Errorf("close fast key: %w", ErrForked)
	}
	k.post.Lock()
	defer k.post.Unlock()
	if k.freed {
		return nil
	}
	if err := k.dev.FreeFastKey(k.key); err != nil {
		return fmt.Errorf("close fast key: %w", err)
	}
	k.freed = true
	return nil
}
