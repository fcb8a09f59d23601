package bpf

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/vm"
)

// The test binary, run again with this variable set, is another process with a
// monitor of its own.
const childEnv = "PINDOWN_BPF_CHILD"

// childMain opens a monitor and does what the parent says, a line at a time.
func childMain() int {
	out := bufio.NewWriter(os.Stdout)
	say := func(format string, args ...any) {
		fmt.Fprintf(out, format+"\n", args...)
		_ = out.Flush()
	}
	if os.Getenv(childEnv) == "after-exec" {
		say("executed")
		_, _ = io.Copy(io.Discard, os.Stdin)
		return 0
	}
	mode := ModeSyscalls
	if os.Getenv(childEnv) == ModeFunctions.String() {
		mode = ModeFunctions
	}
	m, err := Open(&Options{Mode: mode})
	if err != nil {
		say("error %s", strings.ReplaceAll(err.Error(), "\n", " "))
		return 0
	}
	var ids []string
	for _, p := range m.coll.Programs {
		info, err := p.Info()
		if err != nil {
			say("error %v", err)
			return 1
		}
		id, _ := info.ID()
		ids = append(ids, fmt.Sprintf("program:%d", id))
	}
	for _, mp := range m.coll.Maps {
		info, err := mp.Info()
		if err != nil {
			say("error %v", err)
			return 1
		}
		id, _ := info.ID()
		ids = append(ids, fmt.Sprintf("map:%d", id))
	}
	say("ready %s", strings.Join(ids, " "))
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		switch in.Text() {
		case "churn":
			r := vm.Range{Start: churnAddress, End: churnAddress + 1<<20}
			if _, err := mmap(r.Start, r.Len(), unix.MAP_FIXED); err != nil {
				say("error %v", err)
				return 1
			}
			for range 100 {
				poke(r.Start)
				if err := madvise(r, unix.MADV_DONTNEED); err != nil {
					say("error %v", err)
					return 1
				}
			}
			if err := munmap(r); err != nil {
				say("error %v", err)
				return 1
			}
			say("done")
		case "exec":
			err := os.Setenv(childEnv, "after-exec")
			if err == nil {
				err = syscall.Exec("/proc/self/exe", os.Args, os.Environ())
			}
			say("error %v", err)
			return 1
		case "close":
			if err := m.Close(); err != nil {
				say("error %v", err)
				return 1
			}
			// The table's memory goes when nobody holds the table.
			m = nil
			for range 3 {
				runtime.GC()
			}
			say("closed")
		}
	}
	return 0
}

// churnAddress is where parent and child map memory, the same in both.
const churnAddress = 0x5f0000000000

type child struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Scanner
	ids []string
}

func startChild(t *testing.T, mode Mode) *child {
	t.Helper()
	cmd := exec.Command("/proc/self/exe", "-test.run=^$")
	cmd.Env = append(os.Environ(), childEnv+"="+mode.String())
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	c := &child{cmd: cmd, in: in, out: bufio.NewScanner(out)}
	line := c.line(t)
	ids, ok := strings.CutPrefix(line, "ready ")
	if !ok {
		t.Fatalf("child: %s", line)
	}
	c.ids = strings.Fields(ids)
	return c
}

func (c *child) line(t *testing.T) string {
	t.Helper()
	if !c.out.Scan() {
		t.Fatalf("child is gone: %v", c.out.Err())
	}
	return c.out.Text()
}

func (c *child) ask(t *testing.T, what, want string) {
	t.Helper()
	if _, err := io.WriteString(c.in, what+"\n"); err != nil {
		t.Fatal(err)
	}
	if got := c.line(t); got != want {
		t.Fatalf("child was asked to %s and said %q", what, got)
	}
}

