package pindown

import (
	"errors"
	"fmt"
	"log/slog"
	"math"
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
	// means 1 MiB; negative means never, nor are neighbours joined or anything
	// registered ahead. Where ranges that take turns push each other out, it is
	// exceeded eightfold, or by four times the request.
	MergeBytes int64

	// MergeAbove is the number of regions from which on a miss also joins idle
	// regions that merely touch the request, up to MergeBytes and only such as
	// are no longer than the rest. That saves registrations, of which devices
	// have few, but costs registering again, and makes a VM operation on one
	// buffer give up its neighbours'. So it is for when registrations get
	// scarce. Zero means half of MaxRegions; 1 from the first; negative never.
	MergeAbove int

	// AheadBytes is how much may be registered beyond the end of a region that
	// has grown at that end twice, so that a window which grows in small steps
	// isn't registered anew in each: half of its length up to AheadBytes, or an
	// eighth of it. Memory that the device or the monitor refuses, or for which
	// something would have to be evicted, is left out, and nothing is registered
	// ahead with access for peers. Zero means as much as MergeBytes; negative
	// never.
	AheadBytes int64

	// WaitForBudget makes an Acquire that finds every region in use at a
	// limit wait (until its context ends) for one to be released, instead of
	// registering beside the cache.
	WaitForBudget bool

	// RegisterTimeout bounds how long a registration that the device refuses
	// for lack of memory or of registrations is tried again, after evicting
	// idle regions. Unpinning can be asynchronous, so the first refusal is not
	// the last word. Default: 250 ms; negative: no second try.
	RegisterTimeout time.Duration

	// Pressure makes the cache give up a quarter of its regions, idle ones that
	// haven't been used for long, each time that the kernel reports memory
	// pressure: that in 15 % of two seconds some task of this process's control
	// group (version 2; else of the system) waited for memory. What is pinned
	// can't be reclaimed otherwise. It takes a thread that sleeps. The kernel must
	// have CONFIG_PSI and be Linux 6.4, or 5.2 with CAP_SYS_RESOURCE; where it
	// can't report, New logs a warning and the cache does without.
	Pressure     bool
	openPressure func() (pressure, error) // nil but in tests

	// OnStale says what becomes of a region that a VM operation has overtaken
	// while it was in use or exposed. Default: StaleDrop.
	OnStale StalePolicy

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

// StalePolicy says what becomes of a region in use that has become stale.
type StalePolicy uint8

// Policies for stale regions in use.
const (
	StaleInvalid StalePolicy = iota // invalid
	// StaleDrop: no acquire finds it any more, and its registration goes with its
	// last holder or exposure.
	StaleDrop // drop
	// StaleUpdate: the cache's goroutine updates it, as by [Cache.Update] with
	// UpdateAtomic, as soon as the range is mapped again, so that its keys stay
	// good. Until then it is tried again for some seconds, with growing pauses;
	// after that, and on devices that can't, it is dropped. Who needs to know
	// when it is done watches for EventUpdated, or calls Cache.Update himself.
	StaleUpdate // update
)

const (
	defaultMaxRegions      = 65536
	defaultMaxBytes        = 1 << 30
	defaultMergeBytes      = 1 << 20
	defaultRegisterTimeout = 250 * time.Millisecond
	// maxRegisterTimeout is for ever, and can be added to a time.
	maxRegisterTimeout = math.MaxInt64 / 2
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
	if c.OnStale == StaleInvalid {
		c.OnStale = StaleDrop
	}
	if c.MergeBytes == 0 {
		c.MergeBytes = defaultMergeBytes
	}
	switch {
	case c.MergeAbove < 0 || c.MergeBytes < 0:
		c.MergeAbove = math.MaxInt
	case c.MergeAbove == 0:
		c.MergeAbove = max(c.MaxRegions/2, 1)
	}
	if c.AheadBytes == 0 {
		c.AheadBytes = max(c.MergeBytes, 0)
	}
	if c.RegisterTimeout == 0 {
		c.RegisterTimeout = defaultRegisterTimeout
	}
	c.RegisterTimeout = min(c.RegisterTimeout, maxRegisterTimeout)
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
	if o.OnStale > StaleUpdate {
		errs = append(errs, fmt.Errorf("OnStale is %d", o.OnStale))
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
