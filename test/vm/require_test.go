package vm

import (
	"fmt"
	"os"
	"strings"
	"testing"
)

// stopped is a testing.TB that tells how it was ended.
type stopped struct {
	testing.TB
	how string
}

func (s *stopped) Helper()                       {}
func (s *stopped) Fatal(args ...any)             { s.end("fatal: " + fmt.Sprint(args...)) }
func (s *stopped) Skip(args ...any)              { s.end("skip: " + fmt.Sprint(args...)) }
func (s *stopped) Skipf(format string, a ...any) { s.end("skip: " + fmt.Sprintf(format, a...)) }
func (s *stopped) end(how string)                { s.how = how; panic(s) }

func requireOutcome(t *testing.T) (how string) {
	t.Helper()
	s := &stopped{TB: t}
	defer func() {
		if p := recover(); p != nil && p != any(s) {
			panic(p)
		}
		how = s.how
	}()
	Require(s)
	return ""
}

func TestRequire(t *testing.T) {
	if testing.Short() {
		if how := requireOutcome(t); !strings.HasPrefix(how, "skip: ") {
			t.Errorf("under -short: %q", how)
		}
		return
	}
	t.Setenv("PATH", t.TempDir())
	const what = "apt-get install "
	for ci, end := range map[string]string{"true": "fatal: ", "": "skip: "} {
		t.Setenv("CI", ci)
		how := requireOutcome(t)
		if !strings.HasPrefix(how, end) || !strings.Contains(how, what) || !strings.Contains(how, "busybox-static") ||
			!strings.Contains(how, "qemu-system-x86") || strings.Contains(how, "\n") {
			t.Errorf("CI=%s: %q", ci, how)
		}
	}
}

func TestCheckStatic(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	interp, needed, err := dynamic(exe)
	if err != nil {
		t.Fatal(err)
	}
	if err := checkStatic(exe); (err != nil) != (interp != "") {
		t.Errorf("checkStatic: %v, linker %q", err, interp)
	}
	// With -race this program itself is linked dynamically; libraries finds what it runs with.
	libs, err := libraries([]string{"/"}, exe)
	if err != nil || len(libs) < len(needed) {
		t.Errorf("libraries of a program that needs %q: %v, %v", needed, libs, err)
	}
	if _, err := libraries([]string{t.TempDir()}, exe); err == nil && interp != "" {
		t.Error("libraries were found in an empty directory")
	}
	notELF := t.TempDir() + "/file"
	if err := os.WriteFile(notELF, []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if checkStatic(notELF) == nil {
		t.Error("a script is taken for a static program")
	}
}
