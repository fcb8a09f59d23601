package bench

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"runtime"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/pindown/pindown/internal/plural"
	"github.com/pindown/pindown/internal/sys"
)

// Result is one row.
type Result struct {
	Workload Workload `json:"workload"`
	Regions  int      `json:"regions"`
	Threads  int      `json:"threads"`
	Pattern  string   `json:"pattern"`
	Impl     string   `json:"impl"`
	// Monitor is that of the cache; "" for peers.
	Monitor string `json:"monitor,omitempty"`
	// NsPerOp is the time that one thread spends on one operation, the median
	// of the rounds; OpsPerSecond is the rate of all threads together. Both are
	// zero in rows about memory.
	NsPerOp      float64 `json:"ns_per_op"`
	OpsPerSecond float64 `json:"ops_per_second"`
	// Samples are NsPerOp by round; zero where the round gave no figure.
	Samples []float64 `json:"samples_ns,omitempty"`
	// P50, P99 and Max are of single operations, the clock's own cost included,
	// where these were timed one by one.
	P50 float64 `json:"p50_ns,omitempty"`
	P99 float64 `json:"p99_ns,omitempty"`
	Max float64 `json:"max_ns,omitempty"`
	// BytesPerRegion is in rows about memory.
	BytesPerRegion float64 `json:"bytes_per_region,omitempty"`
}

// Ratio compares two rows, round by round.
type Ratio struct {
	Workload Workload `json:"workload"`
	Regions  int      `json:"regions"`
	Pattern  string   `json:"pattern"`
	// Threads is the number of them; 0 if it is what is compared.
	Threads int `json:"threads,omitempty"`
	// Of is divided by To: names of implementations, or of what else differs.
	Of string `json:"of"`
	To string `json:"to"`
	// Quantity says of what: "ns_per_op", "p99_ns" or "ops_per_second".
	Quantity string    `json:"quantity"`
	Median   float64   `json:"median"`
	Pairs    []float64 `json:"pairs"`
	// Bound is what the project means to achieve, and Met whether it does.
	Bound string `json:"bound,omitempty"`
	Met   *bool  `json:"met,omitempty"`
}

// Report is what a run found.
type Report struct {
	Go       string        `json:"go"`
	OS       string        `json:"os"`
	Arch     string        `json:"arch"`
	CPU      string        `json:"cpu"`
	CPUs     int           `json:"cpus"`
	Kernel   string        `json:"kernel"`
	Load     string        `json:"load"` // at the beginning
	Monitor  string        `json:"monitor"`
	Duration time.Duration `json:"duration_ns"`
	Rounds   int           `json:"rounds"`
	Seed     uint64        `json:"seed"`
	// ClockNs is what a look at the clock costs.
	ClockNs float64 `json:"clock_ns"`

	Results []Result `json:"results"`
	Ratios  []Ratio  `json:"ratios"`
	// Notes say what was left out, and why.
	Notes []string `json:"notes,omitempty"`
}

func newReport(o *Options) *Report {
	return &Report{
		Go: runtime.Version(), OS: runtime.GOOS, Arch: runtime.GOARCH, CPUs: runtime.NumCPU(),
		CPU: cpuModel(), Kernel: sys.Release(), Load: load(),
		Monitor: o.Monitor.Name, Duration: o.Duration, Rounds: o.Rounds, Seed: o.Seed,
		ClockNs: clockCost(),
		Results: []Result{}, Ratios: []Ratio{},
	}
}

func (r *Report) note(format string, args ...any) {
	if n := fmt.Sprintf(format, args...); !slices.Contains(r.Notes, n) {
		r.Notes = append(r.Notes, n)
	}
}

// WriteJSON writes the report as one object.
func (r *Report) WriteJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	if err := e.Encode(r); err != nil {
		return fmt.Errorf("write JSON: %w", err)
	}
	return nil
}

