// Package metrics shows a cache's figures to Prometheus.
//
// A [Collector] reads [pindown.Cache.Stats] at each scrape; between scrapes it
// costs nothing, and on hits never. Register it with whatever registry the
// program uses: the package registers nothing by itself.
//
//	registry.MustRegister(metrics.NewCollector(cache))
//
// Metrics carry the labels device and monitor, and those with causes the label
// cause. Two caches of a program that have both in common need a label of the
// program's own to be told apart:
//
//	prometheus.WrapRegistererWith(prometheus.Labels{"cache": "log"}, registry).MustRegister(…)
//
// What to watch: a rising rate of pindown_cache_per_use_total means that memory is
// not cached, and its cause says why; pindown_cache_misses_total with cause "stale"
// beside pindown_cache_invalidations_total, that the program changes mappings that
// it uses for I/O; pindown_cache_evictions_total, that a limit is too low.
package metrics
