package profile

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestFate: what has ended doesn't still run, even if its exit code was lost.
func TestFate(t *testing.T) {
	for want, r := range map[string]*Result{
		"exit code 0":               {Ended: true},
		"exit code 3":               {Ended: true, ExitCode: 3},
		"ended by a signal: killed": {Ended: true, ExitCode: 137, Signal: "killed"},
		"ended, exit code not seen": {Ended: true, ExitCode: -1},
		"still runs":                {ExitCode: -1},
	} {
		if got := r.fate(); got != want {
			t.Errorf("%+v: %q, want %q", r, got, want)
		}
	}
}

// TestLost: what is incomplete is said, and what isn't.
func TestLost(t *testing.T) {
	for _, c := range []struct {
		l    Lost
		want string
		not  string
	}{
		{Lost{Events: 1}, "complete all the same", "Nothing is known"},
		{Lost{Events: 1, Tasks: 2}, "Nothing is known of the calls of tasks", "complete"},
		{Lost{Stacks: 3}, "3 stacks", "complete"},
	} {
		r := Result{Lost: c.l}
		if s := r.lost(); !strings.Contains(s, c.want) || strings.Contains(s, c.not) {
			t.Errorf("%+v: %s", c.l, s)
		}
	}
	if s := (&Result{}).lost(); s != "" {
		t.Error(s)
	}
}

// TestCommandOf: what can't be followed is refused with the reason.
func TestCommandOf(t *testing.T) {
	if got, err := commandOf(os.Getpid()); err != nil || !slices.Equal(got, os.Args) {
		t.Errorf("%q, %v", got, err)
	}

	// A thread.
	tid, end := make(chan int), make(chan struct{})
	go func() {
		runtime.LockOSThread() // which ends with the goroutine
		if n := unix.Gettid(); n != os.Getpid() {
			tid <- n
		} else {
			tid <- 0
		}
		<-end
	}()
	if n := <-tid; n != 0 {
		if _, err := commandOf(n); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("thread of process %d", os.Getpid())) {
			t.Errorf("thread: %v", err)
		}
	}
	close(end)

	// A process that has ended, but is still there.
	cmd := exec.Command("true")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if err := unix.Waitid(unix.P_PID, cmd.Process.Pid, nil, unix.WEXITED|unix.WNOWAIT, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := commandOf(cmd.Process.Pid); !errors.Is(err, os.ErrProcessDone) {
		t.Errorf("zombie: %v", err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}

	// A thread of the kernel: none has memory, others have some.
	all, err := filepath.Glob("/proc/[0-9]*/maps")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range all {
		pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		if got, err := commandOf(pid); pid == 2 && err == nil && slices.Equal(got, []string{"kthreadd"}) {
			t.Errorf("process %d is the kernel's: %q", pid, got)
		}
	}
}

// TestNextPoll: a buffer that fills, or a program that loads something, is looked
// at soon; others ever more rarely, up to a limit.
func TestNextPoll(t *testing.T) {
	const room = 1600
	wait := poll
	for range 10 {
		wait = nextPoll(wait, room/busyShare, room, false)
	}
	if wait != maxPoll {
		t.Errorf("idle: %v", wait)
	}
	if d := nextPoll(maxPoll, room/busyShare+1, room, false); d != poll {
		t.Errorf("busy: %v", d)
	}
	if d := nextPoll(maxPoll, 0, room, true); d != poll {
		t.Errorf("loading: %v", d)
	}
}
