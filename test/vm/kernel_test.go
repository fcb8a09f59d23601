package vm_test

import (
	"encoding/json"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/pindown/pindown/test/vm"
)

// guestPath is where TestKernel puts the command in the guest.
const guestPath = "/bin/pindown"

// TestKernel runs the tests that need another kernel than the host's: one that
// isn't locked down, so that the BPF monitor can sit on kernel functions, and
// that has huge pages.
func TestKernel(t *testing.T) {
	host := buildCommand(t, "cmd/pindown")
	m := vm.Boot(t, vm.Options{Files: map[string]string{guestPath: host}, HugePages: 32})

	t.Run("doctor", func(t *testing.T) { testDoctor(t, m) })
	t.Run("demo", func(t *testing.T) {
		for _, churn := range []string{"unmap", "dontneed", "remap", "mixed"} {
			testDemo(t, m, churn)
		}
	})
	t.Run("bpf", func(t *testing.T) {
		// Each of these loads the programs anew, which takes the verifier seconds
		// here. In system-call mode, which runs on the host as well, what differs
		// between kernels is the matrix.
		const skip = "TestConformance/syscalls/(closed|hit-allocates-nothing|many-watches|events|feed-overflow|exec-child|" +
			"address-reuse|go-heap-reuse|close-during-operations|open-and-close)|" +
			"TestConformance/syscalls/registration-races/(gomaxprocs|signals|gc)|" +
			"TestConformance/functions/registration-races/gc-gomaxprocs-1|Test(NothingLeft|Processes|GoHeap)/syscalls"
		m.RunTests(t, vm.TestBinary{Pkg: "./monitor/bpf", Args: []string{"-test.short", "-test.skip=" + skip}, Timeout: 25 * time.Minute})
	})
	t.Run("soak", func(t *testing.T) {
		m.RunTests(t, vm.TestBinary{Pkg: "./internal/soak", Env: []string{"PINDOWN_SOAK=3000"}, Timeout: 15 * time.Minute})
	})
	t.Run("cache", func(t *testing.T) {
		m.RunTests(t, vm.TestBinary{Pkg: ".", Args: []string{"-test.short"}, Run: "TestHitMakesNoSystemCall|TestFork|TestConcurrentUse", Timeout: 15 * time.Minute})
	})
	t.Run("uffd as nobody", func(t *testing.T) {
		m.RunTests(t, vm.TestBinary{Pkg: "./monitor/uffd", User: "nobody", Args: []string{"-test.short"}, Run: "TestOperations|TestRefused|TestCovered|TestSelfTest|TestClose", Timeout: 15 * time.Minute})
	})
}

// buildCommand builds a command of the module for the guest.
func buildCommand(t *testing.T, dir string) string {
	t.Helper()
	vm.Require(t)
	bin := filepath.Join(t.TempDir(), path.Base(dir))
	cmd := exec.CommandContext(t.Context(), "go", "build", "-o", bin, "github.com/pindown/pindown/"+dir)
	cmd.Env = append(cmd.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build the command: %v\n%s", err, out)
	}
	return bin
}

// testDoctor: function mode is chosen, and there every cell is caught.
func testDoctor(t *testing.T, m *vm.Machine) {
	var report struct {
		Monitors []struct {
			Name, Mode, Reason string
			Usable             bool
			Coverage           map[string]string
		}
		Selected struct{ Monitor, Mode, Device string }
	}
	if err := json.Unmarshal([]byte(m.Command(t, guestPath, "doctor", "--json")), &report); err != nil {
		t.Fatal(err)
	}
	if report.Selected.Monitor != "bpf" || report.Selected.Mode != "functions" {
		t.Errorf("selected %+v", report.Selected)
	}
	for _, mon := range report.Monitors {
		if mon.Name != "bpf" || mon.Mode != "functions" {
			continue
		}
		if !mon.Usable {
			t.Fatalf("function mode: %s", mon.Reason)
		}
		kinds := map[string]bool{}
		for cell, outcome := range mon.Coverage {
			_, kind, _ := strings.Cut(cell, "/")
			if outcome == "caught" {
				kinds[kind] = true
			} else if outcome != "untested" {
				t.Errorf("%s is %s", cell, outcome)
			}
		}
		for _, kind := range []string{"anon-private", "anon-shared", "memfd", "file-private", "file-shared", "sysv", "hugetlb", "go-heap", "brk"} {
			if !kinds[kind] {
				t.Errorf("nothing tested on %s", kind)
			}
		}
		return
	}
	t.Error("function mode isn't in the report")
}

func testDemo(t *testing.T, m *vm.Machine, churn string) {
	t.Helper()
	out := m.Command(t, guestPath, "demo", "--rounds", "200", "--churn", churn, "--json")
	var report struct {
		Monitor string
		Modes   []struct {
			Name        string
			Blocks      int
			WrongBlocks int `json:"wrong_blocks"`
			Hits        int
		}
	}
	if err := json.Unmarshal([]byte(out), &report); err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(report.Modes, func(x struct {
		Name        string
		Blocks      int
		WrongBlocks int `json:"wrong_blocks"`
		Hits        int
	}) bool {
		return x.Name == "pindown" && x.Hits > 0 && x.Blocks > 0 && x.WrongBlocks == 0
	}) {
		t.Errorf("churn %s: %s", churn, out)
	}
	for _, mode := range report.Modes {
		if wrong := mode.WrongBlocks > 0; wrong != (mode.Name == "no-monitor") {
			t.Errorf("churn %s, mode %s: %d wrong blocks", churn, mode.Name, mode.WrongBlocks)
		}
	}
}
