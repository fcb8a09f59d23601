package bpf

import (
	"errors"
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/pindown/pindown/monitor"
)

func TestMain(m *testing.M) {
	if os.Getenv(childEnv) != "" {
		os.Exit(childMain())
	}
	goleak.VerifyTestMain(m)
}

// inVM reports whether this is the virtual machine of test/vm, whose kernel
// allows functions mode.
func inVM() bool { return os.Getenv("PINDOWN_VM") == "1" }

// mustOpen opens a monitor or skips the test: in system-call mode for lack of
// privilege, in functions mode also for a kernel that refuses it, which the VM
// tier then makes up for.
func mustOpen(tb testing.TB, o Options) *Monitor {
	tb.Helper()
	m, err := Open(&o)
	switch {
	case err == nil:
	case errors.Is(err, monitor.ErrNotSupported) && !inVM() && (o.Mode == ModeFunctions || os.Getenv("CI") != "true"):
		tb.Skipf("a kernel that allows it, CAP_BPF and CAP_PERFMON needed: %v", err)
	default:
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := m.Close(); err != nil {
			tb.Error(err)
		}
	})
	return m
}

// eachMode runs a test in both modes.
func eachMode(t *testing.T, test func(t *testing.T, mode Mode)) {
	t.Helper()
	for _, mode := range []Mode{ModeFunctions, ModeSyscalls} {
		t.Run(mode.String(), func(t *testing.T) { test(t, mode) })
	}
}
