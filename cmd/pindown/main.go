// Pindown shows and explains the pin-down cache of this module: see "pindown
// help".
//
// It exits with 0 if all went well, 1 if something failed, 2 if it was called
// wrongly, and 3 if what was asked for isn't supported on this machine; with 128
// and the signal's number if SIGINT or SIGTERM ended it early. "profile" and
// "record" exit as the program did that they ran.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"
)

func main() { os.Exit(run()) }

func run() int {
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	defer signal.Stop(signals)
	go func() {
		s, _ := (<-signals).(syscall.Signal)
		cancel(signalError(s))
		// A signal that comes later, when nothing seems to happen, ends the program
		// at once. (Not one that comes with the first, as timeout(1) sends it.)
		time.AfterFunc(time.Second, func() { signal.Stop(signals) })
	}()
	root := NewRootCommand()
	err := signalled(ctx, root.ExecuteContext(ctx))
	if s := message(err); s != "" {
		fmt.Fprintf(os.Stderr, "pindown: %s\n", s)
	}
	return exitCode(err)
}

// signalError is the signal that ended the command early.
type signalError syscall.Signal

func (s signalError) Error() string {
	if syscall.Signal(s) == syscall.SIGINT {
		return "interrupted"
	}
	return syscall.Signal(s).String()
}

// Is makes it what a context that ended because of it fails with, also where the
// cause is asked for.
func (s signalError) Is(target error) bool { return target == context.Canceled }

// signalled returns the signal that made ctx end if that is why the command
// failed, and otherwise err.
func signalled(ctx context.Context, err error) error {
	if s, ok := errors.AsType[signalError](context.Cause(ctx)); ok && errors.Is(err, context.Canceled) {
		return s
	}
	return err
}
