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
			c := Case{Workload: Restamp, Pattern: p, Regions: n, Threads: 1}
			if err := r.tolerate(c, r.restampsAt(c)); err != nil {
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
			t := &restamper{s: cache, a: &a, other: c.Regions - 1, related: c.Pattern == "related"}
			for _, i := range r.rng(3).Perm(t.other) {
				t.order = append(t.order, a.first(i))
			}
			tasks = append(tasks, task{row: r.row(c, impl), measure: func() (ns float64, err error) {
				// There is a lane only while it is measured: giving up regions costs
				// more with one.
				if t.w, err = s.Worker(impl); err != nil {
					return 0, err
				}
				defer t.w.Close() //nolint:errcheck // its errors are those of Run
				return t.measure(r)
			}})
		}
	}
	rows, err := r.rounds(tasks)
	if err == nil {
		r.add(rows)
	}
	return err
}

// restamper acquires after operations.
type restamper struct {
	s       *cacheSubject
	w       Worker
	a       *Area
	other   int // the region on which operations happen that are unrelated
	related bool
	order   []uint32
	at      int
}

func (t *restamper) measure(r *runner) (ns float64, err error) {
	before := t.s.cache.Stats().Restamped
	made, _ := t.s.Registrations()
	p, err := r.team.run(0, r.o.Duration, t.step)
	restamped := t.s.cache.Stats().Restamped - before
	again, _ := t.s.Registrations()
	switch {
	case err != nil:
	case !t.related && restamped < p.ops:
		err = fmt.Errorf("%d of %d acquires compared stamps", restamped, p.ops)
	case t.related && again-made < p.ops:
		err = fmt.Errorf("%w: %d of %d acquires registered", errStale, again-made, p.ops)
	}
	return p.nsPerOp, err
}

// step has a batch of regions acquired after an operation elsewhere, or each
// after one on itself.
func (t *restamper) step() (int, error) {
	batch := min(t.other, restampBatch)
	if t.at+batch > len(t.order) {
		t.at = 0
	}
	pages := t.order[t.at : t.at+batch]
	t.at += batch
	if !t.related {
		if err := t.s.touch(t.a.Range(t.other)); err != nil {
			return 0, err
		}
		if err := t.w.Run(t.a.Base, t.a.Length(), []uint32{t.a.first(t.other)}); err != nil {
			return 0, err
		}
		return batch, t.w.Run(t.a.Base, t.a.Length(), pages)
	}
	for i := range pages {
		start := t.a.Base + uintptr(pages[i])<<pageShift
		if err := t.s.touch(vm.Range{Start: start, End: start + t.a.Length()}); err != nil {
			return 0, err
		}
		if err := t.w.Run(t.a.Base, t.a.Length(), pages[i:i+1]); err != nil {
			return 0, err
		}
	}
	return batch, nil
}
