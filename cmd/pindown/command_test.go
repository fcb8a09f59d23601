package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/epoch"
	"github.com/pindown/pindown/internal/demo"
	"github.com/pindown/pindown/internal/doctor"
)

// execute runs the command in this process.
func execute(t *testing.T, args ...string) (stdout string, code int, err error) {
	t.Helper()
	root := NewRootCommand()
	var out bytes.Buffer
	root.SetArgs(args)
	root.SetOut(&out)
	root.SetErr(io.Discard)
	err = root.ExecuteContext(t.Context())
	return out.String(), exitCode(err), err
}

func object(t *testing.T, text string) map[string]any {
	t.Helper()
	var m map[string]any
	d := json.NewDecoder(strings.NewReader(text))
	if err := d.Decode(&m); err != nil {
		t.Fatalf("%v in:\n%s", err, text)
	}
	if d.More() {
		t.Errorf("more than one value in:\n%s", text)
	}
	return m
}

func TestUsage(t *testing.T) {
	dir := t.TempDir()
	for _, c := range []struct {
		args string
		want string
	}{
		{"nosuch", "unknown command"},
		{"demo extra", "unknown command"},
		{"version extra", "unknown command"},
		{"doctor extra", "unknown command"},
		{"--nosuch", "unknown flag"},
		{"demo --nosuch", "unknown flag"},
		{"demo --rounds", "needs an argument"},
		{"demo --rounds x", "invalid argument"},
		{"demo --rounds 0", "at least 1"},
		{"demo --rounds -5", "at least 1"},
		{"demo --rounds 99999999999", "at most"},
		{"demo --buffer 0", "at least one page"},
		{"demo --buffer -1", "want a number of bytes"},
		{"demo --buffer 4097", "multiple of the page size"},
		{"demo --buffer 1G", "at most 64 MiB"},
		{"demo --buffer 20000000000G", "want a number of bytes"},
		{"demo --buffer K", "want a number of bytes"},
		{"demo --churn sour", "one of none, unmap, dontneed, remap, mixed"},
		{"demo --churn invalid", "one of"},
		{"demo --monitor eye", "one of auto"},
		{"doctor --trial monitor/eye", "unknown trial"},
	} {
		args := strings.Fields(c.args)
		if strings.HasPrefix(c.args, "demo --") {
			args = append(args, "--file", filepath.Join(dir, "never"))
			if c.args == "demo --rounds" {
				args = args[:2]
			}
		}
		out, code, err := execute(t, args...)
		if code != exitUsage || err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: exit code %d, error %v, want %d and %q", c.args, code, err, exitUsage, c.want)
		}
		if out != "" {
			t.Errorf("%s: writes %q", c.args, out)
		}
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left %v, %v", left, err)
	}
}

func TestHelp(t *testing.T) {
	walk(NewRootCommand(), func(c *cobra.Command) {
		if c.Hidden || c.Name() == "help" || c.Name() == "completion" || c.HasParent() && c.Parent().Name() == "completion" {
			return
		}
		if c.Short == "" {
			t.Errorf("%s has no short help", c.CommandPath())
		}
		args := append(strings.Fields(c.CommandPath())[1:], "--help")
		out, code, err := execute(t, args...)
		if code != exitOK || !strings.Contains(out, "Usage:") {
			t.Errorf("%v: exit code %d, %v:\n%s", args, code, err, out)
		}
		if strings.Contains(out, "trial string") {
			t.Errorf("%v shows what is hidden", args)
		}
	})
	if out, code, _ := execute(t); code != exitOK || !strings.Contains(out, "Available Commands") {
		t.Errorf("without a verb: exit code %d:\n%s", code, out)
	}
}

func walk(c *cobra.Command, f func(*cobra.Command)) {
	f(c)
	for _, sub := range c.Commands() {
		walk(sub, f)
	}
}

