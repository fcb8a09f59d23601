// Profiles makes the figures of docs/vm-activity.md anew: it runs each workload
// under the profiler a few times, replays the recordings, and writes the tables
// into the document, between its markers, and all figures to a file of JSON.
package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/iouring"
	"github.com/pindown/pindown/internal/calibrate"
	"github.com/pindown/pindown/internal/profile"
	"github.com/pindown/pindown/internal/replay"
	"github.com/pindown/pindown/internal/sys"
	"github.com/pindown/pindown/internal/workloads"
	"github.com/pindown/pindown/trace"
)

type options struct {
	runs, scale int
	only        string
	doc, data   string
	keep        string
	render      bool
	models      []replay.Model
}

// measured is all figures, as they are in the file of data.
type measured struct {
	Kernel    string         `json:"kernel"`
	Arch      string         `json:"arch"`
	CPUs      int            `json:"cpus"`
	Go        string         `json:"go"`
	Models    []replay.Model `json:"models"`
	Workloads []*figures     `json:"workloads"`
}

func main() {
	var o options
	flag.IntVar(&o.runs, "runs", 5, "how often each workload runs")
	flag.IntVar(&o.scale, "scale", 5, "about how many seconds a run takes")
	flag.StringVar(&o.only, "only", "", "the workload of this `name` alone, which writes no document")
	flag.StringVar(&o.doc, "doc", "docs/vm-activity.md", "the document")
	flag.StringVar(&o.data, "data", "docs/vm-activity.json", "all figures")
	flag.StringVar(&o.keep, "keep", "", "keep the recordings in this `directory`")
	flag.BoolVar(&o.render, "render", false, "measure nothing: make the tables from the file of figures")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := o.run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "profiles:", err)
		stop()
		os.Exit(1) //nolint:forbidigo,gocritic // This is a main.
	}
}

// figures are what the document shows of a workload, one value for each run.
type figures struct {
	Name     string `json:"name"`
	What     string `json:"what"`
	UseBytes uint64 `json:"use_bytes"`
	// Seconds, and the others below, have a value for each run.
	Seconds    []float64 `json:"seconds"`
	Processes  []float64 `json:"processes"`
	Operations []float64 `json:"operations"`
	Changes    []float64 `json:"changes"`
	// Share is the time in VM operations of the time that there was.
	Share    []float64            `json:"share_of_time"`
	Uses     []float64            `json:"uses"`
	UseSize  []float64            `json:"use_bytes_sum"`
	Lost     []float64            `json:"lost"`
	Overhead []float64            `json:"overhead_share"`
	Calls    map[string][]float64 `json:"calls"`
	// Requests and the next are of policy drop: Registered of them, Reclaimed
	// since memory changed, Replaced since ranges overlap or for room.
	Requests   []float64         `json:"requests"`
	HitRate    []float64         `json:"hit_rate"`
	Registered []float64         `json:"registered"`
	Reclaimed  []float64         `json:"reclaimed"`
	Replaced   []float64         `json:"replaced"`
	Pinned     []float64         `json:"peak_pinned_bytes"`
	Models     map[string]*split `json:"models"`
}

// split is where the time goes under a cost model, by policy and part, in
// seconds.
type split map[string]map[string][]float64

func (o *options) run(ctx context.Context) error {
	var all *measured
	var err error
	if o.render {
		all, err = o.load()
	} else {
		all, err = o.measureAll(ctx)
	}
	if err != nil {
		return err
	}
	var tables bytes.Buffer
	write(&tables, all)
	if o.only != "" {
		_, err := tables.WriteTo(os.Stdout)
		return err
	}
	return replaceFigures(o.doc, tables.Bytes())
}

func (o *options) load() (*measured, error) {
	b, err := os.ReadFile(o.data)
	if err != nil {
		return nil, err
	}
	var all measured
	return &all, json.Unmarshal(b, &all)
}

