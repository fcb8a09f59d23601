package demo

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown"
	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/iouring"
	"github.com/pindown/pindown/monitor/manual"
	"github.com/pindown/pindown/vm"
)

// registrar is what makes a mode: how a block's buffer gets its slot.
type registrar interface {
	// acquire returns the slot of buffer i, which is at r.
	acquire(ctx context.Context, i int, r vm.Range) (slot uint32, err error)
	// release ends the use of buffer i, if it was acquired.
	release(i int) error
	// finish adds the counters to t and closes what the registrar opened.
	finish(t *Totals) error
}

// session is one slice of one mode: a pool, and whatever the mode puts between it and
// the ring.
type session struct {
	mode Mode
	dev  *iouring.Device
	pool *pool
	reg  registrar
	file *target
	rng  *rand.Rand
	how  Churn

	done    []iouring.Completion
	victim  []int  // scratch: which buffers churn
	used    []bool // by buffer: it was written from
	changed []bool // by buffer: its pages changed after it was
	begun   bool
	totals  *Totals
}

// openSession opens everything that a slice needs. Nothing here is timed.
func openSession(r *run, m Mode, seed uint64, totals *Totals) (_ *session, err error) {
	s := &session{
		mode: m, dev: r.dev, file: r.file, how: r.opts.Churn, totals: totals,
		rng:    rand.New(rand.NewPCG(r.opts.Seed, seed)),
		done:   make([]iouring.Completion, r.buffers),
		victim: make([]int, r.buffers), used: make([]bool, r.buffers), changed: make([]bool, r.buffers),
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close())
		}
	}()
	for i := range s.victim {
		s.victim[i] = i
	}
	if s.pool, err = newPool(r.buffers, uintptr(r.opts.Buffer)); err != nil {
		return nil, err
	}
	s.reg, err = r.registrar(m)
	return s, err
}

func (r *run) registrar(m Mode) (registrar, error) {
	switch m {
	case NoMonitor:
		// A monitor that is told nothing: the cache of a program that
		// doesn't know, or forgot, that its memory changes.
		mon, err := manual.New(nil)
		if err != nil {
			return nil, err
		}
		return r.cached(&pindown.Options{Monitor: mon}, mon.Close)
	case Pindown:
		if r.opts.Monitor == nil {
			c, err := r.cached(nil, nil)
			if err == nil {
				r.res.Monitor, r.res.Reason = c.cache.Monitor(), c.cache.Reason()
			}
			return c, err
		}
		mon, reason := r.opts.Monitor()
		if mon == nil {
			r.res.Monitor, r.res.Reason = "none", reason
			return &perUse{dev: r.dev, regs: make([]device.Registration, r.buffers)}, nil
		}
		r.res.Monitor = mon.Name()
		return r.cached(&pindown.Options{Monitor: mon}, mon.Close)
	case PerUse:
		return &perUse{dev: r.dev, regs: make([]device.Registration, r.buffers)}, nil
	default:
		return unregistered{}, nil
	}
}

// churn puts other pages behind a part of the pool: never all of it, so that
// there is something to hit, but with a pool of one.
func (s *session) churn() error {
	n := len(s.victim)
	if s.how == ChurnNone || n == 1 && s.rng.IntN(2) == 0 {
		return nil
	}
	s.rng.Shuffle(n, func(i, j int) { s.victim[i], s.victim[j] = s.victim[j], s.victim[i] })
	start := time.Now()
	changed := max(1, n/4)
	for _, i := range s.victim[:changed] {
		if err := s.pool.renew(i, s.how, s.rng); err != nil {
			return fmt.Errorf("churn buffer %d: %w", i, err)
		}
		s.changed[i] = s.used[i]
	}
	s.totals.Changes += uint64(changed)
	s.totals.vmTimes.add(time.Since(start), changed)
	return nil
}

// batch fills a buffer for each block, writes all of them to the file from
// offset off on, and waits for the writes. Only registering and I/O are timed,
// in the same way in every mode.
func (s *session) batch(ctx context.Context, off int64, ids []blockID) error {
	for i, id := range ids {
		id.fill(s.pool.bytes(i))
	}
	start := time.Now()
	err := s.transfer(ctx, off, len(ids))
	for i := range ids {
		err = errors.Join(err, s.reg.release(i))
	}
	if err != nil {
		return err
	}
	s.totals.times.add(time.Since(start), len(ids))
	s.totals.Blocks += uint64(len(ids))
	for i := range ids {
		s.used[i] = true
		if s.changed[i] {
			s.totals.exposed++
		}
	}
	return nil
}

