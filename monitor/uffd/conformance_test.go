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
	monitortest.Run(t, func(t *testing.T) monitor.Monitor { return open(t, nil) }, &monitortest.Options{
		Require: []vm.Mapping{vm.MappingAnonPrivate},
		Blind:   blind,
	})
}

// TestSelfTest shows the coverage on this machine.
func TestSelfTest(t *testing.T) {
	m := open(t, nil)
	c, err := monitor.SelfTest(m)
	if err != nil {
		t.Fatal(err)
	}
	for _, cell := range c.Cells() {
		t.Logf("%v: %v", cell, c[cell])
	}
	for _, cell := range c.Blind() {
		if cell.Op != vm.OpShmat && cell.Op != vm.OpGuard {
			t.Errorf("blind: %v", cell)
		}
	}
}
