package simhca

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/pindown/pindown/device"
)

// Flush implements [device.Flusher]. A receive counts once a send has begun to
// fill it. With a Stepper it executes work itself, and returns a wrapped
// device.ErrBusy if that comes to a halt.
func (d *Device) Flush(ctx context.Context, reg device.Registration) error {
	return d.done(VerbFlush, reg.Range, d.flushAll(ctx, reg))
}

// target is what one queue must have completed.
type target struct {
	q                   *Queue
	completed, received uint64
}

func (d *Device) flushAll(ctx context.Context, reg device.Registration) error {
	if err := errors.Join(ctx.Err(), d.can(CanFlush)); err != nil {
		return err
	}
	if err := d.enter(); err != nil {
		return err
	}
	e := d.table.byHandle(reg.Handle, kindRegion)
	if e == nil {
		d.leave()
		return device.ErrNotRegistered
	}
	keys := []uint32{e.key()}
	for _, w := range d.table.entries {
		if e.windows > 0 && w != nil && w.kind.isWindow() && w.over == e {
			keys = append(keys, w.key())
		}
	}
	d.leave()
	if err := d.fault(Fault{Verb: VerbFlush, Step: StepBegin, Key: reg.LocalKey, Range: reg.Range}); err != nil {
		return err
	}
	return d.await(ctx, d.targets(keys))
}

// targets returns what must complete so that nothing posted before uses keys.
func (d *Device) targets(keys []uint32) []target {
	d.queueMu.Lock()
	queues := slices.Clone(d.queues)
	d.queueMu.Unlock()
	var list []target
	for _, q := range queues {
		q.mu.Lock()
		t := target{q: q}
		for _, r := range q.sends {
			if r.uses(keys) {
				t.completed = r.seq
			}
		}
		if q.filling != nil {
			for _, k := range keys {
				if usesLocal(q.filling.local, k) {
					t.received = q.received + 1
				}
			}
		}
		q.mu.Unlock()
		if t.completed > 0 || t.received > 0 {
			list = append(list, t)
		}
	}
	return list
}

func (t target) met() bool {
	t.q.mu.Lock()
	defer t.q.mu.Unlock()
	return t.q.completed >= t.completed && t.q.received >= t.received
}

// await waits for all of list, or the context.
func (d *Device) await(ctx context.Context, list []target) error {
	p := &d.progress
	stop := context.AfterFunc(ctx, p.made)
	defer stop()
	met := func() bool {
		list = slices.DeleteFunc(list, target.met)
		return len(list) == 0
	}
	if s := d.opts.Stepper; s != nil {
		for !met() {
			if err := ctx.Err(); err != nil {
				return err
			}
			if !s.Step() {
				return fmt.Errorf("work that can't proceed: %w", device.ErrBusy)
			}
		}
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for !met() {
		if err := ctx.Err(); err != nil {
			return err
		}
		p.cond.Wait()
	}
	return nil
}
