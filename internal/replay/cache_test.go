package replay

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/pindown/pindown"
	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/simhca"
	"github.com/pindown/pindown/monitor/manual"
	"github.com/pindown/pindown/trace"
	"github.com/pindown/pindown/trace/tracetest"
)

// realCache is the cache itself, over simulated memory.
type realCache struct {
	t      *testing.T
	space  *simhca.Space
	dev    *simhca.Device
	mon    *manual.Monitor
	cache  *pindown.Cache
	held   map[uint32]pindown.Region
	events chan pindown.Event
	gone   uint64 // invalidated so far
}

func openReal(t *testing.T, merge int64) *realCache {
	t.Helper()
	s := simhca.NewSpace(&simhca.SpaceOptions{PageSize: simPage, Everywhere: true})
	d := simhca.Open(s, nil)
	m, err := manual.New(&manual.Options{Regions: 20000})
	if err != nil {
		t.Fatal(err)
	}
	events := make(chan pindown.Event, 1<<16)
	c, err := pindown.New(d, &pindown.Options{
		// What is registered beyond the union isn't simulated.
		AheadBytes: -1, MergeAbove: -1,
		Monitor: m, MaxRegions: 60000, MaxBytes: 1 << 40, MergeBytes: merge, OnEvent: func(e pindown.Event) { events <- e },
	})
	if err != nil {
		t.Fatal(err)
	}
	return &realCache{t: t, space: s, dev: d, mon: m, cache: c, held: make(map[uint32]pindown.Region), events: events}
}

func (r *realCache) close() {
	for _, x := range r.held {
		_ = x.Release() // what the trace ends with
	}
	if err := r.cache.Close(); err != nil {
		r.t.Error(err)
	}
	if err := r.mon.Close(); err != nil {
		r.t.Error(err)
	}
	if n := r.dev.Stats().Registrations; n != 0 {
		r.t.Errorf("%d registrations are left", n)
	}
	if err := r.dev.Close(); err != nil {
		r.t.Error(err)
	}
	if err := r.space.Check(); err != nil {
		r.t.Error(err)
	}
}

// settle waits until so many regions have been invalidated in all: the cache
// gives them up beside the program, and one that isn't yet would be merged with
// what is asked for.
func (r *realCache) settle(n uint64) {
	for r.gone < n {
		select {
		case e := <-r.events:
			if e.Kind == pindown.EventInvalidated {
				r.gone++
			}
		case <-time.After(time.Minute):
			r.t.Fatalf("%d regions were invalidated, the simulation says %d", r.gone, n)
		}
	}
}

func (r *realCache) do(a *action) {
	rng := simRange(a.start, a.end)
	switch a.kind {
	case actAcquire:
		access := device.LocalRead
		if a.write {
			access = device.LocalWrite
		}
		x, err := r.cache.AcquireRange(r.t.Context(), rng, access)
		if err != nil {
			r.t.Fatal(err)
		}
		r.held[a.slot] = x
	case actRelease:
		if x, ok := r.held[a.slot]; ok {
			delete(r.held, a.slot)
			if err := x.Release(); err != nil {
				r.t.Fatal(err)
			}
		}
	case actInvalidate:
		if err := r.mon.Do(rng, func() error { return r.space.Dontneed(rng) }); err != nil {
			r.t.Fatal(err)
		}
	default:
		r.t.Fatalf("unexpected %+v", *a)
	}
}

// TestPolicyDropIsTheCache: with room for everything, the simulated policy has
// the hits and the registrations that the cache itself has.
func TestPolicyDropIsTheCache(t *testing.T) {
	events := 2000
	if testing.Short() {
		events = 200
	}
	for _, merge := range []int64{-1, 64 << 10, 1 << 20} {
		for _, p := range []tracetest.Program{tracetest.Pool, tracetest.Churn, tracetest.Collected, tracetest.Scan, tracetest.Mixed} {
			t.Run(fmt.Sprintf("%d/merge=%d", p, merge), func(t *testing.T) {
				compareWithCache(t, tracetest.Bytes(t, p, 11, events), merge)
			})
		}
	}
}

