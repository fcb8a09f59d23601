// Package workloads has small real programs with heavy VM activity, and ways of
// running them, so that their profiles can be made anew by one command
// (internal/workloads/profiles). The figures in docs/vm-activity.md are theirs.
//
// Each is a program as it is, not made for the purpose of showing something,
// or a small one that does what many do: allocate, transfer, free.
package workloads
