package manual

import (
	"errors"
	"testing"

	"github.com/pindown/pindown/epoch"
	"github.com/pindown/pindown/monitor"
	"github.com/pindown/pindown/vm"
)

func open(t *testing.T) *Monitor {
	t.Helper()
	m, err := New(nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	return m
}

func TestSelfTestThroughDo(t *testing.T) {
	m := open(t)
	trials, err := monitor.Trials(m)
	if err != nil {
		t.Fatal(err)
	}
	caught := 0
	for _, tr := range trials {
		t.Log(tr.Operation, tr.Mapping, tr.By, tr.Outcome, tr.Reason)
		switch tr.Outcome {
		case monitor.Caught:
			caught++
		case monitor.Untested:
		default:
			t.Errorf("%s on %v: %v", tr.Operation, tr.Mapping, tr.Outcome)
		}
	}
	if caught < 40 {
		t.Errorf("%d caught", caught)
	}
	if used := m.Table().Stats().Used; used != 0 {
		t.Errorf("%d slots in use", used)
	}
}

// untold hides that the monitor is a Teller.
type untold struct{ monitor.Monitor }

func TestSelfTestUntold(t *testing.T) {
	cov, err := monitor.SelfTest(untold{open(t)})
	if err != nil {
		t.Fatal(err)
	}
	for cell, o := range cov {
		if o != monitor.Blind && o != monitor.Untested {
			t.Errorf("%v: %v", cell, o)
		}
	}
	if len(cov.Blind()) < 20 {
		t.Errorf("blind: %v", cov.Blind())
	}
}

func TestCover(t *testing.T) {
	m := open(t)
	r := vm.Range{Start: 1 << 20, End: 2 << 20}
	if err := m.Cover(r); err != nil {
		t.Error(err)
	}
	for _, bad := range []vm.Range{{}, {Start: epoch.MaxAddress, End: epoch.MaxAddress + 1}} {
		if err := m.Cover(bad); !errors.Is(err, monitor.ErrUncovered) {
			t.Errorf("cover %v: %v", bad, err)
		}
	}
	m.Close()
	m.Close()
	if err := m.Cover(r); !errors.Is(err, monitor.ErrClosed) {
		t.Errorf("cover when closed: %v", err)
	}
	if !m.Table().Word().Lost() {
		t.Error("table not lost")
	}
}

func TestDo(t *testing.T) {
	m := open(t)
	r := vm.Range{Start: 1 << 20, End: 2 << 20}
	var w epoch.Watch
	if err := m.Table().Watch(&w, r); err != nil {
		t.Fatal(err)
	}
	feed := m.Subscribe()
	defer feed.Close()
	stamp := m.Table().Stamp(&w)
	during := stamp
	boom := errors.New("boom")
	if err := m.Do(r, func() error { during = m.Table().Stamp(&w); return boom }); !errors.Is(err, boom) {
		t.Error(err)
	}
	after := m.Table().Stamp(&w)
	if stamp >= during || during >= after {
		t.Errorf("stamps %d, %d, %d", stamp, during, after)
	}
	func() {
		defer func() { _ = recover() }()
		_ = m.Do(r, func() error { panic("boom") })
	}()
	if got := m.Table().Stamp(&w); got != after+2*(after-during) {
		t.Errorf("after a panic: %d, %d before", got, after)
	}
	for range 2 {
		if e := <-feed.C; e != (vm.Event{Range: r, Op: vm.OpManual}) {
			t.Errorf("event %v", e)
		}
	}
}

func TestInvalidate(t *testing.T) {
	m := open(t)
	var w epoch.Watch
	if err := m.Table().Watch(&w, vm.Range{Start: 1 << 20, End: 2 << 20}); err != nil {
		t.Fatal(err)
	}
	stamp := m.Table().Stamp(&w)
	m.Invalidate(vm.Range{Start: 2 << 20, End: 3 << 20})
	if m.Table().Stamp(&w) != stamp {
		t.Error("the neighbour counts")
	}
	m.Invalidate(vm.Range{Start: 2<<20 - 1, End: 3 << 20})
	if m.Table().Stamp(&w) == stamp {
		t.Error("the last byte doesn't count")
	}
}
