/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/*
 * The programs of the BPF monitor. doc.go says what they are for.
 */
#include "bpf.h"
#include "kernel.h"
#include "touch.h"

/* The address space that is watched. */
volatile const u64 target_mm = 0;
/* bpf_probe_read_kernel may be used; not in a kernel locked down for confidentiality. */
volatile const u32 can_probe = 1;
/* mmap_lock's tracepoints have the memory cgroup's path as second argument (before Linux 6.14). */
volatile const u32 lock_has_path = 0;

/* The kernel rounds to its pages, which on arm64 may be larger than the table's. */
volatile const u64 page_size = 4096;

/* The heartbeat's page. An operation that begins there is counted below. */
volatile const u64 probe_start = 0;

/* What identify found. */
u64 current_mm;
/* News that found the ring full. */
u64 news_lost;
/* Operations on the heartbeat's page, by where they were seen. */
#define PROBES 3
u64 probed[PROBES];

struct news {
	u64 start, end;
	s32 nr;  /* of the system call that the thread was in; NR_NONE */
	u32 arg; /* what tells its kinds apart: advice or flags */
};

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 65536); /* set by the loader */
} news SEC(".maps");

/*
 * What the current system call does to mappings.
 */
struct op {
	u64 start, end;   /* nothing if equal */
	u64 start2, end2; /* a second range: mremap's destination */
	s32 nr;
	u32 arg;
};

/* Set by the reader before it sleeps for long, cleared by who wakes it. */
u32 asleep;
/* Half of the news ring. */
volatile const u64 news_half = 32768;
/* The clock tick of the last news that woke a reader which wasn't asleep. */
u64 news_woke;

/*
 * Whether to wake the reader, since that takes the thread longer than all the
 * rest, and the reader's processor then takes part in each flush of a
 * translation. A reader that isn't asleep looks by itself after some
 * milliseconds; until then it is woken only if the ring fills, once in a tick.
 */
static __inline_always u64 wakeup(void)
{
	u64 now;

	if (READ_ONCE(asleep)) {
		asleep = 0;
		return BPF_RB_FORCE_WAKEUP;
	}
	if (bpf_ringbuf_query(&news, BPF_RB_AVAIL_DATA) < news_half)
		return BPF_RB_NO_WAKEUP;
	now = bpf_jiffies64();
	if (READ_ONCE(news_woke) == now)
		return BPF_RB_NO_WAKEUP;
	news_woke = now;
	return BPF_RB_FORCE_WAKEUP;
}

/* The system call isn't known yet; only news needs it. */
#define NR_ASK (-2)

static __inline_always void ask(struct news *n)
{
	struct task_struct *task = bpf_get_current_task_btf();
	struct pt_regs *regs;

	n->nr = NR_NONE;
	if (task->flags & (PF_KTHREAD | PF_IO_WORKER) || SYSCALL_COMPAT(task))
		return;
	regs = bpf_task_pt_regs(task);
	n->nr = SYSCALL_NR(regs);
	if (n->nr != NR_NONE)
		n->nr &= SYSCALL_NR_MASK;
	n->arg = n->nr == NR_madvise || n->nr == NR_shmat ? SYSCALL_ARG3(regs) : SYSCALL_ARG4(regs);
}

/* After nobody: touches [start,end) and sends the news if somebody is interested. */
__noinline int record_range(u64 start, u64 end, s32 nr, u32 arg)
{
	struct news n = { start, end, nr, arg };

	if (!touch_somebody(start, end))
		return 0;
	if (nr == NR_ASK)
		ask(&n);
	if (bpf_ringbuf_output(&news, &n, sizeof(n), wakeup()))
		__sync_fetch_and_add(&news_lost, 1);
	return 0;
}

static __inline_always u64 page_down(u64 n)
{
	return n & ~(page_size - 1);
}

static __inline_always u64 page_up(u64 n)
{
	return page_down(n + page_size - 1);
}

static __inline_always void record(struct op *op, int at)
{
	if (op->start == probe_start)
		__sync_fetch_and_add(&probed[at], 1);
	if (nobody())
		return;
	record_range(page_down(op->start), page_up(op->end), op->nr, op->arg);
	if (op->start2 != op->end2)
		record_range(page_down(op->start2), page_up(op->end2), op->nr, op->arg);
}

