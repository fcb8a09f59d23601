package auto

import (
	"context"
	"errors"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/pindown/pindown/epoch"
	"github.com/pindown/pindown/monitor"
	"github.com/pindown/pindown/monitor/manual"
	"github.com/pindown/pindown/vm"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func manualOpener(opened *[]*manual.Monitor) Opener {
	return Opener{Name: "told", Open: func() (monitor.Monitor, error) {
		m, err := manual.New(nil)
		if err != nil {
			return nil, err
		}
		*opened = append(*opened, m)
		return m, nil
	}}
}

// silent covers everything and sees nothing.
type silent struct{ m *manual.Monitor }

func (s silent) Name() string             { return "deaf" }
func (s silent) Table() *epoch.Table      { return s.m.Table() }
func (s silent) Cover(vm.Range) error     { return nil }
func (s silent) HitCheck() func() bool    { return nil }
func (s silent) Subscribe() *monitor.Feed { return s.m.Subscribe() }
func (s silent) Close() error             { return s.m.Close() }

func TestSelection(t *testing.T) {
	var opened []*manual.Monitor
	nope := Opener{Name: "nope", Mode: "odd", Open: func() (monitor.Monitor, error) { return nil, errors.New("not today") }}
	blind := Opener{Name: "blind", Open: func() (monitor.Monitor, error) {
		m, err := manual.New(nil)
		return silent{m}, err
	}}
	list := []Opener{nope, blind, manualOpener(&opened)}

	a, b := open(t.Context(), list), open(t.Context(), list)
	if a.Monitor() == nil || a.Monitor() != b.Monitor() || len(opened) != 1 {
		t.Fatalf("not shared: %v, %v, %d opened", a.Monitor(), b.Monitor(), len(opened))
	}
	got := a.Candidates()
	if len(got) != 3 || got[0].Usable || got[1].Usable || !got[2].Usable {
		t.Fatalf("candidates: %+v", got)
	}
	if got[0].String() != "nope (odd)" || got[0].Reason != "not today" {
		t.Errorf("first: %+v", got[0])
	}
	if !strings.Contains(got[1].Reason, "blind to") {
		t.Errorf("a monitor that sees nothing: %q", got[1].Reason)
	}
	if err := errors.Join(a.Close(), a.Close()); err != nil {
		t.Error(err)
	}
	if b.Monitor().Table().Word().Lost() {
		t.Fatal("closed while shared")
	}
	// One that is lost is not given to new callers.
	if err := opened[0].Close(); err != nil {
		t.Fatal(err)
	}
	c := open(t.Context(), list)
	if c.Monitor() == b.Monitor() || len(opened) != 2 {
		t.Error("a lost monitor is shared")
	}
	if err := b.Close(); err != nil {
		t.Error(err)
	}
	if c.Monitor().Table().Word().Lost() {
		t.Error("closing the lost one closed the new one")
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if !opened[1].Table().Word().Lost() {
		t.Error("not closed with its last share")
	}

	none := open(context.Background(), []Opener{nope})
	if none.Monitor() != nil || none.Reason() != "nope (odd): not today" {
		t.Errorf("%v, %q", none.Monitor(), none.Reason())
	}
	if err := none.Close(); err != nil {
		t.Error(err)
	}
}
