// Package uring is the raw interface of io_uring: structures, constants and
// the three system calls, as include/uapi/linux/io_uring.h has them.
//
// It checks nothing and keeps no state. Errors are plain errnos, for the caller
// to wrap. Structures and constants keep the kernel's meaning under Go names.
package uring
