package bpf

import (
	"fmt"
	"log/slog"
	"time"

	"github.com/pindown/pindown/monitor"
)

//go:generate go tool stringer -type Mode -linecomment -output mode_string.go

// Mode is where the programs are attached. Its String is the name that reports
// and JSON use.
type Mode uint8

// Modes.
const (
	// ModeAuto takes functions if the kernel allows it, else system calls.
	ModeAuto      Mode = iota // auto
	ModeFunctions             // functions
	ModeSyscalls              // syscalls
)

// Options configure a Monitor. The zero value means defaults.
type Options struct {
	// Mode is where the programs are attached. Default ModeAuto.
	Mode Mode
	// Regions is the number of regions that the table is sized for, 512 to 1024
	// bytes of locked kernel memory each, 16 MiB at most. More are watched less
	// precisely. Default 4096.
	Regions int
	// NewsBytes is the size of the ring buffer for news, a power of two and a
	// multiple of the page size. News that finds it full is counted as lost.
	// Default 64 KiB.
	NewsBytes int
	// Heartbeat is how often the monitor makes sure that it still sees
	// operations. Default 1 second; negative means never.
	Heartbeat time.Duration
	// Logger receives life-cycle messages. Default: none.
	Logger *slog.Logger
}

func (o *Options) withDefaults() (Options, error) {
	var r Options
	if o != nil {
		r = *o
	}
	if r.Mode > ModeSyscalls {
		return r, fmt.Errorf("open bpf monitor: unknown mode %d: %w", r.Mode, monitor.ErrNotSupported)
	}
	if r.Regions <= 0 {
		r.Regions = 4096
	}
	if r.NewsBytes <= 0 {
		r.NewsBytes = 64 << 10
	}
	if r.Heartbeat == 0 {
		r.Heartbeat = time.Second
	}
	if r.Logger == nil {
		r.Logger = slog.New(slog.DiscardHandler)
	}
	return r, nil
}
