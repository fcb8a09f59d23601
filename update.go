package pindown

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"slices"
	"time"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/monitor"
	"github.com/pindown/pindown/vm"
)

// An update moves a registration from one entry to another. The stale entry is
// retired as any stale entry is: no hit on it succeeds any more, ever. The device
// points the keys at the pages mapped now, and a new entry is published with the
// registration, by the steps of any miss: watch, word and stamp, Cover, device,
// publish. So whoever reads without a lock sees nothing new.
//
// Who still holds the old entry holds the same registration. The old entry is
// then an alias: Cache.moved leads from it to the new one, on which it counts as a
// holder until its own last holder has gone. An alias never leads to an alias: when
// the new entry is itself moved, its aliases move along.
//
// A holder that is no user (an alias, an exposure, an update under way) is in
// entry.refs like others, and in Cache.lent too, for a strict update waits for
// users alone.

// UpdatePolicy says how the keys of a registration pass from the old pages to
// the new.
type UpdatePolicy uint8

// Policies of an update.
const (
	UpdateInvalid UpdatePolicy = iota // invalid
	// UpdateStrict: a key that means the old pages means nothing before it means
	// the new ones, and work under the two never overlaps. Acquires of the range
	// wait, so a holder who acquires the range once more before releasing it waits for
	// an update that waits for it, for as long as a context allows. The update waits
	// until every other holder has released the region
	// and, where the device can tell (device.Flusher), until what was posted has
	// completed; then it revokes and loads (device.RevokingUpdater). Where the device
	// can't tell, who has work in flight waits for it first. In between peers get what
	// the device answers under a revoked key.
	UpdateStrict // strict
	// UpdateAtomic: the keys pass from the old pages to the new in one step
	// (device.Updater). Work in flight sees the old or the new, never both within
	// a page, and never an invalid key. It waits for nothing and nobody.
	UpdateAtomic // atomic

	updatePolicies
)

// UpdateOutcome is what an update did to a region.
type UpdateOutcome uint8

// Outcomes of an update. What is left after each is told in the package comment.
const (
	UpdateUnknown UpdateOutcome = iota // unknown
	// UpdateFresh: nothing had touched the region; nothing was done.
	UpdateFresh // fresh
	// UpdateDone: the same keys mean the pages mapped now.
	UpdateDone // updated
	// UpdateAgain: as UpdateDone, but a VM operation has touched the range
	// meanwhile, or Invalidate has been called for it, so the region is stale again.
	UpdateAgain // stale-again
	// UpdateAnew: the device can't update, so the range was registered anew; the
	// keys happen to be the same.
	UpdateAnew // registered-anew
	// UpdateKeyChanged: registered anew, and the keys are others.
	UpdateKeyChanged // key-changed
	// UpdateFailed: the keys mean the old pages, as before, until the last holder
	// has gone. No acquire finds the region.
	UpdateFailed // failed
	// UpdateGone: the keys mean nothing any more. No acquire finds the region.
	UpdateGone // gone

	updateOutcomes
)

// Updated is what an update did to one region.
type Updated struct {
	// Range is the region's.
	Range Range
	// Outcome says what happened.
	Outcome UpdateOutcome
	// OldLocalKey and OldRemoteKey are the keys before, LocalKey and RemoteKey
	// those after: the same, but for UpdateKeyChanged; zero for UpdateGone.
	OldLocalKey, OldRemoteKey uint32
	LocalKey, RemoteKey       uint32
	// Err says why it isn't UpdateDone or UpdateFresh; nil for those, and for
	// what was registered anew as the device can't do better.
	Err error
}

// KeyChanged reports whether the old keys are no good any more.
func (u Updated) KeyChanged() bool {
	return u.Outcome == UpdateKeyChanged || u.Outcome == UpdateGone
}

