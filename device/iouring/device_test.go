package iouring_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/iouring"
	"github.com/pindown/pindown/vm"
)

// needRing skips the test where io_uring isn't available, and fails it in CI.
func needRing(tb testing.TB, err error) {
	tb.Helper()
	switch {
	case err == nil:
	case errors.Is(err, device.ErrNotSupported) && os.Getenv("CI") != "true":
		tb.Skipf("needs io_uring: %v", err)
	default:
		tb.Fatal(err)
	}
}

func open(tb testing.TB, opts *iouring.Options) *iouring.Device {
	tb.Helper()
	d, err := iouring.Open(opts)
	// A ring that was just closed may still be charged to the user.
	for deadline := time.Now().Add(20 * time.Second); errors.Is(err, device.ErrNoMemory) && !errors.Is(err, device.ErrNotSupported) && time.Now().Before(deadline); {
		time.Sleep(time.Millisecond)
		d, err = iouring.Open(opts)
	}
	needRing(tb, err)
	tb.Cleanup(func() {
		if err := d.Close(); err != nil {
			tb.Error(err)
		}
	})
	return d
}

func mapAnon(tb testing.TB, pages int) []byte {
	tb.Helper()
	b, err := unix.Mmap(-1, 0, pages*os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		tb.Fatal(err)
	}
	if err := unix.Madvise(b, unix.MADV_NOHUGEPAGE); err != nil && !errors.Is(err, unix.EINVAL) {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = unix.Munmap(b) })
	return b
}

func memfd(tb testing.TB) int {
	tb.Helper()
	fd, err := unix.MemfdCreate("iouring-test", unix.MFD_CLOEXEC)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = unix.Close(fd) })
	return fd
}

// do submits what is queued and returns the completions of n requests.
func do(tb testing.TB, r *iouring.Ring, n int) []iouring.Completion {
	tb.Helper()
	out := make([]iouring.Completion, n)
	if err := r.Do(out); err != nil {
		tb.Fatal(err)
	}
	return out
}

func fill(b []byte, c byte) {
	for i := range b {
		b[i] = c
	}
}

// fileHas reports whether the file holds n bytes of c from off on.
func fileHas(tb testing.TB, fd int, off int64, n int, c byte) bool {
	tb.Helper()
	got := make([]byte, n)
	if m, err := unix.Pread(fd, got, off); err != nil || m != n {
		tb.Fatalf("pread: %d, %v", m, err)
	}
	return bytes.Equal(got, bytes.Repeat([]byte{c}, n))
}

