package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/pindown/pindown/internal/outfile"
	"github.com/pindown/pindown/internal/profile"
)

// exitError is the exit code of a program that was run: not an error of ours.
type exitError int

func (e exitError) Error() string { return fmt.Sprintf("exit code %d", int(e)) }

// Exit codes for a program that couldn't be run, as of a shell.
const (
	exitNotExecutable = 126
	exitNotFound      = 127
)

type profileOptions struct {
	pid       int
	json      bool
	output    string
	html      string
	trace     string
	traceSize size
	uses      size
	noUses    bool
	quiet     bool
	buffer    size
	sites     int
}

func newProfileCommand() *cobra.Command {
	var o profileOptions
	cmd := &cobra.Command{
		Use:   "profile [flags] [-p PID | -- command [argument…]]",
		Short: "What a program's VM activity does to registrations of memory",
		Long: `Profile runs a program, or follows one that runs, and shows its VM operations
(munmap, mmap, mremap, madvise, brk, …) by kind, size, rate, latency and call
site; the registrations of memory that it makes with io_uring and libibverbs,
and what they cost; and stale windows: registrations whose memory was changed
while they were registered, with the places in the program. It follows all
threads and children that the program makes, from its execution on.

The program runs as it would without, on this terminal, and its exit code is
that of this command (128 and the number of a signal that ended it; 127 if it
wasn't found, 126 if it can't be executed). The summary goes to standard error,
or to the file of --output. With --json the program's standard output goes to
standard error, and the JSON alone to standard output, or to the file of
--output, which leaves the program's standard output as it is.

Calls are counted in the kernel, completely. Sizes, latencies and call sites come
from events, which may be lost if there are too many; lost ones are counted and
shown. Call stacks need frame pointers; functions are named from symbol tables
and from the line tables of Go programs. 32-bit programs aren't seen, nor
libibverbs in statically linked programs, nor uses of verbs registrations, which
need no system call.

It needs CAP_BPF and CAP_PERFMON; CAP_SYS_ADMIN to see what goes through
libibverbs and to measure what it costs; CAP_SYS_PTRACE to name functions of
somebody else's process.`,
		Example: `  pindown profile -- go build ./...
  pindown profile --html report.html -- python3 train.py
  pindown profile -p 4711                          # until ^C
  pindown profile --json -- ./server | jq .stale_windows
  pindown profile --trace server.pdtrace -- ./server`,
		RunE: func(cmd *cobra.Command, args []string) error { return o.run(cmd, args) },
	}
	o.addFlags(cmd.Flags())
	cmd.Flags().StringVar(&o.trace, "trace", "", "record all events to this `file`, for pindown replay")
	return cmd
}

func (o *profileOptions) addFlags(f *pflag.FlagSet) {
	f.SetInterspersed(false)
	f.IntVarP(&o.pid, "pid", "p", 0, "follow the process with this `number`, until it ends or ^C")
	jsonFlag(f, &o.json)
	f.StringVarP(&o.output, "output", "o", "", "write the summary, or JSON, to this `file`")
	f.StringVar(&o.html, "html", "", "write a report with plots to this `file`")
	f.Var(&o.traceSize, "trace-size", "`size` from which on a recording gets no more events, only the names for those that it has (default no limit)")
	f.Var(&o.uses, "uses", "`size` of a transfer (read, write, send, receive) from which on it is a use of a buffer (default 16K)")
	f.BoolVar(&o.noUses, "no-uses", false, "leave transfers out")
	f.BoolVarP(&o.quiet, "quiet", "q", false, "no progress on the terminal")
	f.Var(&o.buffer, "buffer", "`size` of the buffer for events (default 16M)")
	f.IntVar(&o.sites, "sites", profile.DefaultSites, "call sites in JSON and report")
}

// outputs are the files to write. They are opened before the program runs, so
// that what can't be written is told in time.
type outputs struct {
	text, html, trace *outfile.File
}

func (o *profileOptions) open() (f outputs, err error) {
	for _, x := range []struct {
		path string
		to   **outfile.File
	}{{o.output, &f.text}, {o.html, &f.html}, {o.trace, &f.trace}} {
		if x.path == "" {
			continue
		}
		file, err := outfile.Create(x.path)
		if err == nil && file.Path() != "" && slices.ContainsFunc(f.all(), func(g *outfile.File) bool { return outfile.Same(g.Path(), file.Path()) }) {
			err = errors.Join(usageError{fmt.Errorf("%s: named for two outputs", x.path)}, file.Finish(false))
		}
		if err != nil {
			return f, errors.Join(err, f.finish(false))
		}
		*x.to = file
	}
	return f, nil
}

func (f *outputs) all() []*outfile.File {
	return slices.DeleteFunc([]*outfile.File{f.text, f.html, f.trace}, func(g *outfile.File) bool { return g == nil })
}

// finish closes the files, and puts them in their places if good.
func (f *outputs) finish(good bool) error {
	var errs []error
	for _, g := range f.all() {
		errs = append(errs, g.Finish(good))
	}
	return errors.Join(errs...)
}

// keepTrace leaves a recording that couldn't be written to its end where it is.
func (f *outputs) keepTrace(err error) error {
	t := f.trace
	f.trace = nil
	if t.Path() != "" {
		err = fmt.Errorf("%w; what was written until then is in %s", err, t.Name())
	}
	return errors.Join(err, t.Close())
}

