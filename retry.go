package pindown

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/pindown/pindown/device"
)

// A device may refuse to give back a registration for the moment: it is busy,
// has no memory for the request, or somebody has lent the registration out. The
// reaper tries again, with growing pauses; meanwhile the registration counts
// against the limits, for its pages are pinned. What the device doesn't take back
// in the end is given up, counted as leaked and told.
//
// Close has the last tries made at once, for as long as Options.RegisterTimeout,
// and returns the error of what was given up; whoever releases the last share of a
// registration after Close makes them himself, and gets the error.

const (
	firstRetry = time.Millisecond
	lastRetry  = time.Second
	// maxRetries is how often the reaper tries again: for about a quarter of a
	// minute.
	maxRetries = 24
)

// stuck is an entry that the device hasn't taken back yet.
type stuck struct {
	e     *entry
	tries int
	pause time.Duration // after the last try
	due   time.Duration // by the cache's clock
	err   error
}

// patiently makes a call to the device for r, and again after evicting idle regions
// when the device refuses for lack of something that they hold, and after a pause
// when it is busy: for Options.RegisterTimeout after the first refusal, unless ctx
// is impatient.
func (c *Cache) patiently(ctx context.Context, r Range, call func() error) error {
	var deadline time.Duration
	for pause := 100 * time.Microsecond; ; {
		err := call()
		if err == nil || !transient(err) || errors.Is(err, device.ErrRegistrationLost) ||
			c.opts.RegisterTimeout < 0 || impatient(ctx) {
			return err
		}
		switch now := c.clock(); {
		case deadline == 0:
			deadline = now + c.opts.RegisterTimeout
		case now > deadline:
			return err
		}
		if !errors.Is(err, device.ErrBusy) && c.evictSome(r) {
			// Something was given back: try at once. If unpinning is
			// asynchronous this fails again, with nothing left to evict at
			// last, and then we wait.
			continue
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", ctx.Err(), err)
		}
		pause = min(2*pause, 20*time.Millisecond)
	}
}

// impatient reports whether a first refusal is to be taken for an answer.
func impatient(ctx context.Context) bool {
	switch ctx.(type) {
	case once, revivalContext:
		return true
	}
	return false
}

// transient reports whether a call to the device that failed so may succeed later.
func transient(err error) bool {
	return errors.Is(err, device.ErrBusy) || errors.Is(err, device.ErrNoMemory) || errors.Is(err, device.ErrNoSlots)
}

// exhume deregisters a settled entry and gives its budget back, now or later. The
// error is the device's, if it is the last word.
func (c *Cache) exhume(e *entry) error {
	switch flags := e.refs.Load(); {
	case flags&refMoved != 0:
		c.handOver(e)
		return nil
	case flags&refLost != 0:
		c.gone(e)
		return nil
	}
	err := c.deviceDeregister(e)
	if err == nil {
		c.gone(e)
		return nil
	}
	c.tell(Event{Kind: EventBackgroundError, Range: e.rng(), Err: err})
	s := stuck{e: e, err: err, pause: firstRetry, due: c.clock() + firstRetry}
	if !transient(err) {
		c.giveUpOn(s)
		return err
	}
	c.mu.Lock()
	late := c.noRetries
	if !late {
		c.stuck = append(c.stuck, s)
	}
	c.mu.Unlock()
	if late {
		return c.insist(s)
	}
	c.reaper.wake()
	return nil
}

// retry tries the stuck entries that are due, or, if it is the end, each until it
// is over. It returns how long until the next is due; none if nothing is left.
func (c *Cache) retry(end bool) (next time.Duration, left bool) {
	c.mu.Lock()
	list := c.stuck
	c.stuck = nil
	c.noRetries = end
	c.mu.Unlock()
	var rest []stuck
	for _, s := range list {
		switch {
		case end:
			_ = c.insist(s)
		case s.due > c.clock():
			rest = append(rest, s)
		case !c.again(&s):
			if s.tries < maxRetries && transient(s.err) {
				rest = append(rest, s)
			} else {
				c.giveUpOn(s)
			}
		}
	}
	c.mu.Lock()
	c.stuck = append(c.stuck, rest...)
	for _, s := range c.stuck {
		if wait := max(s.due-c.clock(), 0); !left || wait < next {
			next, left = wait, true
		}
	}
	c.mu.Unlock()
	return next, left
}

// again tries once more, and reports success.
func (c *Cache) again(s *stuck) bool {
	c.stats.deregisterRetries.Add(1)
	s.tries++
	if s.err = c.deviceDeregister(s.e); s.err != nil {
		s.pause = min(2*s.pause, lastRetry)
		s.due = c.clock() + s.pause
		return false
	}
	c.gone(s.e)
	return true
}

// insist tries until it is over.
func (c *Cache) insist(s stuck) error {
	for deadline := c.clock() + c.opts.RegisterTimeout; ; {
		if c.again(&s) {
			return nil
		}
		if c.clock() >= deadline || !transient(s.err) {
			c.giveUpOn(s)
			return s.err
		}
		time.Sleep(min(s.pause, max(deadline-c.clock(), 0)))
	}
}

// giveUpOn is the end of an entry that the device doesn't take back, or doesn't
// know.
func (c *Cache) giveUpOn(s stuck) {
	if !errors.Is(s.err, device.ErrNotRegistered) {
		reg := c.registration(s.e)
		reg.Range = s.e.rng()
		c.leak(reg, fmt.Errorf("given up after %d tries: %w", s.tries+1, s.err))
	}
	c.gone(s.e)
}

// leak notes that the device keeps a registration for good.
func (c *Cache) leak(reg device.Registration, err error) {
	c.stats.leaked.Add(1)
	c.mu.Lock()
	if c.closed {
		select {
		case <-c.over:
		default:
			c.kept++
			c.keptWhy = err
		}
	}
	c.mu.Unlock()
	c.tell(Event{Kind: EventLeaked, Range: reg.Range, LocalKey: reg.LocalKey, RemoteKey: reg.RemoteKey, Err: err})
}

// gone gives back the budget of an entry that has no registration any more, as
// far as we can tell.
func (c *Cache) gone(e *entry) {
	if e.refs.Load()&refWider != 0 {
		c.wider.Delete(e)
	}
	if e.mode == modePerUse {
		c.perUseGone()
		return
	}
	c.table.Unwatch(&e.watch)
	c.lock()
	c.unreserve(e.rng())
	c.mu.Unlock()
	c.letGo()
}