static __inline_always void whole(struct op *op)
{
	op->start = 0;
	op->end = MAX_PAGE << PINDOWN_EPOCH_PAGE_SHIFT;
}

/* Advice that replaces no page that is pinned. */
static __inline_always int harmless_advice(u32 advice)
{
	switch (advice) {
	case MADV_NORMAL ... MADV_WILLNEED:
	case MADV_DONTFORK ... MADV_DODUMP:
	case MADV_COLD ... MADV_POPULATE_WRITE:
	case MADV_COLLAPSE:
		return 1;
	}
	return 0;
}

/* Where the thread is when a tracepoint calls. */
#define AT_ZAP 0    /* some page left the page tables; their lock is held */
#define AT_LOCK 1   /* mmap_lock was taken or downgraded */
#define AT_UNLOCK 2 /* mmap_lock is about to be released */
/* Where functions call. */
#define AT_ENTRY 0
#define AT_EXIT 1

/* The break before the brk in progress; mmap_lock guards it. */
u64 old_brk;

/*
 * Fills in op for the native system call nr. Returns false if there is nothing
 * to record at this place.
 *
 * A call that holds mmap_lock for all of its change is recorded once, at the
 * last moment at which nobody else can have the lock, in whatever mode: before
 * it is released, or downgraded, as munmap does once the mapping is out of the
 * tree and before it zaps. Whoever faults, asks for the mapping or maps
 * something else has to wait until then, so the change and its record appear at
 * once. Of page tables that move that isn't true, since the processor reads
 * them without a lock, and mremap is recorded at the start as well.
 */
static __inline_always int classify(struct op *op, struct pt_regs *regs, struct mm_struct *mm,
				    s32 nr, int at, int write)
{
	u64 addr = SYSCALL_ARG1(regs), len = SYSCALL_ARG2(regs);
	int last = at == AT_UNLOCK ? write : at == AT_LOCK && !write;

	op->start = addr;
	op->end = addr + len;
	switch (nr) {
	case NR_munmap:
	case NR_remap_file_pages:
		return last;
	case NR_mmap:
		op->arg = SYSCALL_ARG4(regs);
		return last && op->arg & MAP_FIXED;
	case NR_mremap: {
		u64 old_len = page_up(len), new_len = page_up(SYSCALL_ARG3(regs));

		if (at == AT_ZAP)
			return 0;
		op->arg = SYSCALL_ARG4(regs);
		op->end = addr + old_len;
		if (op->arg & MREMAP_FIXED) {
			op->start2 = SYSCALL_ARG5(regs);
			op->end2 = op->start2 + new_len;
		} else if (new_len && new_len <= old_len && !(op->arg & MREMAP_DONTUNMAP)) {
			/* It stays where it is and loses its tail. */
			op->start = addr + new_len;
		}
		return 1;
	}
	case NR_madvise:
		op->arg = SYSCALL_ARG3(regs);
		return at == AT_ZAP && !harmless_advice(op->arg);
	case NR_process_madvise:
		op->arg = SYSCALL_ARG4(regs);
		whole(op);
		return at == AT_ZAP && !harmless_advice(op->arg);
	case NR_brk:
		/* brk sets the new break before it unmaps. */
		if (at == AT_LOCK && write)
			old_brk = mm->brk;
		op->start = page_up(addr);
		op->end = page_up(old_brk);
		return last && addr != 0 && op->start < op->end;
	case NR_shmat:
		op->arg = SYSCALL_ARG3(regs);
		whole(op); /* the segment's size isn't at hand */
		return last && op->arg & SHM_REMAP;
	case NR_mprotect:
	case NR_msync:
	case NR_clone:
#if defined(NR_fork)
	case NR_fork:
	case NR_vfork:
#endif
	case NR_execve:
	case NR_exit:
	case NR_shmdt:
	case NR_mlock:
	case NR_munlock:
	case NR_mlockall:
	case NR_munlockall:
	case NR_prctl:
	case NR_io_setup:
	case NR_io_destroy:
	case NR_exit_group:
	case NR_mbind:
	case NR_execveat:
	case NR_mlock2:
	case NR_pkey_mprotect:
	case NR_clone3:
	case NR_set_mempolicy_home_node:
	case NR_map_shadow_stack:
	case NR_mseal:
		return 0;
	}
	/*
	 * Any other call may fault pages in while it copies, which looks like a
	 * zap here, and none zaps private anonymous memory. One that takes the
	 * lock for writing may unmap something.
	 */
	whole(op);
	return at != AT_ZAP && write;
}

