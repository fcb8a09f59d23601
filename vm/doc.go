// Package vm names what every part of pindown talks about: ranges of virtual
// addresses, VM operations, and the kinds of mapping they act on.
//
// A [Range] is half-open, [Start,End), everywhere in this module. A VM
// operation ([Op]) is anything that changes which page backs an address. The
// package holds no state and makes no system call.
package vm