// unchangedKeys returns the result of an update that does nothing to e.
func unchangedKeys(e *entry) Updated {
	return Updated{
		Range: e.rng(), OldLocalKey: e.localKey, OldRemoteKey: e.remoteKey,
		LocalKey: e.localKey, RemoteKey: e.remoteKey,
	}
}

const (
	// maxOvertaken is how often an update starts again because a VM operation
	// has overtaken it.
	maxOvertaken = 8
	// updatePoll is how long a strict update waits for holders before it looks
	// again, for a release may have missed that it is waited for.
	updatePoll = time.Millisecond
)

// Update points the registration of every stale region that overlaps r at the
// pages mapped now, keeping its keys where the device can. Regions that are held
// though no acquire finds them any more (because they are stale, or were given up
// by Invalidate) are updated too; afterwards they are found again. Regions that
// are fresh are left alone and not listed in the result. Registrations per use
// aren't regions of the cache: see [Region.Update].
//
// It returns what happened to each region, in address order, and the errors
// joined. ctx bounds every wait: for other registrations of the range, for
// holders and work in flight, and for a device that is short. Once a strict update
// has revoked the keys it goes on to its end whatever becomes of ctx. A strict update
// waits for the caller's own holds as well: who holds the region calls
// [Region.Update].
//
// A strict update needs what is in flight under the keys to be over, and the caller
// sees to that: holders have waited for their work before they release. A
// device.Flusher makes sure of it, and where requests are in flight that nobody waits
// for (device.ErrBusy for longer than Options.RegisterTimeout, as on an io_uring
// whose completions aren't taken) the update fails before it has changed anything. An
// atomic update needs none of this.
//
// Errors: ErrRange, ErrPolicy, ErrClosed, ErrForked, the context's, the
// monitor's and the device's, all wrapped.
func (c *Cache) Update(ctx context.Context, r Range, policy UpdatePolicy) ([]Updated, error) {
	if err := r.Check(); err != nil {
		return nil, fmt.Errorf("update %v: %w: %w", r, ErrRange, err)
	}
	if err := c.mayUpdate(policy); err != nil {
		return nil, fmt.Errorf("update %v: %w", r, err)
	}
	if ctx == nil {
		ctx = context.Background()
	}
	list, err := c.staleIn(r)
	if err != nil {
		return nil, fmt.Errorf("update %v: %w", r, err)
	}
	out := make([]Updated, 0, len(list))
	var errs []error
	defer func() {
		for _, e := range list { // There are some if the device has panicked.
			c.giveBack(e)
		}
	}()
	for len(list) > 0 {
		e := list[0]
		list = list[1:]
		u := c.update(ctx, e, policy)
		errs = append(errs, u.Err)
		out = append(out, u)
	}
	return out, errors.Join(errs...)
}

// Update is [Cache.Update] for the region that the caller holds. A strict update
// doesn't wait for this hold, nor for those of others who are in Region.Update, by
// whichever policy (else the two would wait for each other): the
// caller posts no work under the keys until Update returns, and on a device that
// isn't a device.Flusher has none in flight. Calls at the same time through copies of
// one Region count as so many holders. On a device that can't update, room is needed
// for another registration beside this one, and if Options.WaitForBudget is set the
// call waits for it. A registration per use is always updated, as nothing tells whether it is stale.
//
// After UpdateDone the caller holds the updated registration, with the same keys.
// After UpdateKeyChanged it holds the old registration still, with the old keys and
// pages: release it and acquire again.
func (r Region) Update(ctx context.Context, policy UpdatePolicy) (Updated, error) {
	if r.entry() == nil {
		return Updated{}, fmt.Errorf("update: %w", ErrReleased)
	}
	if err := r.c.mayUpdate(policy); err != nil {
		return Updated{}, fmt.Errorf("update %v: %w", r.Range(), err)
	}
	if ctx == nil {
		ctx = context.Background()
	}
	if r.entry().mode != modeCached {
		u := r.c.updatePerUse(ctx, r.entry(), policy)
		return u, u.Err
	}
	c, e := r.c, r.entry()
	c.lock()
	c.lent[e]++ // the caller's hold
	c.lend(e)
	c.mu.Unlock()
	defer func() {
		c.lock()
		c.settleLoan(e)
		c.mu.Unlock()
	}()
	u := c.update(ctx, e, policy)
	return u, u.Err
}

