package bench

import (
	"fmt"
	"slices"
	"time"
)

// minMiss is the least number of regions for which misses are measured.
const minMiss = 100

// misses measures acquire and release of what isn't resident: with room for it,
// and where something must be evicted.
func (r *runner) misses() error {
	for _, p := range Patterns(Miss) {
		for _, n := range r.o.Regions {
			if !r.wants(p) || n < minMiss || !slices.Contains(r.o.Threads, 1) {
				continue
			}
			c := Case{Workload: Miss, Pattern: p, Regions: n, Threads: 1}
			if err := r.tolerate(c, r.missesAt(c)); err != nil {
				return err
			}
		}
	}
	return nil
}

func (r *runner) missesAt(c Case) error {
	a := pageShape
	a.Regions = c.Regions
	// Few enough in a round that all rounds together don't change the size much.
	k := min(max(c.Regions/20, 100), 5000)
	f, err := r.fill(c, &a, k*r.o.Rounds*2, c.Pattern == "room")
	if err != nil {
		return err
	}
	defer f.close() //nolint:errcheck // of what is thrown away
	var tasks []task
	for _, s := range f.all {
		next := c.Regions
		// The cache's own way only: a lane has nothing to do with misses.
		impl := s.Impls[0]
		w, err := s.Worker(impl)
		if err != nil {
			return err
		}
		defer w.Close() //nolint:errcheck // its errors are those of Run
		tasks = append(tasks, task{row: r.row(c, impl), measure: func() (ns float64, err error) {
			pages := make([]uint32, k)
			for i := range pages {
				pages[i] = a.first(next)
				next++
			}
			made, _ := s.Registrations()
			err = r.team.do(func() error {
				begin := time.Now()
				err := w.Run(a.Base, a.Length(), pages)
				ns = float64(time.Since(begin)) / float64(k)
				return err
			})
			if again, _ := s.Registrations(); err == nil && again-made != uint64(k) {
				err = fmt.Errorf("%d registrations for %d misses", again-made, k)
			}
			return ns, err
		}})
	}
	rows, err := r.rounds(tasks)
	if err == nil {
		r.add(rows)
	}
	return err
}
