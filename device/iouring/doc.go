// Package iouring registers memory in the fixed-buffer table of an io_uring.
//
// A [Device] owns a run of slots of one ring's table: on a ring that the
// program has already, from any library ([New]), or on one that it opens
// itself ([Open]). A registration's local key is the slot: the buf_index of
// READ_FIXED and WRITE_FIXED. A device is also a [device.Updater] and a
// [device.RevokingUpdater]: see below.
//
// [Ring] is a minimal ring for programs that have none: reads, writes, fixed or
// not, in batches.
//
// # What the kernel does with a buffer
//
//   - It pins the pages for writing, for long: memory must be writable, and a
//     registration always grants [device.LocalWrite]. Read-only memory and
//     address space that isn't mapped give [device.ErrFault]; so does, since
//     Linux 6.5, a shared mapping of a file on a file system that writes back,
//     which was [device.ErrUnsupportedMemory] before.
//   - Pinned pages count against RLIMIT_MEMLOCK of the user who created the
//     ring, across all their processes, unless the ring was created with
//     CAP_IPC_LOCK. Since Linux 6.14 a ring's queues count too. A page of a
//     huge page counts, once for each ring, as the whole huge page.
//   - An update needs room for the new pages before the old are given back.
//   - Pages are given back when the slot is cleared or updated and no request
//     in flight uses them any more (Linux 6.13; before that, when no earlier
//     request of the whole ring is in flight). A closed ring gives everything
//     back from a kernel worker, some time after close(2) returned.
//     [Device.Close] therefore clears its slots first.
//   - Registering a part of a huge page takes time in proportion to the pages
//     in the table, since the kernel searches it for that huge page.
//
// # Updates
//
// An atomic update ([Device.Update]) points the slot at the pages now mapped, in one
// step of the kernel. It waits for nothing: a request in flight keeps the pages with
// which it began, which stay pinned until it is over; a later one sees the new pages.
//
// A strict update ([Device.Revoke], [Device.Load]) empties the slot and fills it again.
// The kernel does the same with requests in flight: they go on with the old pages,
// even after Load. So a strict update is only as strict as its caller, who drains the
// slot first. [Device.Flush] is how it is made sure of: on a ring that Open made,
// requests queued or in flight through its [Ring] give device.ErrBusy, and a strict
// update by a pindown.Cache then fails, with the old pages and nothing revoked, unless
// somebody takes the completions within Options.RegisterTimeout. On somebody else's
// ring, nothing tells what is in flight: there a strict update takes its caller's word,
// and that of each holder who has released, that no request under the key is.
//
// # What an update costs
//
// An update is one system call, as a registration is. Both pin the new pages; the
// update also unpins the old ones before it returns (io_reset_rsrc_node after
// io_sqe_buffer_register, in the kernel's io_uring/rsrc.c), page by page unless they
// are parts of one folio. That is the whole difference, and nothing outside the kernel
// can take it away: the bare calls have the same ratio. A deregistration unpins too,
// and registration and deregistration are what an update is instead of. Medians of
// BenchmarkUpdateRatio on Linux 6.18, in base pages but for the last line:
//
//	               update / register      update / (register + deregister)
//	size           device   bare calls    device   bare calls
//	4 KiB          1.01     1.03          0.54     0.55
//	64 KiB         1.08     1.09          0.60     0.61
//	1 MiB          1.19     1.21          0.79     0.80
//	16 MiB         1.27     1.27          0.92     0.92
//	1 MiB, huge    1.01     1.03          0.59     0.60
//
// The second pair of columns is the fair reading. In the first, a registration of an
// empty slot leaves the old pages pinned, and whoever makes it has yet to pay for that;
// from run to run the line of 1 MiB is 1.18 to 1.23 there, of the bare calls 1.19 to
// 1.26.
//
// # Requirements
//
// Linux 5.13, amd64 or arm64. The sysctl kernel.io_uring_disabled and seccomp
// filters can take io_uring away from a process; then opening fails with an
// error that wraps [device.ErrNotSupported] and says which it is.
package iouring
