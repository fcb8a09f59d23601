package profile

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/pindown/pindown/internal/report"
)

// Limits on what the text shows.
const (
	textSites   = 5
	textFrames  = 6
	textWindows = 10
	textKinds   = 4
)

// WriteText writes a summary for a terminal.
func (r *Result) WriteText(w io.Writer) error {
	p := &printer{w: w}
	p.head(r)
	p.operations(r)
	p.callSites(r)
	p.registrations(r)
	p.windows(r)
	p.rest(r)
	return p.err
}

// commandLine is the command on one line; what is more than a word is quoted.
func (r *Result) commandLine() string {
	words := make([]string, len(r.Command))
	for i, w := range r.Command {
		words[i] = w
		if q := strconv.Quote(w); w == "" || q != `"`+w+`"` || strings.ContainsAny(w, " '$&|;<>*?()") {
			words[i] = q
		}
	}
	return strings.Join(words, " ")
}

// fate says what became of the program.
func (r *Result) fate() string {
	switch {
	case r.Signal != "":
		return "ended by a signal: " + r.Signal
	case r.ExitCode >= 0:
		return fmt.Sprintf("exit code %d", r.ExitCode)
	case r.Ended:
		return "ended, exit code not seen"
	default:
		return "still runs"
	}
}

type printer struct {
	w   io.Writer
	err error
}

func (p *printer) f(format string, args ...any) {
	if p.err == nil {
		_, p.err = fmt.Fprintf(p.w, format, args...)
	}
}

func (p *printer) table(rows [][]string) {
	if p.err != nil {
		return
	}
	t := tabwriter.NewWriter(p.w, 0, 0, 2, ' ', tabwriter.AlignRight)
	for _, row := range rows {
		_, _ = fmt.Fprintf(t, "  %s\t\n", strings.Join(row, "\t"))
	}
	p.err = t.Flush()
}

func (p *printer) head(r *Result) {
	p.f("%s\n", r.commandLine())
	p.f("%s, %s, %s, %s\n\n", r.fate(), duration(r.Seconds), plural(r.Processes, "process", "processes"), plural(len(r.Threads), "thread with VM operations", "threads with VM operations"))
}

// byTime returns the names of the operations, the longest first.
func (r *Result) byTime() []string {
	return slices.SortedFunc(maps.Keys(r.Operations), func(a, b string) int {
		return cmp.Or(cmp.Compare(r.Operations[b].Seconds, r.Operations[a].Seconds), cmp.Compare(a, b))
	})
}

func (p *printer) operations(r *Result) {
	if len(r.Operations) == 0 {
		p.f("no VM operations\n")
		return
	}
	rows := [][]string{{"operation", "calls", "failed", "changes", "bytes", "time", "mean", "median", "99 %", "longest"}}
	for _, name := range r.byTime() {
		o := r.Operations[name]
		rows = append(rows, []string{
			name, fmt.Sprint(o.Count), fmt.Sprint(o.Failed), fmt.Sprint(o.Changes), size(o.Bytes), duration(o.Seconds),
			duration(o.Mean), duration(o.P50), duration(o.P99), duration(o.Max),
		})
	}
	p.table(rows)
	for _, name := range r.byTime() {
		kinds := r.Operations[name].Kinds
		if len(kinds) < 2 {
			continue
		}
		var parts []string
		for _, k := range slices.SortedFunc(maps.Keys(kinds), func(a, b string) int {
			return cmp.Or(cmp.Compare(kinds[b], kinds[a]), cmp.Compare(a, b))
		}) {
			parts = append(parts, fmt.Sprintf("%s %d", k, kinds[k]))
		}
		p.f("  %s: %s\n", name, strings.Join(parts[:min(len(parts), 2*textKinds)], ", "))
	}
	p.f("\"changes\" are calls that replaced or removed pages: memory that is registered there would be stale.\n")
}

func (p *printer) callSites(r *Result) {
	if len(r.CallSites) == 0 {
		return
	}
	p.f("\nCall sites with most time:\n")
	for _, c := range r.CallSites[:min(textSites, len(r.CallSites))] {
		p.f("  %s in %s: %d calls, %s, %s\n", c.Operation, c.Program, c.Count, size(c.Bytes), duration(c.Seconds))
		p.stack("    ", c.Stack)
	}
}

func (p *printer) stack(indent string, frames []Frame) {
	for _, f := range frames[:min(textFrames, len(frames))] {
		p.f("%s%s\n", indent, f)
	}
	if len(frames) == 0 {
		p.f("%s(no call stack)\n", indent)
	}
}

