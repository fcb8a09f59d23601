// Package manual provides the monitor that sees what the program says.
//
// It is for programs that own every change to the memory they register: an
// arena that is mapped once and resized in one place, say. It needs no
// privilege and no kernel feature, and costs nothing between calls.
//
// It is blind to everything that isn't said: another library's munmap, the Go
// runtime's scavenger, a file that another process truncates. A forked child
// is not seen either; the child's copy of the table reads as never written, so
// that it is served nothing. Memory that anybody else may unmap, move or
// replace, the Go heap above all, must not be registered under this monitor.
package manual

import (
	"fmt"
	"sync/atomic"

	"github.com/pindown/pindown/epoch"
	"github.com/pindown/pindown/internal/tablemem"
	"github.com/pindown/pindown/monitor"
	"github.com/pindown/pindown/vm"
)

var _ monitor.Teller = (*Monitor)(nil)

// Options configure a Monitor. The zero value means defaults.
type Options struct {
	// Regions is the number of regions that the table is sized for. More are
	// watched less precisely. Default 4096.
	Regions int
}

// Monitor records the operations that the program announces. All methods may
// be called from many goroutines.
type Monitor struct {
	monitor.Hub
	table  *epoch.Table
	closed atomic.Bool
}

// New returns a running monitor. Nil options mean defaults. It fails only for
// lack of memory for the table.
func New(o *Options) (*Monitor, error) {
	regions := 4096
	if o != nil && o.Regions > 0 {
		regions = o.Regions
	}
	table, err := tablemem.New(epoch.BucketBitsFor(regions))
	if err != nil {
		return nil, fmt.Errorf("open manual monitor: %w", err)
	}
	return &Monitor{table: table}, nil
}

// Name returns "manual".
func (m *Monitor) Name() string { return "manual" }

// Table returns the table that the monitor writes.
func (m *Monitor) Table() *epoch.Table { return m.table }

// Cover returns nil for every range that can be watched: the program has
// promised to announce what happens there. After Close it returns a wrapped
// monitor.ErrClosed.
func (m *Monitor) Cover(r vm.Range) error {
	if m.closed.Load() {
		return fmt.Errorf("cover %v: %w", r, monitor.ErrClosed)
	}
	if r.Empty() || r.End > epoch.MaxAddress {
		return fmt.Errorf("cover %v: %w", r, monitor.ErrUncovered)
	}
	return nil
}

// HitCheck returns nil: what has been announced is on record.
func (m *Monitor) HitCheck() func() bool { return nil }

// Do runs change, which changes pages behind r and nothing else, and records
// it before and after. It returns change's error; r is invalidated whether
// change fails, panics or succeeds.
func (m *Monitor) Do(r vm.Range, change func() error) error {
	m.Before(r)
	defer m.After(r)
	return change()
}

// Before says that the program is about to change pages behind r. It must be
// followed by After once the change is made: a range that was registered in
// between holds the old pages. Prefer Do.
func (m *Monitor) Before(r vm.Range) { m.table.Touch(r) }

// After says that the change to pages behind r is made, and sends the news.
func (m *Monitor) After(r vm.Range) {
	if m.table.Touch(r) {
		m.Send(vm.Event{Range: r, Op: vm.OpManual})
	}
}

// Invalidate says that pages behind r have changed. The change counts as
// finished when Invalidate returns: whoever acquires a range between the two
// may be served the old registration. It is enough where nobody does, or where
// the change was noticed rather than made.
func (m *Monitor) Invalidate(r vm.Range) { m.After(r) }

// Close marks the table lost and closes the feeds. It is idempotent and
// returns nil.
func (m *Monitor) Close() error {
	if m.closed.CompareAndSwap(false, true) {
		m.table.SetLost()
		m.CloseFeeds()
	}
	return nil
}
