package verbs_test

import (
	"errors"
	"fmt"
	"os"
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

// TestMain fails if a goroutine or an open adapter is left at the end.
func TestMain(m *testing.M) {
	if run := children[os.Getenv(childEnv)]; run != nil {
		os.Exit(runChild(run))
	}
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		if left := openAdapters(); code == 0 && len(left) > 0 {
			fmt.Fprintln(os.Stderr, "adapters left open:", left)
			code = 1
		}
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

// open opens an adapter, or skips the test: those with an adapter run in the
// virtual machine of test/vm, where one is there.
func open(t *testing.T, opts *verbs.Options) *verbs.Device {
	t.Helper()
	d, err := verbs.Open(opts)
	if errors.Is(err, device.ErrNotSupported) && os.Getenv("PINDOWN_VM") == "" {
		t.Skipf("no adapter here, test/vm runs this test with one: %v", err)
	}
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
