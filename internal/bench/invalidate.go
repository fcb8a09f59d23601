package bench

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

const (
	// maxInvalidate is the most regions that one operation is tried on, unless
	// no smaller number is asked for.
	maxInvalidate = 100_000
	// bystanders are regions outside the operation.
	bystanders = 16
	// reclaimTimeout bounds the wait for the background.
	reclaimTimeout = 10 * time.Second
	// during is the number of acquires that are timed while the background
	// reclaims.
	during = 1000
)

var errStale = errors.New("bench: served after its invalidation")

// invalidations measures one VM operation over many regions: how long it takes
// itself, how long the acquire of one of them right after it, other acquires and
// hits meanwhile, and how long until all are deregistered.
func (r *runner) invalidations() error {
	for _, n := range r.o.Regions {
		if n > maxInvalidate && n > slices.Min(r.o.Regions) || !r.wantsAny(Patterns(Invalidate)...) || !slices.Contains(r.o.Threads, 1) {
			continue
		}
		c := Case{Workload: Invalidate, Regions: n, Threads: 1}
		if err := r.tolerate(c, r.invalidationsOf(c)); err != nil {
			return err
		}
	}
	return nil
}

// toll is what the operations on one subject took.
type toll struct {
	*resident
	w                      Worker
	operation, after, last []float64
	acquired, hit          []float64 // medians by round
	acquires, hits         *hdrhistogram.Histogram
	lazy                   bool // nothing reclaims in the background
}

func newHistogram() *hdrhistogram.Histogram { return hdrhistogram.New(1, int64(time.Minute), 3) }

func (r *runner) invalidationsOf(c Case) error {
	a := pageShape
	a.Regions = c.Regions + bystanders
	f, err := r.fill(c, &a, 0, false)
	if err != nil {
		return err
	}
	defer f.close() //nolint:errcheck // of what is thrown away
	var tolls []*toll
	for _, s := range f.all {
		w, err := s.Worker(s.Impls[0])
		if err != nil {
			return err
		}
		defer w.Close() //nolint:errcheck // its errors are those of Run
		tolls = append(tolls, &toll{resident: s, w: w, acquires: newHistogram(), hits: newHistogram()})
	}
	for round := range r.o.Rounds {
		for _, t := range tolls {
			r.progress("invalidate %d regions, %s: round %d of %d", c.Regions, t.Impls[0], round+1, r.o.Rounds)
			for _, part := range []func(int) error{t.reclaim, t.meanwhile} {
				if err := r.register(t.resident, 0, a.Regions); err != nil {
					return err
				}
				runtime.GC()
				if err := r.team.do(func() error { return part(c.Regions) }); err != nil {
					return fmt.Errorf("%s: %w", t.Impls[0], err)
				}
			}
		}
	}
	for _, part := range []struct {
		pattern string
		samples func(*toll) []float64
		single  func(*toll) *hdrhistogram.Histogram
	}{
		{"operation", func(t *toll) []float64 { return t.operation }, nil},
		{"acquire-after", func(t *toll) []float64 { return t.after }, nil},
		{"acquire-during", func(t *toll) []float64 { return t.acquired }, func(t *toll) *hdrhistogram.Histogram { return t.acquires }},
		{"hit-during", func(t *toll) []float64 { return t.hit }, func(t *toll) *hdrhistogram.Histogram { return t.hits }},
		{"reclaim", func(t *toll) []float64 { return t.last }, nil},
	} {
		if !r.wants(part.pattern) {
			continue
		}
		var rows []Result
		for _, t := range tolls {
			if part.pattern == "reclaim" && t.lazy {
				r.report.note("%s, invalidate reclaim: nothing in the background deregisters", t.Impls[0])
				continue
			}
			c.Pattern = part.pattern
			x := r.row(c, t.Impls[0])
			x.Samples = part.samples(t)
			x.conclude()
			if part.single != nil {
				x.quantiles(part.single(t))
			}
			rows = append(rows, x)
		}
		r.add(rows)
	}
	return nil
}

// quantiles adds those of single operations.
func (x *Result) quantiles(h *hdrhistogram.Histogram) {
	x.P50, x.P99, x.Max = float64(h.ValueAtQuantile(50)), float64(h.ValueAtQuantile(99)), float64(h.Max())
}

// warm hits a little of everything, as a program would have before.
func (t *toll) warm(n int) error {
	for i := range chunk {
		pages := []uint32{t.area.first(i % n), t.area.first(n + i%bystanders)}
		if err := t.w.Run(t.area.Base, t.area.Length(), pages); err != nil {
			return err
		}
	}
	return nil
}

// reclaim carries out the operation, acquires one region, and waits until the
// others are deregistered.
func (t *toll) reclaim(n int) error {
	if err := t.warm(n); err != nil {
		return err
	}
	made, before := t.Registrations()
	begin := time.Now()
	if err := t.Invalidate(t.area.Span(0, n)); err != nil {
		return err
	}
	operated := time.Now()
	if err := t.w.Run(t.area.Base, t.area.Length(), []uint32{t.area.first(n / 2)}); err != nil {
		return err
	}
	acquired := time.Now()
	if again, _ := t.Registrations(); again == made {
		return errStale
	}
	t.operation = append(t.operation, float64(operated.Sub(begin)))
	t.after = append(t.after, float64(acquired.Sub(operated)))
	for !t.lazy {
		_, live := t.Registrations()
		if live <= before-n+1 {
			t.last = append(t.last, float64(time.Since(operated)))
			break
		}
		runtime.Gosched()
		if time.Since(operated) > reclaimTimeout {
			if _, own := t.Subject.(*cacheSubject); own {
				return fmt.Errorf("%d of %d registrations are live %v after the operation", live, before, reclaimTimeout)
			}
			t.lazy = true
		}
	}
	return nil
}

// meanwhile carries out the operation, and then times acquires of what it
// invalidated, and between them hits on what it didn't.
func (t *toll) meanwhile(n int) error {
	if err := t.warm(n); err != nil {
		return err
	}
	if err := t.Invalidate(t.area.Span(0, n)); err != nil {
		return err
	}
	acquires, hits := newHistogram(), newHistogram()
	k := min(n, during)
	for i := range k {
		// From the end, where the background comes last.
		pages := []uint32{t.area.first(n - 1 - i*(n/k)), t.area.first(n + i%bystanders)}
		begin := time.Now()
		if err := t.w.Run(t.area.Base, t.area.Length(), pages[:1]); err != nil {
			return err
		}
		acquired := time.Now()
		if err := t.w.Run(t.area.Base, t.area.Length(), pages[1:]); err != nil {
			return err
		}
		hit := time.Now()
		for h, d := range map[*hdrhistogram.Histogram]time.Duration{acquires: acquired.Sub(begin), hits: hit.Sub(acquired)} {
			if err := h.RecordValue(max(int64(d), 1)); err != nil {
				return fmt.Errorf("record %v: %w", d, err)
			}
		}
	}
	t.acquired = append(t.acquired, float64(acquires.ValueAtQuantile(50)))
	t.hit = append(t.hit, float64(hits.ValueAtQuantile(50)))
	t.acquires.Merge(acquires)
	t.hits.Merge(hits)
	return nil
}
