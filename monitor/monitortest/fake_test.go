package monitortest_test

import (
	"errors"
	"testing"

	"github.com/pindown/pindown/epoch"
	"github.com/pindown/pindown/monitor"
	"github.com/pindown/pindown/monitor/monitortest"
	"github.com/pindown/pindown/vm"
)

func newFake(t *testing.T, o *monitortest.FakeOptions) *monitortest.Fake {
	t.Helper()
	f, err := monitortest.NewFake(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

func TestFakePlaysKernel(t *testing.T) {
	f := newFake(t, nil)
	r := vm.Range{Start: 1 << 20, End: 2 << 20}
	var w epoch.Watch
	if err := f.Table().Watch(&w, r); err != nil {
		t.Fatal(err)
	}
	feed := f.Subscribe()
	before := f.Table().Stamp(&w)
	during := before
	f.Do(vm.OpMunmap, r, func() { during = f.Table().Stamp(&w) })
	if after := f.Table().Stamp(&w); before >= during || during >= after {
		t.Errorf("stamps %d, %d, %d", before, during, after)
	}
	if e := <-feed.C; e != (vm.Event{Range: r, Op: vm.OpMunmap}) {
		t.Errorf("event %v", e)
	}
	f.Touch(vm.OpMunmap, vm.Range{Start: 2 << 20, End: 3 << 20})
	f.DropNews(true)
	f.Touch(vm.OpDontneed, r)
	f.DropNews(false)
	if got := feed.Lost(); got != 1 {
		t.Errorf("%d lost", got)
	}
	if e := <-feed.C; e.Op != vm.OpUnknown {
		t.Errorf("event %v", e)
	}
}

func TestFakeFaults(t *testing.T) {
	checks := 0
	f := newFake(t, &monitortest.FakeOptions{HitCheck: func() bool { checks++; return false }})
	if f.HitCheck()() || checks != 1 {
		t.Error("hit check isn't the one given")
	}
	r := vm.Range{Start: 1 << 20, End: 2 << 20}
	if err := f.Cover(r); err != nil {
		t.Error(err)
	}
	for _, want := range []error{monitor.ErrPending, monitor.ErrUncovered} {
		f.SetCover(func(vm.Range) error { return want })
		if err := f.Cover(r); !errors.Is(err, want) {
			t.Errorf("cover: %v, want %v", err, want)
		}
	}
	f.SetCover(nil)
	if err := f.Cover(r); err != nil || f.Covers() != 4 {
		t.Errorf("%d covers, %v", f.Covers(), err)
	}
	feed := f.Subscribe()
	f.Lose()
	if _, ok := <-feed.C; ok || !f.Table().Word().Lost() {
		t.Error("not lost")
	}
	if err := f.Cover(r); !errors.Is(err, monitor.ErrLost) {
		t.Errorf("cover when lost: %v", err)
	}
	f.Close()
	if err := f.Cover(r); !errors.Is(err, monitor.ErrClosed) {
		t.Errorf("cover when closed: %v", err)
	}
}