// String returns what is known of a place.
func (f Frame) String() string {
	switch {
	case f.Function != "" && f.File != "":
		return fmt.Sprintf("%s (%s:%d)", f.Function, f.File, f.Line)
	case f.Function != "":
		return fmt.Sprintf("%s (%s)", f.Function, filepath.Base(f.Module))
	case f.Module != "":
		return fmt.Sprintf("%s+%#x", filepath.Base(f.Module), f.Offset)
	}
	return fmt.Sprintf("%#x", f.Address)
}

func (p *printer) registrations(r *Result) {
	g := r.Registering
	if g.Registrations == 0 && g.RegisterFailed == 0 {
		p.f("\nThe program registered no memory (io_uring buffers, libibverbs).\n")
	} else {
		p.f("\nRegistrations: %d of %s in %s; %d deregistered in %s; at most %s at once; %d uses; %d failed\n",
			g.Registrations, size(g.RegisteredBytes), duration(g.RegisterSeconds), g.Deregistrations, duration(g.DeregisterSeconds),
			size(g.MostBytes), g.Uses, g.RegisterFailed)
	}
	if r.Uses.Count > 0 {
		p.f("Uses of buffers: %d of %s (%s)\n", r.Uses.Count, size(r.Uses.Bytes), r.Uses.Rule)
	}
}

func (p *printer) windows(r *Result) {
	if r.Registering.Registrations == 0 {
		return
	}
	if r.Stale.Windows == 0 {
		p.f("No stale windows: no memory was changed while it was registered.\n")
		return
	}
	p.f("\nSTALE: memory was changed %s while it was registered; %s used again afterwards.\n",
		plural(int(r.Stale.Windows), "time", "times"), plural(int(r.Stale.UsedAgain), "was", "were"))
	for _, w := range r.StaleWindows[:min(textWindows, len(r.StaleWindows))] {
		used := "not used again"
		if w.UsedAgain {
			used = fmt.Sprintf("used %s afterwards", plural(int(w.Uses), "time", "times"))
		}
		p.f("  registration %d: %s of %s at %#x, by thread %d, after %s; %s\n",
			w.Registration, w.Operation, size(w.Length), w.Start, w.TID, duration(w.At), used)
		p.f("    changed at\n")
		p.stack("      ", w.Stack)
		p.f("    registered at\n")
		p.stack("      ", w.RegistrationStack)
		if w.UsedAgain && len(w.UseStack) > 0 {
			p.f("    used at\n")
			p.stack("      ", w.UseStack)
		}
	}
	if n := len(r.StaleWindows) - textWindows; n > 0 {
		p.f("  … and %d more\n", n)
	}
}

func (p *printer) rest(r *Result) {
	o := r.Overhead
	p.f("\n")
	switch {
	case o.Measured && o.ProgramSeconds > 0:
		p.f("Profiling took %s in BPF programs (%.1f %% of the program's %s of processor time) and %s in pindown.\n",
			duration(o.Seconds), 100*o.Share, duration(o.ProgramSeconds), duration(o.ReaderSeconds))
	case o.Measured:
		p.f("Profiling took %s in BPF programs and %s in pindown.\n", duration(o.Seconds), duration(o.ReaderSeconds))
	default:
		p.f("Profiling took %s in pindown; the BPF programs' time wasn't measured.\n", duration(o.ReaderSeconds))
	}
	if o.MachineSeconds > 2*o.Seconds && o.MachineSeconds > 0.001 {
		p.f("For all of the machine's system calls the BPF programs took %s.\n", duration(o.MachineSeconds))
	}
	if text := r.lost(); text != "" {
		p.f("Lost: %s\n", text)
	}
	for _, n := range r.Notes {
		p.f("Note: %s\n", n)
	}
}

// lost says what is missing, and of what; nothing if nothing is.
func (r *Result) lost() string {
	l := r.Lost
	if l == (Lost{}) {
		return ""
	}
	s := fmt.Sprintf("%d events, %d stacks, %d tasks, %d mappings.", l.Events, l.Stacks, l.Tasks, l.Mappings)
	switch {
	case l.Tasks > 0:
		s += " Nothing is known of the calls of tasks that were lost."
	case l.Events > 0:
		s += " Calls, failures, bytes and times of operations are complete all the same; all else is of the events that are left: a larger --buffer loses fewer."
	}
	return s
}

func size(n uint64) string { return report.Bytes.Format(float64(n)) }

func duration(seconds float64) string { return report.Seconds.Format(seconds) }

// FormatSize formats a number of bytes for people.
func FormatSize(n uint64) string { return size(n) }
