//go:build race

package pindown_test

// raceEnabled: the race detector makes system calls of its own.
const raceEnabled = true
