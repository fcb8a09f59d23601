package metrics

import (
	"maps"
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/pindown/pindown"
	"github.com/pindown/pindown/vm"
)

// Source is what a Collector reads: a [pindown.Cache].
type Source interface {
	Stats() pindown.Stats
}

var (
	_ Source               = (*pindown.Cache)(nil)
	_ prometheus.Collector = (*Collector)(nil)
)

// Collector collects the figures of one cache. Create it with [NewCollector]. Its
// methods may be called from many goroutines.
type Collector struct{ src Source }

// NewCollector returns a collector of the figures of src. It goes on after the
// cache is closed, with the last figures. In a forked child, to which the cache
// doesn't belong, it collects nothing.
func NewCollector(src Source) *Collector { return &Collector{src} }

// Labels of every metric, and of those by cause.
var (
	labels      = []string{"device", "monitor"}
	causeLabels = append(slices.Clone(labels), "cause")
)

func desc(name, help string, labels []string) *prometheus.Desc {
	return prometheus.NewDesc(prometheus.BuildFQName("pindown", "cache", name), help, labels, nil)
}

// single is a metric that is one number.
type single struct {
	desc  *prometheus.Desc
	kind  prometheus.ValueType
	value func(*pindown.Stats) float64
}

func counter(name, help string, value func(*pindown.Stats) uint64) single {
	return single{desc(name, help, labels), prometheus.CounterValue, func(s *pindown.Stats) float64 { return float64(value(s)) }}
}

func gauge(name, help string, value func(*pindown.Stats) float64) single {
	return single{desc(name, help, labels), prometheus.GaugeValue, value}
}

var singles = []single{
	counter("hits_total", "Acquires served from the cache.",
		func(s *pindown.Stats) uint64 { return s.Hits }),
	counter("restamped_hits_total", "Hits that compared the stamp, because an operation had touched some watched range.",
		func(s *pindown.Stats) uint64 { return s.Restamped }),
	counter("waits_total", "Acquires that waited for another goroutine's registration or for budget.",
		func(s *pindown.Stats) uint64 { return s.Waits }),
	counter("sweeps_total", "Times that news of operations was lost and every region was looked at.",
		func(s *pindown.Stats) uint64 { return s.Sweeps }),
	counter("events_dropped_total", "Events that the program's callback was too slow for.",
		func(s *pindown.Stats) uint64 { return s.EventsDropped }),
	counter("register_errors_total", "Registrations that the device refused.",
		func(s *pindown.Stats) uint64 { return s.RegisterErrors }),
	counter("deregister_errors_total", "Deregistrations that the device refused.",
		func(s *pindown.Stats) uint64 { return s.DeregisterErrors }),
	counter("deregister_retries_total", "Deregistrations that were tried again.",
		func(s *pindown.Stats) uint64 { return s.DeregisterRetries }),
	counter("leaked_total", "Registrations that the device didn't take back.",
		func(s *pindown.Stats) uint64 { return s.Leaked }),
	gauge("regions", "Registrations that the cache holds or is making.",
		func(s *pindown.Stats) float64 { return float64(s.Regions) }),
	gauge("regions_in_use", "Registrations with a holder, stale ones included.",
		func(s *pindown.Stats) float64 { return float64(s.InUse) }),
	gauge("pinned_bytes", "Memory pinned by the cache's registrations, in whole pages.",
		func(s *pindown.Stats) float64 { return float64(s.PinnedBytes) }),
	gauge("per_use_registrations", "Registrations beside the cache that are held.",
		func(s *pindown.Stats) float64 { return float64(s.PerUseHeld) }),
}

// family is a counter by cause. Causes that are known are there from the
// beginning, at zero.
type family struct {
	desc   *prometheus.Desc
	values func(*pindown.Stats) map[string]uint64
}

func causes[K interface {
	comparable
	String() string
}](name, help string, known []K, values func(*pindown.Stats) map[K]uint64) family {
	return family{desc(name, help, causeLabels), func(s *pindown.Stats) map[string]uint64 {
		m := make(map[string]uint64)
		for _, k := range known {
			m[k.String()] = 0
		}
		for k, n := range values(s) {
			m[k.String()] = n
		}
		return m
	}}
}

