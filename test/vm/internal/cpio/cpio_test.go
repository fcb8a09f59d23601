package cpio

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"strconv"
	"strings"
	"testing"
)

type entry struct {
	name         string
	mode         uint32
	major, minor uint32
	data         string
}

// read parses an archive as the kernel's init/initramfs.c does.
func read(t *testing.T, b []byte) []entry {
	t.Helper()
	var out []entry
	off := 0
	for {
		if len(b) < off+110 {
			t.Fatalf("archive ends at %d without a trailer", off)
		}
		h := string(b[off : off+110])
		if h[:6] != "070701" {
			t.Fatalf("magic at %d is %q", off, h[:6])
		}
		field := func(i int) uint32 {
			v, err := strconv.ParseUint(h[6+8*i:14+8*i], 16, 32)
			if err != nil {
				t.Fatalf("field %d at %d: %v", i, off, err)
			}
			return uint32(v)
		}
		size, nameSize := int(field(6)), int(field(11))
		name := string(b[off+110 : off+110+nameSize])
		if !strings.HasSuffix(name, "\x00") {
			t.Fatalf("name %q has no NUL", name)
		}
		name = name[:len(name)-1]
		start := (off + 110 + nameSize + 3) &^ 3
		if name == "TRAILER!!!" {
			if start != len(b) {
				t.Fatalf("archive is %d bytes, trailer ends at %d", len(b), start)
			}
			return out
		}
		out = append(out, entry{name, field(1), field(9), field(10), string(b[start : start+size])})
		off = (start + size + 3) &^ 3
	}
}

func TestWriter(t *testing.T) {
	var buf bytes.Buffer
	w := NewWriter(&buf)
	var want []entry
	add := func(err error, e ...entry) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		want = append(want, e...)
	}
	add(w.Dir("tmp", 0o777|fs.ModeSticky), entry{name: "tmp", mode: 0o041777})
	add(w.Dir("tmp", 0o700))
	add(w.CharDevice("dev/console", 0o600, 5, 1),
		entry{name: "dev", mode: 0o040755}, entry{name: "dev/console", mode: 0o020600, major: 5, minor: 1})
	add(w.Symlink("a/b/c", "../target"), entry{name: "a", mode: 0o040755}, entry{name: "a/b", mode: 0o040755},
		entry{name: "a/b/c", mode: 0o120777, data: "../target"})
	// Every length of name and data modulo the alignment.
	for i := range 6 {
		name, data := strings.Repeat("n", i+1), strings.Repeat("d", i)
		add(w.File(name, 0o755, int64(i), strings.NewReader(data)), entry{name: name, mode: 0o100755, data: data})
	}
	add(w.Close())

	got := read(t, buf.Bytes())
	if fmt.Sprintf("%+v", got) != fmt.Sprintf("%+v", want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

func TestWriterRefuses(t *testing.T) {
	w := NewWriter(&bytes.Buffer{})
	if err := w.File("file", 0o644, 0, nil); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"", "..", "/abs", "../up", "a/../../b", "a//b", "a/", "nul\x00", "file/below"} {
		if err := w.Dir(name, 0o755); !errors.Is(err, ErrName) {
			t.Errorf("Dir(%q): %v", name, err)
		}
	}
	if err := w.Symlink("file", "x"); !errors.Is(err, ErrExist) {
		t.Errorf("duplicate: %v", err)
	}
	if err := w.File("short", 0o644, 5, strings.NewReader("1234")); !errors.Is(err, ErrSize) {
		t.Errorf("short content: %v", err)
	}
	if err := w.File("big", 0o644, 1<<32, nil); !errors.Is(err, ErrSize) {
		t.Errorf("big file: %v", err)
	}
}
