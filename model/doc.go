// Package model holds Spin models of the epoch-table protocol and the test
// that checks them. It has no code of its own.
//
// cache.pml is the table and its readers: threads that acquire a range, hit,
// re-stamp, miss, state interest, stamp, pin and publish. epoch.pml adds a
// writer in the kernel that touches before and after the page tables change;
// uffd.pml adds a userfaultfd reader that touches once per event. update.pml is
// apart: a registration's key is pointed at other pages while work is in flight.
// So is holds.pml: who holds an entry, and when it may be deregistered, on
// processors that delay stores.
//
// The test has Spin search every interleaving for an Acquire that returns a
// registration older than an operation which had returned before Acquire
// began, and for deadlocks. It finds none in the protocol as built, and must
// find one in each variant that leaves out or misplaces a step. README.md says
// what is proved, what is abstracted, and tells each counterexample.
//
// Abstracted: memory is sequentially consistent but in holds.pml, counters don't wrap, one
// range is watched (with or without a neighbour), the tree has two levels, and
// the threads and operations are few.
package model
