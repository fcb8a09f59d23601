package calibrate

import (
	"errors"
	"math"
	"os"
	"strings"
	"testing"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/devicetest"
	"github.com/pindown/pindown/device/iouring"
	"github.com/pindown/pindown/internal/replay"
	"github.com/pindown/pindown/monitor"
	"github.com/pindown/pindown/monitor/auto"
	"github.com/pindown/pindown/vm"
)

func TestFit(t *testing.T) {
	line := func(call, page float64, sizes ...float64) (list []sample) {
		for _, n := range sizes {
			list = append(list, sample{pages: n, register: call + page*n})
		}
		return list
	}
	get := func(s sample) float64 { return s.register }
	for _, c := range []struct {
		samples []sample
		want    replay.Cost
	}{
		{nil, replay.Cost{}},
		{line(0, 0, 1, 4, 16), replay.Cost{}},
		{line(2000, 47, 1, 4, 16, 64, 256, 1024), replay.Cost{Call: 2000, Page: 47}},
		{line(500, 0, 1, 4, 16), replay.Cost{Call: 500}},
		{line(0, 30, 1, 4, 16), replay.Cost{Page: 30}},
		{line(700, 30, 4), replay.Cost{Call: 820}},
		{[]sample{{pages: 1, register: 1}, {pages: 2, register: 100}}, replay.Cost{Page: (1*1 + 2*100/10000.0) / (1 + 4/10000.0)}},
	} {
		got := fit(c.samples, get)
		if math.Abs(got.Call-c.want.Call) > 1e-6 || math.Abs(got.Page-c.want.Page) > 1e-6 {
			t.Errorf("%v: %+v, want %+v", c.samples, got, c.want)
		}
	}
	// Times that fall with the size make no page cheaper than nothing.
	if c := fit([]sample{{pages: 1, register: 100}, {pages: 100, register: 10}}, get); c.Call < 0 || c.Page < 0 {
		t.Errorf("%+v", c)
	}
}

func TestRun(t *testing.T) {
	dev, err := iouring.Open(nil)
	if err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatal(err)
		}
		t.Skipf("io_uring is needed: %v", err)
	}
	defer func() {
		if n := dev.Live(); n != 0 {
			t.Errorf("%d registrations are left", n)
		}
		if err := dev.Close(); err != nil {
			t.Error(err)
		}
	}()
	m, err := Run(t.Context(), dev, &Options{Rounds: 20, Largest: 256 << 10})
	if err != nil {
		t.Fatal(err)
	}
	if m.Register.Call+m.Register.Page <= 0 || m.Deregister.Call+m.Deregister.Page <= 0 || m.Update == (replay.Cost{}) || m.Hit <= 0 || m.Source == "" {
		t.Errorf("%+v", m)
	}
	sel := auto.Open(t.Context())
	hits := "manual"
	if mon := sel.Monitor(); mon != nil {
		hits = mon.Name()
	}
	if err := sel.Close(); err != nil {
		t.Error(err)
	}
	if !strings.Contains(m.Source, "hit: monitor "+hits+";") {
		t.Errorf("not with monitor %s: %s", hits, m.Source)
	}
	t.Logf("%+v", m)
}

// TestNoHits: registrations per use aren't taken for hits.
func TestNoHits(t *testing.T) {
	fake := devicetest.NewFake(nil)
	for _, lost := range []bool{false, true} {
		err := withManual(func(mon monitor.Monitor) error {
			if lost {
				mon.Table().SetLost()
			}
			ns, err := hit(t.Context(), fake, mon, vm.Range{Start: 1 << 30, End: 1<<30 + page}, 2)
			if (ns == 0) != lost {
				t.Errorf("lost %v: %v ns", lost, ns)
			}
			return err
		})
		if err != nil {
			t.Error(err)
		}
	}
	fake.AssertEmpty(t)
}

func TestRunRefused(t *testing.T) {
	no := errors.New("no")
	fake := devicetest.NewFake(&devicetest.FakeOptions{OnRegister: func(int, vm.Range, device.Access) error { return no }})
	if _, err := Run(t.Context(), fake, &Options{Rounds: 1}); !errors.Is(err, ErrNotSupported) || !errors.Is(err, no) {
		t.Error(err)
	}
	fake.AssertEmpty(t)
}
