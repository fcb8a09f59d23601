// Package update shows what becomes of a remote key when the pages behind it are
// replaced.
//
// A peer keeps writing to an advertised remote key while the owner of the memory
// replaces the pages behind it, under four policies of the owner's: a registration
// cache that learns of no VM operation; pindown's cache, whose stale registration
// is dropped and another one advertised; and pindown's update, strict and atomic,
// which keeps the key. The adapter and its memory are simulated (device/simhca).
//
// The local half does the same without a peer on an io_uring and this process's
// memory: the owner's own reads land in a fixed buffer whose pages are replaced.
//
// What is counted as lost is a write that completed successfully, began after the
// owner was done with a replacement, ended before the next, and isn't in the memory
// that the owner has mapped. A write that overlaps a replacement may go to either
// pages by rights; it isn't judged.
package update
