// Package probe watches programs with BPF: every system call that changes an
// address space, transfers that are large enough, registrations with io_uring,
// and those with libibverbs.
//
// The programs sit at tracepoints (raw_syscalls, sched, io_uring), which also
// a kernel that is locked down for confidentiality allows, and at functions of
// libibverbs in user space. They do nothing for a task that isn't followed. A
// task is followed if [Probe.Start] starts it, from the execution of the
// program on, or if it was named by [Probe.Follow], and with it every thread
// and child that it makes from then on. Nothing is missed in between: a child
// inherits in the kernel, before it runs.
//
// Calls are counted in the kernel ([Probe.Counts]), exactly. Each is sent as an
// [Event] too, through a ring buffer. If the reader doesn't keep up, events are
// lost, counted, and the counts stay right.
//
// What is mapped where, for the names of functions, comes from the kernel's
// perf records ([Sideband]), which are complete for programs that are gone when
// somebody looks.
//
// A 32-bit program's system calls aren't seen.
package probe