func (c *Cache) mayUpdate(policy UpdatePolicy) error {
	switch {
	case c.guard.Forked():
		return ErrForked
	case policy == UpdateInvalid || policy >= updatePolicies:
		return fmt.Errorf("policy %v: %w", policy, ErrPolicy)
	}
	return nil
}

// lend makes a holder of e that is no user. mu must be held, and e live or held.
func (c *Cache) lend(e *entry) {
	e.refs.Add(1)
	c.lent[e]++
}

// settleLoan forgets that a holder of e is no user. mu must be held.
func (c *Cache) settleLoan(e *entry) {
	if c.lent[e]--; c.lent[e] == 0 {
		delete(c.lent, e)
	}
}

// giveBack ends what lend began.
func (c *Cache) giveBack(e *entry) {
	c.lock()
	c.settleLoan(e)
	c.mu.Unlock()
	_ = c.releaseUnnoted(e) // counted and told
}

// giveBackAlias is giveBack for an entry that has been moved: if that was its last
// holder, it goes at once.
func (c *Cache) giveBackAlias(e *entry) {
	c.lock()
	c.settleLoan(e)
	e.drop()
	gone := e.queue == queueLimbo && c.holders().of(e) == 0
	if gone {
		c.leave(e)
	}
	c.mu.Unlock()
	if gone {
		c.handOver(e)
	}
}

// staleIn returns the stale entries that overlap r, in address order, each lent
// to the caller.
func (c *Cache) staleIn(r Range) ([]*entry, error) {
	if c.hitCheck != nil {
		c.awaitHitCheck()
	}
	c.lock()
	defer c.mu.Unlock()
	// What is dying may be held.
	for c.settle(); c.settling > 0; c.settle() {
		c.mu.Unlock()
		runtime.Gosched() // The reaper has them, in a moment.
		c.lock()
	}
	if c.closed {
		return nil, ErrClosed
	}
	var list []*entry
	for _, s := range c.sets {
		list = s.spans.overlapping(r, list)
	}
	for e := range c.limbo {
		if e.rng().Overlaps(r) && e.refs.Load()&(refMoved|refLost) == 0 {
			list = append(list, e)
		}
	}
	for to := range c.aliases {
		if to.queue == queueNone && to.rng().Overlaps(r) {
			// Another update is about to publish it. If it is stale already, that
			// one may be past noticing.
			list = append(list, to)
		}
	}
	list = slices.DeleteFunc(list, c.upToDate)
	for _, e := range list {
		c.lend(e)
	}
	slices.SortFunc(list, func(a, b *entry) int { return cmp.Compare(a.start, b.start) })
	return list, nil
}

// upToDate reports whether there is nothing to update about e. mu must be held,
// and e live or held.
func (c *Cache) upToDate(e *entry) bool {
	return e.refs.Load()&(refVoid|refRevoked|refLost) == 0 && c.unchanged(e)
}

// users returns how many users hold the registration that e has: its own and
// those of its aliases. mu must be held, and e be dead and settled.
func (c *Cache) users(e *entry) int {
	held := c.holders()
	n := held.of(e) - c.lent[e]
	for _, alias := range c.aliases[e] {
		n += held.of(alias) - c.lent[alias]
	}
	return n
}

// update updates e, which has been lent to it, and gives it back.
func (c *Cache) update(ctx context.Context, e *entry, policy UpdatePolicy) Updated {
	e, f, u := c.claim(ctx, e)
	if f == nil {
		c.giveBack(e)
	} else {
		u = c.updateClaimed(ctx, e, f, policy)
	}
	if u.Err != nil {
		u.Err = fmt.Errorf("update %v: %w", u.Range, u.Err)
	}
	c.stats.updates[u.Outcome].Add(1)
	c.tellUpdate(u)
	return u
}

