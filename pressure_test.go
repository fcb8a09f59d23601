package pindown_test

import (
	"bytes"
	"log/slog"
	"os"
	"strings"
	"testing"

	"github.com/pindown/pindown"
)

// TestPressure: each firing costs a quarter of the regions, idle ones, and those
// that weren't used for long.
func TestPressure(t *testing.T) {
	const n = 120
	fired := make(chan struct{})
	told := make(chan pindown.Event, n)
	o := &pindown.Options{MergeBytes: -1, OnEvent: func(e pindown.Event) { told <- e }}
	o.SetPressure(fired)
	r := newRig(t, nil, o)
	for i := range n {
		r.use(t, r.buf(2*i*page, page), 0)
	}
	held := r.acquire(t, r.buf(0, page), 0)
	r.use(t, r.buf(2*page, page), 0)
	left := n
	for range 40 {
		fired <- struct{}{}
		left -= min((left+3)/4, left-1)
		eventually(t, "regions given up", func() bool { return r.Stats().Regions <= left })
		check(t, "regions", r.Stats().Regions, left)
		if left > n/2 {
			reg, ok := r.TryAcquire(r.buf(2*page, page), 0)
			check(t, "what is in use is still there", ok, true)
			if ok {
				release(t, &reg)
			}
		}
	}
	s := r.Stats()
	check(t, "regions left", s.Regions, 1)
	check(t, "evicted for pressure", s.Evictions[pindown.EvictPressure], n-1)
	check(t, "live", r.dev.Stats().Live, 1)
	for range n - 1 {
		if e := <-told; e.Kind != pindown.EventEvicted || e.Cause != pindown.EvictPressure || e.InUse {
			t.Fatalf("event %v", e)
		}
	}
	if !strings.Contains(s.String(), "evicted for memory-pressure 119") {
		t.Errorf("%v", s)
	}
	check(t, "stale", held.Stale(), false)
	release(t, &held)
}

// TestNoPressure: a kernel that can't tell is no error; it is logged once.
func TestNoPressure(t *testing.T) {
	var log bytes.Buffer
	o := &pindown.Options{Logger: slog.New(slog.NewTextHandler(&log, nil))}
	o.SetPressure(nil)
	r := newRig(t, nil, o)
	r.use(t, r.buf(0, page), 0)
	check(t, "lines", strings.Count(log.String(), "\n"), 1)
	if !strings.Contains(log.String(), "no trigger on memory pressure") {
		t.Error(log.String())
	}
}

// TestRealPressure has a cache set the kernel's trigger, and close it.
func TestRealPressure(t *testing.T) {
	if _, err := os.Stat("/proc/pressure/memory"); err != nil {
		t.Skipf("needs a kernel with CONFIG_PSI=y that wasn't started with psi=0: %v", err)
	}
	fds := func() int {
		list, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(list)
	}
	var log bytes.Buffer
	r := newRig(t, nil, &pindown.Options{Pressure: true, Logger: slog.New(slog.NewTextHandler(&log, nil))})
	if !r.WatchesPressure() {
		if os.Getenv("CI") == "true" {
			t.Fatal(log.String())
		}
		t.Skipf("needs Linux 6.4 or CAP_SYS_RESOURCE: %s", log.String())
	}
	r.use(t, r.buf(0, page), 0)
	with := fds()
	if err := r.Close(); err != nil {
		t.Error(err)
	}
	check(t, "descriptors closed", with-fds(), 2)
}
