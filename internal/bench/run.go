package bench

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"time"
)

// runner is one Run.
type runner struct {
	ctx        context.Context
	o          Options
	factories  []Factory
	report     *Report
	team       *team
	processors int
	uncached   error // the last one that was tolerated
}

// Run measures what o asks for, nil meaning all. It stops soon after ctx ends
// and returns the context's error, beside a report of what it had measured, if
// anything. Other errors: ErrOptions, also if the options select nothing,
// ErrNotCached where the monitor can't watch the regions, and those of the
// subjects.
func Run(ctx context.Context, o *Options) (*Report, error) {
	if o == nil {
		o = &Options{}
	}
	if err := o.Validate(); err != nil {
		return nil, err
	}
	r := &runner{ctx: ctx, o: o.withDefaults()}
	r.factories = r.o.factories()
	r.report = newReport(&r.o)
	r.team, r.processors = newTeam(2)
	defer r.team.close()
	for _, w := range []struct {
		name Workload
		run  func() error
	}{
		{Hit, r.hits}, {Miss, r.misses}, {Restamp, r.restamps},
		{Invalidate, r.invalidations}, {Churn, r.churn}, {Memory, r.memory},
	} {
		if !slices.Contains(r.o.Workloads, w.name) {
			continue
		}
		if err := w.run(); err != nil {
			err = fmt.Errorf("measure %s: %w", w.name, err)
			if len(r.report.Results) == 0 || ctx.Err() == nil || !errors.Is(err, ctx.Err()) {
				return nil, err
			}
			r.report.note("the rest, from %s on: interrupted", w.name)
			return r.conclude(), err
		}
	}
	if len(r.report.Results) == 0 && r.uncached != nil {
		return nil, r.uncached
	}
	if len(r.report.Results)+len(r.report.Notes) == 0 {
		return nil, r.o.nothing()
	}
	return r.conclude(), nil
}

// conclude judges what was measured.
func (r *runner) conclude() *Report {
	if r.o.Short {
		r.report.note("aims: a short run doesn't tell whether they are met")
	} else {
		judge(r.report)
	}
	return r.report
}

// tolerate notes that a monitor can't watch so many regions, and goes on.
func (r *runner) tolerate(c Case, err error) error {
	if r.o.Monitor.Open == nil || !errors.Is(err, ErrNotCached) {
		return err
	}
	r.uncached = err
	r.report.note("%s with %d regions: %v", c.Workload, c.Regions, err)
	return nil
}

func (r *runner) rng(salt uint64) *rand.Rand { return rand.New(rand.NewPCG(r.o.Seed, salt)) }

func (r *runner) wants(pattern string) bool {
	return len(r.o.Patterns) == 0 || slices.Contains(r.o.Patterns, pattern)
}

// wantsAny reports whether any of the patterns is wanted.
func (r *runner) wantsAny(patterns ...string) bool { return slices.ContainsFunc(patterns, r.wants) }

func (r *runner) progress(format string, args ...any) { r.o.Progress(fmt.Sprintf(format, args...)) }

// resident is a subject that holds the regions of an area.
type resident struct {
	Factory
	Subject
	area *Area
}

// field is some residents over the same addresses.
type field struct {
	all   []*resident
	space *reservation
}

// fill makes a subject of each factory and has it hold the regions of an area
// of the given shape, which fill places. There is room for spare regions more,
// in the address space and, with room, in the subjects.
func (r *runner) fill(c Case, a *Area, spare int, room bool) (f *field, err error) {
	// What happens to the regions must be seen by a monitor that watches the
	// kernel: it changes pages.
	populated := r.o.Monitor.Open != nil && (c.Workload == Restamp || c.Workload == Invalidate || c.Workload == Churn)
	space, err := reserve((a.Regions+spare+1)*int(a.Stride), populated)
	if err != nil {
		return nil, err
	}
	f = &field{space: space}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.close())
			f = nil
		}
	}()
	a.Base = space.start
	capacity := a.Regions
	if room {
		capacity += spare
	}
	for _, fac := range r.factories {
		if why := fac.unfit(c); why != "" {
			r.report.note("%s, %s %s: %s", join(fac.Impls), c.Workload, c.Pattern, why)
			continue
		}
		s, err := fac.New(capacity)
		if err != nil {
			return f, fmt.Errorf("open %s: %w", fac.Impls[0], err)
		}
		if cache, ok := s.(*cacheSubject); ok {
			cache.dev.populate = populated
		}
		f.all = append(f.all, &resident{Factory: fac, Subject: s, area: a})
		if err := r.register(f.all[len(f.all)-1], 0, a.Regions); err != nil {
			return f, err
		}
	}
	runtime.GC() // not while something is measured
	return f, nil
}

