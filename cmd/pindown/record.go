package main

import (
	"fmt"

	"github.com/spf13/cobra"
)

func newRecordCommand() *cobra.Command {
	var o profileOptions
	cmd := &cobra.Command{
		Use:   "record [flags] [file.pdtrace] [-p PID | -- command [argument…]]",
		Short: "Record a program's VM operations, registrations and buffer uses",
		Long: `Record runs a program, or follows one that runs, and writes what it does to its
address space, its registrations of memory and its uses of buffers to a file,
for pindown replay. It is "pindown profile --trace file": see there. The file is
named after the program if it isn't named before "--".

The recording is written as the program goes, beside the file, whose name it
gets at the end: ".file.pdtrace-" and a number. If this command is killed, what
was written until then is there and can be read. Names of functions are written
at the end.`,
		Example: `  pindown record -- go build ./...             # to go.pdtrace
  pindown record server.pdtrace -- ./server
  pindown record server.pdtrace -p 4711`,
		RunE: func(cmd *cobra.Command, args []string) error {
			dash := cmd.ArgsLenAtDash()
			if dash < 0 && o.pid != 0 {
				dash = len(args)
			}
			switch {
			case dash < 0 && len(args) > 0:
				return usageError{fmt.Errorf("the command goes after \"--\"\nRun '%s --help' for usage", cmd.CommandPath())}
			case dash > 1:
				return usageError{fmt.Errorf("one file before \"--\", not %d", dash)}
			case dash == 1:
				o.trace, args = args[0], args[1:]
			case len(args) > 0 || o.pid != 0:
				o.trace = baseName(args, o.pid) + ".pdtrace"
			}
			return o.run(cmd, args)
		},
	}
	o.addFlags(cmd.Flags())
	cmd.Flags().SetInterspersed(true)
	return cmd
}
