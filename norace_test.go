//go:build !race

package pindown_test

const raceEnabled = false
