// Package verbs registers memory with RDMA adapters, through libibverbs.
//
// The library is loaded at run time: nothing is needed to build, no C compiler
// and no header, and CGO_ENABLED=0 works. A program that uses this package is
// linked dynamically, with glibc, as one that uses cgo is. Where the library or
// an adapter is missing, opening fails with an error that wraps
// [device.ErrNotSupported] and says which it is.
//
// [Open] opens an adapter by name. [New] takes a protection domain (struct
// ibv_pd *) that the program has from another binding, cgo or not: the cache
// then works beside it, the keys of its regions go into that binding's work
// requests, and the queue pairs stay the program's own.
//
// A [Device] can do what the adapter and its provider can; [Device.Info] says
// what that is. Methods of the optional interfaces that this adapter can't carry
// out return a wrapped ErrNotSupported and change nothing:
//
//   - [device.Updater] and [device.RevokingUpdater] need ibv_rereg_mr(3) that
//     changes translation (and protection domain) and keeps the keys. The device
//     tries it on a page of its own when it is opened. The man page doesn't say
//     what becomes of work that is in flight meanwhile: an adapter may fail it, so
//     an update of the kind that is called atomic elsewhere isn't here. Have the
//     cache use the strict policy, or finish work first.
//   - [device.Exposer] needs memory windows of type 1, [device.FastRegistrar]
//     memory windows of type 2; see [Queue].
//
// # What is registered
//
//   - The pages are pinned for as long as the registration lives, and count
//     against RLIMIT_MEMLOCK of the process. With [Options.OnDemand] they aren't:
//     the adapter faults them in and follows the page tables, so that
//     registrations never go stale and a cache needs no monitor (give it a
//     monitor/manual, which costs nothing).
//   - A registration without LocalWrite of a private mapping is, before Linux
//     6.2, made by a write fault: a page of a file is copied first.
//   - Shared mappings of files are refused for writing since Linux 6.5 unless
//     the file system needs no write-back; hugetlb, shmem and memfd are taken.
//   - A range in huge pages is registered like any other. The adapter's own
//     table is smaller the larger the pages are: align large buffers to them.
//   - [Device.RegisterDMABuf] registers memory that has no address, such as that
//     of a graphics processor. It isn't cached: only its exporter knows when it
//     moves, and tells the adapter itself.
//   - Forked children don't inherit registrations. Since Linux 5.12 the child's
//     pages are copied at the fork; on older kernels ibv_fork_init(3) must have
//     been called, or a write after a fork leaves the registration behind.
//
// # The data path
//
// [Queue] is a reliable connected queue pair with what the examples and tests of
// this module need: sends, receives, RDMA reads and writes, windows. It isn't a
// general RDMA library and won't become one. A program that has one uses New and
// goes on using it.
package verbs
