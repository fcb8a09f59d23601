package bench

import (
	"fmt"
	"slices"

	"github.com/pindown/pindown/monitor/manual"
	"github.com/pindown/pindown/vm"
)

// restampBatch is how many regions are acquired after one operation elsewhere.
const restampBatch = 256

// restamps measures the first acquire of a region after a VM operation: on
// another region, so that the stamp is compared; or on the region itself, so that
// it is registered anew. The former includes 1/256 of the operation's record and
// of another registration, the latter all of them. The operation's news is left out:
// what whoever acts on it costs is in the workload invalidate.
func (r *runner) restamps() error {
	for _, p := range Patterns(Restamp) {
		for _, n := range r.o.Regions {
			if !r.wants(p) || n < 2 || !slices.Contains(r.o.Threads, 1) {
				continue
			}
			if err := r.restampsAt(Case{Workload: Restamp, Pattern: p, Regions: n, Threads: 1}); err != nil {
				return err
			}
		}
	}
	return nil
}

// touch has an operation on r recorded.
func (s *cacheSubject) touch(r vm.Range) error {
	if m, ok := s.mon.(*manual.Monitor); ok {
		m.Table().Touch(r)
		return nil
	}
	return remap(r, s.dev.populate)
}

func (r *runner) restampsAt(c Case) error {
	a := pageShape
	a.Regions = c.Regions
	f, err := r.fill(c, &a, 0, false)
	if err != nil {
		return err
	}
	defer f.close() //nolint:errcheck // of what is thrown away
	var tasks []task
	for _, s := range f.all {
		cache, ok := s.Subject.(*cacheSubject)
		if !ok {
			continue
		}
		for _, impl := range s.Impls {
			w, err := s.Worker(impl)
			if err != nil {
				return err
			}
			defer w.Close() //nolint:errcheck // its errors are those of Run
			other := c.Regions - 1
			batch := min(other, restampBatch)
			var order []uint32
			for _, i := range r.rng(3).Perm(other) {
				order = append(order, a.first(i))
			}
			at := 0
			step := func() (int, error) {
				if at+batch > len(order) {
					at = 0
				}
				pages := order[at : at+batch]
				at += batch
				if c.Pattern == "unrelated" {
					if err := cache.touch(a.Range(other)); err != nil {
						return 0, err
					}
					if err := w.Run(a.Base, a.Length(), []uint32{a.first(other)}); err != nil {
						return 0, err
					}
					return batch, w.Run(a.Base, a.Length(), pages)
				}
				for i := range pages {
					start := a.Base + uintptr(pages[i])<<pageShift
					if err := cache.touch(vm.Range{Start: start, End: start + a.Length()}); err != nil {
						return 0, err
					}
					if err := w.Run(a.Base, a.Length(), pages[i:i+1]); err != nil {
						return 0, err
					}
				}
				return batch, nil
			}
			tasks = append(tasks, task{row: r.row(c, impl), measure: func() (float64, error) {
				before := cache.cache.Stats().Restamped
				made, _ := cache.Registrations()
				p, err := r.team.run(0, r.o.Duration, step)
				restamped := cache.cache.Stats().Restamped - before
				again, _ := cache.Registrations()
				switch {
				case err != nil:
				case c.Pattern == "unrelated" && restamped < p.ops:
					err = fmt.Errorf("%d of %d acquires compared stamps", restamped, p.ops)
				case c.Pattern == "related" && again-made < p.ops:
					err = fmt.Errorf("%w: %d of %d acquires registered", errStale, again-made, p.ops)
				}
				return p.nsPerOp, err
			}})
		}
	}
	rows, err := r.rounds(tasks)
	if err == nil {
		r.add(rows)
	}
	return err
}
