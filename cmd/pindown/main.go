// Pindown shows and explains the pin-down cache of this module: see "pindown
// help".
//
// It exits with 0 if all went well, 1 if something failed, 2 if it was called
// wrongly, and 3 if what was asked for isn't supported on this machine.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

func main() { os.Exit(run()) }

func run() int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	// A second signal ends the program at once.
	context.AfterFunc(ctx, stop)
	root := NewRootCommand()
	err := root.ExecuteContext(ctx)
	if err != nil {
		fmt.Fprintf(os.Stderr, "pindown: %s\n", message(ctx, err))
	}
	return exitCode(err)
}
