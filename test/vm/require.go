package vm

import (
	"debug/elf"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"testing"
)

// tools are the programs of the host that the harness runs, and the Debian packages they come from.
var tools = []struct{ name, pkg string }{
	{"apt-cache", "apt"},
	{"apt-get", "apt"},
	{"busybox", "busybox-static"},
	{"dpkg-deb", "dpkg"},
	{"mkfs.ext4", "e2fsprogs"},
	{"qemu-system-x86_64", "qemu-system-x86"},
}

// Require ends the test unless virtual machines can be run here.
//
// Under -short it skips. Where a tool is missing, it fails if the environment says CI=true, else skips with a line that says what to install.
func Require(tb testing.TB) {
	tb.Helper()
	if testing.Short() {
		tb.Skip("virtual machines don't run under -short")
	}
	if runtime.GOOS != "linux" || runtime.GOARCH != "amd64" {
		tb.Skipf("virtual machines are made of amd64 Debian packages and programs of this host, which is %s/%s", runtime.GOOS, runtime.GOARCH)
	}
	var pkgs []string
	for _, tool := range tools {
		path, err := lookTool(tool.name)
		if err == nil && tool.name == "busybox" {
			err = checkStatic(path)
		}
		if err != nil {
			pkgs = append(pkgs, tool.pkg)
		}
	}
	if len(pkgs) > 0 {
		slices.Sort(pkgs)
		unavailable(tb, "install what virtual machines need: apt-get install "+strings.Join(slices.Compact(pkgs), " "))
	}
}

// unavailable ends a test that can't run here.
func unavailable(tb testing.TB, why string) {
	tb.Helper()
	if os.Getenv("CI") == "true" {
		tb.Fatal(why)
	}
	tb.Skip(why)
}

// lookTool finds a program in PATH, or where only root's PATH leads.
func lookTool(name string) (string, error) {
	path, err := exec.LookPath(name)
	if err == nil {
		return path, nil
	}
	for _, dir := range []string{"/usr/sbin/", "/sbin/"} {
		if path, err := exec.LookPath(dir + name); err == nil {
			return path, nil
		}
	}
	return "", err
}

// tool returns a command that runs a program of the host, with messages in English.
func tool(name string, args ...string) *exec.Cmd {
	path, err := lookTool(name)
	if err != nil {
		path = name // The command will fail, and say why.
	}
	cmd := exec.Command(path, args...)
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	return cmd
}

// output runs a command and returns its standard output. The error holds what it wrote to standard error.
func output(cmd *exec.Cmd) ([]byte, error) {
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return out, fmt.Errorf("run %s: %w\n%s", strings.Join(cmd.Args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return out, nil
}

// checkStatic refuses a program that needs a dynamic linker.
func checkStatic(path string) error {
	f, err := elf.Open(path)
	if err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	defer f.Close()
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			return fmt.Errorf("check %s: not statically linked", path)
		}
	}
	return nil
}