var families = []family{
	causes("misses_total", "Acquires that were not hits, by cause.",
		[]pindown.MissCause{pindown.MissAbsent, pindown.MissStale, pindown.MissAccess, pindown.MissPartial},
		func(s *pindown.Stats) map[pindown.MissCause]uint64 { return s.Misses }),
	causes("invalidations_total", "Regions that a VM operation made stale, by the operation.",
		[]vm.Op{vm.OpMunmap, vm.OpMmapFixed, vm.OpMremap, vm.OpDontneed, vm.OpManual, vm.OpUnknown},
		func(s *pindown.Stats) map[vm.Op]uint64 { return s.Invalidations }),
	causes("evictions_total", "Valid regions that were given up, by cause.",
		[]pindown.EvictCause{pindown.EvictRegions, pindown.EvictBytes, pindown.EvictDevice, pindown.EvictMerge, pindown.EvictClose, pindown.EvictPressure},
		func(s *pindown.Stats) map[pindown.EvictCause]uint64 { return s.Evictions }),
	causes("per_use_total", "Acquires registered beside the cache, by cause.",
		[]pindown.PerUseCause{pindown.PerUseNoMonitor, pindown.PerUseUncovered, pindown.PerUsePending, pindown.PerUseBudget, pindown.PerUseLost},
		func(s *pindown.Stats) map[pindown.PerUseCause]uint64 { return s.PerUse }),
	causes("updates_total", "Updates of regions under their keys, by what came of them.",
		[]pindown.UpdateOutcome{
			pindown.UpdateFresh, pindown.UpdateDone, pindown.UpdateAgain, pindown.UpdateAnew,
			pindown.UpdateKeyChanged, pindown.UpdateFailed, pindown.UpdateGone,
		},
		func(s *pindown.Stats) map[pindown.UpdateOutcome]uint64 { return s.Updates }),
}

// latency is a histogram of a device's calls.
type latency struct {
	desc  *prometheus.Desc
	value func(*pindown.Stats) *pindown.Latency
}

var latencies = []latency{
	{desc("register_duration_seconds", "Duration of the device's registrations that succeeded.", labels),
		func(s *pindown.Stats) *pindown.Latency { return &s.Register }},
	{desc("deregister_duration_seconds", "Duration of the device's deregistrations that succeeded.", labels),
		func(s *pindown.Stats) *pindown.Latency { return &s.Deregister }},
	{desc("update_duration_seconds", "Duration of the device's updates that succeeded.", labels),
		func(s *pindown.Stats) *pindown.Latency { return &s.Update }},
}

// The buckets that are shown: bounds of a power of two of nanoseconds, from half
// a microsecond to 17 seconds. What is outside counts in the first, or in none
// but the one without bound.
const (
	firstBucket = 9
	lastBucket  = 34
)

func buckets(l *pindown.Latency) map[float64]uint64 {
	m := make(map[float64]uint64)
	var below uint64
	for i, n := range l.Buckets {
		below += n
		if i >= firstBucket && i <= lastBucket {
			m[float64(uint64(1)<<i)/1e9] = below
		}
	}
	return m
}

// Describe sends the descriptions of all metrics.
func (c *Collector) Describe(ch chan<- *prometheus.Desc) {
	for _, m := range singles {
		ch <- m.desc
	}
	for _, m := range families {
		ch <- m.desc
	}
	for _, m := range latencies {
		ch <- m.desc
	}
}

// Collect sends the figures of one snapshot.
func (c *Collector) Collect(ch chan<- prometheus.Metric) {
	s := c.src.Stats()
	if s.Device == "" {
		return // a forked child's
	}
	for _, m := range singles {
		ch <- prometheus.MustNewConstMetric(m.desc, m.kind, m.value(&s), s.Device, s.Monitor)
	}
	for _, m := range families {
		values := m.values(&s)
		for _, cause := range slices.Sorted(maps.Keys(values)) {
			ch <- prometheus.MustNewConstMetric(m.desc, prometheus.CounterValue, float64(values[cause]), s.Device, s.Monitor, cause)
		}
	}
	for _, m := range latencies {
		l := m.value(&s)
		ch <- prometheus.MustNewConstHistogram(m.desc, l.Count, l.Sum.Seconds(), buckets(l), s.Device, s.Monitor)
	}
}
