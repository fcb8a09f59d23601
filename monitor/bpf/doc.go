// Package bpf provides the monitor whose writer is the kernel: BPF programs
// that record each VM operation in the epoch table, in the thread that carries
// it out, before the operation returns. Nobody is blocked, nothing is queued,
// and the Go heap is right too.
//
// [Open] needs CAP_BPF and CAP_PERFMON (or CAP_SYS_ADMIN) and a kernel with
// BTF. There are two modes.
//
// # Functions
//
// fentry and fexit programs on the kernel functions that unmap, zap and move
// pages: unmap_page_range, __unmap_hugepage_range, move_page_tables, or what
// stands for them in the running kernel; arguments are found in its BTF by
// name. The function's own vm_area_struct says which address space changes, so
// that every kind of mapping is seen, and every cause: truncation and hole
// punching by another process, System V segments, hugetlb. Both touches happen
// while the kernel holds the lock that keeps the address from being used again.
//
// Requires Linux 5.17 (bpf_get_func_arg), on arm64 6.4, and a kernel that
// isn't locked down.
//
// # System calls
//
// Tracepoint programs, for kernels that refuse the others. They do not sit on
// entry and exit of system calls: that taxes every system call of every
// process, and the exit is too late, since the mmap lock is gone by then and
// another thread may use the address. They sit where a system call changes the
// address space, and take the range from the registers of the system call that
// the thread is in:
//
//   - rss_stat, which fires under the page table's lock whenever pages that can
//     be pinned leave (or enter) the page tables of an address space: page and
//     time stamp change at once;
//   - mmap_lock_acquire_returned and mmap_lock_released, which fire while the
//     lock is held: for page tables that move (mremap) and for mappings that are
//     replaced before anybody used them.
//
// A system call that doesn't take the mmap lock and changes no resident set
// pays nothing at all. What can't be given a range is recorded as an operation
// on the whole address space: madvise by io_uring, process_madvise,
// shmat(SHM_REMAP), 32-bit system calls.
//
// Covered is private anonymous memory: heaps, stacks, brk, the Go heap,
// transparent huge pages. Refused are file, shared and System V mappings, whose
// pages another process can take away by an operation on the file, and hugetlb
// pages, which no resident set counts.
//
// Requires Linux 5.16 (earlier, mmap_lock_released fires too late), on arm64
// 5.18. Before 6.11 Cover reads /proc/self/maps up to the mapping.
//
// # Who is watched
//
// Programs compare the address space (struct mm_struct) that an operation
// affects with that of the process that opened the monitor. Threads, vfork and
// CLONE_VM children share it and are seen; a forked child isn't, though it
// still maps the table, so a cache must refuse to work there by other means.
// After execve nothing matches any more. Nothing is pinned in a file system:
// programs, links and maps go with the last descriptor, so with the process,
// however it ends.
package bpf
