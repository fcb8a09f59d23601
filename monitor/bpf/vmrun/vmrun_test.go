package bpf_test

import (
	"os"
	"testing"

	"github.com/pindown/pindown/test/vm"
)

func TestVM(t *testing.T) {
	if os.Getenv("BPFVM") == "" {
		t.Skip()
	}
	m := vm.Boot(t, vm.Options{})
	m.RunTests(t, vm.TestBinary{Pkg: "./monitor/bpf", Args: []string{"-test.short"}, Run: os.Getenv("BPFVM")})
}
