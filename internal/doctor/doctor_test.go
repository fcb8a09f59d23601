package doctor

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestParsePrivileges(t *testing.T) {
	status := "Name:\tx\nCapEff:\t000000c000000000\nNoNewPrivs:\t1\nSeccomp:\t2\n"
	p := parsePrivileges(status)
	want := Privileges{
		Capabilities: map[string]bool{"CAP_BPF": true, "CAP_PERFMON": true, "CAP_SYS_PTRACE": false, "CAP_IPC_LOCK": false, "CAP_SYS_ADMIN": false},
		NoNewPrivs:   true, Seccomp: "filter",
	}
	if diff := cmp.Diff(want, p); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	if p := parsePrivileges(""); p.Seccomp != unknown || p.Capabilities["CAP_BPF"] {
		t.Errorf("of nothing: %+v", p)
	}
}

// Without /proc and /sys nothing is known, and nothing goes wrong.
func TestBareEnvironment(t *testing.T) {
	r := environment(t.TempDir())
	if r.Kernel == "" || r.Privileges.Seccomp != unknown {
		t.Errorf("%+v", r)
	}
	for _, s := range r.Settings {
		switch s.Name {
		case "RLIMIT_MEMLOCK":
		case "kernel BTF":
			if s.Value != "no" {
				t.Errorf("%s is %q", s.Name, s.Value)
			}
		default:
			if s.Value != absent {
				t.Errorf("%s is %q", s.Name, s.Value)
			}
		}
	}
}

