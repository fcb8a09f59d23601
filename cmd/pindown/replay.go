package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/pindown/pindown/device/iouring"
	"github.com/pindown/pindown/internal/calibrate"
	"github.com/pindown/pindown/internal/demo"
	"github.com/pindown/pindown/internal/outfile"
	"github.com/pindown/pindown/internal/replay"
	"github.com/pindown/pindown/trace"
)

type replayOptions struct {
	replay     replay.Options
	maxBytes   size
	mergeBytes size
	minUse     size
	requests   string
	models     []string
	modelFiles []string
	calibrate  bool
	writeModel string
	json       bool
	html       string
}

func newReplayCommand() *cobra.Command {
	var o replayOptions
	cmd := &cobra.Command{
		Use:   "replay [flags] trace.pdtrace",
		Short: "What a registration cache would cost a recorded program",
		Long: `Replay reads a trace that pindown record (or profile --trace) wrote, from
standard input if it is "-", and simulates what the program would pay for
registrations of the buffers that it uses: without a cache, and with one under
several policies and cost models. The same trace and flags give the same output.

Policies:

  per-use      registers for each use, and deregisters after it
  lazy         a cache that finds out about stale regions when it is asked
               for them, and keeps them pinned until then
  drop         a cache that deregisters as soon as memory changes, beside the
               program (this project's)
  drop-kernel  the same, but the kernel deregisters inside of the munmap
  update       a cache that points the registration at the new pages when they
               are asked for

Columns: time in registering, updating, deregistering, in VM operations for the
monitor, in hits, and waiting for a registration on its way; the total, which the
program pays; what is deregistered beside it; and what is still registered when
processes end.

A transfer through a buffer that the program had registered itself (io_uring's
fixed buffers) asks for nothing: there its registration is the request.

The hit rate for every size of a cache is computed in one pass. Recommended limits
are the size that has 99 % of the hits that any has, and the most regions at once.

Costs are models: a call and its pages. --json and --html have their sources and
what is assumed. --calibrate measures this machine's io_uring and adds it as
"machine"; --write-model keeps that for other traces, as pindown bench
--calibrate writes it.`,
		Example: `  pindown record -- ./server && pindown replay server.pdtrace
  pindown replay server.pdtrace --html server.html --model ucx,connectx
  pindown replay server.pdtrace --calibrate --write-model here.json
  pindown replay server.pdtrace --model-file here.json --max-bytes 64M --json`,
		Args: usageArgs(cobra.RangeArgs(0, 1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return o.run(cmd, args)
		},
	}
	o.addFlags(cmd.Flags())
	// The names are fixed: no error is possible.
	_ = cmd.RegisterFlagCompletionFunc("model", cobra.FixedCompletions(replay.PresetNames(), cobra.ShellCompDirectiveNoFileComp))
	_ = cmd.RegisterFlagCompletionFunc("requests", cobra.FixedCompletions(requestNames(), cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

func requestNames() []string {
	return []string{replay.AllRequests.String(), replay.UsesOnly.String(), replay.RegistrationsOnly.String()}
}

func (o *replayOptions) addFlags(f *pflag.FlagSet) {
	f.StringSliceVar(&o.models, "model", nil, "cost `models`: "+strings.Join(replay.PresetNames(), ", ")+" (default all)")
	f.StringArrayVar(&o.modelFiles, "model-file", nil, "`file` with a cost model, as --write-model wrote it")
	f.BoolVar(&o.calibrate, "calibrate", false, "measure this machine and add it as a cost model")
	f.StringVar(&o.writeModel, "write-model", "", "`file` to write the measured model to; without a trace that is all")
	f.IntVar(&o.replay.MaxRegions, "max-regions", 65536, "`regions` in each process's cache")
	f.Var(&o.maxBytes, "max-bytes", "`size` of each process's cache (default 1G)")
	f.Var(&o.mergeBytes, "merge-bytes", "`size` up to which overlapping regions are merged, 0 for never (default 1M)")
	f.StringVar(&o.requests, "requests", "all", "what needs a registration: all, uses (of buffers), registrations (of the program)")
	f.Var(&o.minUse, "min-use", "`size` from which on a use needs a registration (default 1)")
	f.BoolVar(&o.replay.Simhca, "simhca", false, "have a simulated adapter carry out each registration, and check the pages of each hit")
	f.StringVar(&o.html, "html", "", "`file` to write a report with plots to")
	jsonFlag(f, &o.json)
}

// checkFiles refuses an output that would take the place of another file of the
// command line.
func (o *replayOptions) checkFiles(args []string) error {
	outputs := slices.DeleteFunc([]string{o.html, o.writeModel}, func(path string) bool { return path == "" })
	for i, out := range outputs {
		if slices.ContainsFunc(outputs[:i], func(path string) bool { return outfile.Same(path, out) }) {
			return usageError{fmt.Errorf("%s: named for two outputs", out)}
		}
		for _, in := range append(slices.Clone(args), o.modelFiles...) {
			if in != "-" && outfile.Same(in, out) {
				return usageError{fmt.Errorf("%s: named for input and for output", out)}
			}
		}
	}
	return nil
}

// complete turns flags into options, and refuses those that make no sense.
func (o *replayOptions) complete(args []string) error {
	switch {
	case len(args) == 0 && (!o.calibrate || o.writeModel == ""):
		return usageError{errors.New("which trace? (or --calibrate --write-model file)")}
	case o.writeModel != "" && !o.calibrate:
		return usageError{errors.New("--write-model is for --calibrate")}
	case o.replay.MaxRegions < 1:
		return usageError{fmt.Errorf("--max-regions %d: at least 1", o.replay.MaxRegions)}
	case o.maxBytes.set && o.maxBytes.n == 0:
		return usageError{errors.New("--max-bytes 0: at least a page")}
	}
	if err := o.checkFiles(args); err != nil {
		return err
	}
	i := slices.Index(requestNames(), o.requests)
	if i < 0 {
		return usageError{fmt.Errorf("--requests %s: one of %s", o.requests, strings.Join(requestNames(), ", "))}
	}
	o.replay.Requests = replay.Requests(i)
	o.replay.MaxBytes, o.replay.MergeBytes, o.replay.MinUse = o.maxBytes.n, o.mergeBytes.n, o.minUse.n
	o.replay.NoMerge = o.mergeBytes.set && o.mergeBytes.n == 0
	for _, name := range o.models {
		m, err := replay.Preset(name)
		if err != nil {
			return usageError{fmt.Errorf("--model %s: one of %s", name, strings.Join(replay.PresetNames(), ", "))}
		}
		o.replay.Models = append(o.replay.Models, m)
	}
	if o.models == nil && o.modelFiles == nil {
		o.replay.Models = replay.Presets()
	}
	for _, path := range o.modelFiles {
		m, err := readModel(path)
		if err != nil {
			return fmt.Errorf("--model-file %s: %w", path, err)
		}
		o.replay.Models = append(o.replay.Models, m)
	}
	return nil
}

func readModel(path string) (m replay.Model, err error) {
	f, err := os.Open(path)
	if err != nil {
		return m, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	return replay.ReadModel(f)
}

func (o *replayOptions) run(cmd *cobra.Command, args []string) (err error) {
	if err := o.complete(args); err != nil {
		return err
	}
	if o.calibrate {
		if err := o.measure(cmd.Context()); err != nil {
			return err
		}
	}
	if len(args) == 0 {
		return nil
	}
	in := cmd.InOrStdin()
	if args[0] != "-" {
		f, err := os.Open(args[0])
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, f.Close()) }()
		in = f
	}
	r, err := trace.NewReader(in)
	if err != nil {
		return fmt.Errorf("%s: %w", args[0], err)
	}
	// The heap grows from nothing to some hundred megabytes: the collector would
	// go through it again and again on the way. This is never touched, so it takes
	// up address space alone.
	const ballast = 64 << 20
	idle := make([]byte, ballast)
	res, err := replay.Run(cmd.Context(), r, &o.replay)
	runtime.KeepAlive(idle)
	if err != nil {
		if errors.Is(err, replay.ErrModel) || errors.Is(err, replay.ErrOptions) {
			return usageError{err}
		}
		return fmt.Errorf("%s: %w", args[0], err)
	}
	if o.html != "" {
		if err := outfile.Write(o.html, res.WriteHTML); err != nil {
			return err
		}
	}
	write := res.WriteText
	if o.json {
		write = res.WriteJSON
	}
	return write(cmd.OutOrStdout())
}

// measure adds this machine's model.
func (o *replayOptions) measure(ctx context.Context) error {
	m, err := machineModel(ctx)
	if err != nil {
		return err
	}
	o.replay.Models = append(o.replay.Models, m)
	if o.writeModel == "" {
		return nil
	}
	return outfile.Write(o.writeModel, func(w io.Writer) error { return writeJSON(w, m) })
}

// machineModel measures what registrations with io_uring cost here.
func machineModel(ctx context.Context) (m replay.Model, err error) {
	dev, err := iouring.Open(nil)
	if err != nil {
		return m, fmt.Errorf("%w: %w", demo.ErrNotSupported, err)
	}
	defer func() { err = errors.Join(err, dev.Close()) }()
	m, err = calibrate.Run(ctx, dev, nil)
	if errors.Is(err, calibrate.ErrNotSupported) {
		return m, fmt.Errorf("%w: %w", demo.ErrNotSupported, err)
	}
	return m, err
}