func TestVersion(t *testing.T) {
	out, code, err := execute(t, "version")
	if code != exitOK || !strings.HasPrefix(out, "pindown ") || strings.Count(out, "\n") != 1 {
		t.Errorf("exit code %d, %v: %q", code, err, out)
	}
	out, code, err = execute(t, "version", "--json")
	if code != exitOK {
		t.Fatalf("exit code %d, %v", code, err)
	}
	m := object(t, out)
	delete(m, "revision")
	delete(m, "modified")
	if m["version"] == "" {
		t.Error("no version")
	}
	delete(m, "version")
	want := map[string]any{
		"go": runtime.Version(), "os": runtime.GOOS, "arch": runtime.GOARCH,
		"epoch_layout": float64(epoch.Version), "epoch_features": []any{"base", "hit-check"},
		"monitors": []any{"bpf", "uffd", "manual"}, "devices": []any{"iouring", "verbs"},
	}
	if diff := cmp.Diff(want, m); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestDoctorJSON(t *testing.T) {
	out, code, err := execute(t, "doctor", "--json")
	if code != exitOK {
		t.Fatalf("exit code %d, %v", code, err)
	}
	m := object(t, out)
	if k, _ := m["kernel"].(string); k == "" || k == "unknown" {
		t.Errorf("kernel %v", m["kernel"])
	}
	checkReport(t, m)
}

// checkReport checks the documented fields of doctor's JSON.
func checkReport(t *testing.T, m map[string]any) {
	t.Helper()
	monitors, _ := m["monitors"].([]any)
	var names, usable []string
	for _, x := range monitors {
		mon := x.(map[string]any)
		name := mon["name"].(string)
		names = append(names, name)
		coverage, ok := mon["coverage"].(map[string]any)
		if !ok {
			t.Errorf("%s: coverage is %v", name, mon["coverage"])
		}
		for cell, outcome := range coverage {
			if op, mapping, ok := strings.Cut(cell, "/"); !ok || op == "" || mapping == "" {
				t.Errorf("%s: cell %q", name, cell)
			}
			if !slices.Contains([]any{"caught", "refused", "blind", "untested"}, outcome) {
				t.Errorf("%s: %s is %v", name, cell, outcome)
			}
		}
		if mon["usable"].(bool) {
			usable = append(usable, name)
			if len(coverage) == 0 {
				t.Errorf("%s is usable without coverage", name)
			}
		} else if mon["reason"].(string) == "" {
			t.Errorf("%s isn't usable for no reason", name)
		}
	}
	if want := []string{"bpf", "uffd", "manual"}; !slices.Equal(names, want) {
		t.Errorf("monitors %v, want %v", names, want)
	}
	selected, _ := m["selected"].(map[string]any)
	want := "none"
	if usable[0] != "manual" {
		want = usable[0]
	}
	if selected["monitor"] != want {
		t.Errorf("selected %v of %v", selected["monitor"], usable)
	}
	devices, _ := m["devices"].([]any)
	dev := devices[0].(map[string]any)
	if dev["name"] != "iouring" {
		t.Errorf("device %v", dev["name"])
	}
	if dev["usable"].(bool) != (selected["device"] == "iouring") {
		t.Errorf("device usable is %v, selected %v", dev["usable"], selected["device"])
	}
	if !dev["usable"].(bool) && dev["reason"].(string) == "" {
		t.Error("the device isn't usable for no reason")
	}
}

func TestTrialJSON(t *testing.T) {
	out, code, err := execute(t, "doctor", "--trial", "monitor/manual")
	if code != exitOK {
		t.Fatalf("exit code %d, %v", code, err)
	}
	var f doctor.Finding
	if err := json.Unmarshal([]byte(out), &f); err != nil || !f.Usable || f.Coverage["munmap/anon-private"] != "caught" {
		t.Errorf("%v: %+v", err, f)
	}
}

func TestDemoJSON(t *testing.T) {
	if !offers["io_uring"]() {
		if os.Getenv("CI") == "true" {
			t.Fatal("needs io_uring")
		}
		t.Skip("needs io_uring")
	}
	path := filepath.Join(t.TempDir(), "blocks")
	out, code, err := execute(t, "demo", "--json", "--rounds", "300", "--churn", "unmap", "--buffer", "64K", "--file", path, "--seed", "3")
	if code != exitOK {
		t.Fatalf("exit code %d, %v", code, err)
	}
	m := object(t, out)
	monitor, _ := m["monitor"].(string)
	if m["device"] != "iouring" || monitor == "" || m["rounds"] != 300.0 || m["churn"] != "unmap" ||
		m["buffer"] != 65536.0 || m["file"] != path || m["seed"] != 3.0 {
		t.Errorf("got %v", m)
	}
	modes, _ := m["modes"].([]any)
	if len(modes) != 4 {
		t.Fatalf("%d modes", len(modes))
	}
	for i, name := range []string{"no-monitor", "pindown", "per-use", "unregistered"} {
		mode := modes[i].(map[string]any)
		if mode["name"] != name {
			t.Errorf("mode %d is %v, want %s", i, mode["name"], name)
		}
		for _, key := range []string{"blocks", "wrong_blocks", "hits", "misses", "invalidations", "registrations", "seconds"} {
			if _, ok := mode[key].(float64); !ok {
				t.Errorf("%s: %s is %v", name, key, mode[key])
			}
		}
		if wrong := mode["wrong_blocks"].(float64); wrong > 0 != (name == "no-monitor") {
			t.Errorf("%s: %v wrong blocks", name, wrong)
		}
		if name == "pindown" && monitor != "none" && mode["hits"] == 0.0 {
			t.Error("no hits")
		}
	}
}

// Control-C ends the demo, which shows what it did until then.
func TestInterrupt(t *testing.T) {
	if !offers["io_uring"]() {
		if os.Getenv("CI") == "true" {
			t.Fatal("needs io_uring")
		}
		t.Skip("needs io_uring")
	}
	path := filepath.Join(t.TempDir(), "blocks")
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "demo", "--rounds", "100000000", "--monitor", "none", "--file", path)
	cmd.Args[0] = "pindown"
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	// The warm-up doesn't write so many blocks; what comes then counts.
	const at = 200 * demo.DefaultBuffer
	for begun := false; !begun; runtime.Gosched() {
		b, err := os.ReadFile(path)
		begun = err == nil && len(b) > at+os.Getpagesize() && bytes.ContainsFunc(b[at:at+os.Getpagesize()], func(r rune) bool { return r != 0 })
	}
	if err := cmd.Process.Signal(os.Interrupt); err != nil {
		t.Error(err)
	}
	err := cmd.Wait()
	if code := cmd.ProcessState.ExitCode(); code != exitSignal+int(syscall.SIGINT) || errs.String() != "pindown: interrupted\n" || !strings.HasPrefix(out.String(), "Interrupted. Until then, of 100000000 blocks") {
		t.Errorf("%v: exit code %d, %q, %q", err, code, errs.String(), out.String())
	}
}

