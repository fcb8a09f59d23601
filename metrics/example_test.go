package metrics_test

import (
	"fmt"
	"log"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/pindown/pindown"
	"github.com/pindown/pindown/device/devicetest"
	"github.com/pindown/pindown/metrics"
	"github.com/pindown/pindown/monitor/manual"
)

func Example() {
	mon, err := manual.New(nil)
	if err != nil {
		log.Fatal(err)
	}
	defer mon.Close()
	cache, err := pindown.New(devicetest.NewFake(nil), &pindown.Options{Monitor: mon})
	if err != nil {
		log.Fatal(err)
	}
	defer cache.Close()

	registry := prometheus.NewRegistry()
	registry.MustRegister(metrics.NewCollector(cache))

	families, err := registry.Gather() // a scrape
	if err != nil {
		log.Fatal(err)
	}
	for _, f := range families[:2] {
		fmt.Println(f.GetName())
	}
	// Output:
	// pindown_cache_deregister_duration_seconds
	// pindown_cache_deregister_errors_total
}
