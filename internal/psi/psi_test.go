package psi

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// TestOpen sets real triggers.
func TestOpen(t *testing.T) {
	if _, err := os.Stat(system); errors.Is(err, fs.ErrNotExist) {
		lacking(t, "a kernel with CONFIG_PSI=y that wasn't started with psi=0")
	}
	for range 3 {
		x, err := Open()
		if errors.Is(err, fs.ErrPermission) && os.Getenv("CI") != "true" {
			lacking(t, "Linux 6.4 or CAP_SYS_RESOURCE: "+err.Error())
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("trigger on %s", x.Path())
		if err := x.Close(); err != nil {
			t.Error(err)
		}
		for range x.Fired() { // closed, perhaps after it has fired
		}
	}
}

func TestOpenFails(t *testing.T) {
	// None at all, and one that isn't a trigger's.
	file := filepath.Join(t.TempDir(), "memory.pressure")
	if _, err := open(file); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("without a file: %v", err)
	}
	if _, err := open("/proc/self/status"); err == nil {
		t.Error("a trigger on a file that takes none")
	}
}

func TestPaths(t *testing.T) {
	const mounts = `22 1 0:20 / /proc rw - proc proc rw
31 30 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
40 30 0:37 %s rw,relatime shared:9 - cgroup2 cgroup2 rw
`
	for _, tc := range []struct{ name, cgroup, mount, want string }{
		{"unified", "0::/user.slice/a b\n", "/ /sys/fs/cgroup", "/sys/fs/cgroup/user.slice/a b/memory.pressure"},
		{"hybrid", "4:memory:/x\n0::/\n", "/ /sys/fs/cgroup/unified", "/sys/fs/cgroup/unified/memory.pressure"},
		{"part of the tree", "0::/box/me\n", "/box /sys/fs/cgroup", "/sys/fs/cgroup/me/memory.pressure"},
		{"escaped", "0::/me\n", `/ /mnt/c\040g`, "/mnt/c g/me/memory.pressure"},
		{"another part of the tree", "0::/boxer/me\n", "/box /sys/fs/cgroup", ""},
		{"version 1 only", "4:memory:/x\n", "/ /sys/fs/cgroup", ""},
		{"nothing", "", "", ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			dir := t.TempDir()
			if tc.name != "nothing" {
				write(t, filepath.Join(dir, "cgroup"), tc.cgroup)
				write(t, filepath.Join(dir, "mountinfo"), fmt.Sprintf(mounts, tc.mount))
			}
			want := []string{system}
			if tc.want != "" {
				want = []string{tc.want, system}
			}
			if got := paths(dir); !slices.Equal(got, want) {
				t.Errorf("got %q, want %q", got, want)
			}
		})
	}
}

func write(t *testing.T, name, text string) {
	t.Helper()
	if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// lacking skips, with what is needed; in CI that is a failure.
func lacking(t *testing.T, what string) {
	t.Helper()
	if os.Getenv("CI") == "true" {
		t.Fatal("needs " + what)
	}
	t.Skip("needs " + what)
}