// claim retires e and lists a flight over it, so that nobody else registers or
// updates the range. If e has been moved it is the entry that has the registration
// now which is claimed, returned, and lent. Without a flight there is nothing to do,
// for the reason in Updated.
func (c *Cache) claim(ctx context.Context, e *entry) (*entry, *flight, Updated) {
	for {
		if c.hitCheck != nil {
			c.awaitHitCheck()
		}
		c.lock()
		u := unchangedKeys(e)
		if c.closed {
			c.mu.Unlock()
			u.Outcome, u.Err = UpdateFailed, ErrClosed
			return e, nil, u
		}
		if to := c.moved[e]; to != nil {
			c.lend(to)
			c.mu.Unlock()
			c.giveBack(e)
			e = to
			continue
		}
		set := c.set(e.granted())
		if other := c.overlappingFlight(set, e.rng()); other != nil {
			if reviving(ctx) {
				c.mu.Unlock()
				u.Outcome, u.Err = UpdateFailed, device.ErrBusy
				return e, nil, u
			}
			done := other.landed()
			c.mu.Unlock()
			select {
			case <-done:
				continue
			case <-ctx.Done():
				u.Outcome, u.Err = UpdateFailed, fmt.Errorf("wait for registration of the range: %w", ctx.Err())
				return e, nil, u
			}
		}
		if e.refs.Load()&refLost != 0 {
			c.mu.Unlock()
			u.Outcome, u.LocalKey, u.RemoteKey, u.Err = UpdateGone, 0, 0, device.ErrRegistrationLost
			return e, nil, u
		}
		if c.upToDate(e) {
			c.mu.Unlock()
			u.Outcome = UpdateFresh
			return e, nil, u
		}
		// It has a holder, so it goes to limbo.
		c.retireAll(Event{Kind: EventInvalidated, Op: vm.OpUnknown}, e)
		c.settle()
		if e.queue == queueDying {
			// The reaper makes a barrier for it.
			c.mu.Unlock()
			runtime.Gosched()
			continue
		}
		f := c.takeOff(e.rng(), e.granted(), set)
		f.target, f.core = e.rng(), e.rng()
		c.flights = append(c.flights, f)
		c.mu.Unlock()
		return e, f, Updated{}
	}
}

// revivalContext is the context of an update that nobody asked for: it gives up
// where it would have to wait, and where the keys would change.
type revivalContext struct{ context.Context }

func reviving(ctx context.Context) bool {
	_, ok := ctx.(revivalContext)
	return ok
}

// updateClaimed is update once e is dead and f keeps others off.
func (c *Cache) updateClaimed(ctx context.Context, e *entry, f *flight, policy UpdatePolicy) Updated {
	u := unchangedKeys(e)
	done := false
	defer func() {
		if !done { // The device has panicked.
			c.land(f)
			c.giveBack(e)
		}
	}()
	n, err := c.drainAndRepoint(ctx, e, policy)
	done = true
	switch {
	case n != nil:
		c.moveTo(f, e, n)
		u.Outcome, u.LocalKey, u.RemoteKey = UpdateDone, n.localKey, n.remoteKey
		if n.localKey != e.localKey || n.remoteKey != e.remoteKey {
			u.Outcome = UpdateKeyChanged
		}
		if c.staleAgain(n) {
			u.Outcome, u.Err = UpdateAgain, errOvertaken
			if err != nil {
				u.Err = fmt.Errorf("%w; another try: %w", errOvertaken, err)
			}
		}
		c.giveBackAlias(e)
		_ = c.releaseUnnoted(n) // counted and told
		return u
	case errors.Is(err, device.ErrRegistrationLost):
		e.refs.Or(refLost)
		u.Outcome, u.LocalKey, u.RemoteKey, u.Err = UpdateGone, 0, 0, err
	case e.refs.Load()&refRevoked != 0:
		u.Outcome, u.LocalKey, u.RemoteKey, u.Err = UpdateGone, 0, 0, err
	case errors.Is(err, device.ErrNotSupported) && reviving(ctx):
		c.warnNoUpdate(err, policy)
		u.Outcome, u.Err = UpdateFailed, err
	case errors.Is(err, device.ErrNotSupported):
		c.warnNoUpdate(err, policy)
		c.land(f)
		c.giveBack(e)
		c.exhumeGraves() // makes room, if nobody else holds it
		return c.registerAnew(ctx, u, e.granted())
	default:
		u.Outcome, u.Err = UpdateFailed, err
	}
	c.land(f)
	c.giveBack(e)
	return u
}

