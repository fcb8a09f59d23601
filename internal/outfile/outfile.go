// Package outfile writes files beside what is there: who reads one never sees a
// part of it, and a failure leaves what was there.
package outfile

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
)

// File is a file that is being written. Finish must be called.
type File struct {
	*os.File

	path string // what it becomes; "" if it is written in place
}

// Create begins to write the file of that name, or the one that it is a symbolic
// link to. A new file has the permissions that os.Create gives it, another keeps
// its own. What can't be replaced, such as a terminal, a pipe or a descriptor
// under /dev or /proc, is written in place, at its end. Until Finish the data is
// in a file beside, of a name that begins with a dot.
func Create(path string) (*File, error) {
	f, err := create(path)
	if err != nil {
		if e, ok := errors.AsType[*fs.PathError](err); ok {
			err = e.Err // its path is of no interest
		}
		return nil, fmt.Errorf("create %s: %w", path, err)
	}
	return f, nil
}

func create(path string) (*File, error) {
	info, err := os.Stat(path)
	if err == nil && (!info.Mode().IsRegular() || isDescriptor(path)) {
		f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
		if err != nil {
			return nil, err
		}
		return &File{File: f}, nil
	}
	if target, e := filepath.EvalSymlinks(path); e == nil {
		path = target
	}
	f, e := createBeside(path)
	if e != nil {
		return nil, e
	}
	if err == nil {
		if err := f.Chmod(info.Mode().Perm()); err != nil {
			return nil, errors.Join(err, f.Close(), os.Remove(f.Name()))
		}
	}
	return &File{File: f, path: path}, nil
}

// createBeside is os.CreateTemp with permissions by the umask.
func createBeside(path string) (*os.File, error) {
	dir, base := filepath.Split(path)
	for try := 0; ; try++ {
		f, err := os.OpenFile(fmt.Sprintf("%s.%s-%d", dir, base, rand.Uint32()), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o666)
		if !errors.Is(err, fs.ErrExist) || try == 1000 {
			return f, err
		}
	}
}

// isDescriptor reports whether path leads to an open descriptor, such as
// /dev/stdout does, which isn't replaced even if it is a regular file.
func isDescriptor(path string) bool {
	for range 8 {
		path, _ = filepath.Abs(path)
		if strings.HasPrefix(path, "/proc/") || strings.HasPrefix(path, "/dev/fd/") {
			return true
		}
		link, err := os.Readlink(path)
		if err != nil {
			return false
		}
		if !filepath.IsAbs(link) {
			link = filepath.Join(filepath.Dir(path), link)
		}
		path = link
	}
	return false
}

// Path returns the path of the file that f replaces or makes; "" if it is written
// in place.
func (f *File) Path() string { return f.path }

// Finish closes the file and, if good, puts it in its place; otherwise it is
// removed.
func (f *File) Finish(good bool) error {
	err := f.Close()
	if f.path == "" {
		return err
	}
	if good && err == nil {
		if err = os.Rename(f.Name(), f.path); err == nil {
			return nil
		}
	}
	return errors.Join(err, os.Remove(f.Name()))
}

// Write writes a file as a whole.
func Write(path string, write func(io.Writer) error) error {
	f, err := Create(path)
	if err != nil {
		return err
	}
	err = write(f)
	return errors.Join(err, f.Finish(err == nil))
}

// Same reports whether two names are of one file, be it there or not. What isn't
// a regular file, such as a terminal, can be written twice and is never the same.
func Same(a, b string) bool {
	x, err1 := os.Stat(a)
	y, err2 := os.Stat(b)
	if err1 == nil && err2 == nil {
		return x.Mode().IsRegular() && os.SameFile(x, y)
	}
	a, _ = filepath.Abs(a)
	b, _ = filepath.Abs(b)
	return a == b
}