/* The opcode of the request that an io_uring worker carries out; -1 if it can't be told. */
static __inline_always int io_opcode(struct task_struct *task)
{
	struct io_worker *worker;
	char *work = 0;
	u8 opcode = 0;

	if (!can_probe || !core_exists(task->worker_private) || !core_exists(((struct io_worker *)0)->cur_work) ||
	    !core_exists(((struct io_kiocb *)0)->work))
		return -1;
	worker = task->worker_private;
	if (!worker)
		return 0; /* the thread that polls for submissions: it hands such work to others */
	if (bpf_probe_read_kernel(&work, sizeof(work), (char *)worker + core_offset(struct io_worker, cur_work)))
		return -1;
	if (!work)
		return 0;
	if (bpf_probe_read_kernel(&opcode, sizeof(opcode),
				  work - core_offset(struct io_kiocb, work) +
					  core_offset(struct io_kiocb, opcode)))
		return -1;
	return opcode;
}

static __inline_always void on_event(struct mm_struct *mm, int at, int write)
{
	struct task_struct *task = bpf_get_current_task_btf();
	u32 flags = task->flags;
	struct op op = { .nr = NR_NONE };
	struct pt_regs *regs;

	/* Kernel threads reclaim, migrate and merge: no pinned page. */
	if (flags & PF_KTHREAD)
		return;
	if (flags & PF_IO_WORKER) {
		int opcode;

		if (at != AT_ZAP)
			return;
		opcode = io_opcode(task);
		if (opcode >= 0 && opcode != IORING_OP_MADVISE)
			return;
		whole(&op);
		record(&op, at);
		return;
	}
	regs = bpf_task_pt_regs(task);
	op.nr = SYSCALL_NR(regs);
	if (op.nr == NR_NONE)
		return; /* a page fault, an interrupt */
	if ((u64)task->mm != target_mm) {
		/* Of all that another process does to this one, only this zaps. */
		if (at != AT_ZAP || (op.nr & SYSCALL_NR_MASK) != NR_process_madvise)
			return;
		op.arg = SYSCALL_ARG4(regs);
		if (!SYSCALL_COMPAT(task) && harmless_advice(op.arg))
			return;
		whole(&op);
	} else if (SYSCALL_COMPAT(task)) {
		/* Other numbers, other arguments, and too rare to decode. */
		if (at != AT_ZAP && !write)
			return;
		whole(&op);
	} else if (!classify(&op, regs, mm, op.nr & SYSCALL_NR_MASK, at, write)) {
		return;
	}
	record(&op, at);
}

/*
 * The lock's mode, from the arguments mm, [path,] write. In assembly, since the
 * compiler would make one load of the two, from a computed address, which the
 * verifier refuses.
 */
static __inline_always int lock_write(u64 *ctx)
{
	u64 write;

	if (lock_has_path)
		asm volatile("%0 = *(u64 *)(%1 + 16)" : "=r"(write) : "r"(ctx));
	else
		asm volatile("%0 = *(u64 *)(%1 + 8)" : "=r"(write) : "r"(ctx));
	return (u8)write;
}

/*
 * Fires whenever a page enters or leaves the page tables of mm and is counted,
 * as every page is that can be pinned, hugetlb ones excepted. zap_pte_range and
 * zap_huge_pmd count while they hold the page table's lock, so for the rest of
 * the world page and time stamp change at once.
 */
SEC("tp_btf/rss_stat")
int on_rss_stat(u64 *ctx)
{
	if (ctx[0] == target_mm)
		on_event((struct mm_struct *)ctx[0], AT_ZAP, 0);
	return 0;
}

/* mm's mmap_lock was taken (ctx: mm, [path,] write, success), or is being downgraded (write is false). */
SEC("tp_btf/mmap_lock_acquire_returned")
int on_lock(u64 *ctx)
{
	if (ctx[0] == target_mm)
		on_event((struct mm_struct *)ctx[0], AT_LOCK, lock_write(ctx));
	return 0;
}