// drainAndRepoint is repoint after e has no user, if policy asks for that.
func (c *Cache) drainAndRepoint(ctx context.Context, e *entry, policy UpdatePolicy) (*entry, error) {
	if policy == UpdateStrict {
		if err := c.drain(ctx, e); err != nil {
			return nil, err
		}
	}
	return c.repoint(ctx, e, policy)
}

// errOvertaken is why an updated region is stale again.
var errOvertaken = errors.New("overtaken by a VM operation, or invalidated")

// staleAgain reports whether n, which an update has published and the caller holds,
// was given up for what it means: not if another registration of the range has taken
// its place, or the cache was closed.
func (c *Cache) staleAgain(n *entry) bool {
	return n.dead() && (n.refs.Load()&refVoid != 0 || !c.valid(n))
}

// errPerUse is why a range that was registered anew has no region.
var errPerUse = errors.New("can be registered per use only")

// drain waits until e has no user.
func (c *Cache) drain(ctx context.Context, e *entry) error {
	c.wait()
	defer c.unwait()
	poll := time.NewTicker(updatePoll)
	defer poll.Stop()
	for waited := false; ; waited = true {
		c.lock()
		n, budget, closed := c.users(e), c.budget, c.closed
		c.mu.Unlock()
		switch {
		case n <= 0:
			return nil
		case closed:
			return fmt.Errorf("wait for %d holders: %w", n, ErrClosed)
		}
		if !waited {
			c.stats.waits.Add(1)
		}
		select {
		case <-budget:
		case <-poll.C:
		case <-ctx.Done():
			return fmt.Errorf("wait for %d holders: %w", n, ctx.Err())
		}
	}
}

// repoint has the device point e's registration at the pages mapped now, and
// returns an entry for it that isn't published yet, with one holder. If there is an
// error beside it, the pages are such as were mapped meanwhile, and the entry is
// stale.
//
// On error alone the registration is as before, but for refRevoked and for an error
// that wraps ErrRegistrationLost. ErrNotSupported means that the device can't do it.
func (c *Cache) repoint(ctx context.Context, e *entry, policy UpdatePolicy) (*entry, error) {
	n := &entry{start: e.start, end: e.end, mode: modeCached}
	if err := c.table.Watch(&n.watch, n.rng()); err != nil {
		return nil, fmt.Errorf("watch: %w", err)
	}
	made := false
	defer func() {
		if !made {
			c.table.Unwatch(&n.watch)
		}
	}()
	old := c.registration(e)
	reg, stamp, err := c.repointOnce(ctx, e, n, policy, old)
	if err != nil {
		return nil, err
	}
	n.stamp = stamp
	for tries := 1; c.table.Stamp(&n.watch) != n.stamp && tries < maxOvertaken; tries++ {
		next, stamp, again := c.repointOnce(ctx, e, n, policy, old)
		if again != nil && (e.refs.Load()&refRevoked != 0 || errors.Is(again, device.ErrRegistrationLost)) {
			// Nothing is left of what the try before has done.
			return nil, again
		}
		if again != nil {
			err = again // What the try before has done is left.
			break
		}
		reg, n.stamp = next, stamp
	}
	made = true
	n.refs.Store(1)
	c.adopt(n, reg)
	return n, err
}

