package main

import (
	"context"
	"os/exec"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/pindown/pindown/internal/doctor"
)

func newDoctorCommand() *cobra.Command {
	var asJSON bool
	var trial string
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Say what works on this machine, and what is missing",
		Long: `Doctor examines the place it runs in: the kernel, the privileges, limits and
settings that matter; each monitor and each device, whether it is usable, why
not, and what would help; and what a cache would choose.

The table of a monitor shows what its self-test found, by operation and kind of
memory: "caught" is seen in time; "refused" means that memory of this kind is
registered per use and never cached; "untested" that the machine doesn't offer
it, or, of the brk heap, that the C library owns it; "BLIND" that the operation goes unseen.

It exits with 0 whatever it finds.`,
		Example: `  pindown doctor
  pindown doctor --json | jq .selected`,
		Args: usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			w := cmd.OutOrStdout()
			if trial != "" {
				f, err := doctor.Trial(cmd.Context(), trial)
				if err != nil {
					return usageError{err}
				}
				return writeJSON(w, f)
			}
			o := doctor.Options{Command: trialCommand}
			bar := &progress{w: cmd.ErrOrStderr()}
			if terminal(bar.w) {
				o.Progress = func(what string) { bar.line("doctor: trying " + what) }
			}
			r := doctor.Run(cmd.Context(), &o)
			bar.line("")
			if err := cmd.Context().Err(); err != nil {
				return err
			}
			if asJSON {
				return r.WriteJSON(w)
			}
			return r.WriteText(w)
		},
	}
	jsonFlag(cmd.Flags(), &asJSON)
	cmd.Flags().StringVar(&trial, "trial", "", "make one trial and write what it found")
	_ = cmd.Flags().MarkHidden("trial") // it exists
	return cmd
}

// trialCommand runs this program again for one trial. It ends with this
// process.
func trialCommand(ctx context.Context, id string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "/proc/self/exe", "doctor", "--trial", id)
	cmd.Args[0] = "pindown"
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd
}
