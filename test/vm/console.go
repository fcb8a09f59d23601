package vm

import (
	"bytes"
	"io"
	"regexp"
	"slices"
	"strings"
	"sync"
)

const (
	tailLines   = 60
	maxLineSize = 4096
)

// fatal matches the lines by which the kernel says that it is broken. An oops is made a panic by the command line, so that all of these end the machine.
var fatal = regexp.MustCompile(`Kernel panic - not syncing|^(\[[ 0-9.]+\] )?(BUG: |Oops: |Oops - |kernel BUG at |general protection fault|Unable to handle kernel |double fault: )`)

// warning matches the lines that begin a warning with a stack trace, after which the kernel goes on.
var warning = regexp.MustCompile(`^(\[[ 0-9.]+\] )?(WARNING: |INFO: task .* blocked for more than )`)

// ansi matches the terminal control sequences that firmware writes.
var ansi = regexp.MustCompile(`\x1b(\[[0-9;?=]*[A-Za-z]|c)`)

// console takes what the serial console and QEMU itself print: to the log, to a tail of lines, and past the patterns above.
type console struct {
	log io.Writer // immutable; what can't be written is lost, as the tail is what matters

	mu       sync.Mutex
	line     []byte        // guarded by mu; the line that has not ended yet
	tail     []string      // guarded by mu
	fatal    string        // guarded by mu; the first line that matched
	warnings []string      // guarded by mu
	broken   chan struct{} // closed when fatal is set
}

func newConsole(log io.Writer) *console {
	return &console{log: log, broken: make(chan struct{})}
}

// Write implements io.Writer. It never fails.
func (c *console) Write(b []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, _ = c.log.Write(b)
	for rest := b; len(rest) > 0; {
		i := bytes.IndexByte(rest, '\n')
		if i < 0 {
			c.line = append(c.line, rest...)
			rest = nil
		} else {
			c.line = append(c.line, rest[:i]...)
			rest = rest[i+1:]
		}
		if i >= 0 || len(c.line) > maxLineSize {
			c.endLineLocked()
		}
	}
	return len(b), nil
}

// endLineLocked looks at a complete line. The caller holds mu.
func (c *console) endLineLocked() {
	line := strings.ToValidUTF8(ansi.ReplaceAllString(string(c.line), ""), "?")
	line = strings.TrimRight(strings.ReplaceAll(line, "\r", ""), " ")
	c.line = c.line[:0]
	if line == "" {
		return
	}
	if len(c.tail) == tailLines {
		c.tail = slices.Delete(c.tail, 0, 1)
	}
	c.tail = append(c.tail, line)
	if c.fatal == "" && fatal.MatchString(line) {
		c.fatal = line
		close(c.broken)
	}
	if warning.MatchString(line) && len(c.warnings) < 100 {
		c.warnings = append(c.warnings, line)
	}
}

// lastLines returns the tail, with what there is of an unfinished line.
func (c *console) lastLines() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := slices.Clone(c.tail)
	if len(c.line) > 0 {
		out = append(out, strings.ToValidUTF8(string(c.line), "?"))
	}
	return out
}

func (c *console) fatalLine() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.fatal
}

func (c *console) warningLines() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.warnings)
}
