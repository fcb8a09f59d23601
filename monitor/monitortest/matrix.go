package monitortest

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"text/tabwriter"

	"github.com/pindown/pindown/internal/oracle"
	"github.com/pindown/pindown/internal/vmops"
	"github.com/pindown/pindown/monitor"
	"github.com/pindown/pindown/vm"
)

// extent is where an operation acts, relative to the watched range:
//
//	watched           [-----------)
//	whole             [-----------)
//	part                   [-)
//	straddle-start [----)
//	straddle-end               [----)
//	superset        [---------------)
//	before          [-)
//	after                         [-)
type extent struct {
	name     string
	from, to func(lo, hi int) int // in units, given the watched range
}

var extents = []extent{
	{"whole", func(lo, _ int) int { return lo }, func(_, hi int) int { return hi }},
	{"part", func(lo, hi int) int { return (lo + hi) / 2 }, func(lo, hi int) int { return (lo+hi)/2 + 1 }},
	{"straddle-start", func(lo, _ int) int { return lo - 1 }, func(lo, _ int) int { return lo + 1 }},
	{"straddle-end", func(_, hi int) int { return hi - 1 }, func(_, hi int) int { return hi + 1 }},
	{"superset", func(lo, _ int) int { return lo - 1 }, func(_, hi int) int { return hi + 1 }},
	{"before", func(lo, _ int) int { return lo - 1 }, func(lo, _ int) int { return lo }},
	{"after", func(_, hi int) int { return hi }, func(_, hi int) int { return hi + 1 }},
}

// combination is one test of the matrix, but for the extent.
type combination struct {
	kind vm.Mapping
	o    *vmops.Operation
	by   vmops.Actor
}

// verdict is what became of it. Those further down weigh more when several
// extents are summed up.
type verdict uint8

const (
	verdictUntested verdict = iota
	verdictKept             // valid, and the pages are the same: nothing to see
	verdictCaught
	verdictRefused
	verdictNeedless // invalid though the operation was elsewhere
	verdictBlind    // valid, and the pages differ
)

var verdictNames = [...]string{"untested", "kept", "caught", "refused", "NEEDLESS", "BLIND"}

func (v verdict) String() string { return verdictNames[v] }

func (s *suite) testMatrix(t *testing.T) {
	m := s.monitor(t)
	helper := startHelper(t)
	outcomes := map[combination]verdict{}
	used := map[int]bool{} // exceptions that were needed
	for _, kind := range s.o.Kinds {
		t.Run(kind.String(), func(t *testing.T) {
			sc := s.scratch(t, kind)
			if sc == nil {
				t.Skip("no such mapping here")
			}
			if err := sc.Release(); err != nil {
				t.Fatal(err)
			}
			for _, o := range vmops.Operations() {
				actors := o.Actors(kind)
				if len(actors) == 0 || o.Heavy && testing.Short() {
					continue
				}
				t.Run(o.Name, func(t *testing.T) {
					s.dog.pat()
					for _, by := range actors {
						if by == vmops.OtherThread && testing.Short() {
							continue
						}
						c := combination{kind, o, by}
						t.Run(by.String(), func(t *testing.T) {
							outcomes[c] = s.testCombination(t, m, c, helper, used)
						})
					}
				})
			}
		})
	}
	t.Log("\n" + matrixText(m.Name(), outcomes))
	for i, e := range s.o.Blind {
		tried := false
		for c, v := range outcomes {
			tried = tried || e.matches(c) && v != verdictUntested
		}
		if tried && !used[i] {
			t.Errorf("documented as blind, but nothing went unseen: %+v", e)
		}
	}
}

// testCombination tries every extent and returns the verdict that weighs most.
func (s *suite) testCombination(t *testing.T, m monitor.Monitor, c combination, h *vmops.Helper, used map[int]bool) verdict {
	t.Helper()
	worst := verdictUntested
	for i, e := range extents {
		if testing.Short() && i%2 == 0 {
			continue // leaves part, straddle-end and before
		}
		t.Run(e.name, func(t *testing.T) {
			v := s.testCell(t, m, c, e, h)
			worst = max(worst, v)
			switch v {
			case verdictBlind:
				i := slices.IndexFunc(s.o.Blind, func(e Exception) bool { return e.matches(c) })
				if i < 0 {
					t.Error("the pages changed unseen")
					return
				}
				used[i] = true
			case verdictNeedless:
				if !slices.ContainsFunc(s.o.Needless, func(e Exception) bool { return e.matches(c) }) {
					t.Error("invalidated by an operation next to it")
				}
			case verdictRefused:
				if slices.Contains(s.o.Require, c.kind) {
					t.Error("refused, but required")
				}
			case verdictUntested:
				t.Skip("not available here")
			case verdictKept, verdictCaught:
			}
		})
	}
	return worst
}

func (s *suite) testCell(t *testing.T, m monitor.Monitor, c combination, e extent, h *vmops.Helper) verdict {
	t.Helper()
	sc := s.scratch(t, c.kind)
	if sc == nil {
		return verdictUntested
	}
	defer release(t, sc)
	lo, hi := sc.Units()/4, 3*sc.Units()/4
	watched, r := sc.Slice(lo, hi), sc.Slice(e.from(lo, hi), e.to(lo, hi))
	p := mustRegister(t, m, watched)
	if p == nil {
		return verdictRefused
	}
	defer p.end()
	w, err := oracle.Hold(watched, sc.Unit())
	if err != nil {
		t.Fatal(err)
	}
	defer closeWitness(t, w)

	err = s.perform(m, sc, c.o, r, c.by, h)
	valid := p.valid()
	if vmops.Unavailable(err) {
		t.Log(err)
		return verdictUntested
	}
	if err != nil {
		t.Fatal(err)
	}
	d, err := w.Compare()
	if err != nil {
		t.Fatal(err)
	}
	// What was only announced at first must be on record in the end.
	p.settle()
	later := p.valid()
	if later && !valid && d.Any() {
		t.Error("invalid at first, then valid again")
	}
	valid = valid || later

	touched := c.o.Affected(sc, r).Overlaps(watched)
	switch {
	case d.Any() && !touched:
		t.Fatalf("%v of %v changed pages in %v: %v", c.o, r, watched, d)
	case d.Any() && valid:
		t.Logf("watched %v, operation on %v: %v", watched, r, d)
		return verdictBlind
	case !valid && !touched:
		return verdictNeedless
	case !valid:
		return verdictCaught
	}
	return verdictKept
}

// matrixText renders the outcomes: a line for each operation on each mapping.
func matrixText(name string, outcomes map[combination]verdict) string {
	var b strings.Builder
	tw := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	actors := []vmops.Actor{vmops.ThisThread, vmops.OtherThread, vmops.Ring, vmops.OtherProcess}
	fmt.Fprintf(tw, "%s\toperation", name)
	for _, by := range actors {
		fmt.Fprintf(tw, "\t%v", by)
	}
	fmt.Fprintln(tw)
	for _, kind := range vmops.Kinds() {
		for _, o := range vmops.Operations() {
			line, any := fmt.Sprintf("%v\t%v", kind, o), false
			for _, by := range actors {
				v, ok := outcomes[combination{kind, o, by}]
				any = any || ok
				if !ok {
					line += "\t."
					continue
				}
				line += "\t" + v.String()
			}
			if any {
				fmt.Fprintln(tw, line)
			}
		}
	}
	_ = tw.Flush()
	return b.String()
}
