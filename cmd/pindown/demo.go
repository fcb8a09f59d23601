package main

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/pindown/pindown/internal/demo"
	"github.com/pindown/pindown/monitor"
	"github.com/pindown/pindown/monitor/auto"
)

type demoOptions struct {
	demo    demo.Options
	buffer  size
	churn   string
	monitor string
	json    bool
}

func newDemoCommand() *cobra.Command {
	var o demoOptions
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Write a file through registered buffers that come and go",
		Long: `Demo writes blocks to a real file with io_uring, from a small pool of buffers
that come and go between writes as in a real program: the same addresses return
with other pages. It does so in four modes:

  no-monitor    a registration cache that learns of no change to the memory
  pindown       pindown's cache, with the best monitor that works here
  per-use       each block's buffer registered before and deregistered after
  unregistered  plain writes, for scale

Every block has its own content, and the file is read back and compared. The
columns: blocks found wrong in the file; the cache's hits, misses and
invalidations; registrations made with the device; time for registering and
I/O, in total, per block, and relative to per-use; time for giving a buffer other
pages. Times are those of the middle half of the batches, so that what else the
machine does decides less; JSON has the plain sum as wall_seconds.

It fails if a block is wrong in any mode but no-monitor. ^C ends it early; what was
written until then is shown.`,
		Example: `  pindown demo
  pindown demo --churn dontneed --rounds 20000
  pindown demo --churn none --buffer 64K --file /mnt/nvme/scratch
  pindown demo --json | jq '.modes[] | {name, wrong_blocks}'`,
		Args: usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return o.run(cmd)
		},
	}
	o.addFlags(cmd.Flags())
	cmd.AddCommand(newDemoUpdateCommand())
	// The names are fixed: no error is possible.
	_ = cmd.RegisterFlagCompletionFunc("churn", cobra.FixedCompletions(demo.Churns(), cobra.ShellCompDirectiveNoFileComp))
	_ = cmd.RegisterFlagCompletionFunc("monitor", cobra.FixedCompletions(monitorNames(), cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

func (o *demoOptions) addFlags(f *pflag.FlagSet) {
	f.StringVar(&o.demo.File, "file", "", "`path` of the file to write, which is kept (default a temporary file)")
	f.BoolVar(&o.demo.Force, "force", false, "overwrite the file even if the demo didn't make it")
	f.IntVar(&o.demo.Rounds, "rounds", demo.DefaultRounds, "blocks to write in each mode")
	f.Var(&o.buffer, "buffer", "size of a buffer, a multiple of the page `size` (default 4K)")
	f.StringVar(&o.churn, "churn", "mixed", "how buffers come and go: "+strings.Join(demo.Churns(), ", "))
	f.StringVar(&o.monitor, "monitor", "auto", "monitor for the mode pindown: "+strings.Join(monitorNames(), ", "))
	f.Uint64Var(&o.demo.Seed, "seed", 1, "seed of the sequence of operations")
	jsonFlag(f, &o.json)
}

// complete turns flags into options, and refuses those that make no sense.
func (o *demoOptions) complete(ctx context.Context) (err error) {
	if o.demo.Rounds < 1 {
		// Zero means the default to the package, but was said here.
		return usageError{fmt.Errorf("--rounds %d: at least 1", o.demo.Rounds)}
	}
	if o.buffer.set && o.buffer.n < 1 {
		return usageError{fmt.Errorf("--buffer %s: at least one page", &o.buffer)}
	}
	if o.buffer.n > demo.MaxBuffer {
		return usageError{fmt.Errorf("--buffer %s: at most %s", &o.buffer, demo.FormatSize(demo.MaxBuffer))}
	}
	o.demo.Buffer = int(o.buffer.n)
	if o.demo.Churn, err = demo.ParseChurn(o.churn); err != nil {
		return usageError{fmt.Errorf("--churn %s: one of %s", o.churn, strings.Join(demo.Churns(), ", "))}
	}
	if o.demo.Monitor, err = monitorOpener(ctx, o.monitor); err != nil {
		return err
	}
	if err := o.demo.Validate(); err != nil {
		return usageError{err}
	}
	return nil
}

func (o *demoOptions) run(cmd *cobra.Command) error {
	if err := o.complete(cmd.Context()); err != nil {
		return err
	}
	bar := &progress{w: cmd.ErrOrStderr()}
	if terminal(bar.w) {
		o.demo.Progress = func(done, total int) {
			bar.line(fmt.Sprintf("demo: %d %% of the blocks", 100*int64(done)/int64(total)))
		}
	}
	if err := o.monitorThere(cmd.Context()); err != nil {
		return err
	}
	res, early := demo.Run(cmd.Context(), &o.demo)
	bar.line("")
	if res == nil {
		return early
	}
	write := res.WriteText
	if o.json {
		write = res.WriteJSON
	}
	if err := write(cmd.OutOrStdout()); err != nil {
		return fmt.Errorf("write result: %w", err)
	}
	if err := res.Failure(); err != nil {
		return err
	}
	return early
}

// monitorThere looks whether there is the monitor that was asked for by name: who
// does that doesn't want the demo without it.
func (o *demoOptions) monitorThere(ctx context.Context) error {
	if o.monitor == "auto" || o.monitor == "none" {
		return nil
	}
	m, why := tryMonitors(ctx, monitorOpeners(o.monitor))
	if err := ctx.Err(); m == nil && err != nil {
		return err
	}
	if m == nil {
		return fmt.Errorf("%w: --monitor %s: %s", demo.ErrNotSupported, o.monitor, why)
	}
	return m.Close()
}

// monitorNames returns what --monitor takes: a monitor with several modes is
// there by name and by name and mode.
func monitorNames() []string {
	names := []string{"auto"}
	for _, o := range auto.Openers() {
		if !slices.Contains(names, o.Name) {
			names = append(names, o.Name)
		}
		if o.Mode != "" {
			names = append(names, o.Name+"-"+o.Mode)
		}
	}
	return append(names, "none")
}

// monitorOpener returns how to open the monitor of that name; nil for "auto".
func monitorOpener(ctx context.Context, name string) (func() (monitor.Monitor, string), error) {
	switch name {
	case "auto":
		return nil, nil
	case "none":
		return func() (monitor.Monitor, string) { return nil, "none was asked for" }, nil
	}
	openers := monitorOpeners(name)
	if len(openers) == 0 {
		return nil, usageError{fmt.Errorf("--monitor %s: one of %s", name, strings.Join(monitorNames(), ", "))}
	}
	return func() (monitor.Monitor, string) { return tryMonitors(ctx, openers) }, nil
}

// monitorOpeners returns the openers of that name, best first; all for "auto".
func monitorOpeners(name string) []auto.Opener {
	var openers []auto.Opener
	for _, o := range auto.Openers() {
		if name == "auto" || name == o.Name || name == o.Name+"-"+o.Mode {
			openers = append(openers, o)
		}
	}
	return openers
}

// tryMonitors returns the first monitor that is usable, or why none is.
func tryMonitors(ctx context.Context, openers []auto.Opener) (monitor.Monitor, string) {
	var reasons []string
	for _, o := range openers {
		m, c := auto.Try(ctx, o)
		if m != nil {
			return m, ""
		}
		reasons = append(reasons, fmt.Sprintf("%v: %s", c, c.Reason))
	}
	return nil, strings.Join(reasons, "; ")
}

// size is a flag for a number of bytes, with an optional binary unit.
type size struct {
	n    uint64
	text string
	set  bool
}

func (s *size) String() string { return s.text }
func (s *size) Type() string   { return "size" }

func (s *size) Set(text string) error {
	number, shift := text, 0
	for i, unit := range []string{"k", "m", "g"} {
		for _, suffix := range []string{unit, unit + "b", unit + "ib"} {
			if rest, ok := strings.CutSuffix(strings.ToLower(text), suffix); ok {
				number, shift = rest, 10*(i+1)
			}
		}
	}
	n, err := strconv.ParseUint(strings.TrimSpace(number), 10, 64)
	if err != nil || n<<shift>>shift != n {
		return fmt.Errorf("want a number of bytes such as 4096, 64K or 1M")
	}
	*s = size{n: n << shift, text: text, set: true}
	return nil
}
