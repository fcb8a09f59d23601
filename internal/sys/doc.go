// Package sys holds the kernel interfaces that golang.org/x/sys/unix lacks:
// userfaultfd(2), the query ioctl of /proc/PID/maps, and what limits pinned
// memory; and what several packages ask of it.
//
// Structures and constants keep the kernel's layout, and their sizes and
// offsets are asserted in tests. Functions return the errno wrapped by
// os.NewSyscallError unless they say otherwise; none retries.
package sys
