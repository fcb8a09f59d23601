package monitortest

import (
	"fmt"
	"sync/atomic"

	"github.com/pindown/pindown/epoch"
	"github.com/pindown/pindown/internal/tablemem"
	"github.com/pindown/pindown/monitor"
	"github.com/pindown/pindown/vm"
)

var _ monitor.Monitor = (*Fake)(nil)

// Fake is a monitor that sees nothing by itself: the test plays the kernel,
// and injects faults. Methods may be called from many goroutines.
type Fake struct {
	monitor.Hub
	table  *epoch.Table
	check  func() bool
	cover  atomic.Pointer[func(vm.Range) error]
	covers atomic.Uint64
	mute   atomic.Bool
	closed atomic.Bool
}

// FakeOptions configure a Fake. The zero value means defaults.
type FakeOptions struct {
	// Regions is what the table is sized for. Default 4096; 1 gives the
	// smallest table, in which many ranges are watched coarsely.
	Regions int
	// HitCheck is returned by HitCheck. Default nil.
	HitCheck func() bool
	// Cover decides what Cover returns; see SetCover. Default nil: all is
	// covered.
	Cover func(vm.Range) error
}

// NewFake returns a running fake. Nil options mean defaults.
func NewFake(o *FakeOptions) (*Fake, error) {
	opt := FakeOptions{Regions: 4096}
	if o != nil {
		opt = *o
		if opt.Regions <= 0 {
			opt.Regions = 4096
		}
	}
	table, err := tablemem.New(epoch.BucketBitsFor(opt.Regions))
	if err != nil {
		return nil, fmt.Errorf("open fake monitor: %w", err)
	}
	f := &Fake{table: table, check: opt.HitCheck}
	f.SetCover(opt.Cover)
	return f, nil
}

// Name returns "fake".
func (f *Fake) Name() string { return "fake" }

// Table returns the table.
func (f *Fake) Table() *epoch.Table { return f.table }

// HitCheck returns the options' function.
func (f *Fake) HitCheck() func() bool { return f.check }

// Cover calls the function given to SetCover, if any. On a closed fake it
// returns a wrapped monitor.ErrClosed, on a lost one monitor.ErrLost.
func (f *Fake) Cover(r vm.Range) error {
	f.covers.Add(1)
	switch {
	case f.closed.Load():
		return fmt.Errorf("cover %v: %w", r, monitor.ErrClosed)
	case f.table.Word().Lost():
		return fmt.Errorf("cover %v: %w", r, monitor.ErrLost)
	}
	if cover := *f.cover.Load(); cover != nil {
		return cover(r)
	}
	return nil
}

// SetCover has Cover call cover from now on: to return a wrapped
// monitor.ErrUncovered or monitor.ErrPending, or to do something at that
// point of a registration. Nil covers everything.
func (f *Fake) SetCover(cover func(vm.Range) error) { f.cover.Store(&cover) }

// Covers returns how often Cover was called.
func (f *Fake) Covers() uint64 { return f.covers.Load() }

// Do plays the kernel: it touches r, calls change (nil for nothing), touches r
// again and sends the news.
func (f *Fake) Do(op vm.Op, r vm.Range, change func()) {
	f.table.Touch(r)
	if change != nil {
		change()
	}
	if f.table.Touch(r) {
		f.News(vm.Event{Range: r, Op: op})
	}
}

// Touch is Do without anything in between.
func (f *Fake) Touch(op vm.Op, r vm.Range) { f.Do(op, r, nil) }

// News sends an event without touching anything, or counts it as lost while
// news are dropped.
func (f *Fake) News(e vm.Event) {
	if f.mute.Load() {
		f.SendLost()
		return
	}
	f.Send(e)
}

// DropNews has every event be lost, and counted as lost, from now on; or not.
func (f *Fake) DropNews(drop bool) { f.mute.Store(drop) }

// Lose has the monitor be lost, as if its reader had died.
func (f *Fake) Lose() {
	f.table.SetLost()
	f.CloseFeeds()
}

// Close marks the table lost and closes the feeds. It is idempotent and
// returns nil.
func (f *Fake) Close() error {
	if f.closed.CompareAndSwap(false, true) {
		f.Lose()
	}
	return nil
}
