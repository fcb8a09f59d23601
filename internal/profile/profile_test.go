package profile

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/pindown/pindown/trace"
)

// need skips the test if the machine lacks something; in CI it fails.
func need(tb testing.TB, ok bool, what string) {
	tb.Helper()
	if ok {
		return
	}
	if os.Getenv("CI") == "true" {
		tb.Fatalf("CI lacks %s", what)
	}
	tb.Skipf("needs %s", what)
}

// skipShort skips what takes seconds, most of them for the kernel to take BPF
// programs away again.
func skipShort(tb testing.TB) {
	tb.Helper()
	if testing.Short() {
		tb.Skip("long")
	}
}

// compile compiles a C program of testdata.
func compile(tb testing.TB, name string, flags ...string) string {
	tb.Helper()
	gcc, err := exec.LookPath("gcc")
	need(tb, err == nil, "gcc (make deps)")
	out := filepath.Join(tb.TempDir(), name)
	args := append([]string{"-O1", "-fno-omit-frame-pointer", "-o", out, filepath.Join("testdata", name+".c")}, flags...)
	if b, err := exec.Command(gcc, args...).CombinedOutput(); err != nil {
		tb.Fatalf("gcc %s: %v\n%s", args, err, b)
	}
	return out
}

func profileIt(tb testing.TB, o *Options) *Result {
	tb.Helper()
	var out bytes.Buffer
	if o.Stderr == nil {
		o.Stdout, o.Stderr = &out, &out
	}
	res, err := Run(context.Background(), o)
	need(tb, !errors.Is(err, ErrNotSupported), fmt.Sprint("BPF: ", err))
	if err != nil {
		tb.Fatal(err)
	}
	if res.Lost.Events != 0 || res.Lost.Tasks != 0 {
		tb.Errorf("lost: %+v", res.Lost)
	}
	if out.Len() > 0 {
		tb.Logf("%s", out.Bytes())
	}
	return res
}

// straced returns how many calls strace counts.
func straced(tb testing.TB, command ...string) map[string]uint64 {
	tb.Helper()
	strace, err := exec.LookPath("strace")
	need(tb, err == nil, "strace (make deps)")
	file := filepath.Join(tb.TempDir(), "strace")
	cmd := exec.Command(strace, append([]string{"-f", "-c", "-o", file}, command...)...)
	var exit *exec.ExitError
	if b, err := cmd.CombinedOutput(); err != nil && !errors.As(err, &exit) {
		tb.Fatalf("strace: %v\n%s", err, b)
	}
	text, err := os.ReadFile(file)
	if err != nil {
		tb.Fatal(err)
	}
	counts := map[string]uint64{}
	for line := range strings.Lines(string(text)) {
		// % time, seconds, usecs/call, calls, [errors,] syscall.
		f := strings.Fields(line)
		if len(f) < 5 {
			continue
		}
		if n, err := strconv.ParseUint(f[3], 10, 64); err == nil {
			counts[f[len(f)-1]] = n
		}
	}
	return counts
}

