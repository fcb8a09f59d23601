// Package calibrate measures what registrations cost on the machine that it
// runs on, as a cost model for package replay.
package calibrate

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"runtime"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown"
	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/internal/replay"
	"github.com/pindown/pindown/internal/sys"
	"github.com/pindown/pindown/monitor"
	"github.com/pindown/pindown/monitor/auto"
	"github.com/pindown/pindown/monitor/manual"
	"github.com/pindown/pindown/vm"
)

// ErrNotSupported says that the device registers nothing that could be timed.
var ErrNotSupported = errors.New("can't be measured here")

// Name is that of the model.
const Name = "machine"

// page is the one that models count in.
const page = 4096

// Options configure a measurement. The zero value of each field means its
// default.
type Options struct {
	// Rounds is how often each call is timed, in each size. Default: 300.
	Rounds int
	// Largest is the longest range to register in bytes, at least 64 KiB.
	// Default: 4 MiB, or less if the device can't pin that.
	Largest int
}

// sample is what calls for some pages took: the median, in nanoseconds.
type sample struct{ pages, register, deregister, update float64 }

// Run measures the calls of dev on memory of its own, and with the best monitor
// that works here, a hit in a cache over dev and what the monitor adds to a VM
// operation. Without a monitor that works, or that caches this memory, a hit is
// measured with the manual one; the model's source says so. Run returns a wrapped
// [ErrNotSupported] if dev doesn't register.
func Run(ctx context.Context, dev device.Device, opts *Options) (replay.Model, error) {
	o := Options{Rounds: 300, Largest: 4 << 20}
	if opts != nil && opts.Rounds > 0 {
		o.Rounds = opts.Rounds
	}
	if opts != nil && opts.Largest > 0 {
		o.Largest = max(opts.Largest, 64<<10)
	}
	lim := dev.Limits()
	for _, most := range []uint64{lim.MaxPinnedBytes / 4, lim.MaxRange} {
		if most > 0 {
			o.Largest = int(max(64<<10, min(uint64(o.Largest), most)))
		}
	}
	mem, err := unix.Mmap(-1, 0, o.Largest, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return replay.Model{}, fmt.Errorf("calibrate: map memory: %w", err)
	}
	defer func() { _ = unix.Munmap(mem) }() // it was mapped here
	// Huge pages would make it look cheaper than what most programs register.
	// Kernels without them know no such advice.
	_ = unix.Madvise(mem, unix.MADV_NOHUGEPAGE)
	for i := 0; i < len(mem); i += page {
		mem[i] = 1
	}

	var samples []sample
	for size := page; size <= o.Largest; size *= 4 {
		s, err := measure(ctx, dev, vm.RangeOf(mem[:size]), o.Rounds)
		if err != nil {
			return replay.Model{}, fmt.Errorf("calibrate: %w", err)
		}
		samples = append(samples, s)
	}
	m := replay.Model{
		Name:       Name,
		Register:   fit(samples, func(s sample) float64 { return s.register }),
		Deregister: fit(samples, func(s sample) float64 { return s.deregister }),
		Update:     fit(samples, func(s sample) float64 { return s.update }),
	}
	var hitName string
	hits := func(mon monitor.Monitor) (err error) {
		hitName = mon.Name()
		m.Hit, err = hit(ctx, dev, mon, vm.RangeOf(mem[:page]), o.Rounds)
		return err
	}
	name, cost, ok, err := touch(ctx, o.Rounds, hits)
	if err != nil {
		return replay.Model{}, fmt.Errorf("calibrate: %w", err)
	}
	if m.Hit == 0 {
		if err := withManual(hits); err != nil {
			return replay.Model{}, fmt.Errorf("calibrate: %w", err)
		}
	}
	if m.Touch = cost; !ok {
		m.Touch = replay.UsualTouch
		m.Assumed = "what the monitor adds to a VM operation: the machine was too busy to measure it"
	}
	m.Source = fmt.Sprintf("measured on this machine: %s, %d CPUs, Linux %s, medians of %d calls with up to %d KiB; hit: monitor %s; VM operation: monitor %s around madvise",
		dev.Name(), runtime.NumCPU(), sys.Release(), o.Rounds, samplesMax(samples)*page/1024, hitName, name)
	return m, nil
}

func samplesMax(s []sample) int { return int(s[len(s)-1].pages) }