func TestSettings(t *testing.T) {
	root := t.TempDir()
	for path, content := range map[string]string{
		"proc/sys/kernel/io_uring_disabled":               "2\n",
		"sys/kernel/security/lockdown":                    "none [integrity] confidentiality\n",
		"sys/kernel/mm/transparent_hugepage/enabled":      "always [madvise] never\n",
		"sys/kernel/btf/vmlinux":                          "",
		"proc/sys/vm/nr_hugepages":                        "0\n",
		"proc/sys/kernel/unprivileged_bpf_disabled/a/dir": "",
	} {
		path = filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got := map[string][2]string{}
	for _, s := range settings(root, Privileges{})[1:] {
		got[s.Name] = [2]string{s.Value, s.Meaning}
	}
	want := map[string][2]string{
		"vm.max_map_count":                 {absent, ""},
		"vm.nr_hugepages":                  {"0", "mappings of huge pages can't be tested"},
		"transparent_hugepage":             {"madvise", ""},
		"vm.unprivileged_userfaultfd":      {absent, ""},
		"kernel.io_uring_disabled":         {"2", "no io_uring for anybody"},
		"kernel.unprivileged_bpf_disabled": {unknown, ""},
		"kernel lockdown":                  {"integrity", "BPF programs may be refused"},
		"kernel BTF":                       {"yes", ""},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// The best usable mode of a monitor stands for it, and the best usable monitor
// is selected; one that is told isn't.
func TestAddMonitor(t *testing.T) {
	r := &Report{Selected: Selected{Monitor: "none"}}
	cov := map[string]string{"munmap/anon-private": "caught"}
	r.addMonitor(trial{name: "bpf", mode: "functions"}, Finding{Reason: "refused\nreally"})
	r.addMonitor(trial{name: "bpf", mode: "syscalls"}, Finding{Usable: true, Coverage: cov})
	r.addMonitor(trial{name: "uffd"}, Finding{Usable: true, Coverage: cov})
	r.addMonitor(trial{name: manualName}, Finding{Usable: true, Coverage: cov})
	if want := (Selected{Monitor: "bpf", Mode: "syscalls"}); r.Selected != want {
		t.Errorf("selected %+v, want %+v", r.Selected, want)
	}
	if len(r.Monitors) != 3 {
		t.Fatalf("%d monitors", len(r.Monitors))
	}
	b := r.Monitors[0]
	if !b.Usable || b.Mode != "syscalls" || b.Reason != "functions: refused; really" || len(b.Modes) != 2 || b.Modes[0].Usable || cmp.Diff(cov, b.Coverage) != "" {
		t.Errorf("bpf: %+v", b)
	}

	r = &Report{Selected: Selected{Monitor: "none"}}
	r.addMonitor(trial{name: "bpf", mode: "functions"}, Finding{Reason: "no"})
	r.addMonitor(trial{name: "bpf", mode: "syscalls"}, Finding{Reason: "neither"})
	r.addMonitor(trial{name: manualName}, Finding{Usable: true})
	if b := r.Monitors[0]; b.Usable || b.Reason != "functions: no; syscalls: neither" || b.Coverage == nil {
		t.Errorf("bpf: %+v", b)
	}
	if r.Selected.Monitor != "none" {
		t.Errorf("selected %q", r.Selected.Monitor)
	}
}

// Whatever becomes of a trial's process is reported.
func TestElsewhere(t *testing.T) {
	for _, c := range []struct {
		script string
		usable bool
		reason string
	}{
		{`echo '{"usable":true,"reason":"fine"}'`, true, "fine"},
		{`kill -SYS $$`, false, "a seccomp filter kills"},
		{`kill -KILL $$`, false, "the trial was killed: killed"},
		{`echo lost >&2; echo more >&2; exit 1`, false, "the trial failed: lost"},
		{`echo garbage`, false, "the trial failed"},
	} {
		f, ok := elsewhere(exec.CommandContext(t.Context(), "/bin/sh", "-c", c.script))
		if !ok || f.Usable != c.usable || !strings.HasPrefix(f.Reason, c.reason) {
			t.Errorf("%s: %v, %+v", c.script, ok, f)
		}
	}
	if _, ok := elsewhere(exec.CommandContext(t.Context(), "/no/such/program")); ok {
		t.Error("a command that can't be started counts")
	}
}

func TestStuckTrial(t *testing.T) {
	block := make(chan struct{})
	defer close(block)
	stuck := trial{name: "stuck", run: func(context.Context) Finding { <-block; return Finding{Usable: true} }}
	// Goroutines that are given up go on using their options.
	o := &Options{Timeout: time.Millisecond}
	if f := o.examine(t.Context(), stuck); f.Usable || !strings.Contains(f.Reason, "the trial hangs") {
		t.Errorf("in this process: %+v", f)
	}
	o = &Options{Timeout: 50 * time.Millisecond, Command: func(ctx context.Context, _ string) *exec.Cmd {
		return exec.CommandContext(ctx, "/bin/sh", "-c", "while :; do :; done")
	}}
	if f := o.examine(t.Context(), stuck); f.Usable || !strings.Contains(f.Reason, "the trial hangs") {
		t.Errorf("in another process: %+v", f)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if f := o.examine(ctx, stuck); f.Usable || f.Reason != "interrupted" {
		t.Errorf("interrupted: %+v", f)
	}
}

func TestTrials(t *testing.T) {
	if _, err := Trial(t.Context(), "nothing"); !errors.Is(err, ErrUnknownTrial) {
		t.Errorf("error %v", err)
	}
	ids := Trials()
	for _, want := range []string{"monitor/uffd", "monitor/manual", "device/iouring"} {
		if !strings.Contains(strings.Join(ids, " "), want) {
			t.Errorf("no %s in %v", want, ids)
		}
	}
	f, err := Trial(t.Context(), "monitor/manual")
	if err != nil || !f.Usable || f.Coverage["munmap/anon-private"] != "caught" {
		t.Errorf("%v: %+v", err, f)
	}
}

func TestHints(t *testing.T) {
	filter := Privileges{Seccomp: "filter", Capabilities: map[string]bool{"CAP_SYS_ADMIN": true}}
	for _, c := range []struct {
		r      Report
		t      trial
		reason string
		want   string
	}{
		{Report{}, trial{name: "bpf"}, "operation not permitted", "setcap"},
		{Report{Privileges: Privileges{NoNewPrivs: true}}, trial{name: "bpf"}, "", "no effect under no_new_privs"},
		{Report{Privileges: filter}, trial{name: "bpf"}, "operation not permitted", "bpf(2)"},
		{Report{Privileges: filter, Settings: []Setting{{Name: "kernel BTF", Value: "no"}}}, trial{name: "bpf"}, "", "CONFIG_DEBUG_INFO_BTF"},
		{Report{Privileges: filter}, trial{name: "uffd"}, "denied by a seccomp filter", "userfaultfd(2)"},
		{Report{}, trial{name: "uffd"}, "kernel without CONFIG_USERFAULTFD", "CONFIG_USERFAULTFD"},
		{Report{}, trial{name: "uffd"}, `kernel "5.4" is older than 5.15`, "newer kernel"},
		{Report{}, trial{name: "uffd"}, "the trial hangs, given up", "report"},
		{Report{}, trial{name: "uffd"}, "something else", ""},
	} {
		if got := c.r.monitorHint(c.t, c.reason); !strings.Contains(got, c.want) || c.want == "" && got != "" {
			t.Errorf("%s, %q: %q, want %q", c.t.name, c.reason, got, c.want)
		}
	}
	for reason, want := range map[string]string{
		"sysctl kernel.io_uring_disabled is 1": "io_uring_group",
		"RLIMIT_MEMLOCK admits no page":        "LimitMEMLOCK",
		"the kernel has no io_uring":           "CONFIG_IO_URING",
		"a security module denies io_uring":    "security module",
	} {
		if got := (&Report{}).deviceHint("iouring", reason); !strings.Contains(got, want) {
			t.Errorf("%q: %q, want %q", reason, got, want)
		}
	}
}

func TestMatrix(t *testing.T) {
	var b strings.Builder
	r := &Report{Settings: []Setting{{Name: "vm.nr_hugepages", Value: "0"}}}
	err := r.matrix(&b, map[string]string{
		"munmap/anon-private": "caught", "munmap/memfd": "refused", "munmap/hugetlb": "untested", "brk-shrink/brk": "untested",
		"truncate/memfd": "refused", "madvise-dontneed/go-heap": "blind",
	})
	want := `  self-test         anon-private  go-heap
  munmap            caught        -
  madvise-dontneed  -             BLIND
  never cached: memfd
  not tested here: hugetlb (vm.nr_hugepages is 0), brk (the C library owns it; cached as anon-private is)
`
	if diff := cmp.Diff(want, b.String()); err != nil || diff != "" {
		t.Errorf("%v; -want +got:\n%s", err, diff)
	}
	b.Reset()
	if err := r.matrix(&b, map[string]string{"munmap/anon-private": "refused", "brk-shrink/brk": "untested"}); err != nil || !strings.HasSuffix(b.String(), "brk (the C library owns it)\n") {
		t.Errorf("%v: %s", err, b.String())
	}
	b.Reset()
	if err := r.matrix(&b, nil); err != nil || b.Len() > 0 {
		t.Errorf("of nothing: %v, %q", err, b.String())
	}
}

// An examination in this process, as where no other can be started.
func TestRunInProcess(t *testing.T) {
	if testing.Short() {
		t.Skip("tries every monitor")
	}
	var steps int
	r := Run(t.Context(), &Options{Progress: func(string) { steps++ }})
	if steps != len(Trials()) {
		t.Errorf("%d steps for %v", steps, Trials())
	}
	for _, m := range r.Monitors {
		if !m.Usable && m.Reason == "" {
			t.Errorf("%s isn't usable for no reason", m.Name)
		}
	}
	var text, js bytes.Buffer
	if err := errors.Join(r.WriteText(&text), r.WriteJSON(&js)); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(text.String(), "monitor "+r.Selected.Monitor) {
		t.Errorf("selected %+v isn't in:\n%s", r.Selected, text.String())
	}
}
