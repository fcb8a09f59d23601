package monitortest

import (
	"fmt"
	"os"
	"os/exec"
	"testing"

	"github.com/pindown/pindown/internal/vmops"
)

const helperEnv = "PINDOWN_MONITORTEST_HELPER"

func init() {
	if os.Getenv(helperEnv) == "" {
		return
	}
	if err := vmops.Serve(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1) //nolint:forbidigo // this is the helper process's main
	}
	os.Exit(0) //nolint:forbidigo // likewise
}

func helperCommand() *exec.Cmd {
	cmd := exec.Command("/proc/self/exe") //nolint:noctx // ends when its input does
	cmd.Env = append(os.Environ(), helperEnv+"=1")
	cmd.Stderr = os.Stderr
	return cmd
}

// startHelper returns another process that carries out operations. It ends
// with the test.
func startHelper(t *testing.T) *vmops.Helper {
	t.Helper()
	h, err := vmops.StartHelper(helperCommand())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	})
	return h
}
