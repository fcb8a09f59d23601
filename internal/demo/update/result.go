package update

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/pindown/pindown/internal/plural"
)

// Result is what a run found.
type Result struct {
	// Device is the name of the adapter that the peer writes through.
	Device string `json:"device"`
	// Replacements is how often the pages were replaced under each policy.
	Replacements int    `json:"replacements"`
	Pages        int    `json:"pages"`
	Seed         uint64 `json:"seed"`
	// Interrupted says that the run was: the last policy there is was replaced
	// less often, and others are missing.
	Interrupted bool `json:"interrupted,omitempty"`
	// Policies are the figures, in the order of [Policy].
	Policies []Totals `json:"policies"`
	// Local is the half on an io_uring.
	Local Local `json:"local"`
}

// Totals are the figures under one policy.
type Totals struct {
	Name Policy `json:"name"`
	// PeerWrites counts the writes that completed successfully, Overlapped those
	// among them that overlapped a replacement and weren't judged, and Lost those
	// of the others that the owner's memory doesn't have.
	PeerWrites uint64 `json:"peer_writes"`
	Overlapped uint64 `json:"overlapped"`
	Lost       uint64 `json:"lost"`
	// Errors counts the writes that failed at the peer.
	Errors uint64 `json:"errors"`
	// KeyChanges counts how often the peer had to be told another key.
	KeyChanges uint64 `json:"key_changes"`
	// Registrations counts those that the cache made.
	Registrations uint64 `json:"registrations"`
}

// Local are the figures of the half without a peer.
type Local struct {
	// Device is the device's name; "none" if there is none, and then Reason says
	// why.
	Device   string        `json:"device"`
	Reason   string        `json:"reason,omitempty"`
	Policies []LocalTotals `json:"policies"`
}

// LocalTotals are the figures of the local half under one policy.
type LocalTotals struct {
	Name Policy `json:"name"`
	// Reads counts the reads into the buffer that completed successfully, Lost
	// those whose data the buffer doesn't have.
	Reads uint64 `json:"reads"`
	Lost  uint64 `json:"lost"`
	// Errors counts the reads that failed, under a key that was advertised before.
	Errors     uint64 `json:"errors"`
	KeyChanges uint64 `json:"key_changes"`
	// Registrations counts those that the cache made.
	Registrations uint64 `json:"registrations"`
}

// ErrFailed is returned, wrapped, for a run that didn't show what it is to show.
var ErrFailed = errors.New("demo update: failed")

// Failure returns a wrapped ErrFailed if pindown lost a write, or if an update
// didn't keep the key.
func (r *Result) Failure() error {
	var errs []error
	judge := func(half string, p Policy, lost, failed, changes uint64) {
		if p != None && lost > 0 {
			errs = append(errs, fmt.Errorf("%s, %v: %d lost", half, p, lost))
		}
		if (p == Strict || p == Atomic) && failed+changes > 0 {
			errs = append(errs, fmt.Errorf("%s, %v: %d errors, %d key changes", half, p, failed, changes))
		}
	}
	for _, t := range r.Policies {
		judge(r.Device, t.Name, t.Lost, t.Errors, t.KeyChanges)
	}
	for _, t := range r.Local.Policies {
		judge(r.Local.Device, t.Name, t.Lost, t.Errors, t.KeyChanges)
	}
	if len(errs) > 0 {
		return fmt.Errorf("%w: %w", ErrFailed, errors.Join(errs...))
	}
	return nil
}

// WriteJSON writes the result as one object, indented.
func (r *Result) WriteJSON(w io.Writer) error {
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	return enc.Encode(r)
}

// WriteText writes the result for people.
func (r *Result) WriteText(w io.Writer) error {
	tw := tabwriter.NewWriter(w, 0, 8, 2, ' ', tabwriter.AlignRight)
	if r.Interrupted {
		fmt.Fprintln(w, "Interrupted. This is what was found until then.")
	}
	fmt.Fprintf(w, "A peer writes to %s, which their owner replaces %s (%s):\n\n",
		plural.Of(r.Pages, "page"), plural.Of(r.Replacements, "time"), r.Device)
	fmt.Fprintln(tw, "policy\tpeer writes\tlost\terrors\tkey changes\tregistrations\t")
	for _, t := range r.Policies {
		fmt.Fprintf(tw, "%v\t%d\t%d\t%d\t%d\t%d\t\n", t.Name, t.PeerWrites, t.Lost, t.Errors, t.KeyChanges, t.Registrations)
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	if r.Local.Device == "none" {
		_, err := fmt.Fprintf(w, "\nNo local half: %s\n", r.Local.Reason)
		return err
	}
	fmt.Fprintf(w, "\nThe owner reads into such pages itself (%s):\n\n", r.Local.Device)
	fmt.Fprintln(tw, "policy\treads\tlost\terrors\tkey changes\tregistrations\t")
	for _, t := range r.Local.Policies {
		fmt.Fprintf(tw, "%v\t%d\t%d\t%d\t%d\t%d\t\n", t.Name, t.Reads, t.Lost, t.Errors, t.KeyChanges, t.Registrations)
	}
	return tw.Flush()
}