// TestCountsAreThoseOfStrace: of a program with children that runs the same
// way every time, each call of each process is counted, from execve on.
func TestCountsAreThoseOfStrace(t *testing.T) {
	program := compile(t, "churn")
	var rec bytes.Buffer
	res := profileIt(t, &Options{Command: []string{program}, Trace: &rec})
	if res.ExitCode != 3 {
		t.Errorf("exit code %d, want 3", res.ExitCode)
	}
	if res.Processes != 4 {
		t.Errorf("%d processes, want 4", res.Processes)
	}
	want := straced(t, program)
	inTrace := recorded(t, &rec)
	for _, name := range []string{"munmap", "mmap", "mremap", "madvise", "brk", "mprotect"} {
		o := res.Operations[name]
		if o == nil || o.Count != want[name] || want[name] == 0 {
			t.Errorf("%s: %+v, strace counted %d", name, o, want[name])
			continue
		}
		if got := inTrace[name]; got != want[name] {
			t.Errorf("%s: %d in the recording, strace counted %d", name, got, want[name])
		}
		var sizes, latencies uint64
		for _, s := range o.Sizes {
			sizes += s.Count
		}
		for _, l := range o.Latencies {
			latencies += l.Count
		}
		if sizes != o.Count || latencies != o.Count {
			t.Errorf("%s: %d calls, %d by size, %d by latency", name, o.Count, sizes, latencies)
		}
	}
	const rounds = 200 + 3*50 + 30
	if got := res.Operations["munmap"].Failed; got != rounds {
		t.Errorf("munmap: %d failed, want %d", got, rounds)
	}
	if got := res.Operations["madvise"].Kinds["dontneed"]; got != rounds {
		t.Errorf("madvise: %d dontneed, want %d", got, rounds)
	}
	if !hasSite(res.CallSites, "madvise", "give_back", "churn", "main") {
		t.Errorf("no call site of madvise in give_back: %+v", res.CallSites)
	}
}

// recorded counts the operations in a recording.
func recorded(tb testing.TB, rec *bytes.Buffer) map[string]uint64 {
	tb.Helper()
	r, err := trace.NewReader(rec)
	if err != nil {
		tb.Fatal(err)
	}
	counts := map[string]uint64{}
	stacks := map[uint32]bool{}
	var used []uint32
	for x, err := range r.All() {
		if err != nil {
			tb.Fatal(err)
		}
		switch x := x.(type) {
		case *trace.Event:
			if x.Kind == trace.KindOp {
				counts[x.Op.Call()]++
			}
			if x.Stack != 0 {
				used = append(used, x.Stack)
			}
		case *trace.Stack:
			stacks[x.ID] = true
		}
	}
	for _, id := range used {
		if !stacks[id] {
			tb.Fatalf("the recording has no stack %d", id)
		}
	}
	return counts
}

// hasSite reports whether there is a call site of an operation with these
// functions, innermost first, beneath each other.
func hasSite(sites []CallSite, operation string, functions ...string) bool {
	return slices.ContainsFunc(sites, func(c CallSite) bool {
		return c.Operation == operation && onStack(c.Stack, functions...)
	})
}

func onStack(stack []Frame, functions ...string) bool {
	var names []string
	for _, f := range stack {
		names = append(names, f.Function)
	}
	for i := range names {
		if len(names)-i >= len(functions) && slices.Equal(names[i:i+len(functions)], functions) {
			return true
		}
	}
	return false
}