func (o *options) measureAll(ctx context.Context) (_ *measured, err error) {
	if o.models, err = costModels(ctx); err != nil {
		return nil, err
	}
	var major, minor int
	if _, err := fmt.Sscanf(sys.Release(), "%d.%d", &major, &minor); err != nil {
		return nil, err
	}
	kernel := fmt.Sprintf("Linux %d.%d", major, minor)
	for i := range o.models {
		// The rest of the name is of this machine alone.
		m := &o.models[i]
		m.Source = strings.ReplaceAll(m.Source, "Linux "+sys.Release(), kernel)
	}
	all := &measured{
		Kernel: kernel, Arch: runtime.GOARCH, CPUs: runtime.NumCPU(), Go: runtime.Version(), Models: o.models,
	}
	for _, w := range workloads.All() {
		if o.only != "" && w.Name != o.only {
			continue
		}
		f, err := o.measure(ctx, &w)
		if errors.Is(err, workloads.ErrMissing) {
			fmt.Fprintf(os.Stderr, "%s: left out: %v\n", w.Name, err)
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("workload %s: %w", w.Name, err)
		}
		all.Workloads = append(all.Workloads, f)
	}
	if o.only != "" {
		return all, nil
	}
	b, err := json.MarshalIndent(all, "", " ")
	if err != nil {
		return nil, err
	}
	return all, os.WriteFile(o.data, append(b, '\n'), 0o644) //nolint:gosec // It is for everybody.
}

// costModels returns the presets, and this machine's if it can be measured.
func costModels(ctx context.Context) (_ []replay.Model, err error) {
	models := replay.Presets()
	dev, err := iouring.Open(nil)
	if errors.Is(err, device.ErrNotSupported) {
		return models, nil
	}
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, dev.Close()) }()
	// One measurement may be disturbed.
	const times = 5
	var here []replay.Model
	for range times {
		m, err := calibrate.Run(ctx, dev, nil)
		if errors.Is(err, calibrate.ErrNotSupported) {
			return models, nil
		}
		if err != nil {
			return nil, err
		}
		here = append(here, m)
	}
	return append(models, middle(here)), nil
}

// middle returns a model of the middle of each figure. A figure that some
// measurements had to assume is that of the others, and is assumed if there are
// none.
func middle(here []replay.Model) replay.Model {
	m := here[0]
	measured := slices.DeleteFunc(slices.Clone(here), func(m replay.Model) bool { return m.Assumed != "" })
	for _, c := range []struct {
		field func(*replay.Model) *float64
		of    []replay.Model
	}{
		{func(m *replay.Model) *float64 { return &m.Register.Call }, here},
		{func(m *replay.Model) *float64 { return &m.Register.Page }, here},
		{func(m *replay.Model) *float64 { return &m.Deregister.Call }, here},
		{func(m *replay.Model) *float64 { return &m.Deregister.Page }, here},
		{func(m *replay.Model) *float64 { return &m.Update.Call }, here},
		{func(m *replay.Model) *float64 { return &m.Update.Page }, here},
		{func(m *replay.Model) *float64 { return &m.Hit }, here},
		{func(m *replay.Model) *float64 { return &m.Touch }, measured},
	} {
		var v []float64
		for _, x := range c.of {
			v = append(v, *c.field(&x))
		}
		if len(v) > 0 {
			*c.field(&m) = median(v)
		}
	}
	var sources []string
	for _, x := range here {
		if !slices.Contains(sources, x.Source) {
			sources = append(sources, x.Source)
		}
	}
	m.Source = fmt.Sprintf("of each figure the middle one of %d measurements, made before those of the programs; %s", len(here), strings.Join(sources, "; or "))
	if len(measured) > 0 {
		m.Assumed = ""
	}
	if n := len(here) - len(measured); n > 0 && len(measured) > 0 {
		m.Source += fmt.Sprintf(" (in %d of the measurements)", len(measured))
	}
	return m
}

