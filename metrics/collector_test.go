package metrics_test

import (
	"context"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	dto "github.com/prometheus/client_model/go"

	"github.com/pindown/pindown"
	"github.com/pindown/pindown/device/devicetest"
	"github.com/pindown/pindown/metrics"
	"github.com/pindown/pindown/monitor/manual"
	"github.com/pindown/pindown/vm"
)

// fixed is a source that doesn't change by itself.
type fixed struct{ s pindown.Stats }

func (f *fixed) Stats() pindown.Stats { return f.s }

// gather returns the families of a collector, by name.
func gather(t *testing.T, c prometheus.Collector) map[string]*dto.MetricFamily {
	t.Helper()
	r := prometheus.NewPedanticRegistry()
	if err := r.Register(c); err != nil {
		t.Fatal(err)
	}
	list, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	m := make(map[string]*dto.MetricFamily)
	for _, f := range list {
		m[f.GetName()] = f
	}
	return m
}

// shown returns every number of the families.
func shown(m map[string]*dto.MetricFamily) (values []float64) {
	for _, f := range m {
		for _, x := range f.Metric {
			values = append(values, x.GetCounter().GetValue(), x.GetGauge().GetValue())
			if h := x.Histogram; h != nil {
				values = append(values, float64(h.GetSampleCount()), h.GetSampleSum())
				for _, b := range h.Bucket {
					values = append(values, float64(b.GetCumulativeCount()))
				}
			}
		}
	}
	return values
}

// TestEveryFieldIsShown: a number that Stats gains belongs here too.
func TestEveryFieldIsShown(t *testing.T) {
	const mark = 12345
	fields := reflect.TypeFor[pindown.Stats]()
	for i := range fields.NumField() {
		f := fields.Field(i)
		if f.Type.Kind() == reflect.String {
			continue
		}
		t.Run(f.Name, func(t *testing.T) {
			src := &fixed{pindown.Stats{Device: "dev", Monitor: "mon"}}
			before := shown(gather(t, metrics.NewCollector(src)))
			v := reflect.ValueOf(&src.s).Elem().Field(i)
			switch {
			case v.CanUint():
				v.SetUint(mark)
			case v.CanInt():
				v.SetInt(mark)
			case v.Kind() == reflect.Map:
				k := reflect.New(f.Type.Key()).Elem()
				k.SetUint(2)
				v.Set(reflect.MakeMap(f.Type))
				v.SetMapIndex(k, reflect.ValueOf(uint64(mark)))
			case f.Type == reflect.TypeFor[pindown.Latency]():
				v.Set(reflect.ValueOf(pindown.Latency{Count: mark, Sum: time.Second}))
			default:
				t.Fatalf("don't know how to set a %v", f.Type)
			}
			after := shown(gather(t, metrics.NewCollector(src)))
			if n := count(after, mark) - count(before, mark); n != 1 {
				t.Errorf("shown %d times", n)
			}
		})
	}
}

func count(list []float64, x float64) (n int) {
	for _, y := range list {
		if y == x {
			n++
		}
	}
	return n
}

func TestLint(t *testing.T) {
	problems, err := testutil.CollectAndLint(metrics.NewCollector(&fixed{pindown.Stats{Device: "dev", Monitor: "mon"}}))
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
}

func TestLabels(t *testing.T) {
	for name, f := range gather(t, metrics.NewCollector(&fixed{pindown.Stats{Device: "dev", Monitor: "mon"}})) {
		for _, x := range f.Metric {
			labels := make(map[string]string)
			for _, l := range x.Label {
				labels[l.GetName()] = l.GetValue()
			}
			if labels["device"] != "dev" || labels["monitor"] != "mon" {
				t.Errorf("%s: %v", name, labels)
			}
			delete(labels, "device")
			delete(labels, "monitor")
			if strings.Contains(labels["cause"], "(") || labels["cause"] == "invalid" {
				t.Errorf("%s: cause %q", name, labels["cause"])
			}
			delete(labels, "cause")
			if len(labels) > 0 {
				t.Errorf("%s: %v", name, labels)
			}
		}
	}
}

