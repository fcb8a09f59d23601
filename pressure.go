package pindown

import (
	"log/slog"

	"github.com/pindown/pindown/internal/psi"
)

// pressure is what fires when memory is short: a psi.Trigger, but in tests.
type pressure interface {
	Fired() <-chan struct{}
	Path() string
	Close() error
}

func openPressure() (pressure, error) { return psi.Open() }

// startPressure sets the trigger that Options.Pressure asks for. Without one the
// cache works, but doesn't know that memory is short.
func (c *Cache) startPressure() {
	if !c.opts.Pressure {
		return
	}
	open := c.opts.openPressure
	if open == nil {
		open = openPressure
	}
	p, err := open()
	if err != nil {
		c.opts.Logger.Warn("no trigger on memory pressure", slog.Any("reason", err))
		return
	}
	c.pressure = p
}

// fired returns the channel that tells the reaper of pressure; nil without.
func (c *Cache) fired() <-chan struct{} {
	if c.pressure == nil {
		return nil
	}
	return c.pressure.Fired()
}

func (c *Cache) stopPressure() {
	if c.pressure != nil {
		_ = c.pressure.Close() // nothing of ours depends on it any more
	}
}

const (
	// pressureShare is the part of the regions that is given up at a time.
	pressureShare = 4
	// pressureBatch is how many are given up between two releases of mu.
	pressureBatch = 64
)

// underPressure gives up idle regions because the kernel is short of memory.
func (c *Cache) underPressure() {
	c.mu.Lock()
	left := (c.live() + pressureShare - 1) / pressureShare
	c.mu.Unlock()
	for left > 0 {
		c.mu.Lock()
		n, _ := c.giveUp(min(left, pressureBatch), 0, EvictPressure)
		c.mu.Unlock()
		if n == 0 {
			return
		}
		left -= n
		c.exhumeGraves()
	}
}
