package monitortest

import (
	"errors"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pindown/pindown/epoch"
	"github.com/pindown/pindown/monitor"
	"github.com/pindown/pindown/vm"
)

// probe is a registration as a cache makes it, with whatever pin does in the
// place of a device.
type probe struct {
	m     monitor.Monitor
	check func() bool
	watch epoch.Watch
	word  atomic.Uint64
	stamp uint64
}

// register takes the steps of a registration in their order. On error nothing
// is left.
func register(m monitor.Monitor, r vm.Range, pin func() error) (*probe, error) {
	p := &probe{m: m, check: m.HitCheck()}
	t := m.Table()
	if err := t.Watch(&p.watch, r); err != nil {
		return nil, err
	}
	word, stamp := t.Take(&p.watch)
	p.stamp = stamp
	err := m.Cover(r)
	if err == nil && pin != nil {
		err = pin()
	}
	if err != nil {
		t.Unwatch(&p.watch)
		return nil, err
	}
	p.word.Store(uint64(word))
	return p, nil
}

// mustRegister registers r and returns once the registration is good: nothing
// that happened at these addresses earlier is still on its way into the table.
// It returns nil if the monitor refuses r. The watchdog ends the wait.
func mustRegister(t *testing.T, m monitor.Monitor, r vm.Range) *probe {
	t.Helper()
	for i := 0; ; i++ {
		p, err := register(m, r, nil)
		switch {
		case errors.Is(err, monitor.ErrUncovered):
			return nil
		case errors.Is(err, monitor.ErrPending):
		case err != nil:
			t.Fatalf("register %v: %v", r, err)
		case p.valid():
			return p
		default:
			p.end()
		}
		pause(i)
	}
}

// valid is what a hit asks.
func (p *probe) valid() bool {
	if p.check != nil && !p.check() {
		return false
	}
	t := p.m.Table()
	return uint64(t.Word()) == p.word.Load() || t.Check(&p.watch, p.stamp, &p.word) == epoch.VerdictValid
}

// settle waits until the hit check, if there is one, lets hits pass: what it
// announced is on record.
func (p *probe) settle() {
	for i := 0; p.check != nil && !p.check() && !p.m.Table().Word().Lost(); i++ {
		pause(i)
	}
}

func (p *probe) end() { p.m.Table().Unwatch(&p.watch) }

// pause lets others run for a moment, in a loop that polls.
func pause(i int) {
	if i < 100 {
		runtime.Gosched()
		return
	}
	time.Sleep(50 * time.Microsecond)
}
