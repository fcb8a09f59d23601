package doctor

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/iouring"
	"github.com/pindown/pindown/monitor"
	"github.com/pindown/pindown/monitor/auto"
	"github.com/pindown/pindown/monitor/manual"
	"github.com/pindown/pindown/vm"
)

// ErrUnknownTrial is returned by Trial for a name that is none.
var ErrUnknownTrial = errors.New("doctor: unknown trial")

// Finding is the result of a trial, as JSON between processes.
type Finding struct {
	Usable   bool              `json:"usable"`
	Reason   string            `json:"reason,omitempty"`
	Coverage map[string]string `json:"coverage,omitempty"`
	Limits   Limits            `json:"limits"`
}

// trial tries one monitor or device.
type trial struct {
	id         string // for Trial
	name, mode string
	run        func(ctx context.Context) Finding
}

const manualName = "manual"

// monitorTrials returns the trials of the monitors, in the order in which a
// cache would try them, and of those that it wouldn't.
func monitorTrials() []trial {
	var ts []trial
	for _, o := range auto.Openers() {
		id := "monitor/" + o.Name
		if o.Mode != "" {
			id += "/" + o.Mode
		}
		ts = append(ts, trial{id, o.Name, o.Mode, func(ctx context.Context) Finding { return tryMonitor(ctx, o) }})
	}
	return append(ts, trial{"monitor/" + manualName, manualName, "", func(ctx context.Context) Finding {
		f := tryMonitor(ctx, auto.Opener{Name: manualName, Open: func() (monitor.Monitor, error) {
			m, err := manual.New(nil)
			if err != nil {
				return nil, err
			}
			return m, nil
		}})
		if f.Usable {
			f.Reason = "sees only what the program says; never selected by itself"
		}
		return f
	}})
}

func deviceTrials() []trial {
	return []trial{
		{"device/iouring", "iouring", "", func(ctx context.Context) Finding { return tryRing(ctx) }},
		{"device/verbs", "verbs", "", func(ctx context.Context) Finding { return tryVerbs(ctx, "/") }},
	}
}

// Trials returns the names that Trial takes.
func Trials() []string {
	var ids []string
	for _, t := range append(monitorTrials(), deviceTrials()...) {
		ids = append(ids, t.id)
	}
	return ids
}

// Trial carries out one trial in this process. It is what Options.Command
// runs in another one.
func Trial(ctx context.Context, id string) (Finding, error) {
	for _, t := range append(monitorTrials(), deviceTrials()...) {
		if t.id == id {
			return t.run(ctx), nil
		}
	}
	return Finding{}, fmt.Errorf("%q: %w", id, ErrUnknownTrial)
}

func tryMonitor(ctx context.Context, o auto.Opener) Finding {
	m, c := auto.Try(ctx, o)
	f := Finding{Usable: c.Usable, Reason: c.Reason, Coverage: map[string]string{}}
	for cell, outcome := range c.Coverage {
		f.Coverage[cell.String()] = outcome.String()
	}
	if m != nil {
		if err := m.Close(); err != nil {
			f.Reason = join(f.Reason, err.Error())
		}
	}
	return f
}

// tryRing opens the device and registers a page.
func tryRing(ctx context.Context) (f Finding) {
	dev, err := iouring.Open(nil)
	if err != nil {
		return Finding{Reason: err.Error()}
	}
	defer func() {
		if err := dev.Close(); err != nil {
			f.Reason = join(f.Reason, err.Error())
		}
	}()
	lim := dev.Limits()
	f.Limits = Limits{
		MaxRegistrations: lim.MaxRegistrations, MaxPinnedBytes: lim.MaxPinnedBytes,
		MaxRange: lim.MaxRange, PageSize: uint64(lim.PageSize),
	}
	page, err := unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		f.Reason = os.NewSyscallError("mmap", err).Error()
		return f
	}
	defer func() { _ = unix.Munmap(page) }()
	reg, err := dev.Register(ctx, vm.RangeOf(page), device.LocalWrite)
	if err == nil {
		err = dev.Deregister(reg)
	}
	if err != nil {
		f.Reason = err.Error()
		return f
	}
	f.Usable = true
	return f
}

// examine carries out a trial, elsewhere if that is possible, and in limited
// time.
func (o *Options) examine(ctx context.Context, t trial) Finding {
	ctx, cancel := context.WithTimeout(ctx, o.Timeout)
	defer cancel()
	done := make(chan Finding, 1) // buffered: nobody may be waiting any more
	go func() {
		if o.Command != nil {
			if f, ok := elsewhere(o.Command(ctx, t.id)); ok {
				done <- f
				return
			}
		}
		done <- t.run(ctx)
	}()
	stuck := func() Finding {
		if ctx.Err() == context.DeadlineExceeded {
			return Finding{Reason: fmt.Sprintf("the trial hangs, given up after %v", o.Timeout)}
		}
		return Finding{Reason: "interrupted"}
	}
	select {
	case f := <-done:
		if ctx.Err() != nil && !f.Usable {
			return stuck()
		}
		return f
	case <-ctx.Done():
		return stuck()
	}
}

// elsewhere runs the command and returns what it found. It returns false if
// there is no way to run it.
func elsewhere(cmd *exec.Cmd) (Finding, bool) {
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	cmd.WaitDelay = time.Second
	if err := cmd.Start(); err != nil {
		return Finding{}, false
	}
	err := cmd.Wait()
	var f Finding
	if jerr := json.Unmarshal(out.Bytes(), &f); err == nil && jerr == nil {
		return f, true
	}
	if e, ok := errors.AsType[*exec.ExitError](err); ok {
		if ws, ok := e.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
			if ws.Signal() == unix.SIGSYS {
				return Finding{Reason: "a seccomp filter kills the process that tries it (SIGSYS)"}, true
			}
			return Finding{Reason: fmt.Sprintf("the trial was killed: %v", ws.Signal())}, true
		}
	}
	return Finding{Reason: join("the trial failed", firstLine(errs.String()))}, true
}

func firstLine(s string) string {
	line, _, _ := strings.Cut(strings.TrimSpace(s), "\n")
	return line
}

func join(a, b string) string {
	if a == "" || b == "" {
		return a + b
	}
	return a + ": " + b
}
