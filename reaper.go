package pindown

import (
	"log/slog"
	"runtime"
	"sync"
	"time"

	"github.com/pindown/pindown/epoch"
	"github.com/pindown/pindown/monitor"
	"github.com/pindown/pindown/vm"
)

// reaper is the cache's goroutine: it reads the monitor's news, retires idle
// stale regions before anyone asks for them, deregisters what is dead, and
// delivers events. Correctness doesn't depend on it.
type reaper struct {
	wakeup chan struct{}
	stop   chan struct{}
	done   chan struct{}
	feed   *monitor.Feed

	mu      sync.Mutex
	events  []Event // guarded by mu
	dropped uint64  // events that found the queue full; guarded by mu
}

const (
	// maxQueuedEvents bounds what a slow OnEvent makes us keep.
	maxQueuedEvents = 1 << 14
	// reaperPause bounds how often the reaper runs. It is the most that news
	// waits.
	reaperPause = time.Millisecond
	// maxReaperLook bounds how long the reaper lets dead entries seem held
	// before it looks again.
	maxReaperLook = 128 * time.Millisecond
	// sweepBatch is how many entries a sweep looks at between two releases of
	// mu.
	sweepBatch = 16
)

func (r *reaper) wake() {
	select {
	case r.wakeup <- struct{}{}:
	default:
	}
}

func (c *Cache) startReaper() {
	r := &c.reaper
	r.wakeup = make(chan struct{}, 1)
	r.stop = make(chan struct{})
	r.done = make(chan struct{})
	var news <-chan vm.Event
	if c.opts.Monitor != nil {
		r.feed = c.opts.Monitor.Subscribe()
		news = r.feed.C
	}
	go c.reap(news)
}

func (c *Cache) stopReaper() {
	close(c.reaper.stop)
	<-c.reaper.done
}

// tell queues an event for OnEvent. It may be called with the cache's mu held.
func (c *Cache) tell(e Event) {
	if c.opts.OnEvent == nil {
		return
	}
	r := &c.reaper
	r.mu.Lock()
	if len(r.events) < maxQueuedEvents {
		r.events = append(r.events, e)
	} else {
		r.dropped++
	}
	r.mu.Unlock()
	r.wake()
}

func (c *Cache) reap(news <-chan vm.Event) {
	r := &c.reaper
	defer close(r.done)
	pause := time.NewTimer(reaperPause)
	pause.Stop()
	look := time.NewTimer(reaperPause)
	look.Stop()
	retry := time.NewTimer(reaperPause)
	retry.Stop()
	fired := c.fired()
	revival := time.NewTimer(reaperPause)
	revival.Stop()
	var lost uint64
	for again := reaperPause; ; {
		if c.waiting() {
			// A release may have missed that it was waited for.
			look.Reset(again)
			again = min(2*again, maxReaperLook)
		} else {
			again = reaperPause
		}
		select {
		case <-r.stop:
			if r.feed != nil {
				r.feed.Close()
			}
			c.settleDying()
			c.revive(true)
			c.lastLook()
			c.exhumeGraves()
			c.retry(true)
			c.deliver()
			return
		case <-r.wakeup:
		case <-retry.C:
		case <-revival.C:
		case _, ok := <-fired:
			if ok {
				c.underPressure()
			} else {
				fired = nil
			}
		case <-look.C:
			c.lookAgain()
		case ev, ok := <-news:
			for n := len(news); ; n-- {
				switch {
				case !ok:
					news = nil
					c.monitorLost()
				case r.feed.Lost() != lost:
					lost = r.feed.Lost()
					c.stats.sweeps.Add(1)
					c.sweep(vm.Range{End: epoch.MaxAddress}, vm.OpUnknown)
				default:
					c.sweep(ev.Range, ev.Op)
				}
				if n == 0 || news == nil {
					break
				}
				ev, ok = <-news
			}
		}
		look.Stop()
		c.settleDying()
		if next, left := c.revive(false); left {
			revival.Reset(next)
		}
		c.exhumeGraves()
		if next, left := c.retry(false); left {
			retry.Reset(next)
		}
		c.deliver()
		// What comes next waits a moment and is dealt with together: under
		// heavy churn whoever needs the range again has dealt with it himself
		// by then, and isn't disturbed.
		pause.Reset(reaperPause)
		select {
		case <-pause.C:
		case <-r.stop:
			pause.Stop()
		}
	}
}

// deliver runs OnEvent on what is queued.
func (c *Cache) deliver() {
	r := &c.reaper
	for {
		r.mu.Lock()
		events := r.events
		r.events = nil
		r.mu.Unlock()
		if len(events) == 0 {
			return
		}
		for _, e := range events {
			c.opts.OnEvent(e)
		}
	}
}

// sweep retires the stale ones among the live entries that overlap r. It looks
// at them under mu, which keeps them from being deregistered meanwhile, a batch
// at a time.
func (c *Cache) sweep(r Range, op vm.Op) {
	var batch [sweepBatch]*entry
	for _, s := range c.sets {
		for at := r; !at.Empty(); {
			if c.hitCheck != nil {
				c.awaitHitCheck()
			}
			c.giveWay()
			c.mu.Lock()
			n := s.spans.some(at, batch[:])
			stale := batch[:0]
			for _, e := range batch[:n] {
				at.Start = e.end
				if !c.unchanged(e) {
					c.end(e)
					stale = append(stale, e)
				}
			}
			c.mu.Unlock()
			if len(stale) > 0 {
				c.settleDying()
				c.mu.Lock()
				c.report(Event{Kind: EventInvalidated, Op: op}, stale)
				c.mu.Unlock()
			}
			if n < len(batch) {
				break
			}
			c.exhumeGraves()
		}
	}
}

// lock takes mu for somebody whose caller waits for the result: the reaper
// gives way.
func (c *Cache) lock() {
	if c.mu.TryLock() {
		return
	}
	c.hurry.Add(1)
	c.mu.Lock()
	c.hurry.Add(-1)
}

// giveWay lets those who wait in lock go first. A mutex would let the reaper
// have it again and again, for up to a millisecond.
func (c *Cache) giveWay() {
	for i := 0; i < 1000 && c.hurry.Load() > 0; i++ {
		runtime.Gosched()
	}
}

// monitorLost gives up everything: nothing can be vouched for any more.
func (c *Cache) monitorLost() {
	c.mu.Lock()
	if c.closed {
		// It went because we, its last user, let it go.
		c.mu.Unlock()
		return
	}
	if c.perUseOnly == PerUseInvalid {
		c.perUseOnly = PerUseLost
	}
	c.mu.Unlock()
	c.opts.Logger.Warn("monitor lost, registering per use", slog.String("monitor", c.opts.Monitor.Name()))
	c.tell(Event{Kind: EventMonitorLost, Err: monitor.ErrLost})
	c.sweep(vm.Range{End: epoch.MaxAddress}, vm.OpUnknown)
}
