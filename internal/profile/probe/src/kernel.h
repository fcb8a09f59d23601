/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/*
 * The members of kernel structures that the programs read. Their offsets are
 * those of the running kernel: relocated at load time from its BTF.
 */
#ifndef PINDOWN_PROFILE_KERNEL_H
#define PINDOWN_PROFILE_KERNEL_H

#include "bpf.h"

struct thread_info {
	u32 status; /* x86 */
} __core;

struct mm_struct {
	unsigned long brk;
} __core;

typedef struct {
	int counter;
} atomic_t;

struct signal_struct {
	atomic_t live;
	u64 sum_sched_runtime; /* of threads that have ended */
} __core;

struct sched_entity {
	u64 sum_exec_runtime;
} __core;

struct task_struct {
	struct thread_info thread_info;
	u32 flags;
	struct mm_struct *mm;
	struct task_struct *group_leader;
	struct task_struct *real_parent;
	struct signal_struct *signal;
	struct sched_entity se;
	s32 tgid;
	s32 exit_code;
} __core;

#define PF_IO_WORKER 0x00000010
#define PF_USER_WORKER 0x00004000
#define PF_KTHREAD 0x00200000

struct io_ring_ctx;

struct io_cmd_data {
	void *file;
	u8 data[56];
} __core;

struct io_kiocb {
	struct io_cmd_data cmd;
	u8 opcode;
	u16 buf_index;
	struct io_ring_ctx *ctx;
} __core;

/* What io_kiocb.cmd holds of a request that reads or writes, and that sends or receives. */
struct io_rw {
	u64 addr;
	u32 len;
} __core;

struct io_sr_msg {
	void *buf;
	int len;
	u16 flags;
} __core;

/* Opcodes of io_uring requests. */
#define IORING_OP_READV 1
#define IORING_OP_WRITEV 2
#define IORING_OP_READ_FIXED 4
#define IORING_OP_WRITE_FIXED 5
#define IORING_OP_READ 22
#define IORING_OP_WRITE 23
#define IORING_OP_SEND 26
#define IORING_OP_RECV 27
#define IORING_OP_SEND_ZC 47
#define IORING_OP_READV_FIXED 60
#define IORING_OP_WRITEV_FIXED 61

#define IORING_RECVSEND_FIXED_BUF (1 << 2)

/* Operations of io_uring_register. */
#define IORING_REGISTER_BUFFERS 0
#define IORING_UNREGISTER_BUFFERS 1
#define IORING_REGISTER_BUFFERS2 15
#define IORING_REGISTER_BUFFERS_UPDATE 16
#define IORING_REGISTER_USE_REGISTERED_RING (1u << 31)

#if defined(__TARGET_ARCH_x86)

struct pt_regs {
	unsigned long sp, ip, bp, r10, r9, r8, ax, cx, dx, si, di;
} __core;

#define SYSCALL_ARG1(regs) ((regs)->di)
#define SYSCALL_ARG2(regs) ((regs)->si)
#define SYSCALL_ARG3(regs) ((regs)->dx)
#define SYSCALL_ARG4(regs) ((regs)->r10)
#define SYSCALL_ARG5(regs) ((regs)->r8)
#define STACK_POINTER(regs) ((regs)->sp)
#define INSTRUCTION_POINTER(regs) ((regs)->ip)
#define FRAME_POINTER(regs) ((regs)->bp)
/* The caller of a function without a frame is on top of the stack. */
#define CALLER(regs, top)

#define CALL_ARG1(regs) ((regs)->di)
#define CALL_ARG2(regs) ((regs)->si)
#define CALL_ARG3(regs) ((regs)->dx)
#define CALL_ARG4(regs) ((regs)->cx)
#define CALL_ARG5(regs) ((regs)->r8)
#define CALL_RESULT(regs) ((regs)->ax)

/* A 32-bit system call by a 64-bit program (int 0x80), or by a 32-bit one. */
#define TS_COMPAT 0x0002
#define SYSCALL_COMPAT(task) ((task)->thread_info.status & TS_COMPAT)
/* The bit of the x32 ABI, whose numbers are otherwise those of 64 bits. */
#define SYSCALL_NR_MASK 0xbfffffff

#define NR_read 0
#define NR_write 1
#define NR_close 3
#define NR_mmap 9
#define NR_mprotect 10
#define NR_munmap 11
#define NR_brk 12
#define NR_pread64 17
#define NR_pwrite64 18
#define NR_readv 19
#define NR_writev 20
#define NR_mremap 25
#define NR_madvise 28
#define NR_shmat 30
#define NR_sendto 44
#define NR_recvfrom 45
#define NR_sendmsg 46
#define NR_recvmsg 47
#define NR_shmdt 67
#define NR_truncate 76
#define NR_ftruncate 77
#define NR_remap_file_pages 216
#define NR_fallocate 285
#define NR_preadv 295
#define NR_pwritev 296
#define NR_preadv2 327
#define NR_pwritev2 328
#define NR_pkey_mprotect 329

#elif defined(__TARGET_ARCH_arm64)

struct pt_regs {
	u64 regs[31];
	u64 sp;
	u64 pc;
	u64 orig_x0;
} __core;

#define SYSCALL_ARG1(r) ((r)->orig_x0)
#define SYSCALL_ARG2(r) ((r)->regs[1])
#define SYSCALL_ARG3(r) ((r)->regs[2])
#define SYSCALL_ARG4(r) ((r)->regs[3])
#define SYSCALL_ARG5(r) ((r)->regs[4])
#define STACK_POINTER(r) ((r)->sp)
#define INSTRUCTION_POINTER(r) ((r)->pc)
#define FRAME_POINTER(r) ((r)->regs[29])
/* The caller of a function without a frame is in the link register. */
#define CALLER(r, top) ((top)[0] = (r)->regs[30])

#define CALL_ARG1(r) ((r)->regs[0])
#define CALL_ARG2(r) ((r)->regs[1])
#define CALL_ARG3(r) ((r)->regs[2])
#define CALL_ARG4(r) ((r)->regs[3])
#define CALL_ARG5(r) ((r)->regs[4])
#define CALL_RESULT(r) ((r)->regs[0])

/* 32-bit programs aren't told apart; their numbers don't fit those below. */
#define SYSCALL_COMPAT(task) 0
#define SYSCALL_NR_MASK 0xffffffff

#define NR_truncate 45
#define NR_ftruncate 46
#define NR_fallocate 47
#define NR_close 57
#define NR_read 63
#define NR_write 64
#define NR_readv 65
#define NR_writev 66
#define NR_pread64 67
#define NR_pwrite64 68
#define NR_preadv 69
#define NR_pwritev 70
#define NR_shmat 196
#define NR_shmdt 197
#define NR_sendto 206
#define NR_recvfrom 207
#define NR_sendmsg 211
#define NR_recvmsg 212
#define NR_brk 214
#define NR_munmap 215
#define NR_mremap 216
#define NR_mmap 222
#define NR_mprotect 226
#define NR_madvise 233
#define NR_remap_file_pages 234
#define NR_preadv2 286
#define NR_pwritev2 287
#define NR_pkey_mprotect 288

#else
#error "unknown architecture"
#endif

/* The same number on every architecture. */
#define NR_io_uring_register 427
#define NR_process_madvise 440

#endif
