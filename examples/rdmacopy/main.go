// Command rdmacopy copies files to another machine with RDMA writes, from and to
// buffers that go through a pindown cache.
//
// README.md says how to run it. It is written to be read and copied from:
// ways.go is where the cache is used, client.go and server.go move the data.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/pindown/pindown"
	"github.com/pindown/pindown/device/verbs"
)

const usage = `usage:
  rdmacopy serve [flags]          take files
  rdmacopy send [flags] file      send a file
  rdmacopy devices                list RDMA adapters and what they can do

rdmacopy serve -h and rdmacopy send -h list the flags.
`

// errUsage: the command line is wrong, and it has been said why.
var errUsage = errors.New("usage")

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:])
	stop()
	switch {
	case errors.Is(err, errUsage):
		os.Exit(2) //nolint:forbidigo // this is main
	case err != nil:
		fmt.Fprintln(os.Stderr, "rdmacopy:", err)
		os.Exit(1) //nolint:forbidigo // this is main
	}
}

func run(ctx context.Context, args []string) error {
	if len(args) == 0 {
		fmt.Fprint(os.Stderr, usage)
		return errUsage
	}
	switch args[0] {
	case "serve":
		return serveCommand(ctx, args[1:])
	case "send":
		return sendCommand(ctx, args[1:])
	case "devices":
		return devicesCommand(os.Stdout, args[1:])
	default:
		fmt.Fprint(os.Stderr, usage)
		return errUsage
	}
}

// parse parses flags, which say themselves what is wrong.
func parse(f *flag.FlagSet, args []string, operands int) error {
	if err := f.Parse(args); err != nil || f.NArg() != operands {
		if err == nil {
			f.Usage()
		}
		return errUsage
	}
	return nil
}

// adapter is an adapter with a cache, closed together.
type adapter struct {
	dev   *verbs.Device
	cache *pindown.Cache
}

func openAdapter(o *verbs.Options) (*adapter, error) {
	dev, err := verbs.Open(o)
	if err != nil {
		return nil, err
	}
	cache, err := pindown.New(dev, nil)
	if err != nil {
		return nil, errors.Join(err, dev.Close())
	}
	fmt.Fprintf(os.Stderr, "device %s, monitor %s\n", dev.Info().Name, cache.Monitor())
	if reason := cache.Reason(); reason != "" {
		fmt.Fprintln(os.Stderr, reason)
	}
	return &adapter{dev, cache}, nil
}

func (a *adapter) Close() error { return errors.Join(a.cache.Close(), a.dev.Close()) }

// adapterFlags adds the flags that choose an adapter.
func adapterFlags(f *flag.FlagSet) *verbs.Options {
	o := &verbs.Options{}
	f.StringVar(&o.Name, "device", "", "`name` of the RDMA adapter; default: the first with an active port")
	f.StringVar(&o.Library, "library", verbs.DefaultLibrary, "`path` of libibverbs")
	return o
}

func devicesCommand(w io.Writer, args []string) error {
	f := flag.NewFlagSet("rdmacopy devices", flag.ContinueOnError)
	library := f.String("library", verbs.DefaultLibrary, "`path` of libibverbs")
	if err := parse(f, args, 0); err != nil {
		return err
	}
	names, err := verbs.Names(*library)
	if err != nil {
		return err
	}
	for _, name := range names {
		dev, err := verbs.Open(&verbs.Options{Name: name, Library: *library})
		if err != nil {
			fmt.Fprintf(w, "%s: %v\n", name, err)
			continue
		}
		i := dev.Info()
		fmt.Fprintf(w, "%s: firmware %q, %d registrations, %d memory windows\n", name, i.Firmware, i.MaxRegistrations, i.MaxWindows)
		for _, c := range []struct {
			what string
			has  bool
		}{
			{"update in place (ibv_rereg_mr)", i.Update}, {"revoke and load", i.Revoke}, {"change access", i.ChangeAccess},
			{"memory windows of type 1", i.WindowType1}, {"memory windows of type 2", i.WindowType2},
			{"On-Demand Paging: registrations follow the page tables, no monitor is needed", i.OnDemand},
			{"On-Demand Paging of the whole address space", i.OnDemandImplicit}, {"dma-buf, if the kernel can", i.DMABuf},
		} {
			mark := "no "
			if c.has {
				mark = "yes"
			}
			fmt.Fprintf(w, "  %s  %s\n", mark, c.what)
		}
		if err := dev.Close(); err != nil {
			return err
		}
	}
	return nil
}
