// Package ibv calls libibverbs, which it loads at run time: no C compiler and
// no header is needed to build it, and a program that never loads the library
// runs without it. It has what package verbs uses and no more.
//
// Types are laid out as in infiniband/verbs.h of rdma-core; layout_unsafe_test.go
// compares them with the installed header. Their pointers lead to memory of
// the library, which the garbage collector doesn't know: nothing here may point
// from there to Go memory for longer than a call.
package ibv
