package vm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"
)

const fixture = "./test/vm/testdata/fixture"

// TestGuest looks at one machine from all sides.
func TestGuest(t *testing.T) {
	m := Boot(t, Options{})
	t.Run("kernel", func(t *testing.T) {
		if !strings.HasPrefix(m.Release(), "6.1.") {
			t.Errorf("release is %s", m.Release())
		}
		if got := strings.TrimSpace(m.Command(t, "uname", "-r")); got != m.Release() {
			t.Errorf("uname says %s, the agent %s", got, m.Release())
		}
		btf := m.Command(t, "head", "-c", "2", "/sys/kernel/btf/vmlinux")
		if btf != "\x9f\xeb" && btf != "\xeb\x9f" {
			t.Errorf("BTF begins with %q", btf)
		}
		if got := strings.TrimSpace(m.Command(t, "cat", "/proc/sys/vm/unprivileged_userfaultfd")); got != "0" {
			t.Errorf("vm.unprivileged_userfaultfd is %s, not the kernel's default", got)
		}
		if free := m.Command(t, "grep", "HugePages_Free", "/proc/meminfo"); !strings.HasSuffix(strings.TrimSpace(free), fmt.Sprintf(" %d", DefaultHugePages)) {
			t.Errorf("huge pages: %s", free)
		}
		if lo := m.Command(t, "ip", "addr", "show", "lo"); !strings.Contains(lo, "LOWER_UP") || !strings.Contains(lo, "127.0.0.1") {
			t.Errorf("loopback: %s", lo)
		}
	})
	t.Run("mounts", func(t *testing.T) { testMounts(t, m) })
	t.Run("nobody", func(t *testing.T) { testNobody(t, m) })
	t.Run("exec", func(t *testing.T) { testExec(t, m) })
	t.Run("files", func(t *testing.T) {
		// More than a frame.
		data := []byte(strings.Repeat("0123456789abcdef", 200_000))
		m.WriteFile(t, "/tmp/deep/er/file", 0o640, data)
		if got := m.Command(t, "cat", "/tmp/deep/er/file"); got != string(data) {
			t.Errorf("%d bytes came back, of %d", len(got), len(data))
		}
		if got := m.Command(t, "stat", "-c", "%a", "/tmp/deep/er/file"); got != "640\n" {
			t.Errorf("mode %s", got)
		}
		if err := m.put(t.Context(), "/proc/no/such", 0o644, strings.NewReader("x")); err == nil {
			t.Error("a file in /proc could be made")
		}
	})
	t.Run("results", func(t *testing.T) { testResults(t, m) })
	t.Run("RunTests", func(t *testing.T) {
		m.RunTests(t, TestBinary{Pkg: fixture, Run: "^(TestPass|TestSkip|TestParallel|TestData)$", User: "nobody"})
	})
	t.Run("timeouts", func(t *testing.T) { testTimeouts(t, m) })
}

func testMounts(t *testing.T, m *Machine) {
	got := make(map[string]string)
	for line := range strings.Lines(m.Command(t, "cat", "/proc/mounts")) {
		f := strings.Fields(line)
		got[f[1]] = f[2]
	}
	for dir, kind := range map[string]string{
		"/proc": "proc", "/sys": "sysfs", "/dev": "devtmpfs", "/tmp": "tmpfs", "/dev/shm": "tmpfs", "/dev/hugepages": "hugetlbfs",
		"/sys/fs/bpf": "bpf", "/sys/fs/cgroup": "cgroup2", "/sys/kernel/debug": "debugfs", "/sys/kernel/tracing": "tracefs", DiskDir: "ext4",
	} {
		if got[dir] != kind {
			t.Errorf("%s: %q, want %s", dir, got[dir], kind)
		}
	}
	for _, dir := range []string{"/tmp", "/dev/shm", DiskDir} {
		res, err := m.Exec(t.Context(), Cmd{Args: []string{"sh", "-c", "echo x >file && cat file && rm file"}, Dir: dir, User: "nobody"})
		if err != nil || res.Code != 0 || res.Stdout != "x\n" {
			t.Errorf("nobody writes to %s: %+v, %v", dir, res, err)
		}
	}
}

