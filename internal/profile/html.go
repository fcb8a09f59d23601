package profile

import (
	"cmp"
	"fmt"
	"io"
	"math/bits"
	"slices"
	"strings"
	"time"

	"github.com/pindown/pindown/internal/report"
)

// WriteHTML writes a page that needs nothing else.
func (r *Result) WriteHTML(w io.Writer) error {
	page := &report.Page{
		Title: "VM activity of " + r.commandLine(),
		Facts: r.facts(),
		Sections: []report.Section{
			{Title: "Operations", Elements: r.operationElements()},
			{Title: "Over time", Elements: r.timelineElements()},
			{Title: "Sizes and latencies", Elements: r.histogramElements()},
			{Title: "Call sites", Elements: r.flameElements()},
			{Title: "Registrations", Elements: r.registrationElements()},
		},
		Foot: strings.Join(r.Notes, " "),
	}
	return page.WriteHTML(w)
}

func (r *Result) facts() []report.Fact {
	o := r.Overhead
	return []report.Fact{
		{Name: "Kernel", Value: r.Kernel},
		{Name: "Ran for", Value: report.Seconds.Format(r.Seconds)},
		{Name: "End", Value: r.fate()},
		{Name: "Processes", Value: fmt.Sprint(r.Processes)},
		{Name: "Threads with VM operations", Value: fmt.Sprint(len(r.Threads))},
		{Name: "Cost", Value: fmt.Sprintf("%s in BPF programs, %.1f %% of the program's processor time", report.Seconds.Format(o.Seconds), 100*o.Share)},
		{Name: "Lost", Value: cmp.Or(r.lost(), "nothing")},
	}
}

func (r *Result) operationElements() []report.Element {
	t := &report.Table{Head: []string{"Operation", "Calls", "Failed", "Changes", "Bytes", "Time", "Mean", "Median", "99 %", "Longest", "Kinds"}}
	for _, name := range r.byTime() {
		o := r.Operations[name]
		var kinds []string
		for k, n := range o.Kinds {
			kinds = append(kinds, fmt.Sprintf("%s %d", k, n))
		}
		slices.Sort(kinds)
		t.Rows = append(t.Rows, []string{
			name, fmt.Sprint(o.Count), fmt.Sprint(o.Failed), fmt.Sprint(o.Changes), size(o.Bytes), duration(o.Seconds),
			duration(o.Mean), duration(o.P50), duration(o.P99), duration(o.Max), strings.Join(kinds, ", "),
		})
	}
	threads := &report.Table{Caption: "Threads with most operations", Head: []string{"Thread", "Process", "Name", "Operations", "Bytes", "Time"}}
	for _, th := range r.Threads[:min(textThreads, len(r.Threads))] {
		threads.Rows = append(threads.Rows, []string{
			fmt.Sprint(th.TID), fmt.Sprint(th.PID), th.Name, fmt.Sprint(th.Operations), size(th.Bytes), duration(th.Seconds),
		})
	}
	return []report.Element{
		t, report.Text("“Changes” are calls that replaced or removed pages: memory that is registered there would be stale."), threads,
	}
}

const textThreads = 20

func (r *Result) timelineElements() []report.Element {
	n := len(r.Timeline.Points)
	x := make([]float64, n+1)
	x[n] = float64(n) * r.Timeline.Interval
	series := map[string][]float64{}
	add := func(name string, i int, v float64) {
		if series[name] == nil {
			series[name] = make([]float64, n+1)
		}
		series[name][i] = v / r.Timeline.Interval
		series[name][n] = series[name][i] // until the end of the last interval
	}
	for i, p := range r.Timeline.Points {
		x[i] = float64(i) * r.Timeline.Interval
		add("operations", i, float64(p.Operations))
		add("changes", i, float64(p.Changes))
		add("uses of buffers", i, float64(p.Uses))
		add("registrations", i, float64(p.Registrations))
		add("bytes", i, float64(p.Bytes))
		add("time in operations", i, p.Seconds)
	}
	lines := func(title string, unit report.Unit, names ...string) report.Element {
		l := &report.Lines{Title: title, X: report.Axis{Unit: report.Seconds}, Y: report.Axis{Unit: unit}, Step: true}
		for _, name := range names {
			l.Series = append(l.Series, report.Series{Name: name, X: x, Y: series[name]})
		}
		return l
	}
	return []report.Element{
		lines("Rate", report.PerSecond, "operations", "changes", "uses of buffers", "registrations"),
		lines("Bytes per second that operations concern", report.BytesPerSecond, "bytes"),
		lines("Share of the time in operations, of all threads together", report.Percent, "time in operations"),
	}
}

// latencyGroups are powers of two of nanoseconds.
const firstGroup, groups = 7, 28

