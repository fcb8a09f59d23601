//go:build !race

package simhca_test

const raceEnabled = false
