package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/pindown/pindown/internal/bench"
	"github.com/pindown/pindown/monitor"
)

type benchOptions struct {
	workloads []string
	regions   []int
	threads   []int
	patterns  []string
	impls     []string
	duration  time.Duration
	rounds    int
	short     bool
	seed      uint64
	monitor   string
	json      bool
	benchfmt  bool
	calibrate bool
}

func newBenchCommand() *cobra.Command {
	var o benchOptions
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Measure what the cache itself costs",
		Long: `Bench measures the cache with a device that does nothing, on reserved addresses
without memory behind them:

  hit         acquire and release of a resident region: 16 of them over and over
              (hot), all alike (uniform), some more often (zipf), or a page of a
              larger region (…-sub); with 1 and 2 threads on the same region,
              on one region each, and at random
  miss        acquire and release of what isn't resident, with room for it and
              where another region must be evicted
  restamp     the first hit after a VM operation on another region, and the first
              acquire after one on the region itself
  invalidate  one VM operation over all regions: the operation itself, the acquire
              right after it, acquires and hits meanwhile, and the time until all
              are deregistered in the background
  churn       single hits, with the other CPU quiet, mapping and unmapping
              unrelated memory, and changing a watched region
  memory      bytes for each idle region at the largest number of regions

Times are medians of rounds in which everything is measured in turn. NS/OP is the
time that one thread spends on an operation, M/S what all threads do together, in
millions a second. P50, P99 and MAX are of operations timed one by one and include
a look at the clock. The ratios are taken round by round; where the project has an
aim it is printed beside.

The monitor is "manual" unless another one is named: the program says what it
changes, which costs nothing else. With a monitor that watches the kernel, the
operations are real ones. ^C ends it early; what was measured until then is shown.`,
		Example: `  pindown bench --short
  pindown bench --workload hit --regions 1,1000,1000000 --pattern uniform
  pindown bench --workload churn --monitor auto
  pindown bench --json | jq -c '.results[] | [.workload, .pattern, .regions, .ns_per_op]'
  pindown bench --workload hit --benchfmt > new.txt && benchstat old.txt new.txt
  pindown bench --calibrate > here.json   # for pindown replay --model-file here.json`,
		Args: usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return o.run(cmd)
		},
	}
	o.addFlags(cmd.Flags())
	var workloads, patterns []string
	for _, w := range bench.Workloads() {
		workloads = append(workloads, string(w))
		patterns = append(patterns, bench.Patterns(w)...)
	}
	slices.Sort(patterns)
	for flag, values := range map[string][]string{
		"workload": workloads, "pattern": slices.Compact(patterns), "monitor": benchMonitorNames(),
	} {
		// The names are fixed: no error is possible.
		_ = cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp))
	}
	return cmd
}

func (o *benchOptions) addFlags(f *pflag.FlagSet) {
	f.StringSliceVar(&o.workloads, "workload", nil, "`workloads` to run (default all)")
	f.IntSliceVar(&o.regions, "regions", nil, "`numbers` of resident regions (default 1,1000,10000,100000,1000000)")
	f.IntSliceVar(&o.threads, "threads", nil, "`numbers` of threads, of 1 and 2 (default both)")
	f.StringSliceVar(&o.patterns, "pattern", nil, "`patterns` to run (default all)")
	f.StringSliceVar(&o.impls, "impl", nil, "`implementations` to run (default all)")
	f.DurationVar(&o.duration, "duration", 0, "time of one measurement in one round (default 50ms)")
	f.IntVar(&o.rounds, "rounds", 0, "number of rounds (default 7)")
	f.BoolVar(&o.short, "short", false, "measure little and briefly: at most 10000 regions, 3 rounds of 5ms, and no verdict on aims")
	f.Uint64Var(&o.seed, "seed", 1, "seed of the random choices")
	f.StringVar(&o.monitor, "monitor", "manual", "monitor of the cache: "+strings.Join(benchMonitorNames(), ", "))
	f.BoolVar(&o.benchfmt, "benchfmt", false, "write Go benchmark lines, for benchstat")
	f.BoolVar(&o.calibrate, "calibrate", false, "only measure registrations with io_uring, and write a cost model for replay --model-file")
	jsonFlag(f, &o.json)
}

// benchMonitorNames returns what --monitor takes.
func benchMonitorNames() []string {
	names := slices.DeleteFunc(monitorNames(), func(n string) bool { return n == "none" })
	return append([]string{"manual"}, names...)
}

// errNoMonitor marks an error as that of a machine without the monitor.
var errNoMonitor = errors.New("monitor not usable")

// benchMonitor returns the monitor of that name; nil for the manual one.
func benchMonitor(ctx context.Context, name string) (*bench.Monitor, error) {
	if name == "manual" {
		return nil, nil
	}
	if !slices.Contains(benchMonitorNames(), name) {
		return nil, usageError{fmt.Errorf("--monitor %s: one of %s", name, strings.Join(benchMonitorNames(), ", "))}
	}
	openers := monitorOpeners(name)
	return &bench.Monitor{Name: name, Open: func() (monitor.Monitor, error) {
		m, why := tryMonitors(ctx, openers)
		if m == nil {
			return nil, fmt.Errorf("%w: --monitor %s: %s", errNoMonitor, name, why)
		}
		return m, nil
	}}, nil
}

func (o *benchOptions) run(cmd *cobra.Command) error {
	if o.calibrate {
		m, err := machineModel(cmd.Context())
		if err != nil {
			return err
		}
		return writeJSON(cmd.OutOrStdout(), m)
	}
	if o.json && o.benchfmt {
		return usageError{errors.New("--json and --benchfmt exclude each other")}
	}
	if cmd.Flags().Changed("rounds") && o.rounds < 1 {
		return usageError{fmt.Errorf("--rounds %d: at least 1", o.rounds)}
	}
	if cmd.Flags().Changed("duration") && o.duration <= 0 {
		return usageError{fmt.Errorf("--duration %v: more than nothing", o.duration)}
	}
	b := bench.Options{
		Regions: o.regions, Threads: o.threads, Patterns: o.patterns, Impls: o.impls,
		Duration: o.duration, Rounds: o.rounds, Short: o.short, Seed: o.seed,
	}
	for _, w := range o.workloads {
		b.Workloads = append(b.Workloads, bench.Workload(w))
	}
	var err error
	if b.Monitor, err = benchMonitor(cmd.Context(), o.monitor); err != nil {
		return err
	}
	if err := b.Validate(); err != nil {
		return badOptions(err, bench.ErrOptions)
	}
	bar := &progress{w: cmd.ErrOrStderr()}
	if terminal(bar.w) {
		b.Progress = func(what string) { bar.line("bench: " + what) }
	}
	r, early := bench.Run(cmd.Context(), &b)
	bar.line("")
	if errors.Is(early, bench.ErrOptions) {
		return badOptions(early, bench.ErrOptions)
	}
	if r == nil {
		return early
	}
	write := r.WriteText
	switch {
	case o.json:
		write = r.WriteJSON
	case o.benchfmt:
		write = r.WriteBenchfmt
	}
	if err := write(cmd.OutOrStdout()); err != nil {
		return err
	}
	return early
}
