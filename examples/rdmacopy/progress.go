package main

import (
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// bar is a progress bar on a terminal; elsewhere it shows nothing.
type bar struct {
	title string
	total int64
	begin time.Time
	shown time.Time
	tty   bool
}

func newBar(title string, total int64) *bar {
	_, err := unix.IoctlGetTermios(int(os.Stderr.Fd()), unix.TCGETS)
	return &bar{title: title, total: total, begin: time.Now(), tty: err == nil}
}

// show draws the bar, ten times a second at most.
func (b *bar) show(n int64) {
	now := time.Now()
	if !b.tty || now.Sub(b.shown) < 100*time.Millisecond && n < b.total {
		return
	}
	b.shown = now
	const width = 40
	part := 1.0
	if b.total > 0 {
		part = float64(n) / float64(b.total)
	}
	full := int(part * width)
	fmt.Fprintf(os.Stderr, "\r\033[K%s [%s%s] %3.0f %%  %s", b.title, strings.Repeat("=", full), strings.Repeat(" ", width-full), 100*part, rate(n, now.Sub(b.begin)))
}

// end takes the bar away.
func (b *bar) end() {
	if b.tty {
		fmt.Fprint(os.Stderr, "\r\033[K")
	}
}
