package vm_test

import (
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
	t.Run("nobody", func(t *testing.T) {
		m.RunTests(t, vm.TestBinary{
			Pkg: "./device/verbs", User: "nobody", Limits: map[int]uint64{unix.RLIMIT_MEMLOCK: 256 << 10},
			Run: "TestMemlock|TestConforms$|TestExpose$", Args: []string{"-test.short"}, Timeout: 10 * time.Minute,
		})
	})
}