// TestCrowdIsTheCache: ranges that push each other out are joined as far as the
// cache joins them, and as many are remembered. Overlapping windows take turns,
// as many as are just joined and one more, for either of the limits; and as many
// as are just remembered.
func TestCrowdIsTheCache(t *testing.T) {
	const merge = 16 // pages
	for _, c := range []struct{ windows, length, step uint64 }{
		{2, 12, 8}, {3, 12, 8},
		{crowdFactor*merge/8 - 1, 12, 8}, {crowdFactor * merge / 8, 12, 8}, {crowdFactor*merge/8 + 1, 12, 8},
		{crowdFactor*merge - 10, 11, 1}, {crowdFactor*merge - 9, 11, 1},
		{7, 40, 20}, {8, 40, 20}, {121, 40, 1}, {122, 40, 1},
		{rememberedMerges, 12, 6}, {rememberedMerges + 1, 12, 6}, {rememberedMerges + 2, 12, 6},
		{rememberedMerges, 100, 90}, {rememberedMerges + 1, 100, 90},
	} {
		for _, order := range []string{"in turn", "back and forth", "random"} {
			t.Run(fmt.Sprintf("%d of %d by %d %s", c.windows, c.length, c.step, order), func(t *testing.T) {
				var b bytes.Buffer
				w, err := trace.NewWriter(&b, nil)
				if err != nil {
					t.Fatal(err)
				}
				rnd := rand.New(rand.NewPCG(1, 1))
				rounds := 5 * int(c.windows)
				for i := range rounds {
					n := uint64(i) % c.windows
					switch {
					case order == "random":
						n = rnd.Uint64N(c.windows)
					case order == "back and forth" && uint64(i)/c.windows%2 == 1:
						n = c.windows - 1 - n
					}
					at := 1000 + n*c.step
					e := &trace.Event{
						Kind: trace.KindUse, Use: trace.UseRead, PID: 1, Range: simRange(at, at+c.length),
						Start: time.Duration(i) * time.Millisecond, Duration: time.Microsecond,
					}
					if err := w.Event(e); err != nil {
						t.Fatal(err)
					}
				}
				if err := w.Close(); err != nil {
					t.Fatal(err)
				}
				compareWithCache(t, b.Bytes(), merge*simPage)
			})
		}
	}
}

func compareWithCache(t *testing.T, b []byte, merge int64) {
	t.Helper()
	r, err := trace.NewReader(bytes.NewReader(b))
	if err != nil {
		t.Fatal(err)
	}
	opts, err := (&Options{
		MaxRegions: 60000, MaxBytes: 1 << 40, MergeBytes: uint64(max(merge, 0)), NoMerge: merge < 0,
	}).withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	simulated := newSim(Drop, &opts, simPage)
	var real []*realCache
	expect := make(map[uint32]uint64)
	line := newTimeline(&opts, func(batch []action) {
		for i := range batch {
			a := &batch[i]
			before := simulated.invalidIdle + simulated.invalidInUse
			simulated.run(batch[i : i+1])
			for int(a.space) >= len(real) {
				real = append(real, openReal(t, merge))
			}
			c := real[a.space]
			c.do(a)
			expect[a.space] += simulated.invalidIdle + simulated.invalidInUse - before
			c.settle(expect[a.space])
		}
	})
	if err := line.run(r, func() error { return nil }); err != nil {
		t.Fatal(err)
	}
	var hits, registered uint64
	for _, c := range real {
		s := c.cache.Stats()
		hits += s.Hits
		registered += s.Register.Count
		c.close()
	}
	t.Logf("%d hits, %d registrations", hits, registered)
	if hits != simulated.hits || registered != simulated.register.n {
		t.Errorf("%d hits and %d registrations, simulated %d and %d", hits, registered, simulated.hits, simulated.register.n)
	}
}
