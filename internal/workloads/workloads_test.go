package workloads_test

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"testing"

	"github.com/pindown/pindown/internal/workloads"
)

// TestWorkloads: each can be made ready and run twice, by itself. What takes
// long, or needs servers, is left to the command that profiles them.
func TestWorkloads(t *testing.T) {
	if testing.Short() {
		t.Skip("builds and runs programs")
	}
	run := map[string]bool{"go server": true, "malloc": true, "malloc, fixed threshold": true, "python": true}
	names := map[string]bool{}
	for _, w := range workloads.All() {
		if names[w.Name] || w.What == "" || w.UseBytes == 0 {
			t.Errorf("workload %+v", w)
		}
		names[w.Name] = true
		if !run[w.Name] {
			continue
		}
		t.Run(w.Name, func(t *testing.T) {
			p, err := w.Prepare(context.Background(), t.TempDir(), 0)
			if errors.Is(err, workloads.ErrMissing) && os.Getenv("CI") != "true" {
				t.Skip(err)
			}
			if err != nil {
				t.Fatal(err)
			}
			for range 2 {
				cmd := exec.Command(p.Command[0], p.Command[1:]...)
				cmd.Env = append(os.Environ(), p.Env...)
				if out, err := cmd.CombinedOutput(); err != nil {
					t.Fatalf("%v: %v\n%s", p.Command, err, out)
				}
			}
		})
	}
	for name := range run {
		if !names[name] {
			t.Errorf("no workload %q", name)
		}
	}
}
