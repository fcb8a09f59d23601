package iouring_test

import (
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/devicetest"
	"github.com/pindown/pindown/device/iouring"
	"github.com/pindown/pindown/vm"
)

// sandboxEnv tells a child which test to play, by the memlock limit in bytes.
const sandboxEnv = "PINDOWN_IOURING_MEMLOCK"

// sandboxes counts the children.
var sandboxes atomic.Uint32

// runSandboxed runs the named test of this binary as a user without
// privileges, whose budget of locked memory nobody else uses.
func runSandboxed(t *testing.T, test string, memlock uint64) {
	t.Helper()
	if os.Getuid() != 0 {
		if os.Getenv("CI") == "true" {
			t.Fatal("needs root, to become another user")
		}
		t.Skip("needs root, to become another user")
	}
	// The go command builds tests where nobody else may look.
	dir, err := os.MkdirTemp("", "iouring-sandbox")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	bin := filepath.Join(dir, "iouring.test")
	if err := copyExecutable(bin); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), bin, "-test.run=^"+test+"$", "-test.v", "-test.timeout=60s")
	if testing.Short() {
		cmd.Args = append(cmd.Args, "-test.short")
	}
	cmd.Dir = "/"
	cmd.Env = append(os.Environ(), sandboxEnv+"="+strconv.FormatUint(memlock, 10))
	// Far from users that exist, and another for each child: what rings of one
	// had locked is given back late.
	id := 2_000_000 + uint32(os.Getpid())*64 + sandboxes.Add(1)%64
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: id, Gid: id}}
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "--- PASS: "+test) {
		t.Errorf("as user %d with %d bytes to lock: %v\n%s", id, memlock, err, out)
	} else if testing.Verbose() {
		t.Logf("%s", out)
	}
}

func copyExecutable(to string) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	from, err := os.Open(self)
	if err != nil {
		return err
	}
	defer from.Close()
	f, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY, 0o755)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, from)
	return errors.Join(err, f.Close())
}

// sandboxed sets the limit of a child; it skips in a parent.
func sandboxed(t *testing.T) (memlock uint64) {
	t.Helper()
	v, ok := os.LookupEnv(sandboxEnv)
	if !ok {
		t.Skip("runs in a child process")
	}
	memlock, err := strconv.ParseUint(v, 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: memlock, Max: memlock}); err != nil {
		t.Fatal(err)
	}
	return memlock
}

func TestUnprivileged(t *testing.T) {
	runSandboxed(t, "TestChildConforms", 8<<20)
	runSandboxed(t, "TestChildLimits", 1<<20+100)
	for _, limit := range []uint64{0, 4095, 2 << 12, 4 << 12} {
		runSandboxed(t, "TestChildNoMemlock", limit)
	}
}

func TestChildConforms(t *testing.T) {
	memlock := sandboxed(t)
	p := dataPath{func(dev device.Device) *iouring.Ring { return dev.(*iouring.Device).Ring() }}
	devicetest.Run(t, func(t *testing.T) device.Device {
		t.Helper()
		d := open(t, nil)
		if got := d.Limits().MaxPinnedBytes; got == 0 || got > memlock {
			t.Errorf("limit of %d bytes pinned, want at most %d", got, memlock)
		}
		return d
	}, p.options())
}