func (o *options) measure(ctx context.Context, w *workloads.Workload) (_ *figures, err error) {
	dir, err := os.MkdirTemp("", "workload")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	if err := os.Chmod(dir, 0o755); err != nil { //nolint:gosec // Another user may have to come in.
		return nil, err
	}
	p, err := w.Prepare(ctx, dir, o.scale)
	if err != nil {
		return nil, err
	}
	for _, e := range p.Env {
		name, value, _ := strings.Cut(e, "=")
		if err := os.Setenv(name, value); err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, os.Unsetenv(name)) }()
	}
	f := &figures{Name: w.Name, What: w.What, UseBytes: w.UseBytes, Models: map[string]*split{}, Calls: map[string][]float64{}}
	for i := range o.runs {
		if err := o.once(ctx, w, p, f, i); err != nil {
			return nil, err
		}
		fmt.Fprintf(os.Stderr, "%s: run %d of %d: %.1f s, %.0f operations, %.0f uses\n", w.Name, i+1, o.runs, last(f.Seconds), last(f.Operations), last(f.Uses))
	}
	return f, nil
}

func last(v []float64) float64 { return v[len(v)-1] }

// once runs a workload once and adds to its figures.
func (o *options) once(ctx context.Context, w *workloads.Workload, p *workloads.Prepared, f *figures, i int) (err error) {
	path := filepath.Join(cmp.Or(o.keep, os.TempDir()), fmt.Sprintf("%s-%d.pdtrace", strings.ReplaceAll(w.Name, " ", "-"), i))
	rec, err := os.Create(path)
	if err != nil {
		return err
	}
	defer func() {
		err = errors.Join(err, rec.Close())
		if o.keep == "" {
			err = errors.Join(err, os.Remove(path))
		}
	}()
	var out bytes.Buffer
	res, err := profile.Run(ctx, &profile.Options{
		Command: p.Command, Stdout: &out, Stderr: &out, UseBytes: w.UseBytes, Trace: rec, RingBytes: 64 << 20, Tool: "profiles",
	})
	if err != nil {
		return err
	}
	if res.ExitCode != 0 {
		return fmt.Errorf("exit code %d: %s", res.ExitCode, out.Bytes())
	}
	if _, err := rec.Seek(0, io.SeekStart); err != nil {
		return err
	}
	r, err := trace.NewReader(rec)
	if err != nil {
		return err
	}
	rep, err := replay.Run(ctx, r, &replay.Options{Models: o.models})
	if err != nil {
		return err
	}
	f.add(res, rep)
	return nil
}

func (f *figures) add(res *profile.Result, rep *replay.Result) {
	var operations, changes uint64
	var seconds float64
	for name, o := range res.Operations {
		operations += o.Count
		changes += o.Changes
		seconds += o.Seconds
		f.Calls[name] = append(f.Calls[name], float64(o.Count))
	}
	f.Seconds = append(f.Seconds, res.Seconds)
	f.Processes = append(f.Processes, float64(res.Processes))
	f.Operations = append(f.Operations, float64(operations))
	f.Changes = append(f.Changes, float64(changes))
	f.Share = append(f.Share, seconds/res.Seconds)
	f.Uses = append(f.Uses, float64(res.Uses.Count))
	f.UseSize = append(f.UseSize, float64(res.Uses.Bytes))
	f.Lost = append(f.Lost, float64(res.Lost.Events))
	f.Overhead = append(f.Overhead, res.Overhead.Share)
	for _, p := range rep.Policies {
		name := p.Policy.String()
		if p.Policy == replay.Drop {
			f.HitRate = append(f.HitRate, p.HitRate)
			f.Pinned = append(f.Pinned, float64(p.PeakBytes))
			f.Requests = append(f.Requests, float64(p.Requests))
			f.Registered = append(f.Registered, float64(p.Register.Count))
			f.Reclaimed = append(f.Reclaimed, float64(p.Reclaimed.Count))
			f.Replaced = append(f.Replaced, float64(p.Deregister.Count))
		}
		for _, t := range p.Times {
			s := f.Models[t.Model]
			if s == nil {
				s = &split{}
				f.Models[t.Model] = s
			}
			parts := (*s)[name]
			if parts == nil {
				parts = map[string][]float64{}
				(*s)[name] = parts
			}
			for part, v := range map[string]float64{
				"register": t.Register, "update": t.Update, "deregister": t.Deregister, "invalidate": t.Invalidate,
				"hit": t.Hit, "wait": t.Wait, "total": t.Total, "beside": t.Beside,
			} {
				parts[part] = append(parts[part], v)
			}
		}
	}
}

