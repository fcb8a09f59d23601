package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/internal/bench"
	"github.com/pindown/pindown/internal/demo"
	"github.com/pindown/pindown/internal/profile"
)

// badOptions returns err as the caller's, without what the package's error says
// before it.
func badOptions(err, sentinel error) error {
	return usageError{errors.New(strings.TrimPrefix(err.Error(), sentinel.Error()+": "))}
}

// Exit codes.
const (
	exitOK          = 0
	exitFailed      = 1
	exitUsage       = 2
	exitUnsupported = 3
	// exitSignal and its number: a signal.
	exitSignal = 128
)

// usageError marks an error as the caller's, for exit code 2.
type usageError struct{ err error }

func (e usageError) Error() string { return e.err.Error() }
func (e usageError) Unwrap() error { return e.err }

// NewRootCommand returns the command with all of its verbs. Its errors are for
// exitCode and message.
func NewRootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:   "pindown",
		Short: "A memory registration cache kept coherent with the address space",
		Long: `Pindown is a cache of memory registrations (io_uring fixed buffers, RDMA) whose
entries are never stale, whatever the process does to its address space. This
command shows what that is about, and what of it works on this machine.

Exit codes: 0 ok, 1 failed, 2 wrong usage, 3 not supported on this machine, 128
and the number of a signal that ended it.`,
		Example: `  pindown demo                  # stale registrations, and none, on a real file
  pindown doctor                # what works here, and what is missing
  pindown profile -- ./server   # what a program's memory operations do to registrations
  pindown replay server.pdtrace # what a cache would cost a recorded program
  pindown bench --short         # what the cache itself costs`,
		Args:          usageArgs(cobra.NoArgs),
		SilenceErrors: true,
		SilenceUsage:  true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return cmd.Help()
		},
	}
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return usageError{fmt.Errorf("%w\nRun '%s --help' for usage", err, cmd.CommandPath())}
	})
	root.Version = versionLine()
	root.SetVersionTemplate("{{.Version}}")
	root.AddCommand(newBenchCommand(), newDemoCommand(), newDoctorCommand(), newProfileCommand(), newRecordCommand(), newReplayCommand(), newVersionCommand())
	root.InitDefaultHelpCmd()
	for _, c := range root.Commands() {
		if c.Name() == "help" {
			c.Args = helpTopic
		}
	}
	return root
}

// helpTopic makes what help knows nothing of a usage error.
func helpTopic(cmd *cobra.Command, args []string) error {
	if c, rest, err := cmd.Root().Find(args); err != nil || len(rest) > 0 {
		return usageError{fmt.Errorf("%s: no command %q\nRun '%s --help' for usage", c.CommandPath(), strings.Join(rest, " "), c.CommandPath())}
	}
	return nil
}

// usageArgs makes the errors of a check of arguments usage errors.
func usageArgs(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if err := check(cmd, args); err != nil {
			return usageError{fmt.Errorf("%w\nRun '%s --help' for usage", err, cmd.CommandPath())}
		}
		return nil
	}
}

// exitCode maps what the command returned.
func exitCode(err error) int {
	_, usage := errors.AsType[usageError](err)
	program, ran := errors.AsType[exitError](err)
	start, failed := errors.AsType[startError](err)
	sig, caught := errors.AsType[signalError](err)
	switch {
	case err == nil:
		return exitOK
	case ran:
		return int(program)
	case failed:
		return start.code
	case caught:
		return exitSignal + int(sig)
	case usage, errors.Is(err, demo.ErrOptions):
		return exitUsage
	case errors.Is(err, demo.ErrNotSupported), errors.Is(err, profile.ErrNotSupported), errors.Is(err, errNoMonitor), errors.Is(err, bench.ErrNotCached):
		return exitUnsupported
	default:
		return exitFailed
	}
}

// memlockHint is what helps against too small a limit.
const memlockHint = "raise RLIMIT_MEMLOCK (ulimit -l, LimitMEMLOCK= of a unit), or run with CAP_IPC_LOCK"

// message is what the user reads about an error; nothing if the program that was run has said it all.
func message(err error) string {
	if program, ran := errors.AsType[exitError](err); err == nil || ran && err.Error() == program.Error() {
		return ""
	}
	s := reason(err)
	if errors.Is(err, demo.ErrMemlock) || errors.Is(err, device.ErrNoMemory) {
		s += "; " + memlockHint
	}
	return s
}

func reason(err error) string {
	s := err.Error()
	switch {
	case errors.Is(err, demo.ErrOptions):
		return strings.TrimPrefix(s, demo.ErrOptions.Error()+": ")
	case errors.Is(err, demo.ErrNotSupported):
		// The layers below say the same in their own words.
		s = strings.TrimPrefix(s, demo.ErrNotSupported.Error()+": ")
		return "not supported here: " + strings.ReplaceAll(s, device.ErrNotSupported.Error()+": ", "")
	case errors.Is(err, profile.ErrNotSupported):
		return "not supported here: " + strings.ReplaceAll(s, profile.ErrNotSupported.Error()+": ", "")
	case errors.Is(err, demo.ErrNotOurs):
		return strings.ReplaceAll(s, demo.ErrNotOurs.Error(), "file exists, and not from an earlier demo; --force overwrites it")
	case errors.Is(err, demo.ErrMemlock):
		return strings.ReplaceAll(s, demo.ErrMemlock.Error(), "RLIMIT_MEMLOCK is too small")
	}
	return s
}

// jsonFlag adds the flag that every verb has.
func jsonFlag(f *pflag.FlagSet, to *bool) {
	f.BoolVar(to, "json", false, "write JSON to standard output")
}

func writeJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	return e.Encode(v)
}
