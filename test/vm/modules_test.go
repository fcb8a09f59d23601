package vm

import (
	"compress/gzip"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

func TestResolve(t *testing.T) {
	deps := map[string][]string{
		"a": {"b", "c"}, "b": {"d-e"}, "c": {"b", "built-in"}, "d_e": nil, "alone": nil,
		"loop1": {"loop2"}, "loop2": {"loop1"}, "self": {"self"}, "lost": {"gone"},
	}
	s := &moduleSet{
		paths:   make(map[string]string),
		builtin: map[string]bool{"built_in": true},
		depends: func(path string) ([]string, error) { return deps[moduleName(path)], nil },
	}
	for name := range deps {
		s.paths[name] = "/dir/" + name + ".ko"
	}
	for _, c := range []struct {
		names, want []string
		err         error
	}{
		{names: []string{"a"}, want: []string{"d_e", "b", "c", "a"}},
		{names: []string{"alone", "c", "a", "c"}, want: []string{"alone", "d_e", "b", "c", "a"}},
		{names: []string{"d-e", "built-in"}, want: []string{"d_e"}},
		{names: nil, want: nil},
		{names: []string{"loop1"}, err: errModuleCycle},
		{names: []string{"self"}, err: errModuleCycle},
		{names: []string{"alone", "lost"}, err: errNoModule},
		{names: []string{"no_such"}, err: errNoModule},
	} {
		mods, err := s.resolve(c.names...)
		var got []string
		for _, m := range mods {
			got = append(got, m.name)
		}
		if !errors.Is(err, c.err) || !slices.Equal(got, c.want) {
			t.Errorf("%v: %v, %v; want %v, %v", c.names, got, err, c.want, c.err)
		}
	}
}

func TestParseDepends(t *testing.T) {
	for in, want := range map[string][]string{
		"":                                      nil,
		"depends=":                              nil,
		"license=GPL\x00depends=\x00name=x\x00": nil,
		"alias=depends=no\x00\x00depends=ib_core,udp_tunnel\x00retpoline=Y\x00": {"ib_core", "udp_tunnel"},
		"depends=one": {"one"}, // no NUL at the end
	} {
		if got := parseDepends([]byte(in)); !slices.Equal(got, want) {
			t.Errorf("%q: %q", in, got)
		}
	}
}

func TestOpenModules(t *testing.T) {
	dir := t.TempDir()
	write := func(name, content string) string {
		p := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
		return p
	}
	if _, err := openModules(dir); err == nil {
		t.Error("an empty directory is taken for modules")
	}
	write("modules.builtin", "kernel/lib/crc-itu-t.ko\nkernel/mm/zsmalloc.ko\n")
	write("kernel/fs/a-b.ko", "not an ELF file")
	write("kernel/fs/c.ko.xz", "")
	write("kernel/fs/notes", "")
	s, err := openModules(dir)
	if err != nil {
		t.Fatal(err)
	}
	if len(s.paths) != 2 || s.paths["a_b"] == "" || s.paths["c"] == "" || !s.builtin["crc_itu_t"] || !s.builtin["zsmalloc"] {
		t.Errorf("got %+v", s)
	}
	if _, err := s.resolve("a-b"); err == nil {
		t.Error("a file that is no module was resolved")
	}

	p := filepath.Join(dir, "z.ko.gz")
	f, err := os.Create(p)
	if err != nil {
		t.Fatal(err)
	}
	z := gzip.NewWriter(f)
	_, err = z.Write([]byte("content"))
	if err := errors.Join(err, z.Close(), f.Close()); err != nil {
		t.Fatal(err)
	}
	if b, err := readModule(p); err != nil || string(b) != "content" {
		t.Errorf("compressed: %q, %v", b, err)
	}
	if _, err := readModule(write("x.ko.lz9", "")); err == nil {
		t.Error("unknown compression was read")
	}
}