func TestChildLimits(t *testing.T) {
	memlock := sandboxed(t)
	page := uint64(os.Getpagesize())
	d := open(t, &iouring.Options{Entries: 8})
	pages := d.Limits().MaxPinnedBytes / page
	// The queues of eight entries fit into two pages.
	if got := d.Limits().MaxPinnedBytes; got != pages*page || pages != memlock/page-2 {
		t.Errorf("limit of %d bytes pinned, want whole pages of %d less two", got, memlock)
	}
	b := mapAnon(t, int(pages)+1)
	if _, err := d.Register(t.Context(), vm.RangeOf(b), 0); !errors.Is(err, device.ErrNoMemory) || !errors.Is(err, unix.ENOMEM) {
		t.Errorf("one page more than the limit: %v", err)
	}
	reg, err := d.Register(t.Context(), vm.RangeOf(b[page:]), 0)
	if err != nil {
		t.Fatalf("the whole limit: %v", err)
	}
	// An update needs room for old and new.
	if _, err := d.Update(t.Context(), reg); !errors.Is(err, device.ErrNoMemory) {
		t.Errorf("update at the limit: %v", err)
	}
	if err := d.Deregister(reg); err != nil { // It was left intact.
		t.Fatal(err)
	}
	// The budget is the user's, not the ring's. (Another ring's queues take
	// two pages of it, or none.)
	other := open(t, &iouring.Options{Entries: 8})
	if _, err := d.Register(t.Context(), vm.RangeOf(b[3*page:]), 0); err != nil {
		t.Fatal(err)
	}
	if _, err := other.Register(t.Context(), vm.RangeOf(b[:5*page]), 0); !errors.Is(err, device.ErrNoMemory) {
		t.Errorf("more than what is left, by another ring: %v", err)
	}
	if err := other.Close(); err != nil {
		t.Fatal(err)
	}
	// A closed device's memory is there for the next, if not at once.
	late := 0
	retry := func(f func() error) {
		t.Helper()
		deadline := time.Now().Add(20 * time.Second)
		err := f()
		for errors.Is(err, device.ErrNoMemory) && time.Now().Before(deadline) {
			late++
			time.Sleep(time.Millisecond)
			err = f()
		}
		if err != nil {
			t.Fatalf("use what a closed device held: %v", err)
		}
	}
	for range 20 {
		if err := d.Close(); err != nil {
			t.Fatal(err)
		}
		retry(func() (err error) {
			d, err = iouring.Open(&iouring.Options{Entries: 8})
			return err
		})
		retry(func() (err error) {
			_, err = d.Register(t.Context(), vm.RangeOf(b[page:]), 0)
			return err
		})
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
	t.Logf("memory was late %d times", late)
	// Options replace the derived limit.
	var mine *iouring.Device
	retry(func() (err error) {
		mine, err = iouring.Open(&iouring.Options{MaxPinnedBytes: 12345})
		return err
	})
	if got := mine.Limits().MaxPinnedBytes; got != 12345 {
		t.Errorf("limit %d, want the one given", got)
	}
	if err := mine.Close(); err != nil {
		t.Error(err)
	}
}

func TestChildNoMemlock(t *testing.T) {
	sandboxed(t)
	d, err := iouring.Open(nil)
	if err == nil {
		d.Close()
	}
	if !errors.Is(err, device.ErrNotSupported) || !errors.Is(err, device.ErrNoMemory) || !strings.Contains(err.Error(), "RLIMIT_MEMLOCK") {
		t.Errorf("open without memory to lock: %v", err)
	}
	// Plain requests need a ring only, which has been free of charge at times.
	ring, err := iouring.NewRing(nil)
	if err == nil {
		err = ring.Close()
	}
	if err != nil && (!errors.Is(err, device.ErrNotSupported) || !errors.Is(err, device.ErrNoMemory)) {
		t.Errorf("ring without memory to lock: %v", err)
	}
}

// What a container's seccomp filter does to a program.
func TestSeccomp(t *testing.T) {
	runSandboxed(t, "TestChildSeccompSetup", 8<<20)
	runSandboxed(t, "TestChildSeccompHidden", 8<<20)
	runSandboxed(t, "TestChildSeccompRegister", 8<<20)
}

func wantSeccomp(t *testing.T, err error, errno syscall.Errno) {
	t.Helper()
	if !errors.Is(err, device.ErrNotSupported) || !errors.Is(err, errno) || !strings.Contains(err.Error(), "seccomp") {
		t.Errorf("under a filter that answers %v: %v", errno, err)
	}
}

func TestChildSeccompSetup(t *testing.T) {
	sandboxed(t)
	if err := denyCall(unix.SYS_IO_URING_SETUP, unix.EPERM); err != nil {
		t.Fatal(err)
	}
	_, err := iouring.Open(nil)
	wantSeccomp(t, err, unix.EPERM)
	_, err = iouring.NewRing(nil)
	wantSeccomp(t, err, unix.EPERM)
}

func TestChildSeccompHidden(t *testing.T) {
	sandboxed(t)
	if err := denyCall(unix.SYS_IO_URING_SETUP, unix.ENOSYS); err != nil {
		t.Fatal(err)
	}
	_, err := iouring.Open(nil)
	wantSeccomp(t, err, unix.ENOSYS)
}

func TestChildSeccompRegister(t *testing.T) {
	sandboxed(t)
	ring := newRing(t, nil)
	if err := denyCall(unix.SYS_IO_URING_REGISTER, unix.EPERM); err != nil {
		t.Fatal(err)
	}
	_, err := iouring.New(ring.Fd(), nil)
	wantSeccomp(t, err, unix.EPERM)
	_, err = iouring.Open(nil)
	wantSeccomp(t, err, unix.EPERM)
}

func TestPrivilegedHasNoLimit(t *testing.T) {
	var hdr unix.CapUserHeader
	hdr.Version = unix.LINUX_CAPABILITY_VERSION_3
	var data [2]unix.CapUserData
	if err := unix.Capget(&hdr, &data[0]); err != nil || data[0].Effective&(1<<unix.CAP_IPC_LOCK) == 0 {
		t.Skip("needs CAP_IPC_LOCK")
	}
	d := open(t, nil)
	if n := d.Limits().MaxPinnedBytes; n != 0 {
		t.Errorf("limit of %d bytes pinned with CAP_IPC_LOCK, want none", n)
	}
}
