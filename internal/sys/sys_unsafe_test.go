package sys

import (
	"errors"
	"os"
	"strings"
	"sync"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/vm"
)

// TestLayout holds the structures against include/uapi/linux/userfaultfd.h and
// fs.h: sizes, offsets, and the ioctl numbers that encode the sizes.
func TestLayout(t *testing.T) {
	iowr := func(dir, size, typ, nr uintptr) uintptr { return dir<<30 | size<<16 | typ<<8 | nr }
	for _, c := range []struct {
		name      string
		got, want uintptr
	}{
		{"uffd_msg", unsafe.Sizeof(UFFDMsg{}), 32},
		{"uffd_msg.event", unsafe.Offsetof(UFFDMsg{}.Event), 0},
		{"uffd_msg.arg", unsafe.Offsetof(UFFDMsg{}.Arg), 8},
		{"uffdio_api", unsafe.Sizeof(uffdioAPIArg{}), 24},
		{"uffdio_api.features", unsafe.Offsetof(uffdioAPIArg{}.Features), 8},
		{"uffdio_range", unsafe.Sizeof(uffdioRange{}), 16},
		{"uffdio_register", unsafe.Sizeof(uffdioRegisterArg{}), 32},
		{"uffdio_register.mode", unsafe.Offsetof(uffdioRegisterArg{}.Mode), 16},
		{"uffdio_register.ioctls", unsafe.Offsetof(uffdioRegisterArg{}.Ioctls), 24},
		{"uffdio_writeprotect", unsafe.Sizeof(uffdioWriteprotectArg{}), 24},
		{"uffdio_writeprotect.mode", unsafe.Offsetof(uffdioWriteprotectArg{}.Mode), 16},
		{"procmap_query", unsafe.Sizeof(procmapQueryArg{}), 104},
		{"procmap_query.vma_start", unsafe.Offsetof(procmapQueryArg{}.VMAStart), 24},
		{"procmap_query.vma_page_size", unsafe.Offsetof(procmapQueryArg{}.VMAPageSize), 48},
		{"procmap_query.inode", unsafe.Offsetof(procmapQueryArg{}.Inode), 64},
		{"procmap_query.dev_major", unsafe.Offsetof(procmapQueryArg{}.DevMajor), 72},
		{"procmap_query.vma_name_size", unsafe.Offsetof(procmapQueryArg{}.VMANameSize), 80},
		{"procmap_query.vma_name_addr", unsafe.Offsetof(procmapQueryArg{}.VMANameAddr), 88},
		{"UFFDIO_REGISTER", uffdioRegister, iowr(3, 32, 0xaa, 0)},
		{"UFFDIO_UNREGISTER", uffdioUnregister, iowr(2, 16, 0xaa, 1)},
		{"UFFDIO_WRITEPROTECT", uffdioWriteprotect, iowr(3, 24, 0xaa, 6)},
		{"UFFDIO_API", uffdioAPI, iowr(3, 24, 0xaa, 0x3f)},
		{"PROCMAP_QUERY", procmapQuery, iowr(3, 104, 'f', 17)},
	} {
		if c.got != c.want {
			t.Errorf("%s = %#x, want %#x", c.name, c.got, c.want)
		}
	}
}

