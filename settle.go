package pindown

import (
	"errors"
	"fmt"
	"runtime"
	"time"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/internal/sys"
	"github.com/pindown/pindown/vm"
)

// The way of an entry from live to deregistered: end (dying), settle (limbo or
// graves), exhume.

// end takes a live entry off every list, so that no later hit on it succeeds.
// Holders found after it are all there are, if Cache.fence was called between.
// mu must be held.
func (c *Cache) end(e *entry) {
	set := c.set(e.granted())
	set.index.remove(e)
	set.spans.remove(e)
	c.evict.drop(e)
	e.refs.Or(refDead)
	e.queue = queueDying
	c.dying = append(c.dying, e)
}

// fence makes what lanes have stored visible, and what they load from now on
// is no older than this call: see holds.go. mu must be held.
func (c *Cache) fence() {
	if c.fencing() {
		barrier()
	}
}

// barrier has every thread of the process pass a memory barrier. The system call
// worked when it was registered; if a filter forbids it since, or always did, time
// does: what a thread has stored leaves its processor in nanoseconds, or when the
// thread leaves it.
func barrier() {
	if sys.Membarrier() != nil {
		time.Sleep(time.Millisecond)
	}
}

// fencing reports whether a fence is needed. mu must be held.
func (c *Cache) fencing() bool { return c.fenceLanes && len(c.lanes) > 0 }

// settle finds out who of the dying is held. mu must be held.
func (c *Cache) settle() {
	if len(c.dying) == 0 {
		return
	}
	// Who lets go from now on looks whether what he held is dead.
	c.state.Or(stateDead)
	c.fence()
	c.sort(c.dying)
	clear(c.dying)
	c.dying = c.dying[:0]
}

// sort puts entries that were ended before a fence where they belong. mu must
// be held.
func (c *Cache) sort(dying []*entry) {
	// Again: mu may have been released since, and what went elsewhere may have
	// been the last in limbo.
	c.state.Or(stateDead)
	held := c.holders()
	for _, e := range dying {
		if held.of(e) == 0 {
			c.unheld(e)
			c.graves = append(c.graves, e)
		} else {
			e.queue = queueLimbo
			c.limbo[e] = struct{}{}
		}
	}
	c.emptied()
	if len(c.limbo) > 0 {
		c.reaper.wake() // a release may have missed stateDead: it must look again
	}
}

// unheld notes that a dead entry has no holders. mu must be held.
func (c *Cache) unheld(e *entry) {
	e.queue = queueGone
	c.set(e.granted()).index.forget(e)
}

// emptied tells releases that nothing dead is held any more, if so. mu must be
// held.
func (c *Cache) emptied() {
	if len(c.limbo) == 0 {
		c.state.And(^uint32(stateDead))
	}
}

// leave takes e out of limbo: it isn't held any more. mu must be held.
func (c *Cache) leave(e *entry) {
	delete(c.limbo, e)
	c.unheld(e)
	c.emptied()
}

// settleDying is settle for the reaper: it holds nobody up while a barrier is
// made.
func (c *Cache) settleDying() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.dying) == 0 || !c.fencing() {
		c.settle()
		return
	}
	batch := c.dying
	c.dying = nil
	c.settling = len(batch)
	c.state.Or(stateDead)
	c.mu.Unlock()
	barrier()
	c.mu.Lock()
	c.settling = 0
	c.sort(batch)
}

// retireAll ends those of the list that are live, settles them, counts and
// tells. mu must be held; the caller sees to the graves.
func (c *Cache) retireAll(why Event, list ...*entry) {
	n := 0
	for _, e := range list {
		if e.listed() {
			c.end(e)
			list[n] = e
			n++
		}
	}
	if n > 0 {
		c.settle()
		c.report(why, list[:n])
	}
}