// A signal is the exit code where it is why a command ends, and only there.
func TestSignalled(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	if err := signalled(ctx, context.Canceled); exitCode(err) != exitFailed {
		t.Errorf("without a signal: %v", err)
	}
	cancel(signalError(syscall.SIGTERM))
	for err, want := range map[error]int{
		nil: exitOK, io.EOF: exitFailed, usageError{io.EOF}: exitUsage, exitError(7): 7,
		context.Canceled: 143, fmt.Errorf("run: %w", context.Canceled): 143,
		fmt.Errorf("run: %w", context.Cause(ctx)): 143,
	} {
		if got := exitCode(signalled(ctx, err)); got != want {
			t.Errorf("%v: exit code %d, want %d", err, got, want)
		}
	}
	for sig, want := range map[syscall.Signal]string{syscall.SIGINT: "interrupted", syscall.SIGTERM: "terminated"} {
		if got := message(signalError(sig)); got != want {
			t.Errorf("%v: %q, want %q", sig, got, want)
		}
	}
}

// What is too small a limit says what helps, whoever found it.
func TestMemlockHint(t *testing.T) {
	for err, want := range map[error]string{
		fmt.Errorf("buffers: %w", demo.ErrMemlock):                           "buffers: RLIMIT_MEMLOCK is too small; raise RLIMIT_MEMLOCK (ulimit -l",
		fmt.Errorf("%w: ring: %w", demo.ErrNotSupported, device.ErrNoMemory): "not supported here: ring: device: no memory to pin; raise RLIMIT_MEMLOCK (ulimit -l",
		fmt.Errorf("register: %w", device.ErrNoMemory):                       "register: device: no memory to pin; raise RLIMIT_MEMLOCK (ulimit -l",
	} {
		if got := message(err); !strings.HasPrefix(got, want) {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

func TestSize(t *testing.T) {
	for text, want := range map[string]uint64{
		"4096": 4096, "64K": 64 << 10, "64k": 64 << 10, "1M": 1 << 20, "1MiB": 1 << 20, "2 mb": 2 << 20, "1g": 1 << 30, "0": 0,
	} {
		var s size
		if err := s.Set(text); err != nil || s.n != want {
			t.Errorf("%q: %d, %v, want %d", text, s.n, err, want)
		}
	}
	for _, text := range []string{"", "K", "-1", "1.5M", "1T", "0x10", "18446744073709551616", "17179869184G", "4Kb ib"} {
		var s size
		if err := s.Set(text); err == nil {
			t.Errorf("%q: %d", text, s.n)
		}
	}
}

func TestExitCodes(t *testing.T) {
	for err, want := range map[error]int{
		nil: exitOK, io.EOF: exitFailed, usageError{io.EOF}: exitUsage, demo.ErrOptions: exitUsage,
		demo.ErrNotSupported: exitUnsupported, demo.ErrWrongBlocks: exitFailed, demo.ErrNotOurs: exitFailed,
	} {
		if got := exitCode(err); got != want {
			t.Errorf("%v: %d, want %d", err, got, want)
		}
	}
}
