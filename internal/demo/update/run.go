package update

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/pindown/pindown"
	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/simhca"
	"github.com/pindown/pindown/monitor/manual"
	"github.com/pindown/pindown/vm"
)

// writesBetween is how many judged writes the owner waits for before it replaces
// the pages again.
const writesBetween = 20

// Run makes the demonstration. Nil options are the defaults. When ctx ends it
// stops with the context's error, and returns what it found until then, or nil if
// that is nothing.
func Run(ctx context.Context, o *Options) (*Result, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	opts := o.withDefaults()
	res := &Result{Replacements: opts.Replacements, Pages: opts.Pages, Seed: opts.Seed}
	for p := None; p < policyEnd; p++ {
		t, name, err := remote(ctx, &opts, p)
		if err == nil || t.PeerWrites > 0 {
			res.Device = name
			res.Policies = append(res.Policies, t)
		}
		if err != nil {
			return res.upTo(ctx, fmt.Errorf("demo update: policy %v: %w", p, err))
		}
	}
	var err error
	if res.Local, err = local(ctx, &opts); err != nil {
		return res.upTo(ctx, fmt.Errorf("demo update: local half: %w", err))
	}
	return res, nil
}

// upTo returns what there is when a run ends with err: nothing, unless it was
// interrupted.
func (r *Result) upTo(ctx context.Context, err error) (*Result, error) {
	if len(r.Policies) == 0 || ctx.Err() == nil || !errors.Is(err, ctx.Err()) {
		return nil, err
	}
	r.Interrupted = true
	if r.Local.Device == "" {
		r.Local = Local{Device: "none", Reason: "interrupted before", Policies: []LocalTotals{}}
	}
	return r, err
}

// owner is who has the memory.
type owner struct {
	policy Policy
	mon    *manual.Monitor
	cache  *pindown.Cache
	mem    vm.Range
	access pindown.Access
	reg    pindown.Region
}

func newOwner(p Policy, dev device.Device, mon *manual.Monitor, mem vm.Range, access pindown.Access) (*owner, error) {
	cache, err := pindown.New(dev, &pindown.Options{Monitor: mon})
	if err != nil {
		return nil, err
	}
	w := &owner{policy: p, mon: mon, cache: cache, mem: mem, access: access}
	if w.reg, err = cache.AcquireRange(context.Background(), mem, access); err != nil {
		return nil, errors.Join(err, cache.Close())
	}
	return w, nil
}

// replaced does what the policy says after the pages have been replaced.
func (w *owner) replaced(ctx context.Context) error {
	switch w.policy {
	case Drop:
		if err := w.reg.Release(); err != nil {
			return err
		}
		// The cache gives up the stale registration on its own goroutine; until
		// it has, the old key reaches the old pages.
		for w.cache.Stats().Regions > 0 {
			if err := ctx.Err(); err != nil {
				return err
			}
			runtime.Gosched()
		}
		reg, err := w.cache.AcquireRange(ctx, w.mem, w.access)
		w.reg = reg
		return err
	case Strict, Atomic:
		policy := pindown.UpdateAtomic
		if w.policy == Strict {
			policy = pindown.UpdateStrict
		}
		_, err := w.reg.Update(ctx, policy)
		return err
	default:
		return nil
	}
}

func (w *owner) close() error {
	return errors.Join(w.reg.Release(), w.cache.Close())
}

// remoteRun is the half with a peer, under one policy.
type remoteRun struct {
	*owner
	space *simhca.Space
	queue [2]*simhca.Queue // the owner's and the peer's
	local device.Registration
	own   *simhca.Space // the peer's memory

	key    atomic.Uint32 // what is advertised
	epoch  atomic.Uint64 // odd while the owner replaces pages
	judged atomic.Uint64
	totals Totals // the peer's until it has ended
}

func remote(ctx context.Context, o *Options, p Policy) (_ Totals, name string, err error) {
	mon, err := manual.New(nil)
	if err != nil {
		return Totals{}, "", err
	}
	defer func() { err = errors.Join(err, mon.Close()) }()
	so := &simhca.SpaceOptions{}
	if p != None {
		so.Before = func(e vm.Event) { mon.Before(e.Range) }
		so.After = func(e vm.Event) { mon.After(e.Range) }
	}
	r := &remoteRun{space: simhca.NewSpace(so), own: simhca.NewSpace(nil), totals: Totals{Name: p}}
	// A peer's request that meets a revoked key waits, as adapters answer
	// "receiver not ready".
	dev := simhca.Open(r.space, &simhca.Options{HoldRevoked: true, Seed: o.Seed})
	far := simhca.Open(r.own, &simhca.Options{Name: "peer", Seed: o.Seed})
	defer func() { err = errors.Join(err, dev.Close(), far.Close(), r.space.Check(), r.own.Check()) }()
	mem, err := r.space.Map(o.Pages, simhca.ProtRead|simhca.ProtWrite)
	if err != nil {
		return Totals{}, "", err
	}
	buf, err := r.own.Map(1, simhca.ProtRead|simhca.ProtWrite)
	if err != nil {
		return Totals{}, "", err
	}
	if r.local, err = far.Register(ctx, buf, 0); err != nil {
		return Totals{}, "", err
	}
	for i, d := range []*simhca.Device{dev, far} {
		if r.queue[i], err = d.ProtectionDomain().NewQueue(nil); err != nil {
			return Totals{}, "", err
		}
	}
	if err := simhca.Connect(r.queue[0], r.queue[1]); err != nil {
		return Totals{}, "", err
	}
	if r.owner, err = newOwner(p, dev, mon, mem, pindown.LocalWrite|pindown.RemoteWrite); err != nil {
		return Totals{}, "", err
	}
	defer func() { err = errors.Join(err, r.close()) }()
	r.key.Store(r.reg.RemoteKey())

	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	done := make(chan struct{})
	var peerErr error
	var wg sync.WaitGroup
	wg.Go(func() {
		if peerErr = r.peer(ctx, done); peerErr != nil {
			cancel(peerErr)
		}
	})
	err = r.serve(ctx, o)
	close(done)
	wg.Wait()
	if peerErr != nil {
		err = peerErr
	}
	r.totals.Registrations = r.cache.Stats().Register.Count
	return r.totals, dev.Name(), err
}

