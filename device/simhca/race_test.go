//go:build race

package simhca_test

// raceEnabled shortens what takes long under the race detector.
const raceEnabled = true
