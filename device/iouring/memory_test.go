package iouring_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/iouring"
	"github.com/pindown/pindown/vm"
)

// eventuallyPinned waits until this process has at most want KiB pinned, since
// a closed ring gives memory back from a kernel worker.
func eventuallyPinned(t *testing.T, want uint64) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for {
		n, err := pinned()
		if err != nil {
			t.Fatal(err)
		}
		if n <= want {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d KiB are pinned, want %d", n, want)
		}
		time.Sleep(time.Millisecond)
	}
}

func wantPinned(t *testing.T, when string, want uint64) {
	t.Helper()
	if n, err := pinned(); err != nil || n != want {
		t.Errorf("%s: %d KiB pinned, %v, want %d", when, n, err, want)
	}
}

// What can be registered of each kind of mapping.
func TestKindsOfMemory(t *testing.T) {
	d := open(t, nil)
	page := os.Getpagesize()
	f, err := os.Create(filepath.Join(t.TempDir(), "file"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(int64(4 * page)); err != nil {
		t.Fatal(err)
	}
	mem := memfd(t)
	if err := unix.Ftruncate(mem, int64(4*page)); err != nil {
		t.Fatal(err)
	}
	const rw = unix.PROT_READ | unix.PROT_WRITE
	for _, c := range []struct {
		name        string
		fd          int
		prot, flags int
		want        []error
	}{
		{"private anonymous", -1, rw, unix.MAP_PRIVATE | unix.MAP_ANONYMOUS, nil},
		{"shared anonymous", -1, rw, unix.MAP_SHARED | unix.MAP_ANONYMOUS, nil},
		{"memfd", mem, rw, unix.MAP_SHARED, nil},
		{"private file", int(f.Fd()), rw, unix.MAP_PRIVATE, nil},
		{"shared file", int(f.Fd()), rw, unix.MAP_SHARED, []error{device.ErrFault, device.ErrUnsupportedMemory}},
		{"read-only file", int(f.Fd()), unix.PROT_READ, unix.MAP_PRIVATE, []error{device.ErrFault}},
		{"read-only anonymous", -1, unix.PROT_READ, unix.MAP_PRIVATE | unix.MAP_ANONYMOUS, []error{device.ErrFault}},
		{"write-only anonymous", -1, unix.PROT_WRITE, unix.MAP_PRIVATE | unix.MAP_ANONYMOUS, nil},
		{"beyond the file's end", mem, rw, unix.MAP_SHARED, []error{device.ErrFault}},
	} {
		size := 4 * page
		if c.name == "beyond the file's end" {
			size = 8 * page
		}
		b, err := unix.Mmap(c.fd, 0, size, c.prot, c.flags)
		if err != nil {
			t.Fatal(err)
		}
		reg, err := d.Register(t.Context(), vm.RangeOf(b), 0)
		switch {
		case c.want == nil:
			if err != nil {
				t.Errorf("%s: %v", c.name, err)
			}
		case err == nil:
			if c.name == "shared file" { // A file system may do without write-back.
				t.Logf("%s: registered", c.name)
			} else {
				t.Errorf("%s: registered, want %q", c.name, c.want)
			}
		default:
			ok := false
			for _, want := range c.want {
				ok = ok || errors.Is(err, want)
			}
			if !ok {
				t.Errorf("%s: %v, want %q", c.name, err, c.want)
			}
		}
		if err == nil {
			if err := d.Deregister(reg); err != nil {
				t.Error(err)
			}
		}
		if err := unix.Munmap(b); err != nil {
			t.Error(err)
		}
	}
}

// Part of a huge page is charged as all of it, once for all registrations, and
// given back with the first: so limits count more, or less, than bytes.
func TestHugePageCountsWhole(t *testing.T) {
	const huge = 2 << 20
	b, err := unix.Mmap(-1, 0, 2*huge, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Munmap(b) }()
	off := int(-vm.RangeOf(b).Start & (huge - 1))
	b2 := b[off : off+huge]
	if err := unix.Madvise(b2, unix.MADV_HUGEPAGE); err != nil {
		t.Skipf("needs transparent huge pages: %v", err)
	}
	b2[0] = 1
	d := open(t, nil)
	before, err := pinned()
	if err != nil {
		t.Fatal(err)
	}
	first, err := d.Register(t.Context(), vm.RangeOf(b2[:4096]), 0)
	if err != nil {
		t.Fatal(err)
	}
	if n, _ := pinned(); n == before+4 {
		t.Skip("needs a free huge page; the kernel gave small ones")
	}
	wantPinned(t, "one page of a huge page", before+huge/1024)
	second, err := d.Register(t.Context(), vm.RangeOf(b2[8192:12288]), 0)
	if err != nil {
		t.Fatal(err)
	}
	wantPinned(t, "another page of it", before+huge/1024)
	if err := errors.Join(d.Deregister(first), d.Deregister(second)); err != nil {
		t.Fatal(err)
	}
	eventuallyPinned(t, before)
}

func TestHugeTLB(t *testing.T) {
	b, err := unix.Mmap(-1, 0, 2<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_HUGETLB)
	if err != nil {
		t.Skipf("needs a free huge page in the pool (sysctl vm.nr_hugepages): %v", err)
	}
	defer func() { _ = unix.Munmap(b) }()
	d := open(t, nil)
	reg, err := d.Register(t.Context(), vm.RangeOf(b), device.LocalWrite)
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Deregister(reg); err != nil {
		t.Error(err)
	}
}

// A closed device has given its memory back, but for what requests in flight
// still use; a ring that is only closed does so later.
func TestRelease(t *testing.T) {
	const pages = 2048
	before, err := pinned()
	if err != nil {
		t.Fatal(err)
	}
	b := mapAnon(t, pages)
	kib := uint64(len(b)) / 1024

	d := open(t, nil)
	if _, err := d.Register(t.Context(), vm.RangeOf(b), 0); err != nil {
		t.Fatal(err)
	}
	wantPinned(t, "registered", before+kib)
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	eventuallyPinned(t, before)

	// In flight: the pages stay until the request ends.
	ring := newRing(t, nil)
	d, err = iouring.New(ring.Fd(), nil)
	if err != nil {
		t.Fatal(err)
	}
	reg, err := d.Register(t.Context(), vm.RangeOf(b), 0)
	if err != nil {
		t.Fatal(err)
	}
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(p[0]); _ = unix.Close(p[1]) }()
	if err := ring.ReadFixed(p[0], vm.RangeOf(b), -1, reg.LocalKey, 1); err != nil {
		t.Fatal(err)
	}
	if _, err := ring.Submit(); err != nil {
		t.Fatal(err)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	wantPinned(t, "closed, with a request in flight", before+kib)
	if _, err := unix.Write(p[1], []byte("x")); err != nil {
		t.Fatal(err)
	}
	do(t, ring, 1)
	eventuallyPinned(t, before)

	// The ring goes, and nobody cleared its slots: its mappings keep it alive
	// beyond the descriptors.
	d, err = iouring.New(ring.Fd(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := d.Register(t.Context(), vm.RangeOf(b), 0); err != nil {
		t.Fatal(err)
	}
	if err := ring.Close(); err != nil {
		t.Fatal(err)
	}
	wantPinned(t, "ring closed, device open", before+kib)
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	eventuallyPinned(t, before)
}