func testNobody(t *testing.T, m *Machine) {
	status := func(c Cmd) map[string]string {
		c.Args, c.User = []string{"cat", "/proc/self/status", "/proc/self/limits"}, "nobody"
		res, err := m.Exec(t.Context(), c)
		if err != nil || res.Code != 0 {
			t.Fatalf("%+v, %v", res, err)
		}
		out := make(map[string]string)
		for line := range strings.Lines(res.Stdout) {
			if k, v, ok := strings.Cut(line, ":"); ok {
				out[k] = strings.Join(strings.Fields(v), " ")
			} else if v, ok := strings.CutPrefix(line, "Max locked memory"); ok {
				out["memlock"] = strings.Join(strings.Fields(v), " ")
			}
		}
		return out
	}
	const id = "65534 65534 65534 65534"
	s := status(Cmd{Limits: map[int]uint64{8: 128 << 10}}) // RLIMIT_MEMLOCK
	if s["Uid"] != id || s["Gid"] != id || s["Groups"] != "" || s["CapEff"] != "0000000000000000" || s["memlock"] != "131072 131072 bytes" {
		t.Errorf("with a limit: uid %s, gid %s, groups %q, capabilities %s, memlock %s", s["Uid"], s["Gid"], s["Groups"], s["CapEff"], s["memlock"])
	}
	s = status(Cmd{Caps: []uintptr{38, 39}, Limits: map[int]uint64{8: ^uint64(0)}}) // CAP_PERFMON, CAP_BPF
	if s["Uid"] != id || s["CapEff"] != "000000c000000000" || s["memlock"] != "unlimited unlimited bytes" {
		t.Errorf("with capabilities: uid %s, capabilities %s, memlock %s", s["Uid"], s["CapEff"], s["memlock"])
	}
	res, err := m.Exec(t.Context(), Cmd{Args: []string{"cat", "/proc/1/environ"}, User: "nobody"})
	if err != nil || res.Code == 0 {
		t.Errorf("nobody reads what is root's: %+v, %v", res, err)
	}
}

func testExec(t *testing.T, m *Machine) {
	res, err := m.Exec(t.Context(), Cmd{
		Args: []string{"sh", "-c", `echo "$0 $PINDOWN_VM $X $PWD"; echo err >&2; exit 3`, "zero"}, Env: []string{"X=y z"}, Dir: "/mnt",
	})
	if err != nil || res != (Result{Stdout: "zero 1 y z /mnt\n", Stderr: "err\n", Code: 3}) {
		t.Errorf("%+v, %v", res, err)
	}
	res, err = m.Exec(t.Context(), Cmd{Args: []string{"sh", "-c", "echo a; echo b >&2; echo c"}, Combined: true})
	if err != nil || res.Stdout != "a\nb\nc\n" || res.Stderr != "" {
		t.Errorf("combined: %+v, %v", res, err)
	}
	res, err = m.Exec(t.Context(), Cmd{Args: []string{"sh", "-c", "kill -SEGV $$"}})
	if err != nil || res.Code != -1 || res.Signal != 11 {
		t.Errorf("killed: %+v, %v", res, err)
	}
	for name, c := range map[string]Cmd{
		"no such program": {Args: []string{"no-such-program"}},
		"no such user":    {Args: []string{"true"}, User: "somebody"},
		"no such dir":     {Args: []string{"true"}, Dir: "/no/such"},
		"no arguments":    {},
	} {
		if res, err := m.Exec(t.Context(), c); err == nil {
			t.Errorf("%s: %+v", name, res)
		}
	}
	// Calls overlap: the first of these ends only when the second has run.
	first := make(chan error, 1)
	m.Command(t, "mkfifo", "/tmp/fifo")
	go func() {
		res, err := m.Exec(t.Context(), Cmd{Args: []string{"cat", "/tmp/fifo"}})
		if err == nil && res.Stdout != "from the second\n" {
			err = fmt.Errorf("first of two commands: %+v", res)
		}
		first <- err
	}()
	m.Command(t, "sh", "-c", "echo from the second >/tmp/fifo")
	if err := <-first; err != nil {
		t.Error(err)
	}
}

