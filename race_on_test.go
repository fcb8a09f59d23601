//go:build race

package pindown_test

const raceDetector = true