func TestMapsAt(t *testing.T) {
	mem, err := unix.Mmap(-1, 0, 3*os.Getpagesize(), unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(mem)
	r := vm.RangeOf(mem)
	m, err := OpenMaps()
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	for _, text := range []bool{false, true} {
		m.text = text
		v, err := m.At(r.Start + 1)
		if err != nil {
			t.Fatal(err)
		}
		if !v.Range.Contains(r) || v.Inode != 0 || v.Name != "" || v.Flags&(VMAReadable|VMAShared) != VMAReadable {
			t.Errorf("text %v: mapping of %v is %+v", text, r, v)
		}
		if _, err := m.At(1); !errors.Is(err, ErrNoVMA) {
			t.Errorf("text %v: mapping at 1: %v, want ErrNoVMA", text, err)
		}
		// Code: a file with a name.
		v, err = m.At(**(**uintptr)(unsafe.Pointer(&codePointer)))
		if err != nil || v.Inode == 0 || v.Flags&VMAExecutable == 0 || v.Name == "" {
			t.Errorf("text %v: mapping of code is %+v, %v", text, v, err)
		}
	}
}

var codePointer = TestLayout

func TestMapsLongName(t *testing.T) {
	f, err := os.CreateTemp(t.TempDir(), strings.Repeat("x", 100))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(4096); err != nil {
		t.Fatal(err)
	}
	mem, err := unix.Mmap(int(f.Fd()), 0, 4096, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(mem)
	m, err := OpenMaps()
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	for _, text := range []bool{false, true} {
		m.text = text
		v, err := m.At(vm.RangeOf(mem).Start)
		if err != nil || v.Name != "?" || v.Flags&VMAShared == 0 || v.Inode == 0 {
			t.Errorf("text %v: %+v, %v", text, v, err)
		}
	}
}

// A query that runs while the file is closed must not reach the file that gets
// its descriptor next; the race detector sees it.
func TestCloseDuringQuery(t *testing.T) {
	m, err := OpenMaps()
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	started := make(chan struct{}, 2)
	for range 2 {
		wg.Go(func() {
			for first := true; ; first = false {
				if _, err := m.At(1); errors.Is(err, os.ErrClosed) {
					return
				} else if !errors.Is(err, ErrNoVMA) {
					t.Error(err)
					return
				}
				if first {
					started <- struct{}{}
				}
			}
		})
	}
	<-started
	<-started
	if err := m.Close(); err != nil {
		t.Error(err)
	}
	wg.Wait()
}

func TestParseVMA(t *testing.T) {
	v, err := parseVMA([]byte("7f0000000000-7f0000002000 rw-s 00001000 fd:0a 1234                       /tmp/a b (deleted)"))
	want := VMA{
		Range: vm.Range{Start: 0x7f0000000000, End: 0x7f0000002000},
		Flags: VMAReadable | VMAWritable | VMAShared, Inode: 1234, Major: 0xfd, Minor: 0x0a, Name: "/tmp/a b (deleted)",
	}
	if err != nil || v != want {
		t.Errorf("got %+v, %v, want %+v", v, err, want)
	}
	for _, bad := range []string{"", "x", "1-2 rwxp", "2-1 rwxp 0 0:0 0", "1-2 rwzp 0 0:0 0", "1-2 rw 0 0:0 0", "1-2 rwxp 0 0:0 -1"} {
		if _, err := parseVMA([]byte(bad)); !errors.Is(err, ErrParse) {
			t.Errorf("%q: %v, want ErrParse", bad, err)
		}
	}
}

func FuzzParseVMA(f *testing.F) {
	f.Add([]byte("7f0000000000-7f0000002000 rw-p 00000000 00:00 0 "))
	f.Add([]byte("7ffd1000-7ffd2000 r-xp 00000000 00:00 0                          [vdso]"))
	f.Fuzz(func(t *testing.T, line []byte) {
		if v, err := parseVMA(line); err == nil && v.Range.Check() != nil {
			t.Errorf("%q gave %+v", line, v)
		}
	})
}

func TestUserfaultfd(t *testing.T) {
	fd, err := Userfaultfd(UFFDUserModeOnly | unix.O_CLOEXEC | unix.O_NONBLOCK)
	if err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatal(err)
		}
		t.Skipf("userfaultfd needed: %v", err)
	}
	defer unix.Close(fd)
	if _, err := UFFDHandshake(fd, UFFDFeatureEventUnmap|UFFDFeaturePagefaultFlagWP); err != nil {
		t.Fatal(err)
	}
	mem, err := unix.Mmap(-1, 0, 2*os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	r := vm.RangeOf(mem)
	if err := UFFDWriteprotect(fd, r, 0); !errors.Is(err, unix.ENOENT) {
		t.Errorf("write protect of what isn't registered: %v, want ENOENT", err)
	}
	ioctls, err := UFFDRegister(fd, r, UFFDRegisterModeWP)
	if err != nil || ioctls&UFFDIoctlWriteprotect == 0 {
		t.Fatalf("register: ioctls %#x, %v", ioctls, err)
	}
	if err := UFFDWriteprotect(fd, r, 0); err != nil {
		t.Error(err)
	}
	if UFFDChanging(fd) {
		t.Error("changing before any operation")
	}
	done := make(chan error)
	go func() { done <- unix.Munmap(mem) }()
	for !UFFDChanging(fd) {
	}
	var buf [32]byte
	for {
		if n, err := unix.Read(fd, buf[:]); err == nil {
			if n != len(buf) {
				t.Errorf("read %d bytes", n)
			}
			break
		}
	}
	m := (*UFFDMsg)(unsafe.Pointer(&buf))
	if m.Event != UFFDEventUnmap || m.Arg[0] != uint64(r.Start) || m.Arg[1] != uint64(r.End) {
		t.Errorf("message %+v, want unmap of %v", m, r)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	if UFFDChanging(fd) {
		t.Error("still changing")
	}
}

func BenchmarkUFFDChanging(b *testing.B) {
	fd, err := Userfaultfd(UFFDUserModeOnly | unix.O_CLOEXEC | unix.O_NONBLOCK)
	if err != nil {
		b.Skip(err)
	}
	defer unix.Close(fd)
	if _, err := UFFDHandshake(fd, UFFDFeatureEventUnmap|UFFDFeaturePagefaultFlagWP); err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		if UFFDChanging(fd) {
			b.Fatal("changing")
		}
	}
}

func BenchmarkMapsAt(b *testing.B) {
	m, err := OpenMaps()
	if err != nil {
		b.Fatal(err)
	}
	defer m.Close()
	for _, mode := range []string{"query", "text"} {
		b.Run(mode, func(b *testing.B) {
			m.text = mode == "text"
			for b.Loop() {
				if _, err := m.At(uintptr(unsafe.Pointer(m))); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