// testResults asserts what is reported for tests that end in every way a test can.
func testResults(t *testing.T, m *Machine) {
	report := func(run string, timeout time.Duration) *Report {
		return m.Report(t, TestBinary{Pkg: fixture, Run: run, Timeout: timeout})
	}
	check := func(t *testing.T, r *Report, name string, status Status, output ...string) {
		t.Helper()
		res := r.Find(name)
		if res == nil {
			t.Errorf("%s is not in the report", name)
			return
		}
		if res.Status != status {
			t.Errorf("%s: %s, want %s", name, res.Status, status)
		}
		for _, o := range output {
			if !strings.Contains(res.Output, o) {
				t.Errorf("%s: no %q in\n%s", name, o, res.Output)
			}
		}
	}

	r := report("^(TestPass|TestFail|TestSkip|TestSub|TestParallel|TestData)$", 0)
	if r.Code != 1 || r.Signal != 0 || r.Err != nil || len(r.Tests) != 6 || r.Pkg != "github.com/pindown/pindown/test/vm/testdata/fixture" {
		t.Errorf("package: %+v", r)
	}
	check(t, r, "TestPass", Passed, "log of a test that passes")
	check(t, r, "TestFail", Failed, "printed to standard output\nprinted to standard error\n", "first error", "second error")
	check(t, r, "TestSkip", Skipped, "reason to skip")
	check(t, r, "TestSub", Failed)
	check(t, r, "TestSub/good", Passed)
	check(t, r, "TestSub/bad/one", Failed, "subtest's error")
	check(t, r, "TestSub/lazy", Skipped)
	check(t, r, "TestParallel", Passed)
	check(t, r, "TestParallel/a", Passed, "from a")
	check(t, r, "TestParallel/b", Passed, "from b")
	check(t, r, "TestData", Passed)

	r = report("^(TestPass|TestPanic)$", 0)
	check(t, r, "TestPass", Passed)
	check(t, r, "TestPanic", Failed, "panic: panic in a test", "goroutine ")
	if r.Code != 2 {
		t.Errorf("panic: %+v", r)
	}

	r = report("^(TestPass|TestHang)$", 3*time.Second)
	check(t, r, "TestPass", Passed)
	check(t, r, "TestHang", Unfinished, "about to hang", "panic: test timed out after 3s", "fixture.TestHang")
	if r.Code != 2 || r.Err != nil {
		t.Errorf("hang: %+v", r)
	}

	r = report("^(TestPass|TestExit)$", 0)
	check(t, r, "TestPass", Passed)
	if r.Code != 7 || r.Find("TestExit") == nil || r.Find("TestExit").Status == Passed {
		t.Errorf("exit: %+v", r)
	}

	r = report("^TestExitZero$", 0)
	check(t, r, "TestExitZero", Failed, "unexpected call to os.Exit(0)")

	r = report("^TestNoSuch$", 0)
	if r.Code != 0 || len(r.Tests) != 0 {
		t.Errorf("no test: %+v", r)
	}
}