// measure times the calls for one range.
func measure(ctx context.Context, dev device.Device, r vm.Range, rounds int) (sample, error) {
	updater, _ := dev.(device.Updater)
	var register, deregister, update []float64
	for range rounds {
		if err := ctx.Err(); err != nil {
			return sample{}, context.Cause(ctx)
		}
		start := time.Now()
		reg, err := dev.Register(ctx, r, device.LocalWrite)
		register = append(register, since(start))
		if err != nil {
			return sample{}, fmt.Errorf("%w: register %d bytes with %s: %w", ErrNotSupported, r.Len(), dev.Name(), err)
		}
		if updater != nil {
			start = time.Now()
			switch again, err := updater.Update(ctx, reg); {
			case errors.Is(err, device.ErrNotSupported):
				updater = nil
			case err != nil:
				return sample{}, errors.Join(fmt.Errorf("update with %s: %w", dev.Name(), err), dev.Deregister(reg))
			default:
				update = append(update, since(start))
				reg = again
			}
		}
		start = time.Now()
		err = dev.Deregister(reg)
		deregister = append(deregister, since(start))
		if err != nil {
			return sample{}, fmt.Errorf("deregister with %s: %w", dev.Name(), err)
		}
	}
	return sample{float64(r.Pages(page)), median(register), median(deregister), median(update)}, nil
}

func since(start time.Time) float64 { return float64(time.Since(start).Nanoseconds()) }

// median returns 0 for nothing.
func median(v []float64) float64 {
	if len(v) == 0 {
		return 0
	}
	slices.Sort(v)
	return v[len(v)/2]
}

// fit finds a cost for the call and one for the page, by least squares of the
// relative error: a microsecond matters more where all takes two. Neither is
// negative.
func fit(samples []sample, y func(sample) float64) replay.Cost {
	var w, wx, wxx, wy, wxy float64
	for _, s := range samples {
		v := y(s)
		if v <= 0 {
			continue
		}
		k := 1 / (v * v)
		w, wx, wxx, wy, wxy = w+k, wx+k*s.pages, wxx+k*s.pages*s.pages, wy+k*v, wxy+k*s.pages*v
	}
	det := w*wxx - wx*wx
	if w == 0 {
		return replay.Cost{}
	}
	if det <= 1e-12*w*wxx {
		return replay.Cost{Call: wy / w}
	}
	c := replay.Cost{Call: (wy*wxx - wx*wxy) / det, Page: (w*wxy - wx*wy) / det}
	if c.Call < 0 {
		c = replay.Cost{Page: wxy / wxx}
	}
	if c.Page < 0 {
		c = replay.Cost{Call: wy / w}
	}
	return c
}

const batch = 200 // hits in one measurement

func withManual(f func(monitor.Monitor) error) (err error) {
	mon, err := manual.New(nil)
	if err != nil {
		return fmt.Errorf("open monitor: %w", err)
	}
	defer func() { err = errors.Join(err, mon.Close()) }()
	return f(mon)
}

// hit times an acquire that hits and its release; 0 if fewer than 9 of 10
// do.
func hit(ctx context.Context, dev device.Device, mon monitor.Monitor, r vm.Range, rounds int) (_ float64, err error) {
	cache, err := pindown.New(dev, &pindown.Options{Monitor: mon})
	if err != nil {
		return 0, fmt.Errorf("open cache: %w", err)
	}
	defer func() { err = errors.Join(err, cache.Close()) }()
	var times []float64
	for range rounds {
		start := time.Now()
		for range batch {
			reg, err := cache.AcquireRange(ctx, r, pindown.LocalWrite)
			if err != nil {
				return 0, fmt.Errorf("acquire: %w", err)
			}
			if err := reg.Release(); err != nil {
				return 0, fmt.Errorf("release: %w", err)
			}
		}
		times = append(times, since(start)/batch)
	}
	if s := cache.Stats(); s.Hits < uint64(rounds*batch*9/10) {
		return 0, nil
	}
	return median(times), nil
}

// spread is what two measurements of the same may differ by, in nanoseconds, for
// their difference from a third to mean something.
const spread = 200

// touch times madvise on a page without a monitor, with the best that works here,
// and without again, and returns the difference. It is of the quickest tenth:
// on a busy machine the others wait for other CPUs to forget the page. If the two
// without differ too much, ok is false. With the monitor it calls f.
func touch(ctx context.Context, rounds int, f func(monitor.Monitor) error) (name string, cost float64, ok bool, err error) {
	mem, err := unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return "", 0, false, fmt.Errorf("map memory: %w", err)
	}
	defer func() { _ = unix.Munmap(mem) }() // it was mapped here
	timed := func() (float64, error) {
		var times []float64
		for range rounds * 10 {
			mem[0] = 1
			start := time.Now()
			err := unix.Madvise(mem, unix.MADV_DONTNEED)
			times = append(times, since(start))
			if err != nil {
				return 0, fmt.Errorf("madvise: %w", err)
			}
		}
		slices.Sort(times)
		return times[len(times)/10], nil
	}
	before, err := timed()
	if err != nil {
		return "", 0, false, err
	}
	sel := auto.Open(ctx)
	if sel.Monitor() == nil {
		return "none works", 0, true, sel.Close()
	}
	name = sel.Monitor().Name()
	with, err := timed()
	if err == nil {
		err = f(sel.Monitor())
	}
	if err = errors.Join(err, sel.Close()); err != nil {
		return name, 0, false, err
	}
	after, err := timed()
	return name, max(0, with-min(before, after)), math.Abs(before-after) < spread, err
}
