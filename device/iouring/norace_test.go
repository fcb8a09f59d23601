//go:build !race

package iouring_test

const raceEnabled = false
