package iouring

import (
	"errors"
	"os"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/internal/uring"
	"github.com/pindown/pindown/vm"
)

func setup(t *testing.T, flags uint32) int {
	t.Helper()
	fd, err := uring.Setup(8, &uring.Params{Flags: flags})
	switch {
	case errors.Is(err, unix.EINVAL) && flags != 0:
		t.Skipf("needs io_uring_setup with flags %#x: %v", flags, err)
	case err != nil && os.Getenv("CI") != "true":
		t.Skipf("needs io_uring: %v", setupError(err))
	case err != nil:
		t.Fatal(setupError(err))
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	return fd
}

func page(t *testing.T) vm.Range {
	t.Helper()
	b, err := unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(b) })
	return vm.RangeOf(b)
}

func TestSentinels(t *testing.T) {
	for errno, want := range map[syscall.Errno]error{
		unix.ENOMEM:     device.ErrNoMemory,
		unix.EAGAIN:     device.ErrBusy,
		unix.EINTR:      device.ErrBusy,
		unix.EFAULT:     device.ErrFault,
		unix.EPERM:      device.ErrPermission,
		unix.EEXIST:     device.ErrPermission,
		unix.EOPNOTSUPP: device.ErrUnsupportedMemory,
		unix.ENXIO:      device.ErrClosed,
		unix.EBADF:      device.ErrClosed,
		unix.ENOSYS:     device.ErrNotSupported,
		unix.EINVAL:     device.ErrInvalid,
		unix.EOVERFLOW:  device.ErrInvalid,
	} {
		err := callError("io_uring_register", errno)
		var call *os.SyscallError
		if !errors.Is(err, want) || !errors.Is(err, errno) || !errors.As(err, &call) {
			t.Errorf("%v maps to %q, want %v with the errno", errno, err, want)
		}
	}
	for _, errno := range []syscall.Errno{unix.ENOSYS, unix.EPERM, unix.EACCES} {
		if err := setupError(errno); !errors.Is(err, device.ErrNotSupported) || !errors.Is(err, errno) {
			t.Errorf("setup: %v maps to %q", errno, err)
		}
	}
}

func TestPermReason(t *testing.T) {
	for sysctl, want := range map[string]string{"2\n": "is 2", "1\n": "is 1", "0\n": "seccomp", "": "seccomp"} {
		if got := permReason(sysctl); !strings.Contains(got, want) {
			t.Errorf("sysctl %q: %q, want it to name %q", sysctl, got, want)
		}
	}
}