// report counts entries that have been ended, and tells of them unless why has
// no kind. mu must be held.
func (c *Cache) report(why Event, list []*entry) {
	if why.Kind == EventInvalidated {
		c.stats.invalidations[why.Op].Add(uint64(len(list)))
	} else {
		c.stats.evictions[why.Cause].Add(uint64(len(list)))
	}
	c.resolve(why, list)
	if why.Kind == EventInvalid || c.opts.OnEvent == nil {
		return
	}
	var held holders
	for _, e := range list {
		if held == nil && e.queue == queueDying {
			held = c.holders() // without the barrier: only a hold taken this instant isn't seen
		}
		why.Range, why.LocalKey, why.RemoteKey = e.rng(), e.localKey, e.remoteKey
		why.InUse = e.queue == queueLimbo || e.queue == queueDying && held.of(e) > 0
		c.tell(why)
	}
}

func (c *Cache) wakeForGraves() {
	if len(c.graves)+len(c.dying) > 0 {
		c.reaper.wake()
	}
}

// retire ends a live entry that has been found stale: no hit will find it
// again. Its registration goes when the last holder does. It is harmless on an
// entry that is retired already. mu must be held; the caller sees to the graves.
func (c *Cache) retire(e *entry) {
	why := Event{Kind: EventInvalidated, Op: vm.OpUnknown}
	switch {
	case !e.listed():
		return
	case c.fencing():
		// The reaper makes one barrier for many.
		c.end(e)
		c.report(why, []*entry{e})
	default:
		c.retireAll(why, e)
	}
}

// tryRetire is retire for somebody who waits for nobody. If the lock is taken, the
// entry is left to the news, or to the next who finds it.
func (c *Cache) tryRetire(e *entry) {
	if c.mu.TryLock() {
		c.retire(e)
		c.wakeForGraves()
		c.mu.Unlock()
	}
}

// replace is retire by someone who is about to register e's range anew. If the
// entry has no holder it is deregistered here and now: that costs no more than
// to wake the reaper, and makes room. But not if finding the holders takes a
// barrier.
func (c *Cache) replace(e *entry) {
	c.lock()
	if !e.listed() {
		c.mu.Unlock()
		return
	}
	c.retire(e)
	mine := e.queue == queueGone
	if mine {
		// It is the last: it was settled just now.
		n := len(c.graves) - 1
		c.graves[n] = nil
		c.graves = c.graves[:n]
	} else {
		c.wakeForGraves()
	}
	c.mu.Unlock()
	if mine {
		_ = c.exhume(e) // counted and told
	}
}

// released is called after a holder has let go of e, if that may matter: e may
// be dead, somebody may wait for budget, or this is a forked child.
func (c *Cache) released(e *entry) error {
	switch {
	case c.guard.Forked():
		return fmt.Errorf("release %v: %w", e.rng(), ErrForked)
	case e.dead():
		return c.bury(e)
	case c.state.Load()&stateBudget != 0:
		// Now idle, so it can be evicted for someone who waits or was refused.
		c.mu.Lock()
		c.freed()
		c.mu.Unlock()
	}
	return nil
}

// bury settles a dead entry that has lost a holder, if that was the last. The
// reaper deregisters it; after Close the caller does, and is told the device's
// error.
func (c *Cache) bury(e *entry) error {
	c.mu.Lock()
	if e.queue != queueLimbo || c.holders().of(e) > 0 {
		// Dying: whoever settles it will find out.
		c.mu.Unlock()
		return nil
	}
	c.leave(e)
	if !c.closed {
		c.graves = append(c.graves, e)
		c.mu.Unlock()
		c.reaper.wake()
		return nil
	}
	c.mu.Unlock()
	return c.exhume(e)
}

// waiting reports whether a release may have missed that it is waited for: its
// plain store may have come late, or stateRefused have been set after it.
func (c *Cache) waiting() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return plainStores && len(c.limbo) > 0 || c.state.Load()&stateBudget != 0
}

