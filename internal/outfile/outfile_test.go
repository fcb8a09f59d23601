package outfile

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func put(text string) func(io.Writer) error {
	return func(w io.Writer) error {
		_, err := io.WriteString(w, text)
		return err
	}
}

// check checks what a file holds, its permissions, and that nothing else is
// beside it.
func check(t *testing.T, path, text string, mode fs.FileMode, files int) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil || string(b) != text {
		t.Errorf("%s holds %q, %v, want %q", path, b, err, text)
	}
	if info, err := os.Lstat(path); err != nil || info.Mode() != mode {
		t.Errorf("%s: mode %v, %v, want %v", path, info.Mode(), err, mode)
	}
	if left, err := os.ReadDir(filepath.Dir(path)); err != nil || len(left) != files {
		t.Errorf("%v, %v, want %d files", left, err, files)
	}
}

// Not parallel: the umask is the process's.
func TestPermissions(t *testing.T) {
	for umask, want := range map[int]fs.FileMode{0o022: 0o644, 0o077: 0o600, 0o002: 0o664} {
		old := unix.Umask(umask)
		path := filepath.Join(t.TempDir(), "f")
		err := Write(path, put("new"))
		unix.Umask(old)
		if err != nil {
			t.Fatal(err)
		}
		check(t, path, "new", want, 1)
	}
	// What is there keeps its own.
	path := filepath.Join(t.TempDir(), "f")
	for _, mode := range []fs.FileMode{0o600, 0o666, 0o640} {
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
		if err := Write(path, put("other")); err != nil {
			t.Fatal(err)
		}
		check(t, path, "other", mode, 1)
	}
}

func TestFailureLeavesWhatWasThere(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	if err := Write(path, func(io.Writer) error { return io.ErrShortWrite }); !errors.Is(err, io.ErrShortWrite) {
		t.Error(err)
	}
	if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
	if err := os.WriteFile(path, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	err := Write(path, func(w io.Writer) error { return errors.Join(put("half")(w), io.ErrShortWrite) })
	if !errors.Is(err, io.ErrShortWrite) {
		t.Error(err)
	}
	check(t, path, "precious", 0o600, 1)

	for _, path := range []string{filepath.Join(t.TempDir(), "no", "f"), t.TempDir()} {
		_, err := Create(path)
		if err == nil || strings.Count(err.Error(), filepath.Dir(path)) != 1 || strings.Contains(err.Error(), "/.") {
			t.Errorf("%v", err)
		}
	}
}

// A link stays one, and what it leads to is replaced.
func TestSymlink(t *testing.T) {
	dir := t.TempDir()
	path, link := filepath.Join(dir, "f"), filepath.Join(dir, "link")
	if err := errors.Join(os.WriteFile(path, nil, 0o600), os.Symlink("f", link)); err != nil {
		t.Fatal(err)
	}
	if err := Write(link, put("text")); err != nil {
		t.Fatal(err)
	}
	check(t, path, "text", 0o600, 2)
	if to, err := os.Readlink(link); to != "f" {
		t.Errorf("link to %q, %v", to, err)
	}
}

// What is open keeps its place, even if it is a regular file: who opened it wants
// to see what is written.
func TestDescriptor(t *testing.T) {
	f, err := os.OpenFile(filepath.Join(t.TempDir(), "f"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	dir := t.TempDir()
	for i, c := range []*os.File{f, w} {
		link := filepath.Join(dir, "stdout"+strconv.Itoa(i))
		if err := os.Symlink("/proc/self/fd/"+strconv.Itoa(int(c.Fd())), link); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(put("1")(c), Write(link, put("2"))); err != nil {
			t.Fatal(err)
		}
		if to, err := os.Readlink(link); err != nil || !strings.HasPrefix(to, "/proc/") {
			t.Errorf("link to %q, %v", to, err)
		}
	}
	check(t, f.Name(), "12", 0o600, 1)
	w.Close()
	if b, err := io.ReadAll(r); string(b) != "12" {
		t.Errorf("%q, %v", b, err)
	}
}

func TestSame(t *testing.T) {
	t.Chdir(t.TempDir())
	if err := errors.Join(os.WriteFile("a", nil, 0o600), os.WriteFile("b", nil, 0o600), os.Symlink("a", "c"), os.Link("b", "d")); err != nil {
		t.Fatal(err)
	}
	wd, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		a, b string
		want bool
	}{
		{"a", "a", true}, {"a", "./a", true}, {"a", "c", true}, {"b", "d", true}, {"a", "b", false}, {"a", "d", false},
		{"/dev/null", "/dev/null", false}, {".", ".", false}, {"x", "x", true}, {"x", filepath.Join(wd, "x"), true}, {"x", "a", false}, {"x", "y", false},
	} {
		if got := Same(c.a, c.b); got != c.want {
			t.Errorf("%s and %s: %v", c.a, c.b, got)
		}
	}
}