func (o *profileOptions) run(cmd *cobra.Command, args []string) (err error) {
	switch {
	case o.pid < 0 || o.pid == 0 && cmd.Flags().Changed("pid"):
		return usageError{fmt.Errorf("-p %d: not a process", o.pid)}
	case len(args) == 0 && o.pid == 0:
		return usageError{fmt.Errorf("a command, or the number of a process, is needed\nRun '%s --help' for usage", cmd.CommandPath())}
	case len(args) > 0 && o.pid != 0:
		return usageError{errors.New("either a command or -p, not both")}
	case o.traceSize.set && o.trace == "":
		return usageError{errors.New("--trace-size is for --trace")}
	case o.sites < 1:
		return usageError{fmt.Errorf("--sites %d: at least 1", o.sites)}
	case o.uses.set && (o.uses.n == 0 || o.noUses):
		return usageError{errors.New("--uses: at least 1 byte; --no-uses leaves transfers out")}
	}
	files, err := o.open()
	if err != nil {
		return err
	}
	good := false
	defer func() {
		if e := files.finish(good); e != nil {
			err = errors.Join(e, err)
		}
	}()
	opts := profile.Options{
		Command: args, PID: o.pid, Stdin: cmd.InOrStdin(), Stdout: cmd.OutOrStdout(), Stderr: cmd.ErrOrStderr(),
		UseBytes: o.uses.n, NoUses: o.noUses, RingBytes: int(min(o.buffer.n, 1<<30)), Sites: o.sites,
		TraceBytes: int64(min(o.traceSize.n, 1<<62)), Tool: "pindown " + newVersionInfo().Version,
	}
	if o.json && files.text == nil {
		opts.Stdout = cmd.ErrOrStderr()
	}
	if files.trace != nil {
		opts.Trace = files.trace
	}
	bar := &progress{w: cmd.ErrOrStderr()}
	if !o.quiet && terminal(bar.w) {
		opts.Progress = func(p *profile.Progress) { bar.line(progressText(p)) }
	}
	ctx := cmd.Context()
	if o.pid == 0 {
		// The program decides what a signal does.
		signals, stop := passed(cmd.InOrStdin())
		defer stop()
		opts.Signals = signals
		ctx = context.WithoutCancel(ctx)
	}
	res, err := profile.Run(ctx, &opts)
	bar.line("")
	if res == nil {
		return shellCode(err)
	}
	if err != nil {
		err = files.keepTrace(err)
	}
	written := o.write(cmd, res, &files)
	good = written == nil
	if err := errors.Join(err, written); err != nil {
		return err
	}
	if o.pid == 0 && res.ExitCode != 0 {
		return exitError(res.ExitCode)
	}
	return nil
}

func (o *profileOptions) write(cmd *cobra.Command, res *profile.Result, files *outputs) error {
	write, to := res.WriteText, cmd.ErrOrStderr()
	if o.json {
		write, to = res.WriteJSON, cmd.OutOrStdout()
	}
	if files.text != nil {
		to = files.text
	}
	if err := writeBuffered(to, write); err != nil {
		return fmt.Errorf("write result: %w", err)
	}
	if files.html != nil {
		if err := writeBuffered(files.html, res.WriteHTML); err != nil {
			return fmt.Errorf("write report: %w", err)
		}
	}
	return nil
}

func writeBuffered(w io.Writer, write func(io.Writer) error) error {
	var b bytes.Buffer
	if err := write(&b); err != nil {
		return err
	}
	_, err := b.WriteTo(w)
	return err
}

// passed returns the signals that are passed on to the program. Those that a
// terminal sends go to the program by themselves, but this one must not die of
// them.
func passed(stdin io.Reader) (signals <-chan os.Signal, stop func()) {
	pass, drop := make(chan os.Signal, 1), make(chan os.Signal, 1)
	signal.Notify(pass, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGUSR1, syscall.SIGUSR2)
	keyboard := pass
	if f, ok := stdin.(io.Writer); ok && terminal(f) {
		keyboard = drop
	}
	signal.Notify(keyboard, os.Interrupt, syscall.SIGQUIT)
	return pass, func() {
		signal.Stop(pass)
		signal.Stop(drop)
	}
}

// shellCode gives the errors of starting a program the exit codes of a shell.
func shellCode(err error) error {
	if !errors.Is(err, profile.ErrStart) {
		return err
	}
	code := exitNotExecutable
	if errors.Is(err, exec.ErrNotFound) || errors.Is(err, os.ErrNotExist) {
		code = exitNotFound
	}
	return startError{err, code}
}

// startError is a program that couldn't be run.
type startError struct {
	error

	code int
}

func (s startError) Unwrap() error { return s.error }

func progressText(p *profile.Progress) string {
	s := fmt.Sprintf("profile: %.0f s, %d operations", p.Elapsed.Seconds(), p.Operations)
	if p.PerSecond > 0 {
		s += fmt.Sprintf(" (%.0f/s)", p.PerSecond)
	}
	s += ", " + profile.FormatSize(p.Bytes)
	if p.Registrations > 0 || p.Stale > 0 {
		s += fmt.Sprintf(", %d registered, %d stale", p.Registrations, p.Stale)
	}
	if p.Lost > 0 {
		s += fmt.Sprintf(", %d lost", p.Lost)
	}
	return s
}

// baseName is what a trace is called that nobody named.
func baseName(args []string, pid int) string {
	if pid != 0 {
		return fmt.Sprint(pid)
	}
	return strings.TrimSuffix(filepath.Base(args[0]), filepath.Ext(args[0]))
}