// Markers in the document.
const (
	begin = "<!-- figures: begin (made by internal/workloads/profiles) -->\n"
	end   = "<!-- figures: end -->\n"
)

func replaceFigures(path string, tables []byte) error {
	doc, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	before, rest, ok := bytes.Cut(doc, []byte(begin))
	_, after, ok2 := bytes.Cut(rest, []byte(end))
	if !ok || !ok2 {
		return fmt.Errorf("%s has no place for figures", path)
	}
	return os.WriteFile(path, slices.Concat(before, []byte(begin), tables, []byte(end), after), 0o644) //nolint:gosec // It is for everybody.
}

func write(w io.Writer, data *measured) {
	all, models := data.Workloads, data.Models
	var costs strings.Builder
	for _, m := range models {
		fmt.Fprintf(&costs, "- **%s**: registering %.3g µs and %.3g ns a page, deregistering %.3g µs and %.3g ns. %s. Assumed: %s.\n",
			m.Name, m.Register.Call/1000, m.Register.Page, m.Deregister.Call/1000, m.Deregister.Page, m.Source, cmp.Or(m.Assumed, "nothing"))
	}
	runs := 0
	for _, f := range all {
		runs = max(runs, len(f.Seconds))
	}
	fmt.Fprintf(w, "\nMedian of %d runs, in parentheses the least and the most. %s, %s, %d CPUs, %s.\n\n", runs, data.Kernel, data.Arch, data.CPUs, data.Go)
	fmt.Fprintln(w, "### What the programs do")
	fmt.Fprintln(w, "\n| Program | Seconds | VM operations/s | that change pages/s | Time in them | Uses/s | Mean use | Profiling |")
	fmt.Fprintln(w, "|---|---:|---:|---:|---:|---:|---:|---:|")
	for _, f := range all {
		fmt.Fprintf(w, "| %s | %s | %s | %s | %s | %s | %s | %s |\n", f.Name, spread(f.Seconds, "%.1f"),
			spread(ratio(f.Operations, f.Seconds), "%.0f"), spread(ratio(f.Changes, f.Seconds), "%.0f"), percent(f.Share),
			spread(ratio(f.Uses, f.Seconds), "%.0f"), profile.FormatSize(uint64(median(f.UseSize)/max(1, median(f.Uses)))), percent(f.Overhead))
	}
	fmt.Fprintln(w, "\n| Program | Calls |\n|---|---|")
	for _, f := range all {
		names := slices.SortedFunc(maps.Keys(f.Calls), func(a, b string) int {
			return cmp.Or(cmp.Compare(median(f.Calls[b]), median(f.Calls[a])), cmp.Compare(a, b))
		})
		var calls []string
		for _, n := range names {
			calls = append(calls, fmt.Sprintf("%s %.0f", n, median(f.Calls[n])))
		}
		fmt.Fprintf(w, "| %s | %s |\n", f.Name, strings.Join(calls, ", "))
	}
	fmt.Fprintln(w, "\n### The cost models")
	fmt.Fprintf(w, "\n%s", costs.String())
	fmt.Fprintln(w, "\n### A cache for their transfers")
	fmt.Fprintln(w, "\nPolicy drop, at most 1 GiB and 65536 regions for each process. The columns in the middle count for 100 uses.")
	fmt.Fprintln(w, "\n| Program | Hit rate | Registered | Deregistered since memory changed | since ranges overlap, or for room | Pinned at most |")
	fmt.Fprintln(w, "|---|---:|---:|---:|---:|---:|")
	for _, f := range all {
		fmt.Fprintf(w, "| %s | %s | %s | %s | %s | %s |\n", f.Name, percent(f.HitRate), hundred(f.Registered, f.Requests),
			hundred(f.Reclaimed, f.Requests), hundred(f.Replaced, f.Requests), profile.FormatSize(uint64(median(f.Pinned))))
	}
	fmt.Fprintln(w, "\n### Where the time goes")
	fmt.Fprintln(w, `
Without a cache: what a use costs, and how much of that is deregistering. With a cache (policy drop): what a use costs the
program, and where that goes; what is deregistered beside the program, for each use; and the share of deregistering in what
the program would pay if the VM operations that change memory waited for it (policy drop-kernel).`)
	for _, m := range models {
		fmt.Fprintf(w, "\n#### %s\n\n", m.Name)
		fmt.Fprintln(w, "| Program | No cache: a use | deregister | Cache: a use | register | deregister | invalidate | hit | wait | Beside | Kernel side: deregister |")
		fmt.Fprintln(w, "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
		for _, f := range all {
			s := *f.Models[m.Name]
			none, drop, kernel := s[replay.PerUse.String()], s[replay.Drop.String()], s[replay.DropKernel.String()]
			fmt.Fprintf(w, "| %s | %s | %s | %s |", f.Name, micro(ratio(none["total"], f.Requests)),
				percent(ratio(none["deregister"], none["total"])), micro(ratio(drop["total"], f.Requests)))
			for _, part := range []string{"register", "deregister", "invalidate", "hit", "wait"} {
				fmt.Fprintf(w, " %s |", percent(ratio(drop[part], drop["total"])))
			}
			fmt.Fprintf(w, " %s | %s |\n", micro(ratio(drop["beside"], f.Requests)), percent(ratio(kernel["deregister"], kernel["total"])))
		}
	}
	fmt.Fprintln(w, "\n### What a cache leaves of the cost")
	fmt.Fprintln(w, `
The time that registrations cost the program with a cache, as a part of what they cost without one: policy drop, then lazy
(stale regions are found and deregistered when they are asked for), then update (a stale region's registration is pointed at
the new pages when it is asked for).`)
	fmt.Fprint(w, "\n| Program |")
	for _, m := range models {
		fmt.Fprintf(w, " %s |", m.Name)
	}
	fmt.Fprintf(w, "\n|---|%s\n", strings.Repeat("---:|", len(models)))
	for _, f := range all {
		fmt.Fprintf(w, "| %s |", f.Name)
		for _, m := range models {
			s := *f.Models[m.Name]
			var cells []string
			for _, p := range []replay.Policy{replay.Drop, replay.Lazy, replay.Update} {
				cells = append(cells, fmt.Sprintf("%.2f", median(ratio(s[p.String()]["total"], s[replay.PerUse.String()]["total"]))))
			}
			fmt.Fprintf(w, " %s |", strings.Join(cells, ", "))
		}
		fmt.Fprintln(w)
	}
	fmt.Fprintln(w)
}

// hundred formats how many there are for 100 of n.
func hundred(v, n []float64) string {
	r := ratio(v, n)
	for i := range r {
		r[i] *= 100
	}
	return spread(r, "%.1f")
}

func ratio(a, b []float64) []float64 {
	r := make([]float64, len(a))
	for i := range a {
		if b[i] != 0 {
			r[i] = a[i] / b[i]
		}
	}
	return r
}

func median(v []float64) float64 {
	s := slices.Sorted(slices.Values(v))
	if len(s) == 0 {
		return 0
	}
	return (s[len(s)/2] + s[(len(s)-1)/2]) / 2
}

// spread formats the median, the least and the most, which may be the same.
func spread(v []float64, format string) string {
	if len(v) == 0 {
		return "–"
	}
	m, lo, hi := fmt.Sprintf(format, median(v)), fmt.Sprintf(format, slices.Min(v)), fmt.Sprintf(format, slices.Max(v))
	if lo == hi {
		return m
	}
	return fmt.Sprintf("%s (%s–%s)", m, lo, hi)
}

func percent(v []float64) string {
	p := make([]float64, len(v))
	for i := range v {
		p[i] = 100 * v[i]
	}
	return spread(p, "%.1f") + " %"
}

func micro(v []float64) string {
	p := make([]float64, len(v))
	for i := range v {
		p[i] = 1e6 * v[i]
	}
	return spread(p, "%.2f") + " µs"
}
