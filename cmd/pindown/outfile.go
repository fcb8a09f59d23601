package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
)

// outFile is a file that is written beside what is there, so that who reads it
// never sees a part, and a failure leaves what was there.
type outFile struct {
	*os.File

	path string // what it becomes; "" if it is written in place
}

func createFile(path string) (*outFile, error) {
	if info, err := os.Stat(path); err == nil && !info.Mode().IsRegular() {
		// A pipe or a terminal, where there is nothing to replace; or an error.
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err != nil {
			return nil, err
		}
		return &outFile{File: f}, nil
	}
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-")
	if err != nil {
		return nil, fmt.Errorf("create %s: %w", path, err)
	}
	return &outFile{File: f, path: path}, nil
}

// finish closes the file, and puts it in its place if good.
func (f *outFile) finish(good bool) error {
	if f.path == "" {
		return f.Close()
	}
	err := errors.Join(f.Chmod(0o644), f.Close())
	if good && err == nil {
		if err = os.Rename(f.Name(), f.path); err == nil {
			return nil
		}
	}
	return errors.Join(err, os.Remove(f.Name()))
}

// writeFile writes a file as a whole.
func writeFile(path string, write func(io.Writer) error) error {
	f, err := createFile(path)
	if err != nil {
		return err
	}
	err = write(f)
	return errors.Join(err, f.finish(err == nil))
}
