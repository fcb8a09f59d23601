package pindown_test

import (
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pindown/pindown"
	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/devicetest"
	"github.com/pindown/pindown/monitor"
	"github.com/pindown/pindown/vm"
)

// stubborn is a rig on a device that refuses deregistrations.
type stubborn struct {
	*injected
	refuse atomic.Int64 // so many of the next ones
	fault  error
	told   chan pindown.Event
}

func newStubborn(t *testing.T, fault error, o pindown.Options) *stubborn {
	t.Helper()
	s := &stubborn{fault: fault, told: make(chan pindown.Event, 1024)}
	fo := &devicetest.FakeOptions{Limits: device.Limits{PageSize: page}}
	fo.OnDeregister = func(int, device.Registration) error {
		if s.refuse.Add(-1) >= 0 {
			return s.fault
		}
		return nil
	}
	o.OnEvent = func(e pindown.Event) {
		if e.Kind == pindown.EventBackgroundError || e.Kind == pindown.EventLeaked {
			s.told <- e
		}
	}
	s.injected = newInjected(t, fo, &o, nil)
	return s
}

// disown takes off the device what the cache has given up on.
func (s *stubborn) disown(t *testing.T) {
	t.Helper()
	s.refuse.Store(0)
	for _, reg := range s.dev.Live() {
		if err := s.dev.Deregister(reg); err != nil {
			t.Error(err)
		}
	}
}

// expect reads the next event.
func (s *stubborn) expect(t *testing.T, kind pindown.EventKind) {
	t.Helper()
	select {
	case e := <-s.told:
		if e.Kind != kind || !errors.Is(e.Err, s.fault) {
			t.Errorf("event %v, want %v for %v", e, kind, s.fault)
		}
	case <-time.After(30 * time.Second):
		t.Fatalf("no event %v", kind)
	}
}

// TestDeregisterIsTriedAgain: what fails for the moment is tried again until it
// works, and counts against the limits until then.
func TestDeregisterIsTriedAgain(t *testing.T) {
	for _, fault := range []error{device.ErrBusy, device.ErrNoMemory, device.ErrNoSlots} {
		s := newStubborn(t, fault, pindown.Options{MaxRegions: 1})
		s.use(t, s.buf(0, page), 0)
		s.refuse.Store(1 << 40)
		if _, err := s.Invalidate(vm.RangeOf(s.mem)); err != nil {
			t.Fatal(err)
		}
		s.expect(t, pindown.EventBackgroundError)
		check(t, "regions charged", s.Stats().Regions, 1)
		check(t, "bytes charged", s.Stats().PinnedBytes, page)
		reg := s.acquire(t, s.buf(8*page, page), 0)
		check(t, "cached beyond the limit", reg.Cached(), false)
		eventually(t, "a second try", func() bool { return s.Stats().DeregisterRetries > 1 })
		s.refuse.Store(0)
		eventually(t, "the registration's end", func() bool { return s.Stats().Regions == 0 })
		release(t, &reg)
		st := s.Stats()
		check(t, "bytes charged", st.PinnedBytes, 0)
		check(t, "leaked", st.Leaked, 0)
		check(t, "live", s.dev.Stats().Live, 0)
		check(t, "tries counted", st.DeregisterRetries, st.DeregisterErrors)
		check(t, "watches left", s.fake.Table().Stats().Used, 0)
		check(t, "events", len(s.told), 0)
	}
}