// testTimeouts has commands that don't end by themselves. The machine survives them.
func testTimeouts(t *testing.T, m *Machine) {
	res, err := m.Exec(t.Context(), Cmd{Args: []string{"sh", "-c", "echo before; exec sleep 100000"}, Timeout: 2 * time.Second})
	if !errors.Is(err, context.DeadlineExceeded) || res.Signal != 3 || res.Stdout != "before\n" {
		t.Errorf("%+v, %v", res, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	m.grace = 2 * time.Second
	defer func() { m.grace = defaultGrace }()
	res, err = m.Exec(ctx, Cmd{Args: []string{"sh", "-c", "trap '' QUIT; echo before; sleep 100000"}})
	if !errors.Is(err, context.DeadlineExceeded) || res.Signal != 9 || res.Stdout != "before\n" {
		t.Errorf("with SIGQUIT ignored: %+v, %v", res, err)
	}
	if got := m.Command(t, "echo", "alive"); got != "alive\n" {
		t.Errorf("afterwards: %q", got)
	}
}

// TestHangingGuest stops the agent, so that nothing is answered any more.
func TestHangingGuest(t *testing.T) {
	m := Boot(t, Options{})
	m.grace = 2 * time.Second
	_, err := m.Exec(t.Context(), Cmd{Args: []string{"sh", "-c", "kill -STOP $PPID"}, Timeout: 2 * time.Second})
	var crash *CrashError
	if !errors.As(err, &crash) || !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("got %v", err)
	}
	if crash.Panic || !strings.Contains(crash.Reason, "still running after 2s") || len(crash.Console) == 0 {
		t.Errorf("crash: %+v", crash)
	}
	if _, err := m.Exec(t.Context(), Cmd{Args: []string{"true"}}); !errors.As(err, &crash) {
		t.Errorf("a command for a dead machine: %v", err)
	}
}

func TestKernelPanic(t *testing.T) {
	m := Boot(t, Options{HugePages: -1, Memory: 1024})
	res, err := m.Exec(t.Context(), Cmd{Args: []string{"sh", "-c", "echo before; echo c >/proc/sysrq-trigger"}})
	var crash *CrashError
	if !errors.As(err, &crash) {
		t.Fatalf("got %+v, %v", res, err)
	}
	if !crash.Panic || !strings.Contains(crash.Reason, "Kernel panic - not syncing: sysrq triggered crash") {
		t.Errorf("reason: %s", crash.Reason)
	}
	if !slices.ContainsFunc(crash.Console, func(l string) bool { return strings.Contains(l, "sysrq_handle_crash") }) {
		t.Errorf("no stack among the last lines:\n%s", strings.Join(crash.Console, "\n"))
	}
	log, rerr := os.ReadFile(crash.Log)
	if rerr != nil || !strings.Contains(string(log), crash.Reason) || !strings.Contains(err.Error(), crash.Log) {
		t.Errorf("log: %v; error: %v", rerr, err)
	}
}

func TestRDMA(t *testing.T) {
	m := Boot(t, Options{RDMA: true, Programs: []string{"dpkg-deb"}})
	if links := m.Command(t, "rdma", "link", "show"); !strings.Contains(links, "rxe0/1 state ACTIVE") || !strings.Contains(links, "netdev dummy0") {
		t.Errorf("links: %s", links)
	}
	if info := m.Command(t, "ibv_devinfo", "-d", "rxe0"); !strings.Contains(info, "PORT_ACTIVE") {
		t.Errorf("devices: %s", info)
	}
	for _, dev := range []string{"/dev/infiniband/uverbs0", "/dev/infiniband/rdma_cm"} {
		m.Command(t, "test", "-c", dev)
	}
	// Data that goes out through the adapter and comes in again. It needs two processes; the client retries until the server listens.
	out := m.Command(t, "sh", "-c", "ibv_rc_pingpong -d rxe0 -g 1 -n 10 & s=$!; "+
		"until ibv_rc_pingpong -d rxe0 -g 1 -n 10 192.0.2.1; do kill -0 $s || exit 1; done; wait $s")
	if strings.Count(out, "10 iters in") != 2 {
		t.Errorf("pingpong: %s", out)
	}
	if out := m.Command(t, "dpkg-deb", "--version"); !strings.Contains(out, "Debian") {
		t.Errorf("a program of the host: %s", out)
	}
}