// repointOnce points e's registration at the pages mapped now, as n, which is
// watched, will have it. It returns the stamp of a time when they were.
func (c *Cache) repointOnce(ctx context.Context, e, n *entry, policy UpdatePolicy, old device.Registration) (
	reg device.Registration, stamp uint64, err error,
) {
	if err := ctx.Err(); err != nil {
		return reg, 0, err
	}
	// What can't be covered isn't revoked for nothing.
	stamp, err = c.takeStamp(ctx, n)
	if err != nil {
		return reg, 0, err
	}
	if e.refs.Load()&refRevoked == 0 && policy == UpdateStrict {
		if err := c.revoke(ctx, e, old); err != nil {
			return reg, 0, err
		}
		// No half: the end of the context is for waiting only.
		ctx = context.WithoutCancel(ctx)
		// Whatever ended before this is in the pages that are loaded.
		if stamp, err = c.takeStamp(ctx, n); err != nil {
			return reg, 0, err
		}
	}
	reg, err = c.point(ctx, e, old)
	return reg, stamp, err
}

// takeStamp takes word and stamp of e, which is watched, and has the monitor
// cover it.
func (c *Cache) takeStamp(ctx context.Context, e *entry) (stamp uint64, err error) {
	for end, pause := c.clock()+max(c.opts.RegisterTimeout, 0), firstRetry; ; pause = min(2*pause, 20*time.Millisecond) {
		if c.hitCheck != nil {
			c.awaitHitCheck()
		}
		_, stamp = c.table.Take(&e.watch)
		if c.opts.Monitor == nil {
			return 0, fmt.Errorf("no monitor: %w", monitor.ErrUncovered)
		}
		err = c.opts.Monitor.Cover(e.rng())
		if err == nil {
			return stamp, nil
		}
		if !errors.Is(err, monitor.ErrPending) || c.clock() >= end || impatient(ctx) {
			return 0, fmt.Errorf("cover: %w", err)
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return 0, fmt.Errorf("cover: %w: %w", ctx.Err(), err)
		}
	}
}

// revoke waits for the work that was posted under e's keys and takes their
// meaning away.
func (c *Cache) revoke(ctx context.Context, e *entry, reg device.Registration) error {
	dev, ok := c.dev.(device.RevokingUpdater)
	if !ok {
		return fmt.Errorf("strict update: %w", device.ErrNotSupported)
	}
	if fl, ok := c.dev.(device.Flusher); ok {
		// A device that can't tell relies on the holders, who have gone.
		err := c.patiently(ctx, e.rng(), func() error { return fl.Flush(ctx, reg) })
		if err != nil && !errors.Is(err, device.ErrNotSupported) {
			return fmt.Errorf("wait for work in flight: %w", err)
		}
	}
	err := c.insistOn(ctx, e.rng(), func() error { return dev.Revoke(ctx, reg) })
	if err == nil {
		e.refs.Or(refRevoked)
	}
	return err
}

// point gives e's keys the pages mapped now.
func (c *Cache) point(ctx context.Context, e *entry, old device.Registration) (reg device.Registration, err error) {
	if e.refs.Load()&refRevoked != 0 {
		dev, ok := c.dev.(device.RevokingUpdater)
		if !ok {
			return reg, device.ErrNotSupported // not possible
		}
		err = c.insistOn(ctx, e.rng(), func() error { reg, err = dev.Load(ctx, old); return err })
		if err == nil {
			e.refs.And(^refRevoked)
		}
	} else {
		dev, ok := c.dev.(device.Updater)
		if !ok {
			return reg, fmt.Errorf("atomic update: %w", device.ErrNotSupported)
		}
		err = c.insistOn(ctx, e.rng(), func() error { reg, err = dev.Update(ctx, old); return err })
	}
	if err == nil && (!reg.Range.Contains(e.rng()) || !reg.Access.Covers(e.granted())) {
		err = fmt.Errorf("device returned %v with %v: %w", reg.Range, reg.Access, device.ErrInvalid)
	}
	return reg, err
}

