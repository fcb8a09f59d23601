//go:build race

package iouring_test

// raceEnabled: the race detector makes sync.Pool drop what it holds.
const raceEnabled = true
