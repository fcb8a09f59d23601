package demo

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/pindown/pindown/internal/plural"
)

// Mode is a way to register buffers.
type Mode uint8

// Modes of the demonstration.
const (
	ModeInvalid Mode = iota
	// NoMonitor is a cache that learns of no VM operation.
	NoMonitor
	// Pindown is pindown's cache with its monitor.
	Pindown
	// PerUse registers and deregisters for each block.
	PerUse
	// Unregistered writes without registration.
	Unregistered
	modeEnd
)

var modeNames = [...]string{"invalid", "no-monitor", "pindown", "per-use", "unregistered"}

// Modes returns the modes in the order of reports.
func Modes() []Mode { return []Mode{NoMonitor, Pindown, PerUse, Unregistered} }

// String returns the name that reports and JSON use.
func (m Mode) String() string { return modeNames[m] }

// MarshalText encodes the mode by name.
func (m Mode) MarshalText() ([]byte, error) { return []byte(m.String()), nil }

// UnmarshalText is the inverse of MarshalText.
func (m *Mode) UnmarshalText(b []byte) error {
	i := slices.Index(modeNames[:], string(b))
	if i <= 0 {
		return fmt.Errorf("mode %q is none of %v", b, Modes())
	}
	*m = Mode(i)
	return nil
}

// Result is what a run found.
type Result struct {
	// Device and Monitor are the names of what mode "pindown" used; "none" for
	// the latter if no monitor is usable, and then Reason says why.
	Device  string `json:"device"`
	Monitor string `json:"monitor"`
	Reason  string `json:"reason,omitempty"`
	// Rounds is the number of blocks written in each mode.
	Rounds int `json:"rounds"`
	// Interrupted says that the run was, and the modes wrote fewer.
	Interrupted bool `json:"interrupted,omitempty"`
	// Modes are the figures in the order of [Modes].
	Modes []Totals `json:"modes"`

	Churn   string `json:"churn"`
	Buffer  int    `json:"buffer"`  // size of a block, in bytes
	Buffers int    `json:"buffers"` // number of buffers in the pool
	Seed    uint64 `json:"seed"`

	File       string `json:"file"`
	FileSystem string `json:"file_system"`
	// Direct says that the file was written with O_DIRECT.
	Direct bool `json:"direct"`

	io string
}

// Totals are the figures of one mode.
type Totals struct {
	Name Mode `json:"name"`
	// Blocks is the number of blocks written, WrongBlocks how many of them
	// were read back with other content, and StaleBlocks how many of these
	// held the whole of an earlier block.
	Blocks      uint64 `json:"blocks"`
	WrongBlocks uint64 `json:"wrong_blocks"`
	StaleBlocks uint64 `json:"stale_blocks"`

	// The cache's counters; zero without a cache. Registrations are those made
	// with the device, PerUse those that a cache made beside itself, by cause.
	Hits          uint64            `json:"hits"`
	Misses        uint64            `json:"misses"`
	Invalidations uint64            `json:"invalidations"`
	Registrations uint64            `json:"registrations"`
	PerUse        map[string]uint64 `json:"per_use,omitempty"`

	// Seconds is the time spent on registering and I/O: the mean of the
	// middle half of the batches, times the number of blocks, so that what
	// else the machine does decides less. WallSeconds is the plain sum.
	Seconds     float64 `json:"seconds"`
	WallSeconds float64 `json:"wall_seconds"`
	// RatioToPerUse is the time of a block by that in the mode "per-use"; zero
	// if nothing was written there.
	RatioToPerUse float64 `json:"ratio_to_per_use"`
	// Changes is how often a buffer was given other pages, and ChangeSeconds
	// the time of one such change, the monitor's share included, taken like
	// Seconds.
	Changes       uint64  `json:"changes"`
	ChangeSeconds float64 `json:"change_seconds"`

	times, vmTimes times
	exposed        uint64 // blocks from buffers whose pages had changed after an earlier one
}

// conclude turns what was summed up into the result.
func (r *Result) conclude(totals [modeEnd]Totals) {
	per := totals[PerUse].times.typical()
	for _, m := range Modes() {
		t := totals[m]
		t.Name = m
		t.Seconds, t.WallSeconds = t.times.typical()*float64(t.Blocks), t.times.total.Seconds()
		t.ChangeSeconds = t.vmTimes.typical()
		if per > 0 {
			t.RatioToPerUse = t.times.typical() / per
		}
		r.Modes = append(r.Modes, t)
	}
}

// Mode returns the figures of m; zero if the result has none.
func (r *Result) Mode(m Mode) Totals {
	for _, t := range r.Modes {
		if t.Name == m {
			return t
		}
	}
	return Totals{}
}

// ErrWrongBlocks is why a run has failed.
var ErrWrongBlocks = errors.New("demo: wrong blocks")

// Failure returns nil if every mode but "no-monitor" wrote every block right,
// and otherwise an error that wraps ErrWrongBlocks.
func (r *Result) Failure() error {
	var errs []error
	for _, t := range r.Modes {
		if t.Name != NoMonitor && t.WrongBlocks > 0 {
			errs = append(errs, fmt.Errorf("mode %v (monitor %s, churn %s, seed %d) wrote %d of %d blocks wrong: %w",
				t.Name, r.Monitor, r.Churn, r.Seed, t.WrongBlocks, t.Blocks, ErrWrongBlocks))
		}
	}
	return errors.Join(errs...)
}

