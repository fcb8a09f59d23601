package pindown

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/monitor"
)

// Options configure a [Cache]. The zero value of each field means its default,
// so nil Options and &Options{} are good choices.
type Options struct {
	// Monitor is what learns of VM operations. The caller keeps it open for
	// the cache's life and closes it afterwards; several caches may share one.
	//
	// Default: the best monitor that proves itself on this machine, shared by
	// every cache of the process that asks for the default. If none does, the
	// cache does not cache: it registers per use, logs a warning, and counts
	// every such registration in Stats.
	Monitor monitor.Monitor

	// MaxRegions is the number of registrations that the cache keeps, in use
	// or idle. Default: what the device takes, at most 65536.
	MaxRegions int

	// MaxBytes is how much memory the cache keeps pinned, in bytes of whole
	// pages. Default: seven eighths of what the device says it can pin, so
	// that registrations per use still find room; 1 GiB if it doesn't say.
	MaxBytes uint64

	// MergeBytes is the length up to which a request that overlaps cached
	// regions is served by one registration of all of them together. Zero
	// means 1 MiB; negative means never.
	MergeBytes int64

	// WaitForBudget makes an Acquire that finds every region in use at a
	// limit wait (until its context ends) for one to be released, instead of
	// registering beside the cache.
	WaitForBudget bool

	// RegisterTimeout bounds how long a registration that the device refuses
	// for lack of memory or of registrations is tried again, after evicting
	// idle regions. Unpinning can be asynchronous, so the first refusal is not
	// the last word. Default: 250 ms; negative: no second try.
	RegisterTimeout time.Duration

	// OnEvent, if not nil, is told what happens to regions. It runs on the
	// cache's own goroutine, one event at a time, never on the path of a VM
	// operation and with no lock held: it may call the cache, except Close and
	// Shutdown, which wait for it to return. While it runs, reclaim stands
	// still.
	OnEvent func(Event)

	// Logger receives warnings about degraded operation. Default: nothing is
	// logged.
	Logger *slog.Logger
}

const (
	defaultMaxRegions      = 65536
	defaultMaxBytes        = 1 << 30
	defaultMergeBytes      = 1 << 20
	defaultRegisterTimeout = 250 * time.Millisecond
)

// withDefaults returns a copy of o, which may be nil, with every default
// filled in for a device with the given limits.
func (o *Options) withDefaults(lim device.Limits) Options {
	var c Options
	if o != nil {
		c = *o
	}
	if c.MaxRegions == 0 {
		c.MaxRegions = defaultMaxRegions
		if lim.MaxRegistrations > 0 {
			c.MaxRegions = min(c.MaxRegions, lim.MaxRegistrations)
		}
	}
	if c.MaxBytes == 0 {
		c.MaxBytes = defaultMaxBytes
		if lim.MaxPinnedBytes > 0 {
			c.MaxBytes = max(lim.MaxPinnedBytes-lim.MaxPinnedBytes/8, uint64(os.Getpagesize()))
		}
	}
	if c.MergeBytes == 0 {
		c.MergeBytes = defaultMergeBytes
	}
	if c.RegisterTimeout == 0 {
		c.RegisterTimeout = defaultRegisterTimeout
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c
}

// validate reports all problems of options with defaults filled in.
func (o *Options) validate(dev device.Device) error {
	var errs []error
	if dev == nil {
		errs = append(errs, errors.New("no device"))
	}
	if o.MaxRegions < 1 {
		errs = append(errs, fmt.Errorf("MaxRegions is %d", o.MaxRegions))
	}
	if page := uint64(os.Getpagesize()); o.MaxBytes < page {
		errs = append(errs, fmt.Errorf("MaxBytes is %d, a page is %d", o.MaxBytes, page))
	}
	if dev != nil {
		if lim := dev.Limits(); lim.MaxRegistrations > 0 && o.MaxRegions > lim.MaxRegistrations {
			errs = append(errs, fmt.Errorf("MaxRegions is %d, the device takes %d", o.MaxRegions, lim.MaxRegistrations))
		}
	}
	if len(errs) > 0 {
		return fmt.Errorf("%w: %w", ErrOptions, errors.Join(errs...))
	}
	return nil
}