func (s *session) transfer(ctx context.Context, off int64, n int) error {
	ring, fd := s.dev.Ring(), int(s.file.write.Fd())
	for i, r := range s.pool.bufs[:n] {
		slot, err := s.reg.acquire(ctx, i, r)
		if err != nil {
			return err
		}
		at, tag := off+int64(i)*int64(s.pool.size), uint64(i)
		if s.mode == Unregistered {
			err = ring.Write(fd, r, at, tag)
		} else {
			err = ring.WriteFixed(fd, r, at, slot, tag)
		}
		if err != nil {
			return err
		}
	}
	if err := ring.Do(s.done[:n]); err != nil {
		return err
	}
	for _, c := range s.done[:n] {
		if err := c.Err(); err != nil {
			return fmt.Errorf("write block to %s: %w", s.file.name, err)
		}
		if uintptr(c.Res) != s.pool.size {
			return fmt.Errorf("write block to %s: %d of %d bytes: %w", s.file.name, c.Res, s.pool.size, unix.ENOSPC)
		}
	}
	return nil
}

// close ends the session. It fails if anything is still registered.
func (s *session) close() error {
	var errs []error
	if s.reg != nil {
		errs = append(errs, s.reg.finish(s.totals))
	}
	if n := s.dev.Live(); n > 0 && errors.Join(errs...) == nil {
		errs = append(errs, fmt.Errorf("%d registrations are left", n))
	}
	if s.pool != nil {
		errs = append(errs, s.pool.close())
	}
	return errors.Join(errs...)
}

// cached is a cache, with or without sight.
type cached struct {
	cache   *pindown.Cache
	regions []pindown.Region
	held    []bool
	after   func() error
}

func (r *run) cached(o *pindown.Options, after func() error) (*cached, error) {
	cache, err := pindown.New(r.dev, o)
	if err != nil {
		if after != nil {
			err = errors.Join(err, after())
		}
		return nil, err
	}
	return &cached{cache: cache, regions: make([]pindown.Region, r.buffers), held: make([]bool, r.buffers), after: after}, nil
}

func (c *cached) acquire(ctx context.Context, i int, r vm.Range) (uint32, error) {
	region, err := c.cache.AcquireRange(ctx, r, pindown.LocalRead)
	if err != nil {
		return 0, err
	}
	c.regions[i], c.held[i] = region, true
	return region.LocalKey(), nil
}

func (c *cached) release(i int) error {
	if !c.held[i] {
		return nil
	}
	c.held[i] = false
	return c.regions[i].Release()
}

func (c *cached) finish(t *Totals) error {
	st := c.cache.Stats()
	t.Hits += st.Hits
	t.Misses += st.TotalMisses()
	t.Invalidations += st.TotalInvalidations()
	t.Registrations += st.Register.Count
	for cause, n := range st.PerUse {
		if t.PerUse == nil {
			t.PerUse = map[string]uint64{}
		}
		t.PerUse[cause.String()] += n
	}
	err := c.cache.Close()
	if c.after != nil {
		err = errors.Join(err, c.after())
	}
	return err
}

// perUse registers for each block and deregisters after it.
type perUse struct {
	dev  *iouring.Device
	regs []device.Registration // Handle zero: not registered
	made uint64
}

func (p *perUse) acquire(ctx context.Context, i int, r vm.Range) (uint32, error) {
	reg, err := register(ctx, p.dev, r)
	if err != nil {
		return 0, err
	}
	p.made++
	p.regs[i] = reg
	return reg.LocalKey, nil
}

// register tries again for a while when memory that was just unpinned is still
// accounted for, as the cache does.
func register(ctx context.Context, dev *iouring.Device, r vm.Range) (device.Registration, error) {
	for wait := time.Millisecond; ; wait *= 2 {
		reg, err := dev.Register(ctx, r, device.LocalRead)
		if err == nil || wait > 200*time.Millisecond ||
			!errors.Is(err, device.ErrNoMemory) && !errors.Is(err, device.ErrBusy) {
			return reg, err
		}
		time.Sleep(wait)
	}
}

func (p *perUse) release(i int) error {
	reg := p.regs[i]
	if reg == (device.Registration{}) {
		return nil
	}
	p.regs[i] = device.Registration{}
	return p.dev.Deregister(reg)
}

func (p *perUse) finish(t *Totals) error {
	t.Registrations += p.made
	return nil
}

// unregistered writes without registrations.
type unregistered struct{}

func (unregistered) acquire(context.Context, int, vm.Range) (uint32, error) { return 0, nil }
func (unregistered) release(int) error                                      { return nil }
func (unregistered) finish(*Totals) error                                   { return nil }
