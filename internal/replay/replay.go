package replay

import (
	"context"
	"fmt"
	"math"
	"sync"
	"sync/atomic"

	"github.com/pindown/pindown/trace"
)

//go:generate go tool stringer -type Policy,Requests -linecomment -output enum_string.go

// Policy is what a cache does about regions that become stale.
type Policy uint8

// Policies; see the package comment.
const (
	PolicyInvalid Policy = iota // invalid
	PerUse                      // per-use
	Lazy                        // lazy
	Drop                        // drop
	DropKernel                  // drop-kernel
	Update                      // update
)

// Policies returns all policies.
func Policies() []Policy { return []Policy{PerUse, Lazy, Drop, DropKernel, Update} }

// MarshalText returns the policy's name.
func (p Policy) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// Requests says what of a trace are requests for a registration.
type Requests uint8

// What requests are.
const (
	AllRequests       Requests = iota // all
	UsesOnly                          // uses
	RegistrationsOnly                 // registrations
)

func (r Requests) uses() bool          { return r != RegistrationsOnly }
func (r Requests) registrations() bool { return r != UsesOnly }

// Options configure a replay. The zero value of each field means its default.
type Options struct {
	// MaxRegions and MaxBytes limit each process's cache. Default: 65536 and
	// 1 GiB, as of the cache itself.
	MaxRegions int
	MaxBytes   uint64
	// MergeBytes is the length up to which a request that overlaps regions is
	// served by their union. Default: 1 MiB. NoMerge turns it off.
	MergeBytes uint64
	NoMerge    bool
	// Requests says what requests are. Default: uses and registrations.
	Requests Requests
	// MinUse is the length of a use from which on it is a request. Default: 1.
	MinUse uint64
	// Models are the cost models. Default: all presets.
	Models []Model
	// Simhca has a simulated adapter (package simhca) carry out every
	// registration, under the costs of the first model, over simulated memory
	// that changes as the trace says; and compares the physical pages behind
	// each hit with those mapped. It takes some microseconds an event, and more
	// for large ranges.
	Simhca bool
}

func (o *Options) withDefaults() (Options, error) {
	var c Options
	if o != nil {
		c = *o
	}
	if c.MaxRegions < 0 {
		return c, fmt.Errorf("%w: %d regions", ErrOptions, c.MaxRegions)
	}
	if c.MaxRegions == 0 {
		c.MaxRegions = 65536
	}
	if c.MaxBytes == 0 {
		c.MaxBytes = 1 << 30
	}
	if c.MergeBytes == 0 {
		c.MergeBytes = 1 << 20
	}
	if c.NoMerge {
		c.MergeBytes = 0
	}
	if c.Models == nil {
		c.Models = Presets()
	}
	if len(c.Models) == 0 || len(c.Models) > 100 {
		return c, fmt.Errorf("%w: %d cost models", ErrOptions, len(c.Models))
	}
	if err := checkModels(c.Models); err != nil {
		return c, err
	}
	models := make([]Model, len(c.Models))
	for i, m := range c.Models {
		models[i] = m.withDefaults()
	}
	c.Models = models
	return c, nil
}

// batch is read by all simulations, and used again after the last.
type batch struct {
	actions []action
	readers atomic.Int32
}

// Run replays the trace. What is missing of a damaged trace is noted in the
// result. It returns an error wrapping [ErrOptions], [ErrModel] or [ErrLimit],
// or one of reading, or ctx's. Nil Options are the defaults.
func Run(ctx context.Context, r *trace.Reader, opts *Options) (*Result, error) {
	o, err := opts.withDefaults()
	if err != nil {
		return nil, fmt.Errorf("replay: %w", err)
	}
	// The page size is known when the first batch comes.
	var sims []*sim
	curve := newCurve()
	var wg sync.WaitGroup
	var queues []chan *batch
	pool := sync.Pool{New: func() any { return new(batch) }}
	consume := func(f func([]action)) {
		q := make(chan *batch, 2)
		queues = append(queues, q)
		wg.Go(func() {
			for b := range q {
				f(b.actions)
				if b.readers.Add(-1) == 0 {
					pool.Put(b)
				}
			}
		})
	}
	var line *timeline
	start := func() {
		page := math.Ldexp(1, int(line.shift))
		for _, p := range []Policy{PerUse, Lazy, Drop, Update} {
			s := newSim(p, &o, page)
			if o.Simhca {
				s.adapter = newAdapter(&o.Models[0])
			}
			sims = append(sims, s)
			consume(s.run)
		}
		consume(curve.run)
	}
	line = newTimeline(&o, func(actions []action) {
		if queues == nil {
			start()
		}
		b := pool.Get().(*batch)
		b.actions = append(b.actions[:0], actions...)
		b.readers.Store(int32(len(queues)))
		for _, q := range queues {
			q <- b
		}
	})
	err = line.run(r, func() error { return context.Cause(ctx) })
	if queues == nil {
		start()
	}
	for _, q := range queues {
		close(q)
	}
	wg.Wait()
	if err != nil {
		return nil, fmt.Errorf("replay: %w", err)
	}
	res := newResult(&o, line, sims, curve)
	for _, s := range sims {
		if s.adapter == nil {
			continue
		}
		x, err := s.adapter.result()
		if err != nil {
			return nil, fmt.Errorf("replay: %v: %w", s.policy, err)
		}
		res.policy(s.policy).Adapter = x
		if s.policy == Drop {
			res.policy(DropKernel).Adapter = x
		}
	}
	return res, nil
}