// insistOn calls the device, and again for a while if it refuses for lack of
// something.
func (c *Cache) insistOn(ctx context.Context, r Range, call func() error) error {
	return c.patiently(ctx, r, func() error {
		start := c.clock()
		err := call()
		if err == nil {
			c.stats.update.record(c.clock() - start)
		}
		return err
	})
}

// moveTo publishes n, which has e's registration now, in place of e.
func (c *Cache) moveTo(f *flight, e, n *entry) {
	c.lock()
	aliases := append(c.aliases[e], e)
	for _, alias := range aliases {
		if alias != e {
			c.settleLoan(e)
			e.drop()
		}
		c.moved[alias] = n
		c.lend(n)
	}
	delete(c.aliases, e)
	c.aliases[n] = aliases
	e.refs.Or(refMoved)
	c.mu.Unlock()
	c.publish(f, n)
}

// handOver is the end of an alias: who has the registration loses a holder.
func (c *Cache) handOver(e *entry) {
	c.table.Unwatch(&e.watch)
	if e.refs.Load()&refWider != 0 {
		c.wider.Delete(e)
	}
	c.lock()
	to := c.moved[e]
	delete(c.moved, e)
	left := c.aliases[to]
	if at := slices.Index(left, e); len(left) > 1 {
		c.aliases[to] = slices.Delete(left, at, at+1)
	} else {
		delete(c.aliases, to)
	}
	c.mu.Unlock()
	c.giveBack(to)
}

// current returns the entry that has e's registration now, with mu held. e must
// be held.
func (c *Cache) current(e *entry) *entry {
	if to := c.moved[e]; to != nil {
		return to
	}
	return e
}

// staleAlias is Region.Stale for a moved entry.
func (c *Cache) staleAlias(e *entry) bool {
	if c.hitCheck != nil {
		c.awaitHitCheck()
	}
	c.lock()
	defer c.mu.Unlock()
	return !c.unchanged(c.current(e))
}

// warnNoUpdate says once that keys will change.
func (c *Cache) warnNoUpdate(err error, policy UpdatePolicy) {
	if c.warned.CompareAndSwap(false, true) {
		c.opts.Logger.Warn("device can't update registrations, registering anew under other keys",
			slog.String("device", c.dev.Name()), slog.String("policy", policy.String()), slog.Any("reason", err))
	}
}

// registerAnew is an update by a device that can't: the range gets a registration
// of its own, and the old one goes with its last holder.
func (c *Cache) registerAnew(ctx context.Context, u Updated, access Access) Updated {
	reg, err := c.acquire(ctx, u.Range, access)
	if err != nil {
		u.Outcome, u.Err = UpdateFailed, err
		return u
	}
	if !reg.Cached() {
		u.Outcome, u.Err = UpdateFailed, errPerUse
	} else {
		u.Outcome, u.LocalKey, u.RemoteKey = UpdateAnew, reg.LocalKey(), reg.RemoteKey()
		if u.LocalKey != u.OldLocalKey || u.RemoteKey != u.OldRemoteKey {
			u.Outcome = UpdateKeyChanged
		}
	}
	if err := reg.Release(); err != nil {
		u.Err = errors.Join(u.Err, err)
	}
	return u
}

// tellUpdate tells of an update.
func (c *Cache) tellUpdate(u Updated) {
	ev := Event{
		Kind: EventUpdated, Range: u.Range, LocalKey: u.OldLocalKey, RemoteKey: u.OldRemoteKey,
		NewLocalKey: u.LocalKey, NewRemoteKey: u.RemoteKey, Err: u.Err,
	}
	switch u.Outcome {
	case UpdateDone, UpdateAgain, UpdateAnew:
	case UpdateKeyChanged, UpdateGone:
		ev.Kind = EventKeyChanged
	default:
		return
	}
	c.tell(ev)
}

