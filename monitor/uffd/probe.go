package uffd

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/internal/sys"
	"github.com/pindown/pindown/monitor"
	"github.com/pindown/pindown/vm"
)

// needed are the features without which the monitor would be blind.
const needed = sys.UFFDFeatureEventUnmap | sys.UFFDFeatureEventRemove | sys.UFFDFeatureEventRemap | sys.UFFDFeaturePagefaultFlagWP

var featureNames = []struct {
	bit  uint64
	name string
}{
	{sys.UFFDFeatureEventUnmap, "EVENT_UNMAP (Linux 4.11)"},
	{sys.UFFDFeatureEventRemove, "EVENT_REMOVE (Linux 4.11)"},
	{sys.UFFDFeatureEventRemap, "EVENT_REMAP (Linux 4.11)"},
	{sys.UFFDFeaturePagefaultFlagWP, "PAGEFAULT_FLAG_WP (Linux 5.7 on amd64, 6.10 on arm64)"},
}

// openUserfaultfd returns a userfaultfd with the features that it has enabled.
// Errors wrap monitor.ErrNotSupported and say what would help.
func openUserfaultfd() (int, uint64, error) {
	// Before that, mmap_changing was a flag and not a count: the end of one
	// operation hid another one, and HitCheck relies on it.
	if err := checkRelease(5, 15); err != nil {
		return -1, 0, err
	}
	fd, err := newUserfaultfd()
	if err != nil {
		return -1, 0, err
	}
	have, err := sys.UFFDHandshake(fd, 0)
	_ = unix.Close(fd)
	if err != nil {
		return -1, 0, fmt.Errorf("%w: %w", monitor.ErrNotSupported, err)
	}
	for _, f := range featureNames {
		if have&f.bit == 0 {
			return -1, 0, fmt.Errorf("userfaultfd lacks %s: %w", f.name, monitor.ErrNotSupported)
		}
	}
	want := needed | have&sys.UFFDFeatureWPHugetlbfsShmem
	// A descriptor takes one handshake.
	if fd, err = newUserfaultfd(); err != nil {
		return -1, 0, err
	}
	if _, err := sys.UFFDHandshake(fd, want); err != nil {
		_ = unix.Close(fd)
		return -1, 0, fmt.Errorf("enable features %#x: %w: %w", want, monitor.ErrNotSupported, err)
	}
	return fd, want, nil
}

func newUserfaultfd() (int, error) {
	fd, err := sys.Userfaultfd(sys.UFFDUserModeOnly | unix.O_CLOEXEC | unix.O_NONBLOCK)
	switch {
	case err == nil:
		return fd, nil
	case errors.Is(err, unix.ENOSYS):
		return -1, fmt.Errorf("kernel without CONFIG_USERFAULTFD, or a seccomp filter that hides it: %w: %w", monitor.ErrNotSupported, err)
	case errors.Is(err, unix.EPERM):
		// In user mode the kernel asks for no privilege (vm.unprivileged_userfaultfd
		// is for the other one), so this is somebody's policy.
		return -1, fmt.Errorf("denied by a seccomp filter or a security module, as container runtimes do by default; allow userfaultfd(2): %w: %w",
			monitor.ErrNotSupported, err)
	case errors.Is(err, unix.EINVAL):
		return -1, fmt.Errorf("userfaultfd lacks UFFD_USER_MODE_ONLY (Linux 5.11): %w: %w", monitor.ErrNotSupported, err)
	}
	return -1, fmt.Errorf("%w: %w", monitor.ErrNotSupported, err)
}

// checkRelease returns an error unless the kernel is at least major.minor.
func checkRelease(major, minor int) error {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return fmt.Errorf("%w: %w", monitor.ErrNotSupported, os.NewSyscallError("uname", err))
	}
	release := unix.ByteSliceToString(u.Release[:])
	a, rest, _ := strings.Cut(release, ".")
	b := rest
	if i := strings.IndexFunc(rest, func(r rune) bool { return r < '0' || r > '9' }); i >= 0 {
		b = rest[:i]
	}
	haveMajor, err := strconv.Atoi(a)
	haveMinor, err2 := strconv.Atoi(b)
	if err != nil || err2 != nil || haveMajor < major || haveMajor == major && haveMinor < minor {
		return fmt.Errorf("kernel %q is older than %d.%d: %w", release, major, minor, monitor.ErrNotSupported)
	}
	return nil
}

// maxMapCount returns vm.max_map_count.
func maxMapCount() int {
	const standard = 65530
	b, err := os.ReadFile("/proc/sys/vm/max_map_count")
	if err != nil {
		return standard
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil || n <= 0 {
		return standard
	}
	return n
}

// probeHugeDevice returns the device of the file system that the kernel keeps
// private anonymous hugetlb memory of the default page size on; zero if there
// is none.
func probeHugeDevice(maps *sys.Maps) uint64 {
	const size = 1 << 30 // a multiple of every default
	mem, err := unix.Mmap(-1, 0, size, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_HUGETLB|unix.MAP_NORESERVE)
	if err != nil {
		return 0
	}
	defer func() { _ = unix.Munmap(mem) }()
	v, err := maps.At(vm.RangeOf(mem).Start)
	if err != nil || v.Name != hugeName {
		return 0
	}
	return deviceOf(v)
}