// The reason for the whole project: the slot keeps the old pages.
func TestStaleSlotWritesOldBytes(t *testing.T) {
	ctx := context.Background()
	d := open(t, nil)
	ring, fd, buf := d.Ring(), memfd(t), mapAnon(t, 2)
	fill(buf, 'o')
	reg, err := d.Register(ctx, vm.RangeOf(buf), 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Madvise(buf, unix.MADV_DONTNEED); err != nil {
		t.Fatal(err)
	}
	fill(buf, 'n')
	write := func() byte {
		t.Helper()
		if err := ring.WriteFixed(fd, reg.Range, 0, reg.LocalKey, 7); err != nil {
			t.Fatal(err)
		}
		if c := do(t, ring, 1)[0]; c.UserData != 7 || c.Res != int32(len(buf)) {
			t.Fatalf("write: %+v", c)
		}
		for _, c := range []byte("on") {
			if fileHas(t, fd, 0, len(buf), c) {
				return c
			}
		}
		return '?'
	}
	if got := write(); got != 'o' {
		t.Errorf("stale slot wrote %q, want the old bytes", got)
	}
	updated, err := d.Update(ctx, reg)
	if err != nil {
		t.Fatal(err)
	}
	if updated != reg {
		t.Errorf("update returned %+v, want %+v", updated, reg)
	}
	if got := write(); got != 'n' {
		t.Errorf("updated slot wrote %q, want the new bytes", got)
	}
	if err := d.Deregister(reg); err != nil {
		t.Fatal(err)
	}
	if err := ring.WriteFixed(fd, reg.Range, 0, reg.LocalKey, 8); err != nil {
		t.Fatal(err)
	}
	if c := do(t, ring, 1)[0]; !errors.Is(c.Err(), unix.EFAULT) {
		t.Errorf("write through a dead key: %v, want EFAULT", c.Err())
	}
}

// A request in flight keeps the pages it started with, through an update and
// a deregistration.
func TestInFlightKeepsOldPages(t *testing.T) {
	for _, verb := range []string{"update", "deregister"} {
		t.Run(verb, func(t *testing.T) {
			ctx := context.Background()
			d := open(t, nil)
			ring, buf := d.Ring(), mapAnon(t, 1)
			var p [2]int
			if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
				t.Fatal(err)
			}
			defer func() { _ = unix.Close(p[0]); _ = unix.Close(p[1]) }()
			fill(buf, 'o')
			// The alias is another mapping of the old page.
			fd := memfd(t)
			if err := unix.Ftruncate(fd, int64(len(buf))); err != nil {
				t.Fatal(err)
			}
			alias, err := unix.Mmap(fd, 0, len(buf), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = unix.Munmap(alias) }()
			r := vm.RangeOf(buf)
			mapFixed(t, r, fd)
			reg, err := d.Register(ctx, r, device.LocalWrite)
			if err != nil {
				t.Fatal(err)
			}
			if err := ring.ReadFixed(p[0], vm.Range{Start: r.Start, End: r.Start + 5}, -1, reg.LocalKey, 1); err != nil {
				t.Fatal(err)
			}
			if n, err := ring.Submit(); n != 1 || err != nil {
				t.Fatal(n, err)
			}
			mapFixed(t, r, -1)
			if verb == "update" {
				_, err = d.Update(ctx, reg)
			} else {
				err = d.Deregister(reg)
			}
			if err != nil {
				t.Fatal(err)
			}
			if _, err := unix.Write(p[1], []byte("hello")); err != nil {
				t.Fatal(err)
			}
			if c := do(t, ring, 1)[0]; c.Res != 5 {
				t.Fatalf("read: %+v", c)
			}
			if string(alias[:5]) != "hello" || !bytes.Equal(buf[:5], make([]byte, 5)) {
				t.Errorf("old page %q, new page %q: want the read in the old", alias[:5], buf[:5])
			}
		})
	}
}

// Two devices share a ring's table, each in its own slots.
func TestCallersRing(t *testing.T) {
	ctx := context.Background()
	ring, err := iouring.NewRing(nil)
	needRing(t, err)
	defer ring.Close()
	a, err := iouring.New(ring.Fd(), &iouring.Options{First: 4, Slots: 6})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	// The table has ten slots now: the rest of it is what is left to others.
	if _, err := iouring.New(ring.Fd(), &iouring.Options{First: 8, Slots: 3}); !errors.Is(err, device.ErrInvalid) || !errors.Is(err, unix.EINVAL) {
		t.Errorf("slots beyond the table: %v", err)
	}
	b, err := iouring.New(ring.Fd(), &iouring.Options{Slots: 4})
	if err != nil {
		t.Fatal(err)
	}
	rest, err := iouring.New(ring.Fd(), &iouring.Options{First: 3})
	if err != nil {
		t.Fatal(err)
	}
	if n := rest.Limits().MaxRegistrations; n != 7 {
		t.Errorf("%d slots from the fourth of ten on, want 7", n)
	}
	if err := rest.Close(); err != nil {
		t.Error(err)
	}
	buf := mapAnon(t, 1)
	inA, err := a.Register(ctx, vm.RangeOf(buf), 0)
	if err != nil {
		t.Fatal(err)
	}
	inB, err := b.Register(ctx, vm.RangeOf(buf), 0)
	if err != nil {
		t.Fatal(err)
	}
	if inA.LocalKey < 4 || inA.LocalKey > 9 || inB.LocalKey > 3 {
		t.Errorf("keys %d and %d, want them in [4,10) and [0,4)", inA.LocalKey, inB.LocalKey)
	}
	if err := a.Deregister(inB); !errors.Is(err, device.ErrNotRegistered) {
		t.Errorf("another device's registration: %v", err)
	}
	// Closing one leaves the other's slots alone.
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	fd := memfd(t)
	for _, c := range []struct {
		reg  device.Registration
		want error
	}{{inA, nil}, {inB, unix.EFAULT}} {
		if err := ring.WriteFixed(fd, c.reg.Range, 0, c.reg.LocalKey, 0); err != nil {
			t.Fatal(err)
		}
		if got := do(t, ring, 1)[0].Err(); got != c.want { //nolint:errorlint // Err returns the plain errno.
			t.Errorf("write through slot %d: %v, want %v", c.reg.LocalKey, got, c.want)
		}
	}
	// The device outlives the caller's descriptor.
	if err := ring.Close(); err != nil {
		t.Fatal(err)
	}
	if err := a.Deregister(inA); err != nil {
		t.Error(err)
	}
}

