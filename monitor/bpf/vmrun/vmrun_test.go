package bpf_test

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/pindown/pindown/test/vm"
)

func TestVM(t *testing.T) {
	if os.Getenv("BPFVM") == "" {
		t.Skip()
	}
	m := vm.Boot(t, vm.Options{})
	m.RunTests(t, vm.TestBinary{Timeout: 25 * time.Minute, Pkg: "./monitor/bpf", Args: append([]string{"-test.short"}, strings.Fields(os.Getenv("BPFARGS"))...), Run: os.Getenv("BPFVM")})
}
