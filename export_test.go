package pindown

import "errors"

// SetPressure makes the cache take fired for the kernel's trigger, which then
// tells of memory pressure; a nil one is a kernel that can't.
func (o *Options) SetPressure(fired chan struct{}) {
	o.Pressure = true
	o.openPressure = func() (pressure, error) {
		if fired == nil {
			return nil, errors.New("no such thing")
		}
		return fakePressure(fired), nil
	}
}

type fakePressure chan struct{}

func (p fakePressure) Fired() <-chan struct{} { return p }
func (p fakePressure) Path() string           { return "fake" }

func (p fakePressure) Close() error {
	close(p)
	return nil
}

// WatchesPressure reports whether the cache has a trigger on memory pressure.
func (c *Cache) WatchesPressure() bool { return c.pressure != nil }

// RetryNow makes the tries that are due for what the device hasn't taken back,
// and all others, without their pauses. It returns what is left.
func (c *Cache) RetryNow() int {
	c.mu.Lock()
	for i := range c.stuck {
		c.stuck[i].due = 0
	}
	c.mu.Unlock()
	c.retry(false)
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.stuck)
}