// alive returns those of the child's programs and maps that the kernel has.
func (c *child) alive(t *testing.T) []string {
	t.Helper()
	var alive []string
	for _, s := range c.ids {
		var id uint32
		var obj io.Closer
		var err error
		if _, e := fmt.Sscanf(s, "program:%d", &id); e == nil {
			obj, err = ebpf.NewProgramFromID(ebpf.ProgramID(id))
		} else if _, e := fmt.Sscanf(s, "map:%d", &id); e == nil {
			obj, err = ebpf.NewMapFromID(ebpf.MapID(id))
		} else {
			t.Fatalf("unexpected %q", s)
		}
		switch {
		case err == nil:
			_ = obj.Close()
			alive = append(alive, s)
		case !errors.Is(err, os.ErrNotExist):
			t.Fatal(err)
		}
	}
	return alive
}

// gone waits until nothing of the child is left: the kernel frees programs
// some time after the last descriptor is closed.
func (c *child) gone(t *testing.T) {
	t.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for {
		left := c.alive(t)
		if len(left) == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("left behind: %v", left)
		}
		time.Sleep(time.Millisecond)
	}
}

// However a process ends, nothing of its monitor stays in the kernel.
func TestNothingLeft(t *testing.T) {
	eachMode(t, func(t *testing.T, mode Mode) {
		mustOpen(t, Options{Mode: mode})
		for _, tt := range []struct {
			name string
			end  func(*testing.T, *child)
		}{
			{"kill", func(t *testing.T, c *child) {
				if err := c.cmd.Process.Kill(); err != nil {
					t.Fatal(err)
				}
				_ = c.cmd.Wait()
			}},
			{"close", func(t *testing.T, c *child) { c.ask(t, "close", "closed") }},
			{"exit", func(_ *testing.T, c *child) {
				_ = c.in.Close()
				_ = c.cmd.Wait()
			}},
			{"exec", func(t *testing.T, c *child) { c.ask(t, "exec", "executed") }},
		} {
			t.Run(tt.name, func(t *testing.T) {
				c := startChild(t, mode)
				if got := c.alive(t); len(got) != len(c.ids) || len(got) < 5 {
					t.Fatalf("of %v only %v are listed", c.ids, got)
				}
				tt.end(t, c)
				c.gone(t)
			})
		}
	})
}

// What another process does at the same addresses is its own affair, while
// both have monitors.
func TestProcesses(t *testing.T) {
	eachMode(t, func(t *testing.T, mode Mode) {
		m := mustOpen(t, Options{Mode: mode, Heartbeat: -1})
		second := mustOpen(t, Options{Mode: mode, Heartbeat: -1})
		r := vm.Range{Start: churnAddress, End: churnAddress + 1<<20}
		if _, err := mmap(r.Start, r.Len(), unix.MAP_FIXED_NOREPLACE); err != nil {
			t.Fatal(err)
		}
		defer func() { _ = munmap(r) }()
		poke(r.Start)
		w, w2 := watch(t, m, r), watch(t, second, r)
		before, before2 := m.Table().Stamp(w), second.Table().Stamp(w2)
		children := []*child{startChild(t, mode), startChild(t, mode), startChild(t, mode)}
		for _, c := range children {
			c.ask(t, "churn", "done")
		}
		if m.Table().Stamp(w) != before || second.Table().Stamp(w2) != before2 {
			t.Error("another process's operations were recorded here")
		}
		if err := madvise(r, unix.MADV_DONTNEED); err != nil {
			t.Fatal(err)
		}
		if m.Table().Stamp(w) == before || second.Table().Stamp(w2) == before2 {
			t.Error("an operation of this process wasn't recorded by both monitors")
		}
	})
}

func TestUnprivileged(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("root needed, to become somebody else")
	}
	eachMode(t, func(t *testing.T, mode Mode) {
		nobody := &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
		cmd := exec.Command("/proc/self/exe", "-test.run=^$")
		cmd.Env = append(os.Environ(), childEnv+"="+mode.String())
		cmd.SysProcAttr = nobody
		out, err := cmd.Output()
		if err != nil {
			t.Fatal(err)
		}
		want := "open bpf monitor in " + mode.String() + " mode: load program: monitor: not supported here: needs CAP_BPF and CAP_PERFMON"
		if !strings.Contains(string(out), want) {
			t.Errorf("got %q, want %q in it", out, want)
		}
	})
}
