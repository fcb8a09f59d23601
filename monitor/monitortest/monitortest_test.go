package monitortest_test

import (
	"testing"

	"github.com/pindown/pindown/monitor"
	"github.com/pindown/pindown/monitor/manual"
	"github.com/pindown/pindown/monitor/monitortest"
	"github.com/pindown/pindown/vm"
)

func openManual(t *testing.T) monitor.Monitor {
	t.Helper()
	m, err := manual.New(nil)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func tell(m monitor.Monitor, r vm.Range, _ vm.Op, do func() error) error {
	return m.(*manual.Monitor).Do(r, do)
}

func TestManual(t *testing.T) {
	monitortest.Run(t, openManual, &monitortest.Options{Around: tell})
}