func (r *Result) histogramElements() []report.Element {
	names := r.byTime()
	sizes := &report.Bars{Title: "Calls by size", Stacked: true, Value: report.Axis{Label: "calls"}}
	latency := &report.Bars{Title: "Calls by the time from entry to return", Stacked: true, Value: report.Axis{Label: "calls"}}
	lowest, highest := 64, 0
	first, last := groups, 0
	for _, o := range r.Operations {
		for _, s := range o.Sizes {
			b := bits.Len64(s.UpTo) - 1
			lowest, highest = min(lowest, b), max(highest, b)
		}
		for _, l := range o.Latencies {
			g := group(l)
			first, last = min(first, g), max(last, g)
		}
	}
	for b := lowest; b <= highest; b++ {
		sizes.Categories = append(sizes.Categories, "≤ "+size(1<<b))
	}
	for g := first; g <= last; g++ {
		latency.Categories = append(latency.Categories, "< "+duration(float64(uint64(1)<<(g+firstGroup))/1e9))
	}
	for _, name := range names {
		o := r.Operations[name]
		s := report.BarSeries{Name: name, Values: make([]float64, max(0, highest-lowest+1))}
		for _, b := range o.Sizes {
			s.Values[bits.Len64(b.UpTo)-1-lowest] += float64(b.Count)
		}
		sizes.Series = append(sizes.Series, s)
		l := report.BarSeries{Name: name, Values: make([]float64, max(0, last-first+1))}
		for _, b := range o.Latencies {
			l.Values[group(b)-first] += float64(b.Count)
		}
		latency.Series = append(latency.Series, l)
	}
	return []report.Element{sizes, latency}
}

// group is the power of two that a bucket of latencies belongs to.
func group(l LatencyBucket) int {
	ns := uint64(l.Below*1e9+0.5) - 1
	return min(max(0, bits.Len64(ns)-firstGroup), groups-1)
}

func (r *Result) flameElements() []report.Element {
	byTime := &report.Flame{Title: "Time in operations by call site", Unit: report.Seconds, Root: report.Node{Name: "all"}}
	byCount := &report.Flame{Title: "Operations by call site", Root: report.Node{Name: "all"}}
	for _, c := range r.CallSites {
		path := []string{c.Program}
		for _, f := range slices.Backward(c.Stack) {
			name := f.Function
			if name == "" {
				name = f.String()
			}
			path = append(path, name)
		}
		path = append(path, c.Operation)
		byTime.Root.Add(c.Seconds, path...)
		byCount.Root.Add(float64(c.Count), path...)
	}
	return []report.Element{byTime, byCount}
}

func (r *Result) registrationElements() []report.Element {
	g := r.Registering
	list := []report.Element{report.Text(fmt.Sprintf("Uses of buffers: %d of %s (%s).", r.Uses.Count, size(r.Uses.Bytes), r.Uses.Rule))}
	if g.Registrations == 0 {
		return append(list, report.Text("The program registered no memory (io_uring buffers, libibverbs)."))
	}
	list = append(list, report.Text(fmt.Sprintf(
		"%d registrations of %s took %s, %d deregistrations %s. At most %s were registered at once. Memory was changed %d times while it was registered, and used again afterwards %d times.",
		g.Registrations, size(g.RegisteredBytes), duration(g.RegisterSeconds), g.Deregistrations, duration(g.DeregisterSeconds),
		size(g.MostBytes), r.Stale.Windows, r.Stale.UsedAgain)))
	spans := &report.Spans{Title: "Lifetimes of registrations", Legend: []string{"valid", "stale: changed while registered", "stale and used"}}
	windows := map[int][]*StaleWindow{}
	for _, w := range r.StaleWindows {
		windows[w.Registration] = append(windows[w.Registration], w)
	}
	at := func(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
	for _, x := range r.Registrations {
		end := x.EndedAt
		if x.Ended == "" {
			end = r.Seconds
		}
		row := report.Row{Name: fmt.Sprintf("%d: %s of process %d, %s", x.Number, x.Via, x.PID, size(x.Length))}
		row.Spans = append(row.Spans, report.Span{From: at(x.At), To: at(end), Title: "registered at " + top(x.Stack)})
		for _, w := range windows[x.Number] {
			s := report.Span{From: at(w.At), To: at(end), Color: 1, Title: w.Operation + " at " + top(w.Stack)}
			if w.UsedAgain {
				row.Spans = append(row.Spans, s)
				s.From, s.Color, s.Title = at(w.FirstUseAt), 2, "used at "+top(w.UseStack)
			}
			row.Spans = append(row.Spans, s)
		}
		spans.Rows = append(spans.Rows, row)
	}
	list = append(list, spans)
	if len(r.StaleWindows) == 0 {
		return list
	}
	t := &report.Table{Caption: "Stale windows", Head: []string{"Registration", "Change", "Bytes", "At", "Uses afterwards", "Changed by", "Registered by", "Used by"}}
	for _, w := range r.StaleWindows[:min(len(r.StaleWindows), DefaultSites)] {
		t.Rows = append(t.Rows, []string{
			fmt.Sprint(w.Registration), w.Operation, size(w.Length), duration(w.At), fmt.Sprint(w.Uses),
			top(w.Stack), top(w.RegistrationStack), top(w.UseStack),
		})
	}
	return append(list, t)
}

// top names the innermost places of a stack.
func top(stack []Frame) string {
	const most = 3
	var names []string
	for _, f := range stack[:min(most, len(stack))] {
		names = append(names, f.String())
	}
	if len(names) == 0 {
		return "—"
	}
	return strings.Join(names, " ← ")
}
