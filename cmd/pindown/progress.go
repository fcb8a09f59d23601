package main

import (
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// terminal reports whether w is one.
func terminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

// progress is a line on a terminal that is written over.
type progress struct {
	w    io.Writer
	last string
}

// line shows s in place of what was there; nothing if it is empty.
func (p *progress) line(s string) {
	if s == p.last {
		return
	}
	p.last = s
	// Progress is a courtesy: if it can't be shown, nothing is lost.
	_, _ = fmt.Fprintf(p.w, "\r\033[K%s", s)
}