// Before Linux 5.19 the flag for sparse tables is refused.
func TestTableWithoutSparse(t *testing.T) {
	fd := setup(t, 0)
	tried := false
	d, err := newDevice(fd, &Options{First: 2, Slots: 3}, func(int, uint32) error {
		tried = true
		return unix.EINVAL
	}, 0)
	if err != nil || !tried {
		t.Fatal(tried, err)
	}
	defer d.Close()
	if e := uring.ProbeSlot(fd, 4); e != unix.EFAULT {
		t.Errorf("probe of the fifth slot of five: %v, want EFAULT", e)
	}
	if e := uring.ProbeSlot(fd, 5); e != unix.EINVAL {
		t.Errorf("probe of the sixth slot of five: %v, want EINVAL", e)
	}
	reg, err := d.Register(t.Context(), page(t), 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Deregister(reg); err != nil {
		t.Error(err)
	}
	// A failure is passed on.
	if _, err := newDevice(setup(t, 0), nil, func(int, uint32) error { return unix.ENOMEM }, 0); !errors.Is(err, device.ErrNoMemory) {
		t.Errorf("table without memory: %v", err)
	}
}

// A ring for a single issuer is refused, or registers by Exec.
func TestSingleIssuer(t *testing.T) {
	work := make(chan func())
	fds := make(chan int)
	go func() { // The ring's own thread.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		fd, err := uring.Setup(8, &uring.Params{Flags: uring.SetupSingleIssuer})
		if err != nil {
			fd = -1 // Before Linux 6.0.
		}
		fds <- fd
		for f := range work {
			f()
		}
	}()
	defer close(work)
	fd := <-fds
	if fd < 0 {
		t.Skip("needs IORING_SETUP_SINGLE_ISSUER, Linux 6.0")
	}
	defer func() { _ = unix.Close(fd) }()
	if d, err := New(fd, nil); !errors.Is(err, device.ErrPermission) || !errors.Is(err, unix.EEXIST) {
		t.Errorf("from another thread: %v", err)
		if err == nil {
			d.Close()
		}
	}
	// Nor from its own thread, since others will call the device.
	own := make(chan error)
	work <- func() {
		_, err := New(fd, nil)
		go func() { own <- err }()
	}
	if err := <-own; !errors.Is(err, device.ErrPermission) {
		t.Errorf("from its own thread: %v", err)
	}
	calls := 0
	d, err := New(fd, &Options{Slots: 4, Exec: func(f func()) {
		done := make(chan struct{})
		work <- func() { f(); calls++; close(done) }
		<-done
	}})
	if err != nil {
		t.Fatal(err)
	}
	r := page(t)
	reg, err := d.Register(t.Context(), r, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := d.Update(t.Context(), reg); err != nil {
		t.Error(err)
	}
	if err := errors.Join(d.Deregister(reg), d.Close()); err != nil {
		t.Error(err)
	}
	if calls < 6 { // Probe, table, register, update, deregister, close.
		t.Errorf("%d calls on the ring's thread, want 6", calls)
	}
}

// The ring's owner took the table away, and the device finds out.
func TestTableUnregistered(t *testing.T) {
	fd := setup(t, 0)
	d, err := New(fd, &Options{Slots: 4})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	r := page(t)
	reg, err := d.Register(t.Context(), r, 0)
	if err != nil {
		t.Fatal(err)
	}
	const unregisterBuffers = 1
	if _, _, errno := unix.Syscall6(unix.SYS_IO_URING_REGISTER, uintptr(fd), unregisterBuffers, 0, 0, 0, 0); errno != 0 {
		t.Fatal(errno)
	}
	if _, err := d.Register(t.Context(), r, 0); !errors.Is(err, device.ErrClosed) || !errors.Is(err, unix.ENXIO) {
		t.Errorf("register without a table: %v", err)
	}
	if _, err := d.Update(t.Context(), reg); !errors.Is(err, device.ErrClosed) {
		t.Errorf("update without a table: %v", err)
	}
	if err := d.Deregister(reg); err != nil { // The key is dead, as asked.
		t.Errorf("deregister without a table: %v", err)
	}
	if err := d.Deregister(reg); !errors.Is(err, device.ErrNotRegistered) {
		t.Errorf("second deregister: %v", err)
	}
}

// Two calls on one registration at a time: the second is told to wait.
func TestBusySlot(t *testing.T) {
	var d *Device
	var reg device.Registration
	nested := false
	d, err := New(setup(t, 0), &Options{Slots: 4, Exec: func(f func()) {
		f()
		if !nested {
			return
		}
		nested = false
		if _, err := d.Update(t.Context(), reg); !errors.Is(err, device.ErrBusy) {
			t.Errorf("update during another call: %v", err)
		}
		if err := d.Deregister(reg); !errors.Is(err, device.ErrBusy) {
			t.Errorf("deregister during another call: %v", err)
		}
	}})
	if err != nil {
		t.Fatal(err)
	}
	if reg, err = d.Register(t.Context(), page(t), 0); err != nil {
		t.Fatal(err)
	}
	nested = true
	if _, err := d.Update(t.Context(), reg); err != nil {
		t.Error(err)
	}
	if err := errors.Join(d.Deregister(reg), d.Close()); err != nil {
		t.Error(err)
	}
}

// Close in the middle of a registration: that fails, and leaves nothing.
func TestCloseDuringRegister(t *testing.T) {
	fd := setup(t, 0)
	var d *Device
	closing := false
	d, err := New(fd, &Options{Slots: 4, Exec: func(f func()) {
		f()
		if closing {
			closing = false
			if err := d.Close(); err != nil {
				t.Error(err)
			}
		}
	}})
	if err != nil {
		t.Fatal(err)
	}
	closing = true
	if _, err := d.Register(t.Context(), page(t), 0); !errors.Is(err, device.ErrClosed) {
		t.Errorf("register while the device is closed: %v", err)
	}
	if d.inflight != 0 {
		t.Errorf("%d calls under way", d.inflight)
	}
	if _, err := unix.FcntlInt(uintptr(d.fd), unix.F_GETFD, 0); !errors.Is(err, unix.EBADF) {
		t.Errorf("the duplicate descriptor is still open: %v", err)
	}
}
