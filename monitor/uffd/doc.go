// Package uffd provides the monitor that learns of VM operations from
// userfaultfd(2). It needs no privilege.
//
// [Open] starts it, [Monitor.Cover] arms ranges: registers them with a
// userfaultfd in write-protect mode. Nothing is ever protected, so nothing ever
// faults; what the registration is for is the events. The kernel makes whoever
// unmaps, replaces, moves or drops armed memory wait until the event was read.
//
// # What is covered
//
// Private anonymous memory: mmap, the brk heap, stacks, transparent huge pages,
// private hugetlb memory where the kernel has write-protect mode for it (5.19)
// and tells a mapping's page size (PROCMAP_QUERY, 6.11).
// Events are munmap, mmap over it, mremap away from or onto it, MADV_DONTNEED,
// MADV_DONTNEED_LOCKED and MADV_FREE, and a program break that shrinks, by any
// thread, by io_uring too.
//
// Not covered, so that Cover returns monitor.ErrUncovered: shared memory
// (anonymous, memfd, System V) and files, shared or private, whose pages change
// by truncation and hole punching without an event; the Go heap (see below);
// memory registered with another userfaultfd; holes.
//
// Blind, on memory that is covered: two calls replace its pages without an
// event. shmat(2) with SHM_REMAP maps a System V segment over it (do_shmat in
// ipc/shm.c passes no list for the events to do_mmap), and
// madvise(MADV_GUARD_INSTALL), Linux 6.13, drops its pages
// (madvise_guard_install in mm/madvise.c has no userfaultfd_remove). A program
// that does either to a buffer it registers must invalidate it itself, or use
// another monitor. UFFDIO_MOVE by another userfaultfd of the process takes
// pages away in silence too, but refuses those that are pinned.
//
// # Side effects
//
// Mappings up to 1 GiB are armed as a whole, which splits nothing: a split would
// make mremap fail across it, and splits count against vm.max_map_count. Larger
// mappings are armed in windows of 64 MiB, until a quarter of
// vm.max_map_count is used up. New mappings don't merge with an armed one. What
// is armed may include neighbours that the kernel merged into the mapping, other
// users' or the Go runtime's; all that they notice is that an operation on armed
// memory waits for the reader (a MADV_DONTNEED of 1.4 µs takes 6.4 µs). On Linux 6.4 to 6.6 page faults in
// armed memory take the mmap lock rather than the mapping's. khugepaged leaves
// armed mappings with holes alone. A forked child's memory isn't armed.
//
// # The reader
//
// While an event is unread its thread is blocked in the kernel. If that thread
// is one of Go's and holds a P, that is: if it came by syscall.RawSyscall, or is
// the runtime itself giving back heap memory, then stop-the-world waits for it,
// and with GOMAXPROCS=1 everything does. A goroutine that reads events needs a
// P to go on after poll, so it would wait too: a deadlock. And where nothing
// deadlocks the operation waits for Go's scheduler. Measured on a loaded 2-CPU
// virtual machine, median time of a munmap of one page with a busy goroutine
// on each P, where 46 µs is the time without a monitor:
//
//	reader                               GOMAXPROCS=1    GOMAXPROCS=2
//	goroutine, netpoller                 49 ms           20 ms
//	goroutine, locked thread, poll(2)    0.10 ms         0.16 ms (p90 27 ms)
//	thread of its own                    0.055 ms        0.11 ms
//
// So the reader is a thread that Go doesn't know, made by clone(2), running a
// loop in assembly that uses no stack, no thread-local storage and takes no
// signal. All it does is:
//
//	   ┌───────────────────────────────────────────────────────────┐
//	   v                                                           │
//	ppoll ──event──> busy+1 ──> read into ring ──> flag 0→1? ─yes─> wake Go
//	   │                             │                 └──no──> busy-1 ─┘
//	   │ stop, error                 │ error               (back to ppoll)
//	   v                             v
//	lost ──> userfaultfd closed (waiting operations go on) ──> exit
//
// The busy count that comes with the flag stays until Go has drained the ring:
// by a goroutine that the wake is for, by a hit that finds the flag set
// ([Monitor.HitCheck]), or by Cover, whoever is first. Draining records each
// message in the table, so a hit finds the table changed or busy and never
// neither. A full ring loses messages and says so; then everything is suspect.
//
// The thread keeps the credentials of the moment it was started. A program that
// drops privileges should do so before Open.
//
// # The window that HitCheck closes
//
// The kernel queues the event of a munmap after it dropped the mmap lock. So
// another thread can map the address anew and hit the old registration while
// the event isn't read, with nothing on record and nobody busy. TestWindow shows
// it step by step; TestWindowRate, where one thread unmaps and another maps the
// same address and hits at once, was served the stale registration in 326 of
// 2000 rounds without the check and in none with it. The check is one system
// call that takes no lock: 1.3 µs where getppid(2) takes 1.1 µs.
//
// # Removals
//
// The event of MADV_DONTNEED and MADV_FREE comes before the pages go. What is
// recorded of them stays pending until every thread was seen outside of
// madvise; until then Cover of the range returns monitor.ErrPending. In
// TestRemoveRace, which registers during the call, 26 of 2000 registrations
// held pages that went afterwards without the rule, and none with it, at the
// price of 64 refused. The proof takes some 8 µs a thread, once per
// registration of a range with a removal since the last proof; Cover of an
// armed range with nothing pending takes 60 ns.
//
// # The Go heap
//
// By default it isn't armed: the scavenger's every madvise would wait for the
// reader. With Options.ArmGoHeap it is, and is seen like any other memory. Whether memory is the Go heap's is found with runtime.Pinner, checked
// at Open against known memory.
//
// # Lock order
//
//	coverMu                  arming, closing; held across ioctls
//	proofMu                  looking at threads; held across reads of /proc
//	  drainMu                armed set, pending removals; memory only
//	    Table, Hub           Touch takes no lock; Send takes the hub's
//
// The reader takes none of them, and nobody who holds drainMu makes a system
// call that can wait.
package uffd
