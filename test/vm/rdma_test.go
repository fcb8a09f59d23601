package vm_test

import (
	"encoding/json"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/test/vm"
)

// TestVerbs runs what needs an RDMA adapter: rxe0, soft-RoCE over a dummy
// network interface.
func TestVerbs(t *testing.T) {
	m := vm.Boot(t, vm.Options{RDMA: true})
	t.Run("device", func(t *testing.T) {
		m.RunTests(t, vm.TestBinary{Pkg: "./device/verbs", Args: []string{"-test.short"}, Timeout: 10 * time.Minute})
	})
	t.Run("profile", func(t *testing.T) {
		m.RunTests(t, vm.TestBinary{Pkg: "./internal/profile", Run: "TestDevices", FailOnSkip: true, Timeout: 10 * time.Minute})
	})
	t.Run("doctor", func(t *testing.T) {
		if err := m.PutProgram(t.Context(), guestPath, buildCommand(t, "cmd/pindown")); err != nil {
			t.Fatal(err)
		}
		out := m.Command(t, guestPath, "doctor", "--trial", "device/verbs")
		t.Log(out)
		var found struct {
			Usable bool
			Reason string
		}
		if err := json.Unmarshal([]byte(out), &found); err != nil || !found.Usable || !strings.Contains(found.Reason, "rxe0") {
			t.Errorf("%v", err)
		}
	})
	t.Run("copy", func(t *testing.T) { testCopies(t, m) })
	t.Run("nobody", func(t *testing.T) {
		m.RunTests(t, vm.TestBinary{
			Pkg: "./device/verbs", User: "nobody", Limits: map[int]uint64{unix.RLIMIT_MEMLOCK: 256 << 10},
			Run: "TestMemlock|TestConforms$|TestExpose$", Args: []string{"-test.short"}, Timeout: 10 * time.Minute,
		})
	})
}

// Sizes of the files that the examples copy, in MiB: of that which must come out
// the same, and of that which is copied in all ways.
const mib, smallMib = 64, 8

// testCopies runs the examples on a file, which must come out the same.
func testCopies(t *testing.T, m *vm.Machine) {
	for _, name := range []string{"rdmacopy", "iouringcopy"} {
		if err := m.PutProgram(t.Context(), "/bin/"+name, buildCommand(t, "examples/"+name)); err != nil {
			t.Fatal(err)
		}
	}
	m.Command(t, "sh", "-c", fmt.Sprintf("mkdir -p /tmp/copies && dd if=/dev/urandom of=%[1]s/source bs=1M count=%[2]d 2>/dev/null && "+
		"dd if=%[1]s/source of=%[1]s/small bs=1M count=%[3]d 2>/dev/null", vm.DiskDir, mib, smallMib))
	t.Run("rdma", func(t *testing.T) {
		t.Log("\n" + m.Command(t, "rdmacopy", "devices"))
		out := m.Command(t, "sh", "-c", fmt.Sprintf(`
			rdmacopy serve -dir /tmp/copies -count 4 2>/tmp/serve & s=$!
			until grep -q listening /tmp/serve; do kill -0 $s || { cat /tmp/serve; exit 1; }; sleep 0.1; done
			rdmacopy send %[1]s/source && rdmacopy send -way all %[1]s/small || { cat /tmp/serve; exit 1; }
			wait $s && cat /tmp/serve && cmp %[1]s/source /tmp/copies/source && cmp %[1]s/small /tmp/copies/small && rm /tmp/copies/*`, vm.DiskDir))
		t.Log("\n" + out)
		if !strings.Contains(out, "device rxe0, monitor bpf") {
			t.Error("not the device or the monitor that was to be shown")
		}
		for _, way := range []string{"cache", "register", "bounce"} {
			if !regexp.MustCompile(`(?m)^ *` + way + ` +` + strconv.Itoa(smallMib<<20) + ` `).MatchString(out) {
				t.Errorf("no result for way %s", way)
			}
		}
		wantHits(t, out, fmt.Sprintf(`(?m)^ *cache +%d .* ([0-9.]+) %% `, mib<<20))
		wantHits(t, out, fmt.Sprintf(`(?m)^ *cache +%d .* ([0-9.]+) %% `, smallMib<<20))
	})
	t.Run("io_uring", func(t *testing.T) {
		out := m.Command(t, "sh", "-c", fmt.Sprintf("iouringcopy %[1]s/source %[1]s/copy 2>&1 && cmp %[1]s/source %[1]s/copy && rm %[1]s/copy", vm.DiskDir))
		t.Log("\n" + out)
		wantHits(t, out, `([0-9.]+) % hits`)
	})
}

// wantHits fails unless nine tenths of the acquires were hits.
func wantHits(t *testing.T, out, pattern string) {
	t.Helper()
	found := regexp.MustCompile(pattern).FindStringSubmatch(out)
	if found == nil {
		t.Error("no share of hits")
		return
	}
	if share, err := strconv.ParseFloat(found[1], 64); err != nil || share < 90 {
		t.Errorf("%s %% of the acquires were hits", found[1])
	}
}
