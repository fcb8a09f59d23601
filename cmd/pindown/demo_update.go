package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/pindown/pindown/internal/demo/update"
)

func newDemoUpdateCommand() *cobra.Command {
	var o update.Options
	var json bool
	cmd := &cobra.Command{
		Use:   "update",
		Short: "Replace the pages behind a remote key that a peer keeps writing to",
		Long: `A peer keeps writing to an advertised remote key while the owner of the memory
replaces the pages behind it, under four policies:

  none           a registration cache that learns of no change: what the peer
                 writes goes to pages that nobody has any more
  drop           pindown drops the stale registration: the peer gets an error, and
                 must be told another key
  update-strict  the key means the old pages, nothing, the new pages; meanwhile
                 the peer is held back
  update-atomic  the key passes from the old pages to the new; the peer never
                 notices

A write is lost if it completed successfully and isn't in the owner's memory, though
it began after one replacement was over and ended before the next. The adapter is
simulated. Where io_uring is available the same is shown of the owner's own reads
into a fixed buffer: there a key is the buffer's index, and an error what a request
gets that carries an index of before.

It fails if a write is lost under any policy but none, or if an update changes a key
or causes an error. ^C ends it early; what was found until then is shown.`,
		Example: `  pindown demo update
  pindown demo update --replacements 2000 --pages 16
  pindown demo update --json | jq '.policies[] | {name, lost, key_changes}'`,
		Args: usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runDemoUpdate(cmd, &o, json)
		},
	}
	f := cmd.Flags()
	f.IntVar(&o.Replacements, "replacements", update.DefaultReplacements, "how often the pages are replaced under each policy")
	f.IntVar(&o.Pages, "pages", update.DefaultPages, "size of the memory in pages")
	f.Uint64Var(&o.Seed, "seed", 1, "seed of the order of operations")
	jsonFlag(f, &json)
	return cmd
}

func runDemoUpdate(cmd *cobra.Command, o *update.Options, json bool) error {
	// Zero means the default to the package, but was said here.
	switch {
	case o.Replacements < 1:
		return usageError{fmt.Errorf("--replacements %d: at least 1", o.Replacements)}
	case o.Pages < 1:
		return usageError{fmt.Errorf("--pages %d: at least 1", o.Pages)}
	}
	if err := o.Validate(); err != nil {
		return badOptions(err, update.ErrOptions)
	}
	res, early := update.Run(cmd.Context(), o)
	if res == nil {
		return early
	}
	write := res.WriteText
	if json {
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
