package vm

import (
	"archive/tar"
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestNewestKernel(t *testing.T) {
	for _, c := range []struct {
		in, want string
	}{
		{"linux-image-6.1.0-9-amd64 linux-image-6.1.0-57-amd64 linux-image-6.1.0-10-amd64", "linux-image-6.1.0-57-amd64"},
		{"Depends: linux-image-6.1.0-57-amd64", "linux-image-6.1.0-57-amd64"},
		{"linux-image-6.1.0-58-cloud-amd64 linux-image-6.1.0-58-rt-amd64 linux-image-6.1.0-57-amd64-unsigned linux-image-6.1.0-9-amd64 tmp-1 rdma", "linux-image-6.1.0-9-amd64"},
		{"linux-image-6.12.0-1-amd64 linux-image-6.1.0-1-arm64", ""},
		{"", ""},
	} {
		got, err := newestKernel(strings.Fields(c.in))
		if got != c.want || (err != nil) != (c.want == "") {
			t.Errorf("%s: %s, %v", c.in, got, err)
		}
	}
}

func TestKeepOfKernel(t *testing.T) {
	for name, want := range map[string]bool{
		"boot/vmlinuz-6.1": true, "lib/modules/6.1/modules.builtin": true, "lib/modules/6.1/kernel/fs/ext4/ext4.ko": true,
		"lib/modules/6.1/kernel/drivers/net/dummy.ko": true, "lib/modules/6.1/kernel/drivers/gpu/x.ko": false, "usr/share/doc/x": false,
		"usr/lib/modules/6.1/kernel/sound/x.ko": false,
	} {
		if got := keepOfKernel(name); got != want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

func archive(t *testing.T, headers ...tar.Header) *tar.Reader {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, h := range headers {
		h.Mode = 0o755
		if h.Typeflag == tar.TypeReg {
			h.Size = int64(len(h.Name))
		}
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if h.Typeflag == tar.TypeReg {
			if _, err := w.Write([]byte(h.Name)); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return tar.NewReader(&buf)
}

func TestUntar(t *testing.T) {
	all := func(name string) bool { return !strings.HasPrefix(name, "drop") }
	dir := t.TempDir()
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	err = untar(archive(t,
		tar.Header{Typeflag: tar.TypeDir, Name: "./usr/"},
		tar.Header{Typeflag: tar.TypeReg, Name: "./usr/lib/file"},
		tar.Header{Typeflag: tar.TypeSymlink, Name: "./usr/lib/link", Linkname: "file"},
		tar.Header{Typeflag: tar.TypeLink, Name: "./usr/hard", Linkname: "./usr/lib/file"},
		tar.Header{Typeflag: tar.TypeReg, Name: "./drop/file"},
	), root, all)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"usr/lib/file", "usr/lib/link", "usr/hard"} {
		if b, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(b) != "./usr/lib/file" {
			t.Errorf("%s: %q, %v", name, b, err)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, "drop")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("dropped file: %v", err)
	}

	outside := t.TempDir()
	for name, headers := range map[string][]tar.Header{
		"parent":           {{Typeflag: tar.TypeReg, Name: "../evil"}},
		"link and through": {{Typeflag: tar.TypeSymlink, Name: "out", Linkname: outside}, {Typeflag: tar.TypeReg, Name: "out/evil"}},
		"hard link":        {{Typeflag: tar.TypeLink, Name: "evil", Linkname: "../../etc/passwd"}},
	} {
		if err := untar(archive(t, headers...), root, all); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	if entries, err := os.ReadDir(outside); err != nil || len(entries) > 0 {
		t.Errorf("outside: %v, %v", entries, err)
	}
}

// TestFetchAtomic has fetches that fail, and one that finds its result there.
func TestFetchAtomic(t *testing.T) {
	cache := t.TempDir()
	t.Setenv("PATH", t.TempDir()) // no apt-get
	all := func(string) bool { return true }
	if _, err := fetch(cache, "name", []string{"pkg"}, all, nil); err == nil {
		t.Error("no error without apt-get")
	}
	entries, err := os.ReadDir(cache)
	if err != nil || len(entries) > 0 {
		t.Errorf("left behind: %v, %v", entries, err)
	}
	if err := os.Mkdir(filepath.Join(cache, "name"), 0o755); err != nil {
		t.Fatal(err)
	}
	if dir, err := fetch(cache, "name", []string{"pkg"}, all, nil); err != nil || dir != filepath.Join(cache, "name") {
		t.Errorf("got %s, %v", dir, err)
	}
}