// register has n regions from the i-th on acquired and released.
func (r *runner) register(s *resident, i, n int) error {
	w, err := s.Worker(s.Impls[0])
	if err != nil {
		return err
	}
	defer func() { _ = w.Close() }() // its errors are those of Run
	pages := make([]uint32, 0, chunk)
	for at := i; at < i+n; at += len(pages) {
		if err := r.ctx.Err(); err != nil {
			return err
		}
		if at&(1<<16-1) == 0 {
			r.progress("%s: %d of %d regions", s.Impls[0], at-i, n)
		}
		pages = pages[:0]
		for k := at; k < min(i+n, at+chunk); k++ {
			pages = append(pages, s.area.first(k))
		}
		if err := w.Run(s.area.Base, s.area.Length(), pages); err != nil {
			return fmt.Errorf("register %d regions with %s: %w", n, s.Impls[0], err)
		}
		if c, ok := s.Subject.(*cacheSubject); ok && at == i {
			if err := c.cached(); err != nil {
				return err // no need to try all of them
			}
		}
	}
	if c, ok := s.Subject.(*cacheSubject); ok {
		return c.cached()
	}
	return nil
}

func (f *field) close() error {
	var errs []error
	for _, s := range f.all {
		errs = append(errs, s.Close())
	}
	f.all = nil
	return errors.Join(append(errs, f.space.release())...)
}

func (f Factory) unfit(c Case) string {
	if f.Unfit == nil {
		return ""
	}
	return f.Unfit(c)
}

// task is something to be measured in rounds.
type task struct {
	row Result
	// measure makes one measurement and returns the time of an operation in ns.
	measure func() (ns float64, err error)
}

// rounds measures all tasks in turn, again and again, and returns the rows.
func (r *runner) rounds(tasks []task) ([]Result, error) {
	rows := make([]Result, len(tasks))
	for i, t := range tasks {
		rows[i] = t.row
	}
	for n := range r.o.Rounds {
		for i, t := range tasks {
			if err := r.ctx.Err(); err != nil {
				return nil, err
			}
			r.progress("%s %s, %d regions, %s: round %d of %d", t.row.Workload, t.row.Pattern, t.row.Regions, t.row.Impl, n+1, r.o.Rounds)
			ns, err := t.measure()
			if errors.Is(err, errNotTogether) {
				r.report.note("%s %s, %d regions, %d threads, %s, round %d: the threads did not get processors at the same time",
					t.row.Workload, t.row.Pattern, t.row.Regions, t.row.Threads, t.row.Impl, n+1)
				ns, err = 0, nil
			}
			if err != nil {
				return nil, fmt.Errorf("%s %s, %d regions, %s: %w", t.row.Workload, t.row.Pattern, t.row.Regions, t.row.Impl, err)
			}
			rows[i].Samples = append(rows[i].Samples, ns)
		}
	}
	for i := range rows {
		rows[i].conclude()
	}
	return rows, nil
}

// conclude computes the figures from the samples.
func (x *Result) conclude() {
	x.NsPerOp = median(measured(x.Samples))
	if x.NsPerOp > 0 {
		x.OpsPerSecond = 1e9 * float64(x.Threads) / x.NsPerOp
	}
}

// row returns an empty row.
func (r *runner) row(c Case, impl string) Result {
	x := Result{Workload: c.Workload, Pattern: c.Pattern, Regions: c.Regions, Threads: c.Threads, Impl: impl}
	if slices.Contains(cacheImpls, impl) {
		x.Monitor = r.o.Monitor.Name
	}
	return x
}

// add reports rows of one case, and what pindown's take of the others'.
func (r *runner) add(rows []Result) {
	r.report.Results = append(r.report.Results, rows...)
	for _, x := range rows {
		for _, y := range rows {
			if slices.Contains(cacheImpls, x.Impl) && !slices.Contains(cacheImpls, y.Impl) && x.Threads == y.Threads && x.Pattern == y.Pattern {
				r.ratio(x, Ratio{Of: x.Impl, To: y.Impl, Threads: x.Threads, Quantity: "ns_per_op"}, x.Samples, y.Samples)
			}
		}
	}
}

// ratio reports of/to, with the rest from the row x.
func (r *runner) ratio(x Result, t Ratio, of, to []float64) {
	t.Workload, t.Regions, t.Pattern = x.Workload, x.Regions, x.Pattern
	for i := range min(len(of), len(to)) {
		if to[i] > 0 && of[i] > 0 {
			t.Pairs = append(t.Pairs, of[i]/to[i])
		}
	}
	if len(t.Pairs) == 0 {
		return
	}
	t.Median = median(t.Pairs)
	r.report.Ratios = append(r.report.Ratios, t)
}

// workers opens a worker of s as impl for each thread. It calls them off with
// the function that it returns.
func (s *resident) workers(impl string, threads int) (list []Worker, off func(), err error) {
	off = func() {
		for _, w := range list {
			_ = w.Close() // its errors are those of Run
		}
	}
	for range threads {
		w, err := s.Worker(impl)
		if err != nil {
			off()
			return nil, nil, err
		}
		list = append(list, w)
	}
	return list, off, nil
}

// warm is how long a loop runs before it is measured.
func (r *runner) warm() time.Duration { return r.o.Duration / 4 }