/* mm's mmap_lock is about to be released (ctx: mm, [path,] write). */
SEC("tp_btf/mmap_lock_released")
int on_unlock(u64 *ctx)
{
	if (ctx[0] == target_mm)
		on_event((struct mm_struct *)ctx[0], AT_UNLOCK, lock_write(ctx));
	return 0;
}

/*
 * Which arguments of a kernel function say what it changes. The loader finds
 * them in the kernel's BTF by name.
 */
struct hook {
	u32 vma;   /* or the struct pagetable_move_control */
	u32 start;
	u32 end;   /* or the size */
	u32 start2; /* HOOK_MOVE: the destination */
	u32 flags;
};

#define HOOK_SIZE 1    /* end is a size */
#define HOOK_MOVE 2    /* moves [start,end) to start2 */
#define HOOK_CONTROL 4 /* moves as a struct pagetable_move_control says */

#define HOOKS 6

volatile const struct hook hooks[HOOKS] = {};

/*
 * Argument n of the function. n is constant for the verifier, which drops the
 * rest: it only lets arguments be read at fixed places, and knows then what a
 * pointer points to. In assembly, since the compiler would make one load of it.
 */
static __inline_always u64 argument(u64 *ctx, u32 n)
{
	u64 value = 0;

#define ARGUMENT(i)                                                                  \
	case i:                                                                      \
		asm volatile("%0 = *(u64 *)(%1 + 8 * " #i ")" : "=r"(value) : "r"(ctx)); \
		break
	switch (n) {
	ARGUMENT(0);
	ARGUMENT(1);
	ARGUMENT(2);
	ARGUMENT(3);
	ARGUMENT(4);
	ARGUMENT(5);
	}
	return value;
}

static __inline_always int on_function(u64 *ctx, const volatile struct hook *h, int at)
{
	struct op op = { .nr = NR_ASK };
	u32 flags = h->flags;
	u64 first = argument(ctx, h->vma);

	if (flags & HOOK_CONTROL) {
		struct pagetable_move_control *control = (void *)first;
		u64 len;

		if (!core_exists(control->len_in) || (u64)control->old->vm_mm != target_mm)
			return 0;
		op.end = control->old_end;
		len = control->len_in;
		op.start = op.end - len;
		/* Both addresses advance as the function goes. */
		op.start2 = control->new_addr - (control->old_addr - op.start);
		op.end2 = op.start2 + len;
	} else {
		if ((u64)((struct vm_area_struct *)first)->vm_mm != target_mm)
			return 0;
		op.start = argument(ctx, h->start);
		op.end = argument(ctx, h->end);
		if (flags & HOOK_SIZE)
			op.end += op.start;
		if (flags & HOOK_MOVE) {
			op.start2 = argument(ctx, h->start2);
			op.end2 = op.start2 + (op.end - op.start);
		}
	}
	record(&op, at);
	return 0;
}

/* The loader attaches pair i to the function that hooks[i] describes. */
#define HOOK(i)                                \
	SEC("fentry/hook" #i)                  \
	int on_enter##i(u64 *ctx)              \
	{                                      \
		return on_function(ctx, &hooks[i], AT_ENTRY); \
	}                                      \
	SEC("fexit/hook" #i)                   \
	int on_exit##i(u64 *ctx)               \
	{                                      \
		return on_function(ctx, &hooks[i], AT_EXIT); \
	}

HOOK(0)
HOOK(1)
HOOK(2)
HOOK(3)
HOOK(4)
HOOK(5)

/* Run by the loader to learn its own address space. */
SEC("raw_tp")
int identify(u64 *ctx)
{
	struct task_struct *task = bpf_get_current_task_btf();

	current_mm = (u64)task->mm;
	return 0;
}

/* Run by tests: touches [ctx[0],ctx[1]). */
SEC("raw_tp")
int touch_range(u64 *ctx)
{
	return touch(ctx[0], ctx[1]);
}

/* What measure_touch touches. */
u64 measured[2];

/* Run by benchmarks, many times in one go, which the kernel does with such programs alone. */
SEC("xdp")
int measure_touch(void *ctx)
{
	return touch(measured[0], measured[1]);
}

char _license[] SEC("license") = "GPL";
