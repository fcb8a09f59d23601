package monitor

import (
	"errors"

	"github.com/pindown/pindown/epoch"
	"github.com/pindown/pindown/vm"
)

// Monitor records the VM operations of this process in an epoch table.
//
// It is open for third parties to implement; monitortest is the suite that an
// implementation passes. Methods may be called from many goroutines.
type Monitor interface {
	// Name returns a short name for logs and reports, such as "uffd".
	Name() string

	// Table returns the table that the monitor writes. It stays the same for
	// the monitor's life.
	Table() *epoch.Table

	// Cover makes sure that from now on every VM operation on r is recorded
	// before it returns, and that no operation recorded earlier is still to
	// change r's pages. It is called between the stamp and the pin. It returns
	// a wrapped ErrUncovered if this monitor can't see everything that may
	// happen to r (r is then registered per use), a wrapped ErrPending if an
	// operation on r is in flight (likewise, but a later try may succeed), and
	// a wrapped ErrClosed or ErrLost.
	Cover(r vm.Range) error

	// HitCheck returns what a hit must call before it loads the table's word,
	// or nil. A monitor that records an operation only after the address can
	// be used again needs one: the function returns true if no operation has
	// changed the page tables without being on record or announced in the
	// word. It takes no lock and allocates nothing.
	HitCheck() func() bool

	// Subscribe returns a feed of events. News may be lost; the feed counts
	// what it lost.
	Subscribe() *Feed

	// Close stops the monitor and marks the table lost, so that whoever still
	// uses it serves nothing more. It is idempotent.
	Close() error
}

// Errors of Cover and of opening a monitor, always returned wrapped.
var (
	// ErrUncovered: the monitor is blind to something that may happen to the
	// range.
	ErrUncovered = errors.New("monitor: range not covered")
	// ErrPending: an operation on the range is still in flight.
	ErrPending = errors.New("monitor: operation in flight")
	// ErrLost: the monitor has stopped seeing operations.
	ErrLost = errors.New("monitor: lost")
	// ErrClosed: the monitor is closed.
	ErrClosed = errors.New("monitor: closed")
	// ErrNotSupported: the monitor can't run on this machine.
	ErrNotSupported = errors.New("monitor: not supported here")
)
