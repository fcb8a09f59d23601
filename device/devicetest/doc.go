// Package devicetest holds what tests of and with devices need.
//
// [Run] is the conformance suite that every [device.Device] passes; it can
// also prove, through hooks into the device's data path, which pages a
// registration points at. [Fake] is a device in memory for tests of what is
// above a device: it counts, enforces limits, injects faults, runs hooks in
// the middle of a registration, and reports misuse.
package devicetest
