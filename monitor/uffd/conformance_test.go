package uffd

import (
	"testing"

	"github.com/pindown/pindown/monitor"
	"github.com/pindown/pindown/monitor/monitortest"
	"github.com/pindown/pindown/vm"
)

// blind is what the package comment says that the monitor doesn't see.
var blind = []monitortest.Exception{
	{Op: vm.OpShmat},
	{Op: vm.OpGuard},
}

func TestConformance(t *testing.T) {
	monitortest.Run(t, func(t *testing.T) monitor.Monitor {
		t.Helper()
		return open(t, nil)
	}, &monitortest.Options{
		Require: []vm.Mapping{vm.MappingAnonPrivate},
		Blind:   blind,
	})
}

// TestSelfTest holds the coverage on this machine against what is documented.
func TestSelfTest(t *testing.T) {
	m := open(t, nil)
	c, err := monitor.SelfTest(m)
	if err != nil {
		t.Fatal(err)
	}
	documented := Coverage()
	for _, cell := range c.Cells() {
		t.Logf("%v: %v", cell, c[cell])
		if cell.Mapping == vm.MappingHugeTLB && c[cell] == monitor.Refused && checkRelease(6, 11) != nil {
			continue // The kernel doesn't tell a mapping's page size.
		}
		if c[cell] != monitor.Untested && cell.Op != vm.OpUnknown && c[cell] != documented[cell] {
			t.Errorf("%v is %v, documented %v", cell, c[cell], documented[cell])
		}
	}
}
