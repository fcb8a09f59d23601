// Package cpio writes cpio archives in the newc format, the one the Linux kernel unpacks as an initramfs.
package cpio

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"path"
	"strings"
)

// Errors returned by the methods of [Writer], wrapped.
var (
	// ErrName means that an entry's name is absolute, not clean, or contains a NUL byte.
	ErrName = errors.New("cpio: bad name")

	// ErrExist means that the archive already holds an entry of that name.
	ErrExist = errors.New("cpio: entry exists")

	// ErrSize means that a file is too large for the format, or that its content has another length than announced.
	ErrSize = errors.New("cpio: bad size")
)

// Type bits of an inode's mode, the same on every Linux architecture.
const (
	typeChar    = 0o020000
	typeDir     = 0o040000
	typeRegular = 0o100000
	typeSymlink = 0o120000
)

// Writer writes an archive entry by entry.
//
// Directories above an entry are added with mode 0755 when they are missing, because the kernel creates none.
// All entries belong to root. A Writer must not be used by several goroutines at once.
type Writer struct {
	w    io.Writer
	n    int64
	ino  uint32
	seen map[string]bool // true for directories
}

// NewWriter returns a Writer that appends to w.
func NewWriter(w io.Writer) *Writer {
	return &Writer{w: w, seen: map[string]bool{".": true}}
}

// Dir adds a directory. Adding one twice is no error: the first mode stays.
func (w *Writer) Dir(name string, perm fs.FileMode) error {
	if isDir, ok := w.seen[name]; ok && isDir {
		return nil
	}
	return w.entry(name, typeDir|unixPerm(perm), 0, 0, 0, nil)
}

// File adds a regular file of size bytes, read from r.
func (w *Writer) File(name string, perm fs.FileMode, size int64, r io.Reader) error {
	if size < 0 || size > math.MaxUint32 {
		return fmt.Errorf("write %s: %w: %d bytes", name, ErrSize, size)
	}
	return w.entry(name, typeRegular|unixPerm(perm), size, 0, 0, r)
}

// Symlink adds a symbolic link.
func (w *Writer) Symlink(name, target string) error {
	return w.entry(name, typeSymlink|0o777, int64(len(target)), 0, 0, strings.NewReader(target))
}

// CharDevice adds a character device node.
func (w *Writer) CharDevice(name string, perm fs.FileMode, major, minor uint32) error {
	return w.entry(name, typeChar|unixPerm(perm), 0, major, minor, nil)
}

// Close ends the archive. It does not close the underlying writer.
func (w *Writer) Close() error {
	if err := w.header("TRAILER!!!", 0, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("write trailer: %w", err)
	}
	return nil
}

func (w *Writer) entry(name string, mode uint32, size int64, major, minor uint32, r io.Reader) error {
	if name == "" || name != path.Clean(name) || strings.HasPrefix(name, "/") || name == "." ||
		name == ".." || strings.HasPrefix(name, "../") || strings.ContainsRune(name, 0) {
		return fmt.Errorf("write %q: %w", name, ErrName)
	}
	if _, ok := w.seen[name]; ok {
		return fmt.Errorf("write %s: %w", name, ErrExist)
	}
	parent := path.Dir(name)
	if isDir, ok := w.seen[parent]; ok && !isDir {
		return fmt.Errorf("write %s: %w: %s is no directory", name, ErrName, parent)
	} else if !ok {
		if err := w.Dir(parent, 0o755); err != nil {
			return err
		}
	}
	w.seen[name] = mode&typeDir == typeDir
	w.ino++
	if err := w.header(name, w.ino, mode, size, major, minor); err != nil {
		return fmt.Errorf("write header of %s: %w", name, err)
	}
	if r == nil {
		return nil
	}
	n, err := io.Copy(w.w, io.LimitReader(r, size))
	w.n += n
	if err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	if n != size {
		return fmt.Errorf("write %s: %w: %d bytes of %d", name, ErrSize, n, size)
	}
	return w.pad()
}

func (w *Writer) header(name string, ino, mode uint32, size int64, major, minor uint32) error {
	nlink := 1
	if mode&typeDir == typeDir {
		nlink = 2
	}
	// magic, ino, mode, uid, gid, nlink, mtime, filesize, dev major and minor, rdev major and minor, namesize, check.
	n, err := fmt.Fprintf(w.w, "070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%s\x00",
		ino, mode, 0, 0, nlink, 0, size, 0, 0, major, minor, len(name)+1, 0, name)
	w.n += int64(n)
	if err != nil {
		return err
	}
	return w.pad()
}

// pad aligns the archive to four bytes.
func (w *Writer) pad() error {
	n, err := w.w.Write(make([]byte, -w.n&3))
	w.n += int64(n)
	return err
}

func unixPerm(perm fs.FileMode) uint32 {
	m := uint32(perm.Perm())
	if perm&fs.ModeSetuid != 0 {
		m |= 0o4000
	}
	if perm&fs.ModeSetgid != 0 {
		m |= 0o2000
	}
	if perm&fs.ModeSticky != 0 {
		m |= 0o1000
	}
	return m
}
