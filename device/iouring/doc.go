// Package iouring registers memory in the fixed-buffer table of an io_uring.
//
// A [Device] owns a run of slots of one ring's table: on a ring that the
// program has already, from any library ([New]), or on one that it opens
// itself ([Open]). A registration's local key is the slot: the buf_index of
// READ_FIXED and WRITE_FIXED. A device is also a [device.Updater] and a
// [device.RevokingUpdater]: a slot can be emptied and filled again, and pointing a
// slot at the pages now mapped is one step in the kernel, requests in flight
// keep the pages they started with.
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
// # Requirements
//
// Linux 5.13, amd64 or arm64. The sysctl kernel.io_uring_disabled and seccomp
// filters can take io_uring away from a process; then opening fails with an
// error that wraps [device.ErrNotSupported] and says which it is.
package iouring