// TestDeregisterIsGivenUp: what can't succeed isn't tried again, is counted and
// told, and doesn't use up the limits for ever.
func TestDeregisterIsGivenUp(t *testing.T) {
	for _, fault := range []error{device.ErrInvalid, device.ErrPermission, errors.New("unheard of")} {
		s := newStubborn(t, fault, pindown.Options{})
		s.use(t, s.buf(0, page), 0)
		s.refuse.Store(1)
		if _, err := s.Invalidate(vm.RangeOf(s.mem)); err != nil {
			t.Fatal(err)
		}
		s.expect(t, pindown.EventBackgroundError)
		s.expect(t, pindown.EventLeaked)
		st := s.Stats()
		check(t, "leaked", st.Leaked, 1)
		check(t, "regions", st.Regions, 0)
		check(t, "bytes", st.PinnedBytes, 0)
		check(t, "tried again", st.DeregisterRetries, 0)
		check(t, "watches left", s.fake.Table().Stats().Used, 0)
		s.disown(t)
	}
	// Nor is what stays busy tried for ever.
	busy := newStubborn(t, device.ErrBusy, pindown.Options{})
	busy.use(t, busy.buf(0, page), 0)
	busy.refuse.Store(1 << 40)
	if _, err := busy.Invalidate(vm.RangeOf(busy.mem)); err != nil {
		t.Fatal(err)
	}
	busy.expect(t, pindown.EventBackgroundError)
	eventually(t, "giving up", func() bool { return busy.RetryNow() == 0 && busy.Stats().Regions == 0 })
	busy.expect(t, pindown.EventLeaked)
	check(t, "leaked", busy.Stats().Leaked, 1)
	check(t, "tried again", busy.Stats().DeregisterRetries, 24)
	busy.disown(t)
	// What the device doesn't know isn't leaked.
	s := newStubborn(t, device.ErrNotRegistered, pindown.Options{})
	s.use(t, s.buf(0, page), 0)
	s.refuse.Store(1)
	if _, err := s.Invalidate(vm.RangeOf(s.mem)); err != nil {
		t.Fatal(err)
	}
	s.expect(t, pindown.EventBackgroundError)
	eventually(t, "the end", func() bool { return s.Stats().Regions == 0 })
	check(t, "leaked", s.Stats().Leaked, 0)
	s.disown(t)
}

// TestDeregisterIsBusyAtClose: Close makes the last tries itself, for a while;
// so does the last release after it.
func TestDeregisterIsBusyAtClose(t *testing.T) {
	for refusals, leaked := range map[int64]uint64{3: 0, 1 << 40: 2} {
		t.Run(fmt.Sprint(refusals), func(t *testing.T) {
			timeout := time.Hour // three refusals don't take that long
			if leaked > 0 {
				timeout = time.Millisecond
			}
			s := newStubborn(t, device.ErrBusy, pindown.Options{RegisterTimeout: timeout})
			held := s.acquire(t, s.buf(0, page), 0)
			s.use(t, s.buf(8*page, page), 0)
			s.use(t, s.buf(16*page, page), 0)
			s.refuse.Store(refusals)
			if err := s.Close(); !errors.Is(err, pindown.ErrInUse) {
				t.Errorf("close: %v", err)
			}
			check(t, "regions after close", s.Stats().Regions, 1)
			check(t, "leaked by close", s.Stats().Leaked, leaked)
			s.expect(t, pindown.EventBackgroundError)
			s.refuse.Store(min(refusals, 3))
			if leaked > 0 {
				s.refuse.Store(refusals)
				leaked++
			}
			if leaked > 0 {
				s.kept = s.fault
			}
			if err := held.Release(); !errors.Is(err, s.kept) {
				t.Errorf("release: %v", err)
			}
			st := s.Stats()
			check(t, "regions", st.Regions, 0)
			check(t, "bytes", st.PinnedBytes, 0)
			check(t, "leaked", st.Leaked, leaked)
			check(t, "watches left", s.fake.Table().Stats().Used, 0)
			s.disown(t)
		})
	}
}

// TestPerUseDeregisterFails: a registration per use is tried again too; the
// holder hears of what is final.
func TestPerUseDeregisterFails(t *testing.T) {
	s := newStubborn(t, device.ErrBusy, pindown.Options{})
	s.fake.SetCover(func(vm.Range) error { return monitor.ErrUncovered })
	reg := s.acquire(t, s.buf(0, page), 0)
	s.refuse.Store(3)
	release(t, &reg)
	eventually(t, "the end", func() bool { return s.Stats().PerUseHeld == 0 })
	check(t, "live", s.dev.Stats().Live, 0)
	check(t, "leaked", s.Stats().Leaked, 0)

	s.fault = device.ErrInvalid
	reg = s.acquire(t, s.buf(0, page), 0)
	s.refuse.Store(1)
	if err := reg.Release(); !errors.Is(err, device.ErrInvalid) {
		t.Errorf("release: %v", err)
	}
	check(t, "held", s.Stats().PerUseHeld, 0)
	check(t, "leaked", s.Stats().Leaked, 1)
	s.disown(t)
}