// WriteText writes tables for people.
func (r *Report) WriteText(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%s, %s, Linux %s, %s, monitor %s, load %s\n%s of %v; times are medians, a look at the clock costs %.0f ns\n\n",
		r.CPU, plural.Of(r.CPUs, "CPU"), r.Kernel, r.Go, r.Monitor, r.Load, plural.Of(r.Rounds, "round"), r.Duration, r.ClockNs)
	rows := [][]string{{"WORKLOAD", "PATTERN", "REGIONS", "THREADS", "IMPL", "NS/OP", "M/S", "SPREAD", "P50", "P99", "MAX", "BYTES/REGION"}}
	for _, x := range r.Results {
		rows = append(rows, []string{
			string(x.Workload), x.Pattern, fmt.Sprint(x.Regions), fmt.Sprint(x.Threads), x.Impl,
			figure(x.NsPerOp), figure(x.OpsPerSecond / 1e6), spread(x.Samples),
			figure(x.P50), figure(x.P99), figure(x.Max), figure(x.BytesPerRegion),
		})
	}
	err := table(&b, rows)
	if len(r.Ratios) > 0 {
		b.WriteByte('\n')
		rows := [][]string{{"RATIO", "OF", "TO", "REGIONS", "THREADS", "MEDIAN", "RANGE", "AIM", ""}}
		for _, x := range r.Ratios {
			threads, met := "", ""
			if x.Threads > 0 {
				threads = fmt.Sprint(x.Threads)
			}
			if x.Met != nil {
				met = map[bool]string{true: "met", false: "NOT MET"}[*x.Met]
			}
			rows = append(rows, []string{
				fmt.Sprintf("%s %s %s", x.Workload, x.Pattern, x.Quantity), x.Of, x.To, fmt.Sprint(x.Regions), threads,
				fmt.Sprintf("%.3f", x.Median), fmt.Sprintf("%.3g–%.3g", slices.Min(x.Pairs), slices.Max(x.Pairs)), x.Bound, met,
			})
		}
		err = errors.Join(err, table(&b, rows))
	}
	if len(r.Notes) > 0 {
		fmt.Fprintf(&b, "\nNot measured:\n  %s\n", strings.Join(r.Notes, "\n  "))
	}
	if err == nil {
		_, err = io.WriteString(w, b.String())
	}
	if err != nil {
		return fmt.Errorf("write table: %w", err)
	}
	return nil
}

// table writes rows, the first of which is the heading, without the columns that
// have nothing but it.
func table(b *strings.Builder, rows [][]string) error {
	var text strings.Builder
	tw := tabwriter.NewWriter(&text, 0, 8, 2, ' ', 0)
	for _, row := range rows {
		var cells []string
		for i, cell := range row {
			if len(rows) == 1 || slices.ContainsFunc(rows[1:], func(r []string) bool { return r[i] != "" }) {
				cells = append(cells, cell)
			}
		}
		fmt.Fprintln(tw, strings.Join(cells, "\t"))
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	for line := range strings.Lines(text.String()) {
		b.WriteString(strings.TrimRight(line, " \n") + "\n")
	}
	return nil
}

// WriteBenchfmt writes lines in the format of Go benchmarks, one for each round,
// for benchstat.
func (r *Report) WriteBenchfmt(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "goos: %s\ngoarch: %s\npkg: github.com/pindown/pindown\ncpu: %s\nmonitor: %s\n", r.OS, r.Arch, r.CPU, r.Monitor)
	for _, x := range r.Results {
		name := fmt.Sprintf("Benchmark%s%s/pattern=%s/regions=%d/threads=%d/impl=%s",
			strings.ToUpper(string(x.Workload[:1])), x.Workload[1:], x.Pattern, x.Regions, x.Threads, x.Impl)
		// Names end where a dash and a number would say GOMAXPROCS.
		if x.BytesPerRegion > 0 {
			fmt.Fprintf(&b, "%s\t1\t%g B/region\n", name, x.BytesPerRegion)
			continue
		}
		for _, s := range measured(x.Samples) {
			n := max(math.Round(float64(r.Duration)/s), 1)
			fmt.Fprintf(&b, "%s\t%.0f\t%g ns/op", name, n, s)
			if x.P99 > 0 {
				fmt.Fprintf(&b, "\t%g p50-ns\t%g p99-ns", x.P50, x.P99)
			}
			b.WriteByte('\n')
		}
	}
	if _, err := io.WriteString(w, b.String()); err != nil {
		return fmt.Errorf("write benchmark lines: %w", err)
	}
	return nil
}

// figure formats a number to about three digits; nothing for zero.
func figure(v float64) string {
	switch {
	case v == 0:
		return ""
	case v < 10:
		return fmt.Sprintf("%.2f", v)
	case v < 1000:
		return fmt.Sprintf("%.1f", v)
	default:
		return fmt.Sprintf("%.0f", v)
	}
}

// spread is how far the rounds lie apart, by the median.
func spread(samples []float64) string {
	samples = measured(samples)
	m := median(samples)
	if len(samples) < 2 || m == 0 {
		return ""
	}
	return fmt.Sprintf("%.0f %%", 100*(slices.Max(samples)-slices.Min(samples))/m)
}

// measured returns the samples without those that gave no figure.
func measured(samples []float64) []float64 {
	return slices.DeleteFunc(slices.Clone(samples), func(s float64) bool { return s <= 0 })
}

func median(v []float64) float64 {
	if len(v) == 0 {
		return 0
	}
	s := slices.Sorted(slices.Values(v))
	return (s[(len(s)-1)/2] + s[len(s)/2]) / 2
}
