package bench

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"time"
)

// cpuModel returns the processor's name.
func cpuModel() string {
	text, _ := os.ReadFile("/proc/cpuinfo") // a courtesy
	for line := range strings.Lines(string(text)) {
		if k, v, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(k) == "model name" {
			return strings.TrimSpace(v)
		}
	}
	return runtime.GOARCH
}

// load returns the load averages of the last one, five and fifteen minutes.
func load() string {
	text, err := os.ReadFile("/proc/loadavg")
	if f := strings.Fields(string(text)); err == nil && len(f) >= 3 {
		return strings.Join(f[:3], " ")
	}
	return "unknown"
}

// clockCost returns what a look at the clock costs, in ns.
func clockCost() float64 {
	var best float64
	for range 20 {
		const n = 1000
		begin := time.Now()
		for range n {
			_ = time.Since(begin)
		}
		if ns := float64(time.Since(begin)) / n; best == 0 || ns < best {
			best = ns
		}
	}
	return best
}

// footprint is the memory that the process has in use.
type footprint struct {
	resident float64 // anonymous memory, as the kernel counts it
	heap     float64 // live Go objects
}

// measureFootprint collects garbage and gives back what is free before it looks.
func measureFootprint() (footprint, error) {
	runtime.GC()
	debug.FreeOSMemory()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	text, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return footprint{}, fmt.Errorf("read memory in use: %w", err)
	}
	for s := bufio.NewScanner(bytes.NewReader(text)); s.Scan(); {
		if f := strings.Fields(s.Text()); len(f) == 3 && f[0] == "RssAnon:" {
			kb, err := strconv.ParseFloat(f[1], 64)
			if err != nil {
				return footprint{}, fmt.Errorf("read memory in use: %w", err)
			}
			return footprint{resident: kb * 1024, heap: float64(m.HeapAlloc)}, nil
		}
	}
	return footprint{}, fmt.Errorf("read memory in use: %w", os.ErrNotExist)
}
