package bench

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

// Shapes of the regions: single pages with a gap, so that nothing is merged; and
// of 16 pages, of which one is asked for.
var (
	pageShape = Area{Pages: 1, Stride: 2}
	subShape  = Area{Pages: 16, Stride: 32}
)

func (r *runner) hits() error {
	for _, n := range r.o.Regions {
		for _, sub := range []bool{false, true} {
			if err := r.tolerate(Case{Workload: Hit, Regions: n}, r.hitsOf(n, sub)); err != nil {
				return err
			}
		}
	}
	return nil
}

// hitsOf measures hits on n regions: of the whole, or of a part.
func (r *runner) hitsOf(n int, sub bool) error {
	var solo, shared []string
	for _, p := range Patterns(Hit) {
		switch {
		case !r.wants(p) || strings.HasSuffix(p, subSuffix) != sub:
		case p != "same" && p != "different" && p != "random":
			if n == 1 && !strings.HasPrefix(p, patternUniform) {
				continue // all the same with one region
			}
			solo = append(solo, p)
		case n > 1 || p == "same":
			shared = append(shared, p)
		}
	}
	if !slices.Contains(r.o.Threads, 1) {
		solo = nil
	}
	if slices.Contains(r.o.Threads, 2) && r.processors < 2 && len(shared) > 0 {
		r.report.note("hits of 2 threads: there is one processor")
		shared = nil
	}
	if len(solo)+len(shared) == 0 {
		return nil
	}
	a := pageShape
	if sub {
		a = subShape
	}
	a.Regions = n
	f, err := r.fill(Case{Workload: Hit, Regions: n, Threads: 1}, &a, 0, false)
	if err != nil {
		return err
	}
	err = r.hitsIn(f, &a, solo, shared, sub)
	if e := f.close(); err == nil {
		err = e
	}
	return err
}

func (r *runner) hitsIn(f *field, a *Area, solo, shared []string, sub bool) error {
	length := a.Length()
	if sub {
		length = 1 << pageShift
	}
	for _, p := range solo {
		order := a.order(strings.TrimSuffix(p, subSuffix), sub, r.rng(1))
		rows, err := r.hitRounds(f, Case{Workload: Hit, Pattern: p, Regions: a.Regions}, a, length, [][]uint32{order}, []int{1})
		if err != nil {
			return err
		}
		r.add(rows)
	}
	for _, p := range shared {
		orders := make([][]uint32, 2)
		for t := range orders {
			switch p {
			case "random":
				orders[t] = a.order(patternUniform, sub, r.rng(uint64(2+t)))
			default:
				orders[t] = make([]uint32, chunk)
				if p == "different" {
					for i := range orders[t] {
						orders[t][i] = a.first(t * a.Regions / 2)
					}
				}
			}
		}
		rows, err := r.hitRounds(f, Case{Workload: Hit, Pattern: p, Regions: a.Regions}, a, length, orders, r.o.Threads)
		if err != nil {
			return err
		}
		r.add(rows)
		for _, x := range rows {
			for _, y := range rows {
				if x.Impl == y.Impl && x.Threads == 2 && y.Threads == 1 {
					// Rates, so the other way round; each row has a sample a round.
					r.ratio(x, Ratio{Of: x.Impl + " 2 threads", To: x.Impl + " 1 thread", Quantity: "ops_per_second"}, rates(x), rates(y))
				}
			}
		}
	}
	return nil
}

// rates returns the samples of x as operations a nanosecond, of all threads.
func rates(x Result) []float64 {
	var list []float64
	for _, ns := range x.Samples {
		rate := 0.0
		if ns > 0 {
			rate = float64(x.Threads) / ns
		}
		list = append(list, rate)
	}
	return list
}

// hitRounds measures one pattern for every implementation and number of threads.
func (r *runner) hitRounds(f *field, c Case, a *Area, length uintptr, orders [][]uint32, threads []int) ([]Result, error) {
	var tasks []task
	for _, n := range threads {
		c := c
		c.Threads = n
		for _, s := range f.all {
			if why := s.unfit(c); why != "" {
				r.report.note("%s, hit %s with %d threads: %s", join(s.Impls), c.Pattern, n, why)
				continue
			}
			for _, impl := range s.Impls {
				workers, off, err := s.workers(impl, n)
				if err != nil {
					return nil, err
				}
				defer off()
				var steps []step
				for t, w := range workers {
					l := &loop{w: w, base: a.Base, length: length, order: orders[t], chunk: chunk}
					if len(orders) > 1 {
						l.chunk = shortChunk
					}
					steps = append(steps, l.step)
				}
				run := func() (pace, error) { return r.team.run(r.warm(), r.o.Duration, steps...) }
				if n == 1 && slices.Contains(threads, 2) {
					// Processors differ, as neighbours on the host do: what two do
					// is compared with the mean of what each does alone.
					run = func() (pace, error) { return r.eachAlone(steps[0]) }
				}
				tasks = append(tasks, task{row: r.row(c, impl), measure: func() (float64, error) {
					made, _ := s.Registrations()
					p, err := run()
					for i := 0; errors.Is(err, errNotTogether) && i < 10 && r.ctx.Err() == nil; i++ {
						p, err = run() // on a busy machine
					}
					if again, _ := s.Registrations(); err == nil && again != made && !s.Registers {
						err = fmt.Errorf("%w: %d of %d acquires registered", ErrNotCached, again-made, p.ops)
					}
					return p.nsPerOp, err
				}})
			}
		}
	}
	return r.rounds(tasks)
}

// eachAlone runs a step on one thread after the other and returns the mean pace.
func (r *runner) eachAlone(s step) (sum pace, err error) {
	n := len(r.team.jobs)
	for i := range n {
		p, err := r.team.runFrom(i, r.warm(), r.o.Duration/time.Duration(n), s)
		if err != nil {
			return sum, err
		}
		sum.ops += p.ops
		sum.perSecond += p.perSecond / float64(n)
	}
	sum.nsPerOp = 1e9 / sum.perSecond
	return sum, nil
}