func TestNewRefuses(t *testing.T) {
	r, err := iouring.NewRing(nil)
	needRing(t, err)
	defer r.Close()
	for _, c := range []struct {
		name string
		fd   int
		opts iouring.Options
		want error
	}{
		{"bad descriptor", -1, iouring.Options{}, unix.EBADF},
		{"not a ring", memfd(t), iouring.Options{}, unix.EOPNOTSUPP},
		{"too many slots", r.Fd(), iouring.Options{First: 1, Slots: iouring.MaxSlots}, device.ErrInvalid},
		{"negative", r.Fd(), iouring.Options{First: -1}, device.ErrInvalid},
		{"first beyond", r.Fd(), iouring.Options{First: iouring.MaxSlots}, device.ErrInvalid},
	} {
		d, err := iouring.New(c.fd, &c.opts)
		if err == nil {
			d.Close()
		}
		if !errors.Is(err, c.want) || !errors.Is(err, device.ErrInvalid) {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
	}
	if _, err := iouring.Open(&iouring.Options{First: 1}); !errors.Is(err, device.ErrInvalid) {
		t.Errorf("open with a first slot: %v", err)
	}
}

// A freed slot isn't used again while fresh ones are there for a while, and
// then its handle differs.
func TestSlotReuse(t *testing.T) {
	ctx := context.Background()
	d := open(t, &iouring.Options{Slots: 100})
	r := vm.RangeOf(mapAnon(t, 1))
	seen := map[uint32]int{}
	handles := map[uint64]bool{}
	var lastKey uint32
	for i := range 500 {
		reg, err := d.Register(ctx, r, 0)
		if err != nil {
			t.Fatal(err)
		}
		if prev, ok := seen[reg.LocalKey]; ok && i-prev < 64 {
			t.Fatalf("slot %d came back after %d registrations", reg.LocalKey, i-prev)
		}
		if handles[reg.Handle] {
			t.Fatalf("handle %#x came back", reg.Handle)
		}
		seen[reg.LocalKey], handles[reg.Handle] = i, true
		lastKey = reg.LocalKey
		if err := d.Deregister(reg); err != nil {
			t.Fatal(err)
		}
		if err := d.Deregister(reg); !errors.Is(err, device.ErrNotRegistered) {
			t.Fatalf("second deregister of slot %d: %v", lastKey, err)
		}
	}
	if d.Live() != 0 {
		t.Errorf("%d live, want none", d.Live())
	}
}

func TestErrorsNameTheCall(t *testing.T) {
	d := open(t, nil)
	buf := mapAnon(t, 1)
	if err := unix.Mprotect(buf, unix.PROT_READ); err != nil {
		t.Fatal(err)
	}
	_, err := d.Register(context.Background(), vm.RangeOf(buf), 0)
	var call *os.SyscallError
	if !errors.Is(err, device.ErrFault) || !errors.Is(err, unix.EFAULT) || !errors.As(err, &call) || call.Syscall != "io_uring_register" {
		t.Errorf("read-only memory: %v", err)
	}
	if want := fmt.Sprint("iouring: register ", vm.RangeOf(buf)); !strings.HasPrefix(fmt.Sprint(err), want) {
		t.Errorf("error %q, want it to begin with %q", err, want)
	}
}

// mapFixed maps fd, or fresh private memory for -1, over r.
func mapFixed(tb testing.TB, r vm.Range, fd int) {
	tb.Helper()
	flags := uintptr(unix.MAP_FIXED | unix.MAP_SHARED)
	if fd < 0 {
		flags = unix.MAP_FIXED | unix.MAP_PRIVATE | unix.MAP_ANONYMOUS
	}
	if _, _, errno := unix.Syscall6(unix.SYS_MMAP, r.Start, r.Len(), unix.PROT_READ|unix.PROT_WRITE, flags, uintptr(fd), 0); errno != 0 {
		tb.Fatal(os.NewSyscallError("mmap", errno))
	}
}
