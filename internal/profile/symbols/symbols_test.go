package symbols_test

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"runtime"
	"strings"
	"testing"

	"github.com/pindown/pindown/internal/profile/symbols"
)

//go:noinline
func here() (uintptr, string, int) {
	pc, file, line, _ := runtime.Caller(0)
	return pc, file, line
}

// lookupSelf looks the place in here up, which is at a fixed address: test
// binaries are no position-independent executables.
func lookupSelf(t *testing.T, path string) symbols.Location {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	s, err := symbols.Open(f)
	if err != nil {
		t.Fatal(err)
	}
	pc, _, _ := here()
	return s.Lookup(uint64(pc) - 1)
}

// TestLookupSelf: this program's own functions, as the runtime names them.
func TestLookupSelf(t *testing.T) {
	_, file, line := here()
	got := lookupSelf(t, "/proc/self/exe")
	want := symbols.Location{Function: runtime.FuncForPC(reflect.ValueOf(here).Pointer()).Name(), Source: file, Line: line}
	if got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

const program = `package main

import "os"

//go:noinline
func work(b []byte) { os.Stdout.Write(b) }

func main() { work(nil) }
`

// TestStripped: the line table is there without symbols.
func TestStripped(t *testing.T) {
	if testing.Short() {
		t.Skip("builds a program")
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "main.go"), []byte(program), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, flags := range []string{"", "-s -w"} {
		out := filepath.Join(dir, "out")
		cmd := exec.Command("go", "build", "-ldflags="+flags, "-o", out, filepath.Join(dir, "main.go"))
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if b, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("go build: %v\n%s", err, b)
		}
		f, err := os.Open(out)
		if err != nil {
			t.Fatal(err)
		}
		s, err := symbols.Open(f)
		if err != nil {
			t.Fatal(err)
		}
		found := 0
		for offset := uint64(0); offset < 1<<20; offset += 16 {
			addr, ok := s.Address(offset)
			if !ok {
				continue
			}
			if l := s.Lookup(addr); l.Function == "main.work" && strings.HasSuffix(l.Source, "main.go") {
				found++
			}
		}
		if found == 0 {
			t.Errorf("ldflags %q: main.work not found", flags)
		}
		_ = f.Close()
	}
}

// FuzzOpen: damaged files are refused or read, whatever is in them.
func FuzzOpen(f *testing.F) {
	f.Add([]byte("\x7fELF"))
	exe, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(exe[:4096])
	f.Fuzz(func(_ *testing.T, b []byte) {
		s, err := symbols.Open(bytes.NewReader(b))
		if err != nil {
			return
		}
		addr, _ := s.Address(0x100)
		s.Lookup(addr)
		s.AfterCall(addr)
	})
}
