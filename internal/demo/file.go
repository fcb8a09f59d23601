package demo

import (
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// fileMark begins a file that the demo made; a page of its own holds it, and
// the blocks follow.
const fileMark = "pindown demo: scratch file, safe to delete\n"

// target is the file that blocks are written to.
type target struct {
	write, read *os.File // the same file, opened twice
	name        string   // for people
	fs          string   // the file system's name
	direct      bool     // O_DIRECT
	header      int64    // where the blocks begin
	path        string   // to be removed; empty to keep
}

// openTarget opens the file with room for size bytes of blocks.
func openTarget(o *Options, size int64) (_ *target, err error) {
	t := &target{header: int64(os.Getpagesize()), name: o.File}
	defer func() {
		if err != nil {
			err = errors.Join(err, t.close())
		}
	}()
	path := o.File
	if path == "" {
		f, err := os.CreateTemp("", "pindown-demo-")
		if err != nil {
			return nil, fmt.Errorf("create temporary file: %w", err)
		}
		t.path, t.write = f.Name(), f
		t.name, path = "a temporary file in "+os.TempDir(), f.Name()
	} else {
		_, missing := os.Lstat(path)
		if t.write, err = openNamed(path, o.Force); err != nil {
			return nil, err
		}
		if errors.Is(missing, os.ErrNotExist) {
			defer func() {
				if err != nil {
					err = errors.Join(err, os.Remove(path))
				}
			}()
		}
	}
	if err := t.reserve(size); err != nil {
		return nil, err
	}
	if t.read, err = os.Open(path); err != nil {
		return nil, err
	}
	if !sameFile(t.write, t.read) {
		return nil, fmt.Errorf("open %s: another file took its place", path)
	}
	t.fs = fsName(t.write)
	t.direct = t.setDirect(t.write) && t.setDirect(t.read)
	if t.path != "" {
		// From here on nothing is left behind, however the run ends.
		if err := os.Remove(t.path); err != nil {
			return nil, err
		}
		t.path = ""
	}
	return t, nil
}

// openNamed opens a file of the user's for the demo: it must be new, empty,
// made by the demo, or forced.
func openNamed(path string, force bool) (*os.File, error) {
	if fi, err := os.Stat(path); err == nil && !fi.Mode().IsRegular() {
		return nil, fmt.Errorf("open %s: not a regular file", path)
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NONBLOCK, 0o644)
	if err != nil {
		return nil, err
	}
	if err := claim(f, force); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

func claim(f *os.File, force bool) error {
	fi, err := f.Stat()
	if err != nil {
		return err
	}
	if !fi.Mode().IsRegular() {
		return fmt.Errorf("open %s: not a regular file", f.Name())
	}
	// Two demos on one file would each find the other's blocks.
	if err := flock(f); errors.Is(err, unix.EWOULDBLOCK) {
		return fmt.Errorf("lock %s: in use by another demo", f.Name())
	}
	if fi.Size() == 0 || force {
		return nil
	}
	mark := make([]byte, len(fileMark))
	if _, err := f.ReadAt(mark, 0); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	if string(mark) != fileMark {
		return fmt.Errorf("%s: %w", f.Name(), ErrNotOurs)
	}
	return nil
}

// reserve gives the file its header and its length, with disk space behind
// it, so that a full disk is found before anything else is done, and the time
// to allocate blocks isn't measured.
func (t *target) reserve(size int64) error {
	if err := t.write.Truncate(0); err != nil {
		return err
	}
	header := append([]byte(fileMark), make([]byte, t.header-int64(len(fileMark)))...)
	if _, err := t.write.WriteAt(header, 0); err != nil {
		return err
	}
	err := retryIntr(func() error { return unix.Fallocate(int(t.write.Fd()), 0, 0, t.header+size) })
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOSYS) {
		return t.write.Truncate(t.header + size)
	}
	if err != nil {
		// What was reserved before the disk was full.
		return errors.Join(fmt.Errorf("reserve %s in %s: %w", FormatSize(uint64(t.header+size)), t.write.Name(), err), t.write.Truncate(0))
	}
	return nil
}

// setDirect switches f to O_DIRECT, where the file system has it: a transfer
// of one page is the proof.
func (t *target) setDirect(f *os.File) bool {
	set := func(direct int) error {
		flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFL, 0)
		if err != nil {
			return err
		}
		_, err = unix.FcntlInt(f.Fd(), unix.F_SETFL, flags&^unix.O_DIRECT|direct)
		return err
	}
	if set(unix.O_DIRECT) != nil {
		return false
	}
	page, err := unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err == nil {
		defer func() { _ = unix.Munmap(page) }()
		err = retryIntr(func() error {
			_, err := unix.Pread(int(f.Fd()), page, 0)
			return err
		})
	}
	if err == nil && f == t.write {
		err = retryIntr(func() error {
			_, err := unix.Pwrite(int(f.Fd()), page, 0)
			return err
		})
	}
	if err != nil {
		_ = set(0)
		return false
	}
	return true
}

// close ends the file, and removes it if it has a name that nobody gave it.
func (t *target) close() error {
	var errs []error
	if t.path != "" {
		errs = append(errs, os.Remove(t.path))
	}
	for _, f := range []*os.File{t.write, t.read} {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	return errors.Join(errs...)
}

// io says how blocks are transferred.
func (t *target) io() string {
	if t.direct {
		return "direct I/O"
	}
	return "buffered I/O, O_DIRECT isn't available"
}

func flock(f *os.File) error {
	return retryIntr(func() error { return unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) })
}

func sameFile(a, b *os.File) bool {
	x, err1 := a.Stat()
	y, err2 := b.Stat()
	return err1 == nil && err2 == nil && os.SameFile(x, y)
}

func retryIntr(f func() error) error {
	for {
		if err := f(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// fsNames are the usual answers of statfs(2).
var fsNames = map[int64]string{
	unix.EXT4_SUPER_MAGIC: "ext4", unix.XFS_SUPER_MAGIC: "xfs", unix.BTRFS_SUPER_MAGIC: "btrfs",
	unix.TMPFS_MAGIC: "tmpfs", unix.OVERLAYFS_SUPER_MAGIC: "overlayfs", unix.NFS_SUPER_MAGIC: "nfs",
	unix.F2FS_SUPER_MAGIC: "f2fs", unix.FUSE_SUPER_MAGIC: "fuse", unix.V9FS_MAGIC: "9p",
	unix.RAMFS_MAGIC: "ramfs", 0x2fc12fc1: "zfs",
}

func fsName(f *os.File) string {
	var st unix.Statfs_t
	if err := retryIntr(func() error { return unix.Fstatfs(int(f.Fd()), &st) }); err != nil {
		return "unknown"
	}
	if name, ok := fsNames[st.Type]; ok {
		return name
	}
	return fmt.Sprintf("%#x", st.Type)
}