// TestStaleWindows: a change to registered memory is reported with the places
// in the program, and whether the registration was used for it afterwards;
// nothing is where there is none. All ways run in one profile.
func TestStaleWindows(t *testing.T) {
	program := compile(t, "ring")
	ways := []struct {
		how         string
		stale, used bool
		ended       string
		uses        uint64
		useStack    bool
	}{
		{how: "clean", ended: "exit", uses: 4},
		{how: "before", ended: "exit", uses: 4},
		{how: "elsewhere", ended: "exit", uses: 4},
		{how: "unregister", ended: "deregistered", uses: 4},
		{how: "closed", ended: "ring closed", uses: 4},
		{how: "unused", stale: true, ended: "exit", uses: 3},
		{how: "stale", stale: true, used: true, ended: "exit", uses: 4, useStack: true},
		{how: "sqpoll", stale: true, used: true, ended: "exit", uses: 4},
	}
	command := []string{"sh", "-c", `for how; do "$0" "$how" || exit; done`, program}
	for _, w := range ways {
		command = append(command, w.how)
	}
	res := profileIt(t, &Options{Command: command})
	need(t, res.ExitCode != 9, "io_uring")
	if res.ExitCode != 0 {
		t.Fatalf("exit code %d", res.ExitCode)
	}
	if len(res.Registrations) != 2*len(ways) || res.Registering.RegisteredBytes != uint64(len(ways))*128<<10 {
		t.Fatalf("registering: %+v, want two of 64 KiB each", res.Registering)
	}
	for i, tt := range ways {
		t.Run(tt.how, func(t *testing.T) {
			regs := res.Registrations[2*i : 2*i+2]
			for _, x := range regs {
				if x.PID != regs[0].PID || x.Ended != tt.ended || x.Via != "io_uring" || !onStack(x.Stack, "register_them", "main") {
					t.Errorf("registration: %+v, want ended by %s", x, tt.ended)
				}
			}
			if uses := regs[0].Uses + regs[1].Uses; uses != tt.uses {
				t.Errorf("%d uses, want %d", uses, tt.uses)
			}
			var windows []*StaleWindow
			for _, w := range res.StaleWindows {
				if w.PID == regs[0].PID {
					windows = append(windows, w)
				}
			}
			if !tt.stale {
				if len(windows) != 0 {
					t.Errorf("stale: %+v", windows[0])
				}
				return
			}
			if len(windows) != 1 {
				t.Fatalf("%d stale windows, want one", len(windows))
			}
			w := windows[0]
			if w.UsedAgain != tt.used || (w.Uses == 1) != tt.used || w.Operation != "madvise dontneed" || w.Length != 16<<10 {
				t.Errorf("window: %+v", w)
			}
			if reg := res.Registrations[w.Registration-1]; reg != regs[1] || reg.Handle != 1 || w.Start != reg.Start {
				t.Errorf("window at %#x of %+v", w.Start, reg)
			}
			if !onStack(w.Stack, "plant", "main") || !onStack(w.RegistrationStack, "register_them", "main") {
				t.Errorf("stacks: %v, %v", w.Stack, w.RegistrationStack)
			}
			if onStack(w.UseStack, "use", "main") != tt.useStack {
				t.Errorf("stack of the use: %v", w.UseStack)
			}
		})
	}
	if res.Stale.Windows != 3 || res.Stale.UsedAgain != 2 {
		t.Errorf("stale: %+v, want 3 windows, 2 used again", res.Stale)
	}
}

// TestVerbs: registrations through any copy of libibverbs, by the outermost
// call.
func TestVerbs(t *testing.T) {
	skipShort(t)
	lib := compile(t, "libibverbs", "-shared", "-fPIC", "-Wl,-soname,libibverbs.so.1")
	dir := filepath.Dir(lib)
	if err := os.Rename(lib, filepath.Join(dir, "libibverbs.so.1")); err != nil {
		t.Fatal(err)
	}
	program := compile(t, "verbs", filepath.Join(dir, "libibverbs.so.1"))
	t.Setenv("LD_LIBRARY_PATH", dir)
	res := profileIt(t, &Options{Command: []string{program}})
	if res.ExitCode != 0 {
		t.Fatalf("exit code %d", res.ExitCode)
	}
	if g := res.Registering; g.Registrations != 2 || g.Deregistrations != 2 || g.RegisteredBytes != 128<<10 {
		t.Errorf("registering: %+v; notes: %q", g, res.Notes)
	}
	for _, x := range res.Registrations {
		if x.Via != "verbs" || !onStack(x.Stack, "register_it", "main") {
			t.Errorf("registration: %+v", x)
		}
	}
	if len(res.StaleWindows) != 1 || res.StaleWindows[0].Registration != 2 || res.StaleWindows[0].Operation != "munmap" {
		t.Errorf("stale windows: %+v", res.StaleWindows)
	}
}