// updatePerUse updates a registration that has one holder, the caller.
func (c *Cache) updatePerUse(ctx context.Context, e *entry, policy UpdatePolicy) Updated {
	u := Updated{
		Range: e.rng(), Outcome: UpdateDone, OldLocalKey: e.localKey, OldRemoteKey: e.remoteKey,
		LocalKey: e.localKey, RemoteKey: e.remoteKey,
	}
	reg := c.registration(e)
	var err error
	if policy == UpdateStrict && e.refs.Load()&refRevoked == 0 {
		err = c.revoke(ctx, e, reg)
		ctx = context.WithoutCancel(ctx)
	}
	if err == nil {
		_, err = c.point(ctx, e, reg)
	}
	switch {
	case err == nil:
	case errors.Is(err, device.ErrRegistrationLost):
		e.refs.Or(refLost)
		u.Outcome, u.LocalKey, u.RemoteKey = UpdateGone, 0, 0
	case e.refs.Load()&refRevoked != 0:
		u.Outcome, u.LocalKey, u.RemoteKey = UpdateGone, 0, 0
	default:
		u.Outcome = UpdateFailed
	}
	if err != nil {
		u.Err = fmt.Errorf("update %v: %w", u.Range, err)
	}
	c.stats.updates[u.Outcome].Add(1)
	return u
}

// revival is a stale region in use that the reaper updates, as Options.OnStale
// says, once its range is mapped again.
type revival struct {
	e     *entry // lent to the revival
	tries int
	pause time.Duration
	due   time.Duration // by the cache's clock
}

// maxRevivals is how often the reaper tries: for about a quarter of a minute.
const maxRevivals = 24

// resolve notes the stale entries among those that have been retired that shall
// be updated. mu must be held.
func (c *Cache) resolve(why Event, list []*entry) {
	if _, ok := c.dev.(device.Updater); !ok || c.opts.OnStale != StaleUpdate || c.closed || why.Kind != EventInvalidated {
		return
	}
	for _, e := range list {
		if e.queue == queueGone || e.refs.Load()&refVoid != 0 {
			continue
		}
		c.lend(e)
		c.revivals = append(c.revivals, revival{e: e, pause: firstRetry, due: c.clock()})
	}
	c.reaper.wake()
}

// revive updates what is due, or at the end gives it up. It returns how long
// until the next is due; none if nothing is left.
func (c *Cache) revive(end bool) (next time.Duration, left bool) {
	c.mu.Lock()
	list := c.revivals
	c.revivals = nil
	c.mu.Unlock()
	rest := list[:0]
	for _, v := range list {
		switch {
		case end || !c.worthReviving(v.e):
			c.giveBack(v.e)
		case v.due > c.clock():
			rest = append(rest, v)
		default:
			c.mu.Lock()
			c.lend(v.e)
			c.mu.Unlock()
			u := c.update(revivalContext{context.Background()}, v.e, UpdateAtomic)
			if v.tries++; u.Outcome == UpdateFailed && v.tries < maxRevivals && !errors.Is(u.Err, device.ErrNotSupported) {
				v.pause = min(2*v.pause, lastRetry)
				v.due = c.clock() + v.pause
				rest = append(rest, v)
			} else {
				c.giveBack(v.e)
			}
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.revivals = append(c.revivals, rest...)
	for _, v := range c.revivals {
		if wait := max(v.due-c.clock(), 0); !left || wait < next {
			next, left = wait, true
		}
	}
	return next, left
}

// worthReviving reports whether somebody still uses e, or peers may.
func (c *Cache) worthReviving(e *entry) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return false
	}
	now := c.current(e)
	n := c.exposed[e] + c.exposed[now]
	for _, alias := range c.aliases[now] {
		n += c.exposed[alias]
	}
	// Who holds what is dying isn't known yet.
	return n > 0 || e.queue == queueDying || c.users(now) > 0
}
