package vm

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"
)

func TestConsole(t *testing.T) {
	const text = "\x1bc\x1b[?7l\x1b[2JSeaBIOS (version 1)\r\n\r\n[    0.000000] Linux version 6.1\r\n\xff\xfe\n" +
		"[    3.1] WARNING: CPU: 1 PID: 9 at mm/gup.c:1 f+0x1\r\nnot finished"
	want := []string{"SeaBIOS (version 1)", "[    0.000000] Linux version 6.1", "?", "[    3.1] WARNING: CPU: 1 PID: 9 at mm/gup.c:1 f+0x1", "not finished"}
	for size := 1; size < len(text); size += 7 {
		var log bytes.Buffer
		c := newConsole(&log)
		for rest := text; rest != ""; {
			n := min(size, len(rest))
			if _, err := c.Write([]byte(rest[:n])); err != nil {
				t.Fatal(err)
			}
			rest = rest[n:]
		}
		if got := c.lastLines(); !slices.Equal(got, want) {
			t.Errorf("in parts of %d: %q", size, got)
		}
		if log.String() != text {
			t.Errorf("in parts of %d: log %q", size, log.String())
		}
		if got := c.warningLines(); len(got) != 1 || c.fatalLine() != "" {
			t.Errorf("in parts of %d: warnings %q, fatal %q", size, got, c.fatalLine())
		}
	}
}

func TestConsoleBounds(t *testing.T) {
	c := newConsole(&bytes.Buffer{})
	for i := range 1000 {
		fmt.Fprintf(c, "line %d\n", i)
	}
	if got := c.lastLines(); len(got) != tailLines || got[len(got)-1] != "line 999" {
		t.Errorf("%d lines, last %q", len(got), got[len(got)-1])
	}
	for range 1000 {
		fmt.Fprint(c, strings.Repeat("x", 1000))
	}
	for _, l := range c.lastLines() {
		if len(l) > maxLineSize+1000 {
			t.Fatalf("line of %d bytes", len(l))
		}
	}
}

func TestConsoleFatal(t *testing.T) {
	for line, want := range map[string]bool{
		"[    7.5] Kernel panic - not syncing: Attempted to kill init! exitcode=0x00000200":  true,
		"[   12.123456] BUG: kernel NULL pointer dereference, address: 0000000000000000":     true,
		"[   12.123456] BUG: unable to handle page fault for address: ffffc90000000000":      true,
		"[   12.123456] Oops: 0002 [#1] PREEMPT SMP NOPTI":                                   true,
		"[   12.123456] kernel BUG at mm/memory.c:123!":                                      true,
		"[   12.123456] general protection fault, probably for non-canonical address 0xdead": true,
		"Kernel panic - not syncing: VFS":                                                    true,
		"[    1.0] tests of BUG: are fine":                                                   false,
		"[    1.0] watchdog: BUG: soft lockup - CPU#0 stuck for 26s!":                        false,
		"[    1.0] Kernel command line: panic=-1 oops=panic":                                 false,
	} {
		c := newConsole(&bytes.Buffer{})
		fmt.Fprintln(c, line)
		select {
		case <-c.broken:
			if !want || c.fatalLine() != line {
				t.Errorf("%q is taken for fatal", line)
			}
		default:
			if want {
				t.Errorf("%q is not taken for fatal", line)
			}
		}
		fmt.Fprintln(c, "Kernel panic - not syncing: a second one") // closes nothing twice
	}
}
