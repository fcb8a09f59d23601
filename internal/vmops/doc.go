// Package vmops is a table of what a program can do to its address space:
// kinds of mapping, and the operations that change which pages are behind
// them.
//
// [New] makes a [Scratch] mapping of a kind, [Operations] lists the
// operations, and [Perform] carries one out on part of a scratch mapping by
// raw system calls, from this thread, another thread, an io_uring or another
// process. The monitors' self-test and conformance suite are generated from
// the table.
//
// A scratch mapping remembers which addresses are its own at every moment. An
// operation that unmaps part of it leaves a hole in which the kernel may place
// anybody's next mapping, so only what is still owned is unmapped in the end.
package vmops
