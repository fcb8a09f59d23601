// Package profile says what a program's use of memory does, or would do, to
// registrations of memory: its VM operations by kind, size, rate, latency,
// thread and call site, the registrations that it makes with io_uring and
// libibverbs and what they cost, and stale windows: registrations whose memory
// was changed while they were registered.
//
// [Run] starts a program, or follows one that runs, and returns a [Result],
// which writes itself as text, JSON or HTML. With Options.Trace all events are
// recorded for package trace as well.
//
// # How
//
// Package probe delivers events and exact counts. An analysis keeps, of each
// event, what the result needs, so a long run needs memory for its call sites,
// threads and registrations only. Call stacks are those that the kernel finds by
// frame pointers. A function without one (a system call's stub in libc, in Go's
// runtime) hides its caller, which is then found by its return address on top of
// the stack.
package profile
