// Pindown shows and explains the pin-down cache of this module: see "pindown
// help".
//
// It exits with 0 if all went well, 1 if something failed, 2 if it was called
// wrongly, and 3 if what was asked for isn't supported on this machine. "profile"
// and "record" exit as the program did that they ran.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"
)

func main() { os.Exit(run()) }

func run() int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	// A signal that comes later, when nothing seems to happen, ends the program
	// at once. (Not one that comes with the first, as timeout(1) sends it.)
	context.AfterFunc(ctx, func() { time.AfterFunc(time.Second, stop) })
	root := NewRootCommand()
	err := root.ExecuteContext(ctx)
	if s := message(ctx, err); s != "" {
		fmt.Fprintf(os.Stderr, "pindown: %s\n", s)
	}
	return exitCode(err)
}