// serve is the owner's part.
func (r *remoteRun) serve(ctx context.Context, o *Options) error {
	rng := rand.New(rand.NewPCG(o.Seed, uint64(r.policy)))
	for range o.Replacements {
		if err := r.await(ctx, writesBetween); err != nil {
			return err
		}
		r.epoch.Add(1)
		if err := r.replace(rng); err != nil {
			return err
		}
		if err := r.replaced(ctx); err != nil {
			return err
		}
		r.key.Store(r.reg.RemoteKey())
		r.epoch.Add(1)
	}
	return r.await(ctx, writesBetween)
}

// await waits for n more judged writes.
func (r *remoteRun) await(ctx context.Context, n uint64) error {
	for end := r.judged.Load() + n; r.judged.Load() < end; runtime.Gosched() {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
	return nil
}

// replace puts other pages behind the memory, in one of the ways of programs.
func (r *remoteRun) replace(rng *rand.Rand) error {
	const prot = simhca.ProtRead | simhca.ProtWrite
	switch rng.IntN(3) {
	case 0:
		return errors.Join(r.space.Unmap(r.mem), r.space.MapFixed(r.mem, prot))
	case 1:
		return r.space.Dontneed(r.mem)
	default:
		return r.space.MapFixed(r.mem, prot)
	}
}

// peer is the peer's part: it writes a number to each place in turn, until done.
func (r *remoteRun) peer(ctx context.Context, done <-chan struct{}) error {
	key := r.key.Load()
	words := uint64(r.mem.Len() / 8)
	for n := uint64(1); ; n++ {
		select {
		case <-done:
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		default:
		}
		// A stride that goes through all words and changes pages often.
		at := r.mem.Start + uintptr(n*(words/2+1)%words*8)
		epoch := r.epoch.Load()
		ok, err := r.write(ctx, at, key, n)
		if err != nil {
			return err
		}
		if !ok {
			r.totals.Errors++
			// The owner tells the key when it has another.
			for r.key.Load() == key {
				select {
				case <-done:
					return nil
				case <-ctx.Done():
					return context.Cause(ctx)
				default:
					runtime.Gosched()
				}
			}
			key = r.key.Load()
			r.totals.KeyChanges++
			if err := simhca.Connect(r.queue[0], r.queue[1]); err != nil {
				return err
			}
			continue
		}
		r.totals.PeerWrites++
		found, err := r.found(at, n)
		switch {
		case epoch%2 != 0 || r.epoch.Load() != epoch:
			r.totals.Overlapped++
			continue
		case err != nil:
			return err
		case !found:
			r.totals.Lost++
		}
		r.judged.Add(1)
	}
}

// write writes n to addr, and reports whether it completed successfully.
func (r *remoteRun) write(ctx context.Context, addr uintptr, key uint32, n uint64) (bool, error) {
	var b [8]byte
	binary.LittleEndian.PutUint64(b[:], n)
	buf := r.local.Range.Start
	if err := r.own.Store(buf, b[:]); err != nil {
		return false, err
	}
	err := r.queue[1].Post(simhca.WorkRequest{
		ID: n, Op: simhca.OpWrite, RemoteAddr: addr, RemoteKey: key,
		Local: []simhca.Segment{{Addr: buf, Length: 8, Key: r.local.LocalKey}},
	})
	if err != nil {
		return false, err
	}
	c, err := r.queue[1].CompletionQueue().Wait(ctx)
	if err != nil {
		return false, err
	}
	return c.Status == simhca.StatusSuccess, nil
}

// found reports whether the owner's memory has n at addr.
func (r *remoteRun) found(addr uintptr, n uint64) (bool, error) {
	var b [8]byte
	if err := r.space.Load(addr, b[:]); err != nil {
		return false, err
	}
	return binary.LittleEndian.Uint64(b[:]) == n, nil
}