// TestCountsSurviveLoss: with a buffer of a page most events are lost, which is
// said, and the counts of calls are complete.
func TestCountsSurviveLoss(t *testing.T) {
	res, err := Run(context.Background(), &Options{Command: []string{compile(t, "churn")}, RingBytes: 4096, NoUses: true})
	need(t, !errors.Is(err, ErrNotSupported), fmt.Sprint("BPF: ", err))
	if err != nil {
		t.Fatal(err)
	}
	if res.Lost.Events == 0 {
		t.Error("nothing lost")
	}
	const rounds, distance = 200 + 3*50 + 30, 7
	o := res.Operations["mremap"]
	if o == nil || o.Count != rounds || o.Failed != 0 {
		t.Fatalf("mremap: %+v, want %d", o, rounds)
	}
	var want uint64
	for _, n := range []int{200, 50, 50, 50, 30} {
		for i := range n {
			want += 2 * uint64(i%distance+1) * 16 * 4096
		}
	}
	if o.Bytes != want {
		t.Errorf("mremap: %d bytes, want %d", o.Bytes, want)
	}
	var text bytes.Buffer
	if err := res.WriteText(&text); err != nil || !strings.Contains(text.String(), "Lost: ") || !strings.Contains(text.String(), "--buffer") {
		t.Errorf("%v: %s", err, text.String())
	}
	var page bytes.Buffer
	if err := res.WriteHTML(&page); err != nil || !strings.Contains(page.String(), res.lost()) {
		t.Errorf("%v: no %q in the report", err, res.lost())
	}
}

// full is a disk that gets full: after so many bytes, or when a file is there.
type full struct {
	left  int
	since string
}

func (f *full) Write(b []byte) (int, error) {
	_, err := os.Stat(f.since)
	if f.left -= len(b); f.left < 0 || err == nil {
		return 0, syscall.ENOSPC
	}
	return len(b), nil
}

// TestDiskFull: a recording that can't be written to its end ends early, and is
// an error; the program and its profile go on.
func TestDiskFull(t *testing.T) {
	program := compile(t, "churn")
	over := filepath.Join(t.TempDir(), "over")
	for _, disk := range []*full{{left: 2000}, {left: 1 << 30, since: over}} { // in the middle, at the end
		res, err := Run(context.Background(), &Options{
			Command: []string{"sh", "-c", `"$0"; code=$?; : >"$1"; exit $code`, program, over}, Trace: disk,
		})
		if !errors.Is(err, syscall.ENOSPC) || res == nil {
			t.Fatalf("result %v, error %v", res != nil, err)
		}
		const rounds = 200 + 3*50 + 30
		if o := res.Operations["mremap"]; res.ExitCode != 3 || o == nil || o.Count != rounds {
			t.Errorf("exit code %d, mremap %+v", res.ExitCode, o)
		}
		if !slices.ContainsFunc(res.Notes, func(n string) bool { return strings.HasPrefix(n, "the recording ends early: ") }) {
			t.Errorf("notes: %q", res.Notes)
		}
		if err := os.Remove(over); err != nil {
			t.Error(err)
		}
	}
	if _, err := Run(context.Background(), &Options{Command: []string{program}, Trace: &full{}}); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("no room at all: %v", err)
	}
}

// TestEnd: a signal is passed on, and the end of the context kills the program.
func TestEnd(t *testing.T) {
	skipShort(t)
	ctx, cancel := context.WithCancel(context.Background())
	signals := make(chan os.Signal, 1)
	for _, tt := range []struct {
		name string
		do   func()
		code int
	}{
		{"signal", func() { signals <- syscall.SIGTERM }, 143},
		{"context", cancel, 137},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var once sync.Once
			res, err := Run(ctx, &Options{
				Command: []string{"sleep", "1000"}, Signals: signals, Progress: func(*Progress) { once.Do(tt.do) },
			})
			need(t, !errors.Is(err, ErrNotSupported), fmt.Sprint("BPF: ", err))
			if err != nil {
				t.Fatal(err)
			}
			if res.ExitCode != tt.code || res.Signal == "" {
				t.Errorf("exit code %d, signal %q", res.ExitCode, res.Signal)
			}
		})
	}
	for _, o := range []Options{{}, {Command: []string{"true"}, PID: 1}, {PID: -1}} {
		if _, err := Run(context.Background(), &o); err == nil {
			t.Errorf("no error of %+v", o)
		}
	}
}
