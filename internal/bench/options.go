package bench

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

// Workload is what is measured.
type Workload string

// Workloads.
const (
	// Hit: acquire and release of what is resident.
	Hit Workload = "hit"
	// Miss: acquire and release of what isn't.
	Miss Workload = "miss"
	// Restamp: acquire and release after a VM operation, on other regions or on
	// the same.
	Restamp Workload = "restamp"
	// Invalidate: one VM operation over many regions.
	Invalidate Workload = "invalidate"
	// Churn: hits while another thread maps and unmaps.
	Churn Workload = "churn"
	// Memory: bytes for each idle region.
	Memory Workload = "memory"
)

// Workloads returns all of them, in the order of reports.
func Workloads() []Workload { return []Workload{Hit, Miss, Restamp, Invalidate, Churn, Memory} }

// Patterns returns the names of all patterns, by workload.
func Patterns(w Workload) []string {
	switch w {
	case Hit:
		var all []string
		for _, p := range []string{patternHot, patternUniform, patternZipf} {
			all = append(all, p, p+subSuffix)
		}
		return append(all, "same", "different", "random")
	case Miss:
		return []string{"room", "evict"}
	case Restamp:
		return []string{"unrelated", "related"}
	case Invalidate:
		return []string{"operation", "acquire-after", "acquire-during", "hit-during", "reclaim"}
	case Churn:
		return []string{"quiet", "unrelated", "watched"}
	case Memory:
		return []string{"total", "heap"}
	}
	return nil
}

// Options say what is measured and how long. The zero value means defaults.
type Options struct {
	// Workloads are those to run. Default: all.
	Workloads []Workload
	// Regions are the numbers of resident regions. Default: 1, 1 000, 10 000,
	// 100 000 and 1 000 000; with Short 1, 1 000 and 10 000.
	Regions []int
	// Threads are the numbers of threads, of 1 and 2. Default: both.
	Threads []int
	// Patterns are those to run. Default: all.
	Patterns []string
	// Impls are the implementations to run. Default: all.
	Impls []string
	// Duration is that of one measurement of a loop, of which each row takes
	// Rounds. Default 50 ms; with Short 5 ms.
	Duration time.Duration
	// Rounds is how often each measurement is made. Default 7; with Short 3.
	Rounds int
	// Short makes everything small, to see that it works, and judges nothing.
	Short bool
	// Seed is that of the random choices. Zero means 1.
	Seed uint64

	// Monitor is the monitor of pindown's caches. Default: the manual one.
	Monitor *Monitor
	// Peers are measured beside pindown.
	Peers []Factory

	// Progress, if not nil, is told what is being done.
	Progress func(what string)
}

// ErrOptions is wrapped by Validate's error.
var ErrOptions = errors.New("bench: bad options")

// maxRegions bounds Options.Regions; page numbers have 32 bits.
const maxRegions = 16 << 20

// withDefaults returns a copy with defaults filled in.
func (o *Options) withDefaults() Options {
	c := *o
	if len(c.Workloads) == 0 {
		c.Workloads = Workloads()
	}
	if len(c.Regions) == 0 {
		c.Regions = []int{1, 1000, 10_000, 100_000, 1_000_000}
		if c.Short {
			c.Regions = c.Regions[:3]
		}
	}
	if len(c.Threads) == 0 {
		c.Threads = []int{1, 2}
	}
	c.Regions, c.Threads = once(c.Regions), once(c.Threads)
	if c.Duration == 0 {
		c.Duration = 50 * time.Millisecond
		if c.Short {
			c.Duration = 5 * time.Millisecond
		}
	}
	if c.Rounds == 0 {
		c.Rounds = 7
		if c.Short {
			c.Rounds = 3
		}
	}
	if c.Seed == 0 {
		c.Seed = 1
	}
	if c.Monitor == nil {
		c.Monitor = &Monitor{Name: "manual"}
	}
	if c.Progress == nil {
		c.Progress = func(string) {}
	}
	return c
}