// lookAgain settles the dead entries that aren't held any more, and wakes who
// waits for budget if there is any.
func (c *Cache) lookAgain() {
	c.mu.Lock()
	defer c.mu.Unlock()
	held := c.holders()
	for e := range c.limbo {
		if held.of(e) == 0 {
			c.leave(e)
			c.graves = append(c.graves, e)
		}
	}
	if c.state.Load()&stateBudget == 0 {
		return
	}
	for _, s := range c.sets {
		idle := false
		s.spans.from(0, ^uintptr(0), func(e *entry) bool {
			idle = held.of(e) == 0
			return !idle
		})
		if idle {
			c.freed()
			return
		}
	}
}

// lastLook is for the end, when nobody will look again: it finds what was
// released while Close looked.
func (c *Cache) lastLook() {
	c.mu.Lock()
	held := len(c.limbo) > 0
	c.mu.Unlock()
	if !held || !plainStores {
		return
	}
	_ = sys.RegisterMembarrier() // without it, barrier takes its time
	barrier()
	c.lookAgain()
}

// exhumeGraves deregisters everything that waits for it, and reports whether
// there was anything.
func (c *Cache) exhumeGraves() bool {
	any := false
	for {
		// Few at a time: who needs budget at once takes of what is left.
		var batch [exhumeBatch]*entry
		c.mu.Lock()
		rest := len(c.graves) - min(len(c.graves), exhumeBatch)
		n := copy(batch[:], c.graves[rest:])
		clear(c.graves[rest:])
		c.graves = c.graves[:rest]
		c.exhuming.Add(int32(n))
		c.mu.Unlock()
		if n == 0 {
			return any
		}
		any = true
		for _, e := range batch[:n] {
			_ = c.exhume(e) // counted and told
			c.exhuming.Add(-1)
		}
	}
}

const (
	exhumeBatch = 16
	// maxExhumeWaits bounds how often a miss waits for a deregistration that
	// another goroutine makes, for it might be that one's device which called us.
	maxExhumeWaits = 4096
)

// awaitExhumation waits a moment for deregistrations that others are making, and
// reports whether there are any; not if it has waited often enough. mu must be
// held; it is released meanwhile.
func (c *Cache) awaitExhumation(waits *int) bool {
	if c.exhuming.Load() == 0 || *waits == maxExhumeWaits {
		return false
	}
	*waits++
	c.mu.Unlock()
	if *waits < maxExhumeWaits/2 {
		runtime.Gosched()
	} else {
		time.Sleep(20 * time.Microsecond)
	}
	c.lock()
	return true
}

// adopt copies what the device returned for e's range. A device may register
// more than it was asked for, but only what was watched is served; how much it
// was is kept beside the entry, since few do.
func (c *Cache) adopt(e *entry, reg device.Registration) {
	e.access = uint16(reg.Access)
	e.localKey, e.remoteKey, e.handle = reg.LocalKey, reg.RemoteKey, reg.Handle
	if reg.Range != e.rng() {
		c.wider.Store(e, reg.Range)
		e.refs.Or(refWider)
	}
}

// registration returns what the device returned for e.
func (c *Cache) registration(e *entry) device.Registration {
	r := e.rng()
	if e.refs.Load()&refWider != 0 {
		wider, _ := c.wider.Load(e)
		r, _ = wider.(Range)
	}
	return device.Registration{Range: r, LocalKey: e.localKey, RemoteKey: e.remoteKey, Access: e.granted(), Handle: e.handle}
}

// deviceDeregister calls the device for a settled entry.
func (c *Cache) deviceDeregister(e *entry) error {
	if err := c.deregister(c.registration(e)); err != nil {
		return fmt.Errorf("release %v: %w", e.rng(), err)
	}
	return nil
}

func (c *Cache) deregister(reg device.Registration) error {
	start := c.clock()
	if err := c.dev.Deregister(reg); err != nil {
		c.stats.deregisterErrors.Add(1)
		return err //nolint:wrapcheck // the callers say what for
	}
	c.stats.deregister.record(c.clock() - start)
	return nil
}

// refuse gives back what the device shouldn't have returned.
func (c *Cache) refuse(reg device.Registration) error {
	err := c.deregister(reg)
	if err != nil && !errors.Is(err, device.ErrNotRegistered) {
		c.leak(reg, err)
	}
	return err
}
