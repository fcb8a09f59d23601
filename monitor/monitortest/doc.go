// Package monitortest is the conformance suite for monitors, and a fake
// monitor for testing what uses one.
//
// [Run] tries every VM operation on every kind of mapping, on the whole
// watched range, part of it, across either end and next to it, by this thread,
// another thread, an io_uring and another process, and judges by the physical
// pages: where other pages are mapped than those that a registration would
// hold, the watch must be invalid before the operation returns. Then it races
// operations with registrations, hits, address reuse, signals, garbage
// collection and closing.
//
// The package re-executes the test binary as the other process: importing it
// adds an init function that does nothing unless an environment variable is
// set. It needs no file but the binary itself.
package monitortest
