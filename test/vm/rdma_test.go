package vm_test

import (
	"testing"
	"time"

	"github.com/pindown/pindown/test/vm"
)

// TestVerbs runs what needs an RDMA adapter: rxe0, soft-RoCE over a dummy
// network interface.
func TestVerbs(t *testing.T) {
	m := vm.Boot(t, vm.Options{RDMA: true})
	t.Run("device", func(t *testing.T) {
		m.RunTests(t, vm.TestBinary{Pkg: "./device/verbs", FailOnSkip: false, Timeout: 10 * time.Minute})
	})
}