// once returns the list without what is in it already.
func once(list []int) []int {
	var short []int
	for _, n := range list {
		if !slices.Contains(short, n) {
			short = append(short, n)
		}
	}
	return short
}

// factories returns the subjects that are asked for, pindown's first.
func (o *Options) factories() []Factory {
	all := append([]Factory{pindownFactory(o.Monitor)}, o.Peers...)
	if len(o.Impls) == 0 {
		return all
	}
	var some []Factory
	for _, f := range all {
		f.Impls = slices.DeleteFunc(slices.Clone(f.Impls), func(i string) bool { return !slices.Contains(o.Impls, i) })
		if len(f.Impls) > 0 {
			some = append(some, f)
		}
	}
	return some
}

// Validate reports all problems.
func (o *Options) Validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	var patterns []string
	for _, w := range Workloads() {
		patterns = append(patterns, Patterns(w)...)
	}
	for _, w := range o.Workloads {
		if !slices.Contains(Workloads(), w) {
			bad("workload %q is none of %s", w, join(Workloads()))
		}
	}
	for _, p := range o.Patterns {
		if !slices.Contains(patterns, p) {
			bad("pattern %q is none of %s", p, join(patterns))
		}
	}
	if len(errs) == 0 && len(o.Patterns) > 0 && len(o.Workloads) > 0 {
		patterns = nil
		for _, w := range o.Workloads {
			patterns = append(patterns, Patterns(w)...)
		}
		if !slices.ContainsFunc(o.Patterns, func(p string) bool { return slices.Contains(patterns, p) }) {
			bad("workload %s has no pattern %s: one of %s", join(o.Workloads), join(o.Patterns), join(patterns))
		}
	}
	for _, n := range o.Regions {
		if n < 1 || n > maxRegions {
			bad("%d regions: at least 1, at most %d", n, maxRegions)
		}
	}
	for _, n := range o.Threads {
		if n < 1 || n > 2 {
			bad("%d threads: 1 or 2", n)
		}
	}
	var impls []string
	for _, f := range append([]Factory{pindownFactory(nil)}, o.Peers...) {
		impls = append(impls, f.Impls...)
	}
	for _, i := range o.Impls {
		if !slices.Contains(impls, i) {
			bad("implementation %q is none of %s", i, join(impls))
		}
	}
	if o.Duration < 0 || o.Duration > time.Minute {
		bad("duration %v: at most a minute", o.Duration)
	}
	if o.Rounds < 0 || o.Rounds > 1000 {
		bad("%d rounds: at most 1000", o.Rounds)
	}
	if len(errs) > 0 {
		return fmt.Errorf("%w: %w", ErrOptions, errors.Join(errs...))
	}
	return nil
}

// needs says what numbers a workload is measured with.
func needs(w Workload) string {
	switch w {
	case Hit:
		return "hit takes 1 thread, or also 2 with the patterns same, different and random; with 1 region the patterns uniform, uniform-sub and same"
	case Miss:
		return fmt.Sprintf("miss takes 1 thread, and at least %d regions", minMiss)
	case Restamp:
		return "restamp takes 1 thread, and at least 2 regions"
	case Invalidate:
		return "invalidate takes 1 thread"
	case Churn:
		return fmt.Sprintf("churn takes 1 thread, and 2 to %d regions", maxInvalidate)
	default:
		return ""
	}
}

// nothing is the error of options that select nothing.
func (o *Options) nothing() error {
	var why []string
	for _, w := range o.Workloads {
		if n := needs(w); n != "" && !slices.Contains(why, n) {
			why = append(why, n)
		}
	}
	return fmt.Errorf("%w: there is nothing of the kind to measure: %s", ErrOptions, strings.Join(why, "; "))
}

func join[S ~string](list []S) string {
	text := make([]string, len(list))
	for i, s := range list {
		text[i] = string(s)
	}
	return strings.Join(text, ", ")
}

// Case is a workload in one shape.
type Case struct {
	Workload Workload
	Pattern  string
	Regions  int
	Threads  int
}
