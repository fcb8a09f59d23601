//go:build race

package epoch

// raceEnabled: the race detector slows single-threaded tests for nothing.
const raceEnabled = true
