package bench

import (
	"fmt"
	"os"
	"slices"
	"sync/atomic"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/monitor/manual"
	"github.com/pindown/pindown/vm"
)

// churnBytes is the size of the mappings that come and go, and churnRound how
// many measurements' time a round takes: the tail needs many.
const (
	churnBytes = 64 << 10
	churnRound = 4
)

// churn times single hits while another thread does nothing, maps and unmaps
// memory that nobody registered, or does so with a region.
func (r *runner) churn() error {
	if r.processors < 2 {
		r.report.note("churn: there is one processor")
		return nil
	}
	for _, n := range r.o.Regions {
		if n < 2 || n > maxInvalidate || !r.wantsAny(Patterns(Churn)...) || !slices.Contains(r.o.Threads, 1) {
			continue
		}
		c := Case{Workload: Churn, Regions: n, Threads: 1}
		if err := r.tolerate(c, r.churnAt(c)); err != nil {
			return err
		}
	}
	return nil
}

// churner is a thread that changes the address space.
type churner func(stop *atomic.Bool) error

// unrelated maps and unmaps memory with pages.
func (s *cacheSubject) unrelated(stop *atomic.Bool) error {
	m, told := s.mon.(*manual.Monitor)
	for !stop.Load() {
		mem, err := unix.Mmap(-1, 0, churnBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_POPULATE)
		if err != nil {
			return os.NewSyscallError("mmap", err)
		}
		unmap := func() error { return os.NewSyscallError("munmap", unix.Munmap(mem)) }
		if told {
			err = m.Do(vm.RangeOf(mem), unmap)
		} else {
			err = unmap()
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (r *runner) churnAt(c Case) error {
	a := pageShape
	a.Regions = c.Regions
	f, err := r.fill(c, &a, 0, false)
	if err != nil {
		return err
	}
	defer f.close() //nolint:errcheck // of what is thrown away
	for _, s := range f.all {
		cache, ok := s.Subject.(*cacheSubject)
		if !ok {
			continue
		}
		watched := func(stop *atomic.Bool) error {
			// The region is acquired again, or nobody would watch it any more.
			w := cacheWorker{cache.cache}
			for !stop.Load() {
				if err := cache.Invalidate(a.Range(a.Regions - 1)); err != nil {
					return err
				}
				if err := w.Run(a.Base, a.Length(), []uint32{a.first(a.Regions - 1)}); err != nil {
					return err
				}
			}
			return nil
		}
		for _, impl := range s.Impls {
			if err := r.churnOf(c, s, &a, impl, []churner{nil, cache.unrelated, watched}); err != nil {
				return err
			}
		}
	}
	return nil
}

// churnOf measures one implementation, quiet and with each churner in turn.
func (r *runner) churnOf(c Case, s *resident, a *Area, impl string, churners []churner) error {
	w, err := s.Worker(impl)
	if err != nil {
		return err
	}
	defer w.Close() //nolint:errcheck // its errors are those of Run
	hitting := *a
	hitting.Regions-- // the last one is for churn
	l := &loop{w: w, base: a.Base, length: a.Length(), order: hitting.order(patternUniform, false, r.rng(4)), chunk: chunk}
	rows := make([]Result, len(churners))
	all := make([]*hdrhistogram.Histogram, len(churners))
	p99 := make([][]float64, len(churners))
	for i, p := range Patterns(Churn) {
		c.Pattern = p
		rows[i], all[i] = r.row(c, impl), newHistogram()
	}
	for n := range r.o.Rounds {
		for i, churn := range churners {
			if err := r.ctx.Err(); err != nil {
				return err
			}
			r.progress("churn %s, %d regions, %s: round %d of %d", rows[i].Pattern, c.Regions, impl, n+1, r.o.Rounds)
			h, err := r.timeHits(l, churn)
			if err != nil {
				return fmt.Errorf("%s: %w", rows[i].Pattern, err)
			}
			rows[i].Samples = append(rows[i].Samples, float64(h.ValueAtQuantile(50)))
			p99[i] = append(p99[i], float64(h.ValueAtQuantile(99)))
			all[i].Merge(h)
		}
	}
	for i := range rows {
		rows[i].conclude()
		rows[i].quantiles(all[i])
	}
	rows = slices.DeleteFunc(rows, func(x Result) bool { return !r.wants(x.Pattern) })
	r.report.Results = append(r.report.Results, rows...)
	for i := range rows {
		if rows[i].Pattern != rows[0].Pattern && rows[0].Pattern == "quiet" {
			// The clock's part is in both: left in, it would hide half of the
			// difference.
			clock := r.report.ClockNs
			k := slices.Index(Patterns(Churn), rows[i].Pattern)
			r.ratio(rows[i], Ratio{Of: impl + " " + rows[i].Pattern, To: impl + " quiet", Quantity: "p99_ns"},
				less(p99[k], clock), less(p99[0], clock))
		}
	}
	return nil
}

// less returns v less x, at least 1.
func less(v []float64, x float64) []float64 {
	w := make([]float64, len(v))
	for i := range v {
		w[i] = max(v[i]-x, 1)
	}
	return w
}

// timeHits times hits one by one, with churn on the other thread.
func (r *runner) timeHits(l *loop, churn churner) (*hdrhistogram.Histogram, error) {
	h := newHistogram()
	last := time.Now()
	hit := func() (int, error) {
		if l.at == len(l.order) {
			l.at = 0
		}
		pages := l.order[l.at : l.at+chunk]
		l.at += chunk
		last = time.Now()
		for i := range pages {
			if err := l.w.Run(l.base, l.length, pages[i:i+1]); err != nil {
				return 0, err
			}
			now := time.Now()
			if err := h.RecordValue(max(int64(now.Sub(last)), 1)); err != nil {
				return 0, fmt.Errorf("record %v: %w", now.Sub(last), err)
			}
			last = time.Now() // recording isn't the hit's
		}
		return chunk, nil
	}
	var stop atomic.Bool
	done := make(chan error, 1)
	if churn != nil {
		r.team.jobs[1] <- func() { done <- churn(&stop) }
	} else {
		done <- nil
	}
	_, err := r.team.run(r.warm(), churnRound*r.o.Duration, hit)
	stop.Store(true)
	if e := <-done; err == nil {
		err = e
	}
	return h, err
}
