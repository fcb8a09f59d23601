package demo

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/pindown/pindown/monitor"
)

// Churn says how the buffers come and go between writes.
type Churn uint8

// Kinds of churn.
const (
	ChurnInvalid Churn = iota
	// ChurnNone: the buffers stay as they are.
	ChurnNone
	// ChurnUnmap: munmap, then mmap at the same address.
	ChurnUnmap
	// ChurnDontneed: madvise(MADV_DONTNEED).
	ChurnDontneed
	// ChurnRemap: mmap(MAP_FIXED) over the buffer, or mremap of other pages
	// onto it.
	ChurnRemap
	// ChurnMixed: any of these.
	ChurnMixed
)

var churnNames = [...]string{"invalid", "none", "unmap", "dontneed", "remap", "mixed"}

// String returns the name that [ParseChurn] takes.
func (c Churn) String() string { return churnNames[c] }

// Churns returns the names of all kinds of churn.
func Churns() []string { return slices.Clone(churnNames[ChurnNone:]) }

// ParseChurn returns the kind of churn of that name, or a wrapped ErrOptions.
func ParseChurn(name string) (Churn, error) {
	if i := slices.Index(churnNames[ChurnNone:], name); i >= 0 {
		return ChurnNone + Churn(i), nil
	}
	return ChurnInvalid, fmt.Errorf("churn %q is none of %s: %w", name, strings.Join(Churns(), ", "), ErrOptions)
}

// Errors of Run, always returned wrapped. Errors of the file and of the device
// come as they are.
var (
	// ErrOptions: the options make no sense, here or anywhere.
	ErrOptions = errors.New("demo: bad options")
	// ErrNotSupported: there is no device to demonstrate with.
	ErrNotSupported = errors.New("demo: not supported here")
	// ErrMemlock: RLIMIT_MEMLOCK is too small for buffers of this size.
	ErrMemlock = errors.New("demo: RLIMIT_MEMLOCK is too small")
	// ErrNotOurs: the file exists and wasn't made by a demo.
	ErrNotOurs = errors.New("demo: file exists, and not from an earlier demo")
)

// Defaults and limits of the options.
const (
	DefaultRounds = 12800
	DefaultBuffer = 4096
	// MaxRounds and MaxBuffer keep a slip of the finger from running for weeks
	// or from filling a disk.
	MaxRounds = 1_000_000_000
	MaxBuffer = 64 << 20
)

// Options configure a run. The zero value, or nil, means defaults.
type Options struct {
	// File is the path of the file to write. It is created, and kept; one that
	// exists must be empty or made by an earlier run. Default: a file in
	// os.TempDir that vanishes with the run.
	File string
	// Force overwrites File whatever it holds, as long as it is a regular
	// file.
	Force bool
	// Rounds is the number of blocks written in each mode. Default
	// DefaultRounds.
	Rounds int
	// Buffer is the size of a buffer and so of a block, in bytes: a multiple of
	// the page size, at most MaxBuffer. Default DefaultBuffer, or the page size
	// if that is larger.
	Buffer int
	// Churn is what happens between rounds. Default ChurnMixed.
	Churn Churn
	// Seed makes the sequence of operations. Default 1.
	Seed uint64
	// Monitor opens the monitor for the mode "pindown", once for each of its
	// slices; the run closes it. A monitor of nil with a reason means that there
	// is none. Default: the cache chooses.
	Monitor func() (m monitor.Monitor, reason string)
	// Progress, if not nil, is told now and then how many blocks of how many are
	// written, all modes together.
	Progress func(done, total int)
}

func (o *Options) withDefaults() Options {
	var c Options
	if o != nil {
		c = *o
	}
	if c.Rounds == 0 {
		c.Rounds = DefaultRounds
	}
	if c.Buffer == 0 {
		c.Buffer = max(DefaultBuffer, os.Getpagesize())
	}
	if c.Churn == ChurnInvalid {
		c.Churn = ChurnMixed
	}
	if c.Seed == 0 {
		c.Seed = 1
	}
	if c.Progress == nil {
		c.Progress = func(int, int) {}
	}
	return c
}

// Validate reports everything that is wrong with the options on any machine,
// as a wrapped ErrOptions.
func (o *Options) Validate() error {
	c := o.withDefaults()
	var errs []error
	if c.Rounds < 1 || c.Rounds > MaxRounds {
		errs = append(errs, fmt.Errorf("%d rounds: at least 1, at most %d", c.Rounds, MaxRounds))
	}
	if page := os.Getpagesize(); c.Buffer < page || c.Buffer > MaxBuffer || c.Buffer%page != 0 {
		errs = append(errs, fmt.Errorf("buffer of %d bytes: a multiple of the page size %d, at most %s", c.Buffer, page, FormatSize(MaxBuffer)))
	}
	if c.Churn > ChurnMixed {
		errs = append(errs, fmt.Errorf("churn %d", c.Churn))
	}
	if len(errs) > 0 {
		return fmt.Errorf("%w: %w", ErrOptions, errors.Join(errs...))
	}
	return nil
}

// FormatSize returns n with the largest binary unit that keeps it whole.
func FormatSize(n uint64) string {
	for _, u := range []struct {
		shift int
		name  string
	}{{30, "GiB"}, {20, "MiB"}, {10, "KiB"}} {
		if n>>u.shift > 0 && n&(1<<u.shift-1) == 0 {
			return fmt.Sprintf("%d %s", n>>u.shift, u.name)
		}
	}
	return fmt.Sprintf("%d B", n)
}
