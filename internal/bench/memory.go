package bench

import "slices"

// memory measures what an idle region takes: of the largest number of regions
// asked for, since what a cache takes once is spread over them. It is the
// difference of what the process holds before the cache is opened and when it is
// filled, garbage collected: of Go objects, and in all, which adds the epoch
// table (or a peer's own memory) as far as it was ever touched.
func (r *runner) memory() error {
	if !r.wantsAny(Patterns(Memory)...) {
		return nil
	}
	all := r.factories
	defer func() { r.factories = all }()
	n := slices.Max(r.o.Regions)
	for _, f := range all {
		r.factories = []Factory{f}
		before, err := measureFootprint()
		if err != nil {
			return err
		}
		a := pageShape
		a.Regions = n
		c := Case{Workload: Memory, Regions: n, Threads: 1}
		field, err := r.fill(c, &a, 0, false)
		if err != nil {
			if err := r.tolerate(c, err); err != nil {
				return err
			}
			continue
		}
		r.progress("memory of %d regions, %s", n, f.Impls[0])
		after, err := measureFootprint()
		empty := len(field.all) == 0
		if e := field.close(); err == nil {
			err = e
		}
		if err != nil {
			return err
		}
		if empty {
			continue
		}
		took := map[string]float64{"total": after.resident - before.resident, "heap": after.heap - before.heap}
		for _, pattern := range Patterns(Memory) {
			c.Pattern = pattern
			if pattern == "heap" && !slices.Contains(cacheImpls, f.Impls[0]) || !r.wants(pattern) {
				continue
			}
			x := r.row(c, f.Impls[0])
			x.BytesPerRegion = took[pattern] / float64(n)
			r.report.Results = append(r.report.Results, x)
		}
	}
	return nil
}