func TestHistogram(t *testing.T) {
	var l pindown.Latency
	for _, d := range []time.Duration{3, 300, 600, 600, time.Millisecond, time.Hour} {
		i := 0
		for d>>i > 0 {
			i++
		}
		l.Buckets[min(i, len(l.Buckets)-1)]++
		l.Count++
		l.Sum += d
	}
	f := gather(t, metrics.NewCollector(&fixed{pindown.Stats{Device: "dev", Register: l}}))["pindown_cache_register_duration_seconds"]
	h := f.Metric[0].Histogram
	if h.GetSampleCount() != 6 || h.GetSampleSum() < 3600 {
		t.Errorf("%d samples, sum %v", h.GetSampleCount(), h.GetSampleSum())
	}
	got := make(map[float64]uint64)
	for _, b := range h.Bucket {
		got[b.GetUpperBound()] = b.GetCumulativeCount()
	}
	for bound, want := range map[float64]uint64{512e-9: 2, 1024e-9: 4, 524288e-9: 4, 1048576e-9: 5, 17.179869184: 5} {
		if n, ok := got[bound]; n != want {
			t.Errorf("below %v s: %d (%v), want %d", bound, n, ok, want)
		}
	}
	bounds := slices.Sorted(maps.Keys(got))
	for i := 1; i < len(bounds); i++ {
		if bounds[i] != 2*bounds[i-1] || got[bounds[i]] < got[bounds[i-1]] {
			t.Errorf("bound %v after %v: %d after %d", bounds[i], bounds[i-1], got[bounds[i]], got[bounds[i-1]])
		}
	}
}

func TestForkedChildShowsNothing(t *testing.T) {
	if m := gather(t, metrics.NewCollector(&fixed{})); len(m) > 0 {
		t.Errorf("%d families", len(m))
	}
}

// TestCache collects from a cache that works.
func TestCache(t *testing.T) {
	mon, err := manual.New(nil)
	if err != nil {
		t.Fatal(err)
	}
	cache, err := pindown.New(devicetest.NewFake(nil), &pindown.Options{Monitor: mon})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cache.Close()
		mon.Close()
	})
	c := metrics.NewCollector(cache)
	r := vm.Range{Start: 1 << 30, End: 1<<30 + 4096}
	for range 3 {
		reg, err := cache.AcquireRange(context.Background(), r, pindown.LocalWrite)
		if err != nil {
			t.Fatal(err)
		}
		if err := reg.Release(); err != nil {
			t.Fatal(err)
		}
	}
	const want = `
# HELP pindown_cache_hits_total Acquires served from the cache.
# TYPE pindown_cache_hits_total counter
pindown_cache_hits_total{device="fake",monitor="manual"} 2
# HELP pindown_cache_misses_total Acquires that were not hits, by cause.
# TYPE pindown_cache_misses_total counter
pindown_cache_misses_total{cause="absent",device="fake",monitor="manual"} 1
pindown_cache_misses_total{cause="access",device="fake",monitor="manual"} 0
pindown_cache_misses_total{cause="partial",device="fake",monitor="manual"} 0
pindown_cache_misses_total{cause="stale",device="fake",monitor="manual"} 0
# HELP pindown_cache_regions Registrations that the cache holds or is making.
# TYPE pindown_cache_regions gauge
pindown_cache_regions{device="fake",monitor="manual"} 1
`
	if err := testutil.CollectAndCompare(c, strings.NewReader(want),
		"pindown_cache_hits_total", "pindown_cache_misses_total", "pindown_cache_regions"); err != nil {
		t.Error(err)
	}
	if f := gather(t, c)["pindown_cache_register_duration_seconds"]; f.Metric[0].Histogram.GetSampleCount() != 1 {
		t.Errorf("%v", f)
	}
}