// WriteJSON writes the result as one JSON object.
func (r *Result) WriteJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	return e.Encode(r)
}

// WriteText writes the result for people: what was run, a table, and what just
// happened.
func (r *Result) WriteText(w io.Writer) error {
	var b strings.Builder
	if r.Interrupted {
		b.WriteString("Interrupted. Until then, of ")
	}
	fmt.Fprintf(&b, "%s of %s in each mode, from %s, churn %s\n",
		plural.Of(r.Rounds, "block"), FormatSize(uint64(r.Buffer)), plural.Of(r.Buffers, "buffer"), r.Churn)
	fmt.Fprintf(&b, "device %s, monitor %s; %s, %s, %s\n\n", r.Device, r.Monitor, r.File, r.FileSystem, r.io)
	tw := tabwriter.NewWriter(&b, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(tw, "mode\tblocks\twrong\thits\tmisses\tinvalidated\tregistered\ttime\tper block\tto per-use\tper change\t")
	for _, t := range r.Modes {
		vm, each, ratio := "-", "-", "-"
		if t.Changes > 0 {
			vm = micros(t.ChangeSeconds)
		}
		if t.Blocks > 0 {
			each = micros(t.Seconds / float64(t.Blocks))
		}
		if t.RatioToPerUse > 0 {
			ratio = fmt.Sprintf("%.2f", t.RatioToPerUse)
		}
		fmt.Fprintf(tw, "%v\t%d\t%d\t%d\t%d\t%d\t%d\t%.3f s\t%s\t%s\t%s\t\n",
			t.Name, t.Blocks, t.WrongBlocks, t.Hits, t.Misses, t.Invalidations, t.Registrations, t.Seconds, each, ratio, vm)
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	fmt.Fprintf(&b, "\n%s\n%s\n", r.aboutNoMonitor(), r.aboutPindown())
	_, err := io.WriteString(w, b.String())
	return err
}

func micros(seconds float64) string { return fmt.Sprintf("%.1f µs", seconds*1e6) }

func percent(n, of uint64) string {
	p := 100 * float64(n) / float64(max(of, 1))
	if n > 0 && p < 0.1 {
		return "less than 0.1 %"
	}
	return fmt.Sprintf("%.1f %%", p)
}

// aboutNoMonitor says in one sentence what the cache without a monitor did.
func (r *Result) aboutNoMonitor() string {
	t := r.Mode(NoMonitor)
	switch {
	case t.WrongBlocks > 0:
		what := "went on using registrations of pages that were no longer there"
		if t.StaleBlocks == t.WrongBlocks {
			what += ", each wrong block holding what an earlier one held"
		}
		return fmt.Sprintf("Without a monitor, %s of the blocks in the file are wrong and no call returned an error: the cache %s.", percent(t.WrongBlocks, t.Blocks), what)
	case t.Blocks == 0:
		return "Without a monitor nothing was written."
	case t.Changes == 0:
		return "No buffer changed its pages, so that even a cache without a monitor wrote every block right."
	case t.exposed == 0:
		return "No buffer was written from again after its pages had changed, so that even a cache without a monitor wrote every block right: more blocks would show the difference."
	default:
		return fmt.Sprintf("Without a monitor no block is wrong, although %s came from buffers that had been given other pages: this wasn't expected.", plural.Of(t.exposed, "block"))
	}
}

// fewBlocks is how many are needed to compare times.
const fewBlocks = 1000

// aboutPindown says in one sentence what pindown did, whatever it was.
func (r *Result) aboutPindown() string {
	t := r.Mode(Pindown)
	var perUse uint64
	var causes []string
	for cause, n := range t.PerUse {
		perUse += n
		causes = append(causes, fmt.Sprintf("%s %d", cause, n))
	}
	slices.Sort(causes)
	switch {
	case t.WrongBlocks > 0:
		return fmt.Sprintf("PINDOWN WROTE %s with monitor %s: this must never happen, please report it.", strings.ToUpper(plural.Of(t.WrongBlocks, "wrong block")), r.Monitor)
	case t.Blocks == 0:
		return "With pindown nothing was written."
	case r.Monitor == "none":
		return fmt.Sprintf("pindown found no monitor that it can trust (%s), so it registered for each use: no wrong block, and no gain.", strings.TrimPrefix(r.Reason, "no usable monitor: "))
	case r.Reason != "":
		return fmt.Sprintf("pindown had to register for each use (%s): no wrong block, and no gain.", r.Reason)
	case t.Hits == 0 && perUse > 0:
		return fmt.Sprintf("pindown registered for each use (%s), since monitor %s can't vouch for this memory: no wrong block, and no gain.", strings.Join(causes, ", "), r.Monitor)
	}
	s := fmt.Sprintf("With monitor %s pindown wrote every block right, and registered for %s of them", r.Monitor, percent(t.Registrations, t.Blocks))
	if perUse > 0 {
		s += fmt.Sprintf(" (of these for one use only: %s)", strings.Join(causes, ", "))
	}
	switch {
	case min(t.Blocks, r.Mode(PerUse).Blocks) < fewBlocks:
		s += "; these are too few blocks to compare times"
	case t.RatioToPerUse < 1:
		s += fmt.Sprintf(", in %.2f of the time of registering per use", t.RatioToPerUse)
	default:
		s += fmt.Sprintf(", but took %.2f of the time of registering per use: it gained nothing here", t.RatioToPerUse)
	}
	return s + "."
}
