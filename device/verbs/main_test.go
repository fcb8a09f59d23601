package verbs_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/verbs"
	"github.com/pindown/pindown/vm"
)

// fakeLib is the library that tests without an adapter use; empty if there is
// none, and errFake says why.
var (
	fakeLib string
	errFake error
)

// realAdapter reports whether the tests run on a real adapter: in the virtual
// machine of test/vm, or on the one that PINDOWN_VERBS_DEVICE names.
func realAdapter() bool {
	return os.Getenv("PINDOWN_VM") != "" || os.Getenv("PINDOWN_VERBS_DEVICE") != ""
}

// compileFake compiles testdata/fakeibv.c.
func compileFake(dir string) (string, error) {
	path := filepath.Join(dir, "libfakeibv.so")
	out, err := exec.Command("gcc", "-std=gnu11", "-shared", "-fPIC", "-O1", "-pthread", "-o", path, "testdata/fakeibv.c").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("needs gcc and the header infiniband/verbs.h (apt-get install gcc libc6-dev libibverbs-dev): %w\n%s", err, out)
	}
	return path, nil
}

// TestMain fails if a goroutine, an open adapter or an object of one is left at
// the end.
func TestMain(m *testing.M) {
	if run := children[os.Getenv(childEnv)]; run != nil {
		os.Exit(runChild(run))
	}
	dir, err := os.MkdirTemp("", "verbs-test-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	if !realAdapter() {
		if fakeLib, errFake = compileFake(dir); errFake != nil && os.Getenv("CI") == "true" {
			fmt.Fprintln(os.Stderr, errFake)
			os.Exit(1)
		}
	}
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		if left := openAdapters(); code == 0 && len(left) > 0 {
			fmt.Fprintln(os.Stderr, "adapters left open:", left)
			code = 1
		}
		if left := fakeObjects(); code == 0 && len(left) > 0 {
			fmt.Fprintln(os.Stderr, "objects left:", left)
			code = 1
		}
		_ = os.RemoveAll(dir)
		os.Exit(code)
	}))
}

// openAdapters returns the descriptors of this process that are adapters or of
// them.
func openAdapters() []string {
	var open []string
	links, _ := filepath.Glob("/proc/self/fd/*")
	for _, link := range links {
		if to, err := os.Readlink(link); err == nil && strings.Contains(to, "infiniband") {
			open = append(open, link+" -> "+to)
		}
	}
	return open
}

// options returns those for the adapter that the tests run on, or skips the
// test.
func options(t *testing.T, opts *verbs.Options) *verbs.Options {
	t.Helper()
	var o verbs.Options
	if opts != nil {
		o = *opts
	}
	if realAdapter() {
		o.Name = os.Getenv("PINDOWN_VERBS_DEVICE")
		return &o
	}
	if errFake != nil {
		line, _, _ := strings.Cut(errFake.Error(), "\n")
		t.Skip(line)
	}
	o.Library = fakeLib
	return &o
}

// open opens the adapter for the test's time.
func open(t *testing.T, opts *verbs.Options) *verbs.Device {
	t.Helper()
	d, err := verbs.Open(options(t, opts))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

// openReal opens a real adapter, or skips the test.
func openReal(t *testing.T) *verbs.Device {
	t.Helper()
	if !realAdapter() {
		t.Skip("needs an RDMA adapter; test/vm runs this test with one, PINDOWN_VERBS_DEVICE=name here")
	}
	return open(t, nil)
}

// pinned returns VmPin of /proc/self/status, in KiB: what adapters hold of this
// process.
func pinned() (uint64, error) {
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, "VmPin:"); ok {
			return strconv.ParseUint(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(rest), "kB")), 10, 64)
		}
	}
	return 0, errors.New("no VmPin in /proc/self/status")
}

// mapMemory maps private anonymous memory of base pages for the test's time.
func mapMemory(t *testing.T, pages int) []byte {
	t.Helper()
	b, err := unix.Mmap(-1, 0, pages*os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(os.NewSyscallError("mmap", err))
	}
	t.Cleanup(func() { _ = unix.Munmap(b) }) // The test may have unmapped it.
	if err := unix.Madvise(b, unix.MADV_NOHUGEPAGE); err != nil && !errors.Is(err, unix.EINVAL) {
		t.Fatal(os.NewSyscallError("madvise", err))
	}
	return b
}

func register(t *testing.T, d *verbs.Device, b []byte, access device.Access) device.Registration {
	t.Helper()
	reg, err := d.Register(t.Context(), vm.RangeOf(b), access)
	if err != nil {
		t.Fatal(err)
	}
	return reg
}
