package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"syscall"
	"time"

	"github.com/spf13/pflag" //nolint:depguard // this module is a command
	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/bench/baseline"
	"github.com/pindown/pindown/bench/ucx"
	"github.com/pindown/pindown/internal/bench"
	"github.com/pindown/pindown/internal/outfile"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	err := run(ctx, os.Args[1:], os.Stdout)
	if err == nil || errors.Is(err, pflag.ErrHelp) {
		return
	}
	if ctx.Err() != nil && errors.Is(err, ctx.Err()) {
		err = errors.New("interrupted")
	}
	fmt.Fprintln(os.Stderr, "bench:", err)
	os.Exit(1) //nolint:forbidigo // this is main
}

func run(ctx context.Context, args []string, w io.Writer) error {
	var o bench.Options
	var workloads []string
	var file string
	f := pflag.NewFlagSet("bench", pflag.ContinueOnError)
	f.StringSliceVar(&workloads, "workload", []string{"hit", "miss", "invalidate", "memory"}, "workloads to run")
	f.IntSliceVar(&o.Regions, "regions", nil, "numbers of resident regions (default 1,1000,10000,100000,1000000)")
	f.IntSliceVar(&o.Threads, "threads", nil, "numbers of threads, of 1 and 2 (default both)")
	f.StringSliceVar(&o.Patterns, "pattern", []string{"uniform", "same", "different", "random", "room", "evict",
		"operation", "acquire-after", "acquire-during", "hit-during", "reclaim", "total", "heap"}, "patterns to run")
	f.StringSliceVar(&o.Impls, "impl", nil, "implementations to run (default all)")
	f.DurationVar(&o.Duration, "duration", 10*time.Millisecond, "time of one measurement in one round")
	f.IntVar(&o.Rounds, "rounds", 25, "number of rounds, and so of pairs")
	f.BoolVar(&o.Short, "short", false, "measure little and briefly")
	f.StringVar(&file, "json", "", "file to write the rows to, as JSON")
	if err := f.Parse(args); err != nil {
		return err
	}
	if o.Short {
		if !f.Changed("duration") {
			o.Duration = 0
		}
		if !f.Changed("rounds") {
			o.Rounds = 0
		}
	}
	for _, name := range workloads {
		o.Workloads = append(o.Workloads, bench.Workload(name))
	}
	o.Peers = []bench.Factory{ucx.Factory(), baseline.MutexBTree(), baseline.PerUse()}
	if err := o.Validate(); err != nil {
		return err
	}
	if _, err := unix.IoctlGetTermios(int(os.Stderr.Fd()), unix.TCGETS); err == nil {
		o.Progress = func(what string) { fmt.Fprintf(os.Stderr, "\r\033[Kbench: %s", what) }
		defer fmt.Fprint(os.Stderr, "\r\033[K")
	}
	r, err := bench.Run(ctx, &o)
	if err != nil {
		return err
	}
	r.Notes = slices.Insert(r.Notes, 0, "UCX "+ucx.Version()+" is libucs from the system")
	if file != "" {
		if err := outfile.Write(file, r.WriteJSON); err != nil {
			return fmt.Errorf("write rows: %w", err)
		}
	}
	if o.Progress != nil {
		fmt.Fprint(os.Stderr, "\r\033[K")
	}
	if err := r.WriteText(w); err != nil {
		return err
	}
	if file != "" {
		fmt.Fprintf(w, "\nrows written to %s\n", file)
	}
	return nil
}
