// Package doctor examines what of pindown works in this process's place: the
// kernel and its settings, the process's privileges and limits, each monitor
// with the coverage that its self-test found, each device, and what would be
// chosen. Where something doesn't work it says why, and what would help.
//
// Each monitor and device is tried in a process of its own where
// [Options.Command] allows that: a sandbox that kills for a system call kills
// the trial, not the examination, and a trial that hangs is given up.
package doctor
