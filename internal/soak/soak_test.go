package soak_test

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"testing"

	"github.com/pindown/pindown"
	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/iouring"
	"github.com/pindown/pindown/internal/oracle"
	"github.com/pindown/pindown/internal/soak"
	"github.com/pindown/pindown/monitor/auto"
	"github.com/pindown/pindown/monitor/manual"
)

// count returns the number of acquires: PINDOWN_SOAK, or what CI has time for.
func count(t *testing.T) int {
	t.Helper()
	if s := os.Getenv("PINDOWN_SOAK"); s != "" {
		n, err := strconv.Atoi(s)
		if err != nil {
			t.Fatalf("PINDOWN_SOAK: %v", err)
		}
		return n
	}
	if testing.Short() {
		return 8_000
	}
	return 200_000
}

// needs skips, or fails in CI, without a device or an oracle.
func needs(t *testing.T) *iouring.Device {
	t.Helper()
	skip := t.Skipf
	if os.Getenv("CI") == "true" {
		skip = t.Fatalf
	}
	if err := oracle.CheckPFN(); err != nil {
		skip("the soak test needs root: %v", err)
	}
	dev, err := iouring.Open(nil)
	if errors.Is(err, device.ErrNotSupported) {
		skip("the soak test needs io_uring: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := dev.Close(); err != nil {
			t.Error(err)
		}
	})
	return dev
}

func TestSoak(t *testing.T) {
	dev := needs(t)
	ran := false
	for _, o := range auto.Openers() {
		m, c := auto.Try(t.Context(), o)
		if m == nil {
			t.Logf("%s isn't usable here: %s", o.Name, c.Reason)
			continue
		}
		ran = true
		for _, procs := range []int{1, 2} {
			t.Run(fmt.Sprintf("%s/procs=%d", o.Name, procs), func(t *testing.T) {
				defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(procs))
				r, err := soak.Run(t.Context(), soak.Config{
					Monitor: m, Device: dev, Acquires: count(t) / 2, GCEvery: 2000,
					Options:  pindown.Options{MaxRegions: 200},
					Progress: func(n int) { t.Logf("%d", n) },
				})
				if err != nil {
					t.Fatal(err)
				}
				t.Log(r)
				if r.Stats.Hits == 0 || r.Stats.TotalInvalidations() == 0 {
					t.Errorf("nothing tried: %v", r)
				}
			})
		}
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	}
	if !ran {
		t.Error("no monitor is usable here")
	}
}

// TestSoakFindsStale: under a monitor that is told nothing the soak fails.
func TestSoakFindsStale(t *testing.T) {
	dev := needs(t)
	m, err := manual.New(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = m.Close() }()
	_, err = soak.Run(t.Context(), soak.Config{Monitor: m, Device: dev, Acquires: 20_000})
	if !errors.Is(err, soak.ErrStale) {
		t.Errorf("got %v, want %v", err, soak.ErrStale)
	}
}
