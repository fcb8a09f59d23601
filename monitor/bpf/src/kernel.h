/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/*
 * The members of kernel structures that the programs read. Their offsets are
 * those of the running kernel: relocated at load time from its BTF.
 */
#ifndef PINDOWN_KERNEL_H
#define PINDOWN_KERNEL_H

#include "bpf.h"

struct thread_info {
	u32 status; /* x86 */
} __core;

struct mm_struct {
	unsigned long brk;
} __core;

struct task_struct {
	struct thread_info thread_info;
	unsigned int flags;
	struct mm_struct *mm;
	void *worker_private; /* since Linux 5.17 */
} __core;

struct vm_area_struct {
	struct mm_struct *vm_mm;
} __core;

/* The argument of move_page_tables since Linux 6.16. */
struct pagetable_move_control {
	struct vm_area_struct *old;
	unsigned long old_end;
	unsigned long new_addr;
	unsigned long old_addr;
	unsigned long len_in;
} __core;

struct io_wq_work;

struct io_worker {
	struct io_wq_work *cur_work;
} __core;

struct io_wq_work {
	void *next;
} __core;

struct io_kiocb {
	u8 opcode;
	struct io_wq_work work;
} __core;

#define PF_IO_WORKER 0x00000010
#define PF_KTHREAD 0x00200000

#define IORING_OP_MADVISE 25

/* A thread that is in no system call: -1 in every architecture's registers. */
#define NR_NONE (-1)

#if defined(__TARGET_ARCH_x86)

struct pt_regs {
	unsigned long r10, r9, r8, dx, si, di, orig_ax;
} __core;

#define SYSCALL_NR(regs) ((s32)(regs)->orig_ax)
#define SYSCALL_ARG1(regs) ((regs)->di)
#define SYSCALL_ARG2(regs) ((regs)->si)
#define SYSCALL_ARG3(regs) ((regs)->dx)
#define SYSCALL_ARG4(regs) ((regs)->r10)
#define SYSCALL_ARG5(regs) ((regs)->r8)

/* A 32-bit system call by a 64-bit program (int 0x80). */
#define TS_COMPAT 0x0002
#define SYSCALL_COMPAT(task) ((task)->thread_info.status & TS_COMPAT)
/* The bit of the x32 ABI, whose numbers are otherwise those of 64 bits. */
#define SYSCALL_NR_MASK 0xbfffffff

#define NR_mmap 9
#define NR_mprotect 10
#define NR_munmap 11
#define NR_brk 12
#define NR_mremap 25
#define NR_msync 26
#define NR_madvise 28
#define NR_shmat 30
#define NR_clone 56
#define NR_fork 57
#define NR_vfork 58
#define NR_execve 59
#define NR_exit 60
#define NR_shmdt 67
#define NR_mlock 149
#define NR_munlock 150
#define NR_mlockall 151
#define NR_munlockall 152
#define NR_prctl 157
#define NR_io_setup 206
#define NR_io_destroy 207
#define NR_remap_file_pages 216
#define NR_exit_group 231
#define NR_mbind 237
#define NR_execveat 322
#define NR_mlock2 325
#define NR_pkey_mprotect 329

#elif defined(__TARGET_ARCH_arm64)

struct pt_regs {
	u64 regs[31];
	u64 orig_x0;
	s32 syscallno;
} __core;

#define SYSCALL_NR(r) ((r)->syscallno)
#define SYSCALL_ARG1(r) ((r)->orig_x0)
#define SYSCALL_ARG2(r) ((r)->regs[1])
#define SYSCALL_ARG3(r) ((r)->regs[2])
#define SYSCALL_ARG4(r) ((r)->regs[3])
#define SYSCALL_ARG5(r) ((r)->regs[4])

/* A 64-bit arm64 program can't make 32-bit system calls. */
#define SYSCALL_COMPAT(task) 0
#define SYSCALL_NR_MASK 0xffffffff

#define NR_mmap 222
#define NR_mprotect 226
#define NR_munmap 215
#define NR_brk 214
#define NR_mremap 216
#define NR_msync 227
#define NR_madvise 233
#define NR_shmat 196
#define NR_clone 220
#define NR_execve 221
#define NR_exit 93
#define NR_shmdt 197
#define NR_mlock 228
#define NR_munlock 229
#define NR_mlockall 230
#define NR_munlockall 231
#define NR_prctl 167
#define NR_io_setup 0
#define NR_io_destroy 1
#define NR_remap_file_pages 234
#define NR_exit_group 94
#define NR_mbind 235
#define NR_execveat 281
#define NR_mlock2 284
#define NR_pkey_mprotect 288

#else
#error "unknown architecture"
#endif

/* The same number on every architecture. */
#define NR_clone3 435
#define NR_process_madvise 440
#define NR_set_mempolicy_home_node 450
#define NR_map_shadow_stack 453
#define NR_mseal 462

#define MAP_FIXED 0x10
#define MREMAP_FIXED 2
#define MREMAP_DONTUNMAP 4
#define SHM_REMAP 040000

#define MADV_NORMAL 0
#define MADV_RANDOM 1
#define MADV_SEQUENTIAL 2
#define MADV_WILLNEED 3
#define MADV_DONTFORK 10
#define MADV_DOFORK 11
#define MADV_MERGEABLE 12
#define MADV_UNMERGEABLE 13
#define MADV_HUGEPAGE 14
#define MADV_NOHUGEPAGE 15
#define MADV_DONTDUMP 16
#define MADV_DODUMP 17
#define MADV_COLD 20
#define MADV_PAGEOUT 21
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#define MADV_COLLAPSE 25

#endif
