package bpf

import (
	"testing"

	"github.com/pindown/pindown/monitor"
)

func TestSelf(t *testing.T) {
	m, err := Open(&Options{Mode: ModeSyscalls})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	trials, err := monitor.Trials(m)
	for _, tr := range trials {
		t.Logf("%-30v %-28s %-12s %v %v", tr.Cell, tr.Operation, tr.By, tr.Outcome, tr.Reason)
	}
	if err != nil {
		t.Fatal(err)
	}
}
