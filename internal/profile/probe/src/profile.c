/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/*
 * The programs of the profiler. doc.go says what they are for.
 */
#include "bpf.h"
#include "kernel.h"

/* The pid namespace whose numbers events carry; 0 for the initial one. */
volatile const u64 ns_dev = 0;
volatile const u64 ns_ino = 0;
/* Transfers of at least so many bytes are uses of a buffer. 0: none are. */
volatile const u64 use_bytes = 0;

/* What an event is about. probe.go has the same numbers. */
enum what {
	NOTHING,
	MUNMAP,
	MMAP,
	MREMAP,
	MADVISE,
	BRK,
	SHMAT,
	SHMDT,
	MPROTECT,
	PROCESS_MADVISE,
	FALLOCATE,
	FTRUNCATE,
	TRUNCATE,
	REMAP_FILE_PAGES,
	OPERATIONS, /* their number */

	USE_READ = 16,
	USE_WRITE,
	USE_RECV,
	USE_SEND,
	USE_READ_FIXED,
	USE_WRITE_FIXED,
	USE_VECTOR = 32, /* a flag: to be taken apart */
	USE_MESSAGE = 64, /* likewise */

	RING_REGISTER = 128, /* a call */
	RING_BUFFER,         /* a buffer of the call before, in the same thread */
	RING_CLOSE,
	PROCESS,
	EXEC,
	EXIT,
	CLOSE,
	VERBS_REGISTER,
	VERBS_DEREGISTER,
	VERBS_REREGISTER,
};

#define TOP 3

struct event {
	u64 time; /* of entry, CLOCK_MONOTONIC */
	u64 took;
	u64 a[5];
	s64 ret;
	u64 ring; /* io_uring: the context's address, a name for it */
	u64 top[TOP]; /* the user stack's top words: there may be a return address */
	u64 stack; /* in stacks; 0: none */
	u32 pid, tid;
	u16 what;
	u16 n; /* index of a vector's element */
	u32 pad;
};

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 24); /* set by the loader */
} events SEC(".maps");

/*
 * A call stack: the address of the instruction, and return addresses as frame
 * pointers lead to them. Its key is a hash of it.
 */
#define DEPTH 32

struct stack {
	u64 n;
	u64 ip[DEPTH];
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 32768); /* set by the loader */
	__type(key, u64);
	__type(value, struct stack);
} stacks SEC(".maps");

struct count {
	u64 calls, failed, bytes, ns;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, OPERATIONS);
	__type(key, u32);
	__type(value, struct count);
} counts SEC(".maps");

/*
 * States of a task. The profiler itself is a STARTER while it starts the
 * program: the child is a CANDIDATE until it executes the program, a MEMBER
 * from then on. Members' children are members.
 */
#define STARTER 1
#define CANDIDATE 2
#define MEMBER 3

struct task {
	u32 state;
	u32 fresh; /* its process hasn't been told of */
	/* The system call in progress. */
	u32 what;
	u32 compat;
	u64 since;
	u64 a[5];
	u64 ring;
	/* The call of libibverbs in progress, the outermost. */
	u64 verbs_since;
	u64 verbs_a[4];
	u32 verbs_what, verbs_depth;
	struct stack stack; /* that is being looked at */
};

struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, s32);
	__type(value, struct task);
} tasks SEC(".maps");

/* Descriptors of io_uring instances, by process. */
struct ring_fd {
	u32 pid, fd;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, struct ring_fd);
	__type(value, u64);
} rings SEC(".maps");

/* Events that found the ring buffer full, and stacks that found no place. */
u64 lost_events;
u64 lost_stacks;
/* Tasks that couldn't be followed. */
u64 lost_tasks;
/* io_uring instances were created: closes are of interest. */
u64 rings_seen;

/* The state of the current task if it is to be watched. */
static __inline_always struct task *member(void)
{
	struct task_struct *current = bpf_get_current_task_btf(), *leader;
	struct task *t = bpf_task_storage_get(&tasks, current, 0, 0), *of_leader;

	if (t)
		return t->state == MEMBER ? t : 0;
	/* A thread that was there before, or that io_uring made. */
	leader = current->group_leader;
	of_leader = bpf_task_storage_get(&tasks, leader, 0, 0);
	if (!of_leader || of_leader->state != MEMBER)
		return 0;
	t = bpf_task_storage_get(&tasks, current, 0, BPF_LOCAL_STORAGE_GET_F_CREATE);
	if (!t) {
		__sync_fetch_and_add(&lost_tasks, 1);
		return 0;
	}
	t->state = MEMBER;
	return t;
}

struct ids {
	u32 tid, pid; /* in the order of struct bpf_pidns_info */
};

static __inline_always struct ids identify(void)
{
	struct ids id = {};
	u64 both;

	if (ns_ino && !bpf_get_ns_current_pid_tgid(ns_dev, ns_ino, &id, sizeof(id)))
		return id;
	both = bpf_get_current_pid_tgid();
	id.pid = both >> 32;
	id.tid = both;
	return id;
}

static __inline_always struct event *begin(u32 what)
{
	struct event *e = bpf_ringbuf_reserve(&events, sizeof(*e), 0);
	struct ids id;

	if (!e) {
		__sync_fetch_and_add(&lost_events, 1);
		return 0;
	}
	__builtin_memset(e, 0, sizeof(*e));
	id = identify();
	e->pid = id.pid;
	e->tid = id.tid;
	e->what = what;
	return e;
}

/* The reader looks by the clock: waking it costs more than all the rest. */
static __inline_always void send(struct event *e)
{
	bpf_ringbuf_submit(e, BPF_RB_NO_WAKEUP);
}

/* Tells of the current process when it is seen for the first time. */
static __inline_always void introduce(struct task *t, u32 what)
{
	struct task_struct *current = bpf_get_current_task_btf();
	struct event *e;

	t->fresh = 0;
	e = begin(what);
	if (!e)
		return;
	e->time = bpf_ktime_get_ns();
	bpf_get_current_comm(e->a, 16);
	e->a[2] = current->real_parent->tgid;
	e->a[3] = current->tgid;
	send(e);
}

/*
 * Counts the system calls of members, whatever they are, and what the programs
 * take for those of interest: entry 0.
 */
static __inline_always void count_cost(u64 calls, u64 since)
{
	u32 nothing = NOTHING;
	struct count *c = bpf_map_lookup_elem(&counts, &nothing);

	if (!c)
		return;
	c->calls += calls;
	if (since)
		c->ns += bpf_ktime_get_ns() - since;
}

/* Frames further apart are none, nor is one below the stack pointer. */
#define FRAME_MAX (1 << 22)

/* The odd constant of FNV-1a. */
#define HASH_PRIME 0x100000001b3ULL

/*
 * Puts the stack into stacks and returns its key. The kernel's own walk
 * (bpf_get_stackid) tries any value of the frame pointer, and takes ten times as
 * long where that is none and faults.
 */
static __noinline u64 walk(struct task *t, u64 ip, u64 sp, u64 fp)
{
	struct stack *s = &t->stack;
	u64 key = (0xcbf29ce484222325ULL ^ ip) * HASH_PRIME, last = sp;

	s->n = 1;
	s->ip[0] = ip;
	for (u32 i = 1; i < DEPTH; i++) {
		struct {
			u64 fp, ip;
		} frame;

		s->ip[i] = 0;
		if (fp & 7 || fp < last || fp - last > FRAME_MAX || s->n != i)
			continue;
		if (bpf_probe_read_user(&frame, sizeof(frame), (void *)fp) || !frame.ip)
			continue;
		s->ip[i] = frame.ip;
		s->n = i + 1;
		key = (key ^ frame.ip ^ key >> 29) * HASH_PRIME;
		last = fp + sizeof(frame);
		fp = frame.fp;
	}
	if (!bpf_map_lookup_elem(&stacks, &key) && bpf_map_update_elem(&stacks, &key, s, BPF_ANY)) {
		__sync_fetch_and_add(&lost_stacks, 1);
		return 0;
	}
	return key;
}

/* Where in the program it happens; also the topmost words of its stack. */
static __inline_always u64 where(struct task *t, u64 *top, struct pt_regs *regs)
{
	u64 sp = STACK_POINTER(regs);

	bpf_probe_read_user(top, TOP * sizeof(*top), (void *)sp);
	CALLER(regs, top);
	return walk(t, INSTRUCTION_POINTER(regs), sp, FRAME_POINTER(regs));
}

/* The same of a thread that is in the kernel, unless it is one of the kernel's. */
static __inline_always u64 where_from(struct task *t, u64 *top)
{
	struct task_struct *current = bpf_get_current_task_btf();

	if (current->flags & (PF_IO_WORKER | PF_USER_WORKER | PF_KTHREAD))
		return 0;
	return where(t, top, bpf_task_pt_regs(current));
}

static __inline_always u32 classify(u32 nr)
{
	switch (nr) {
	case NR_munmap:
		return MUNMAP;
	case NR_mmap:
		return MMAP;
	case NR_mremap:
		return MREMAP;
	case NR_madvise:
		return MADVISE;
	case NR_brk:
		return BRK;
	case NR_shmat:
		return SHMAT;
	case NR_shmdt:
		return SHMDT;
	case NR_mprotect:
	case NR_pkey_mprotect:
		return MPROTECT;
	case NR_process_madvise:
		return PROCESS_MADVISE;
	case NR_fallocate:
		return FALLOCATE;
	case NR_ftruncate:
		return FTRUNCATE;
	case NR_truncate:
		return TRUNCATE;
	case NR_remap_file_pages:
		return REMAP_FILE_PAGES;
	case NR_io_uring_register:
		return RING_REGISTER;
	case NR_close:
		return rings_seen ? CLOSE : NOTHING;
	}
	if (!use_bytes)
		return NOTHING;
	switch (nr) {
	case NR_read:
	case NR_pread64:
		return USE_READ;
	case NR_write:
	case NR_pwrite64:
		return USE_WRITE;
	case NR_readv:
	case NR_preadv:
	case NR_preadv2:
		return USE_READ | USE_VECTOR;
	case NR_writev:
	case NR_pwritev:
	case NR_pwritev2:
		return USE_WRITE | USE_VECTOR;
	case NR_recvfrom:
		return USE_RECV;
	case NR_sendto:
		return USE_SEND;
	case NR_recvmsg:
		return USE_RECV | USE_MESSAGE;
	case NR_sendmsg:
		return USE_SEND | USE_MESSAGE;
	}
	return NOTHING;
}

/* A ring's descriptor is being closed, if it is one: its registrations end. */
static __inline_always void on_close(u32 fd)
{
	struct ids id = identify();
	struct ring_fd key = { id.pid, fd };
	u64 *ring = bpf_map_lookup_elem(&rings, &key);
	struct event *e;

	if (!ring)
		return;
	e = begin(RING_CLOSE);
	if (e) {
		e->ring = *ring;
		e->a[0] = fd;
		e->time = bpf_ktime_get_ns();
		send(e);
	}
	bpf_map_delete_elem(&rings, &key);
}

SEC("tp_btf/sys_enter")
int on_enter(u64 *ctx)
{
	struct task *t = member();
	struct task_struct *current;
	struct pt_regs *regs;
	u32 what;

	if (!t)
		return 0;
	if (t->fresh)
		introduce(t, PROCESS);
	t->what = NOTHING;
	current = bpf_get_current_task_btf();
	what = SYSCALL_COMPAT(current) ? NOTHING : classify((u32)ctx[1] & SYSCALL_NR_MASK);
	if (what == NOTHING) {
		count_cost(1, 0);
		return 0;
	}
	t->since = bpf_ktime_get_ns();
	regs = bpf_task_pt_regs(current);
	t->a[0] = SYSCALL_ARG1(regs);
	if (what == CLOSE) {
		on_close(t->a[0]);
		return 0;
	}
	t->a[1] = SYSCALL_ARG2(regs);
	t->a[2] = SYSCALL_ARG3(regs);
	t->a[3] = SYSCALL_ARG4(regs);
	t->a[4] = SYSCALL_ARG5(regs);
	if (what == BRK && current->mm)
		t->a[1] = current->mm->brk;
	t->ring = 0;
	t->what = what;
	count_cost(1, t->since);
	return 0;
}

/* How many bytes an operation is about. */
static __inline_always u64 bytes(struct task *t, s64 ret)
{
	switch (t->what) {
	case MUNMAP:
	case MMAP:
	case MADVISE:
	case MPROTECT:
	case REMAP_FILE_PAGES:
		return t->a[1];
	case MREMAP:
		return t->a[1] > t->a[2] ? t->a[1] : t->a[2];
	case BRK:
		return (u64)ret > t->a[1] ? ret - t->a[1] : t->a[1] - ret;
	case FALLOCATE:
		return t->a[3];
	case PROCESS_MADVISE:
		return ret > 0 ? ret : 0;
	}
	return 0;
}

static __inline_always void count(struct task *t, s64 ret, u64 took)
{
	u32 what = t->what;
	struct count *c = bpf_map_lookup_elem(&counts, &what);

	if (!c)
		return;
	c->calls++;
	c->ns += took;
	if ((u64)ret >= (u64)-4095)
		c->failed++;
	else
		c->bytes += bytes(t, ret);
}

static __inline_always struct event *begin_call(struct task *t, u32 what, s64 ret, u64 took)
{
	struct event *e = begin(what);

	if (!e)
		return 0;
	e->time = t->since;
	e->took = took;
	e->ret = ret;
	e->ring = t->ring;
	e->a[0] = t->a[0];
	e->a[1] = t->a[1];
	e->a[2] = t->a[2];
	e->a[3] = t->a[3];
	e->a[4] = t->a[4];
	return e;
}

struct iovec {
	u64 base, len;
};

#define VECTOR 16
#define BUFFERS 1024

/* A vectored transfer of ret bytes: an event for each large enough part. */
static __noinline void vector(struct task *t, u64 left, u64 took, u64 stack)
{
	u64 iov = t->a[1], n = t->a[2];

	for (u32 i = 0; i < VECTOR && i < n && left; i++) {
		struct iovec v = {};
		struct event *e;
		u64 len;

		if (bpf_probe_read_user(&v, sizeof(v), (void *)(iov + i * sizeof(v))))
			return;
		len = v.len < left ? v.len : left;
		left -= len;
		if (len < use_bytes)
			continue;
		e = begin_call(t, t->what & (USE_VECTOR - 1), len, took);
		if (!e)
			return;
		e->a[1] = v.base;
		e->a[2] = v.len;
		e->n = i;
		e->stack = stack;
		send(e);
	}
}

/* The offsets of iov and its length in a struct msghdr of a 64-bit program. */
#define MSG_IOV 16

static __inline_always void use(struct task *t, s64 ret, u64 took)
{
	struct event *e;
	u64 top[TOP] = {};

	if (ret < 0 || (u64)ret < use_bytes)
		return;
	if (t->what & USE_VECTOR) {
		vector(t, ret, took, where_from(t, top));
		return;
	}
	if (t->what & USE_MESSAGE) {
		struct iovec v = {}; /* the pointer and the number of parts */

		if (bpf_probe_read_user(&v, sizeof(v), (void *)(t->a[1] + MSG_IOV)))
			return;
		t->a[1] = v.base;
		t->a[2] = v.len;
		vector(t, ret, took, where_from(t, top));
		return;
	}
	e = begin_call(t, t->what, ret, took);
	if (!e)
		return;
	e->stack = where_from(t, e->top);
	send(e);
}

/* The buffers of a registration, after its own event. */
static __noinline void ring_buffers(struct task *t, s64 ret)
{
	u64 iov = t->a[2], n = t->a[3];

	switch ((u32)t->a[1]) {
	case IORING_REGISTER_BUFFERS:
		break;
	case IORING_REGISTER_BUFFERS2:
	case IORING_REGISTER_BUFFERS_UPDATE: {
		/* struct io_uring_rsrc_register: nr, flags, resv2, data, tags; _update2: offset, resv, data, tags, nr. */
		u64 raw[4] = {};

		if (bpf_probe_read_user(raw, sizeof(raw), (void *)iov))
			return;
		if ((u32)t->a[1] == IORING_REGISTER_BUFFERS2) {
			n = (u32)raw[0];
			iov = raw[2];
			if (raw[0] >> 32 & 1)
				return; /* sparse: no buffers yet */
		} else {
			n = (u32)raw[3];
			iov = raw[1];
			t->a[4] = (u32)raw[0];
			if (ret >= 0 && n > (u64)ret)
				n = ret;
		}
		break;
	}
	default:
		return;
	}
	if ((u32)t->a[1] != IORING_REGISTER_BUFFERS_UPDATE)
		t->a[4] = 0;
	if (!iov)
		return;
	for (u32 i = 0; i < BUFFERS && i < n; i++) {
		struct iovec v = {};
		struct event *e;

		if (bpf_probe_read_user(&v, sizeof(v), (void *)(iov + i * sizeof(v))))
			return;
		e = begin_call(t, RING_BUFFER, ret, 0);
		if (!e)
			return;
		e->a[0] = v.base;
		e->a[2] = v.len;
		e->a[4] = t->a[4] + i;
		e->n = i;
		send(e);
	}
}

static __inline_always void ring_register(struct task *t, s64 ret, u64 took)
{
	struct event *e;
	u32 op = t->a[1] & ~IORING_REGISTER_USE_REGISTERED_RING;

	t->a[1] = op;
	if (op != IORING_REGISTER_BUFFERS && op != IORING_UNREGISTER_BUFFERS &&
	    op != IORING_REGISTER_BUFFERS2 && op != IORING_REGISTER_BUFFERS_UPDATE)
		return;
	e = begin_call(t, RING_REGISTER, ret, took);
	if (!e)
		return;
	e->stack = where_from(t, e->top);
	send(e);
	if (ret >= 0)
		ring_buffers(t, ret);
}

SEC("tp_btf/sys_exit")
int on_exit(u64 *ctx)
{
	struct task *t = member();
	struct event *e;
	s64 ret = ctx[1];
	u64 took, now;

	if (!t || t->what == NOTHING)
		return 0;
	if (t->what >= USE_READ && t->what < RING_REGISTER && (ret < 0 || (u64)ret < use_bytes)) {
		t->what = NOTHING;
		return 0;
	}
	now = bpf_ktime_get_ns();
	took = now - t->since;
	if (t->what == RING_REGISTER) {
		ring_register(t, ret, took);
	} else if (t->what >= USE_READ) {
		use(t, ret, took);
	} else {
		count(t, ret, took);
		e = begin_call(t, t->what, ret, took);
		if (e) {
			e->stack = where_from(t, e->top);
			send(e);
		}
	}
	t->what = NOTHING;
	count_cost(0, now);
	return 0;
}

/* The arguments: parent (the current task), child. */
SEC("tp_btf/sched_process_fork")
int on_fork(u64 *ctx)
{
	struct task_struct *parent = (struct task_struct *)ctx[0], *child = (struct task_struct *)ctx[1];
	struct task *of_parent = bpf_task_storage_get(&tasks, parent, 0, 0), *t;
	u32 state;

	if (!of_parent)
		of_parent = bpf_task_storage_get(&tasks, parent->group_leader, 0, 0);
	if (!of_parent)
		return 0;
	state = of_parent->state;
	if (state == STARTER) {
		if (child->tgid == parent->tgid)
			return 0;
		state = CANDIDATE;
	}
	t = bpf_task_storage_get(&tasks, child, 0, BPF_LOCAL_STORAGE_GET_F_CREATE);
	if (!t) {
		__sync_fetch_and_add(&lost_tasks, 1);
		return 0;
	}
	t->state = state;
	t->fresh = child->tgid != parent->tgid;
	return 0;
}

SEC("tp_btf/sched_process_exec")
int on_exec(u64 *ctx)
{
	struct task *t = bpf_task_storage_get(&tasks, bpf_get_current_task_btf(), 0, 0);

	if (!t || t->state == STARTER)
		return 0;
	t->state = MEMBER;
	t->what = NOTHING;
	t->verbs_depth = 0;
	introduce(t, EXEC);
	return 0;
}

SEC("tp_btf/sched_process_exit")
int on_task_exit(u64 *ctx)
{
	struct task_struct *task = (struct task_struct *)ctx[0];
	struct task *t = member();
	struct event *e;

	if (!t || task->signal->live.counter != 0)
		return 0;
	e = begin(EXIT);
	if (!e)
		return 0;
	e->time = bpf_ktime_get_ns();
	e->ret = (u32)task->exit_code;
	e->a[0] = task->se.sum_exec_runtime + task->signal->sum_sched_runtime;
	send(e);
	return 0;
}

/* The arguments: descriptor, context, entries, flags. */
SEC("tp_btf/io_uring_create")
int on_ring_create(u64 *ctx)
{
	struct task *t = member();
	struct ring_fd key;
	u64 ring = ctx[1];

	if (!t)
		return 0;
	key.pid = identify().pid;
	key.fd = ctx[0];
	rings_seen = 1;
	bpf_map_update_elem(&rings, &key, &ring, BPF_ANY);
	return 0;
}

/* The arguments: context, operation, numbers of files and buffers, result. */
SEC("tp_btf/io_uring_register")
int on_ring_register(u64 *ctx)
{
	struct task *t = member();

	if (t)
		t->ring = ctx[0];
	return 0;
}

/* The n bytes of cmd from offset on, without a helper that lockdown forbids. */
static __inline_always u64 cmd_bytes(struct io_kiocb *req, u32 offset, u32 n)
{
	const u8 *data = (const u8 *)req + offset;
	u64 v = 0;

#pragma unroll
	for (u32 i = 0; i < 8; i++)
		if (i < n)
			v |= (u64)READ_ONCE(data[i]) << 8 * i;
	return v;
}

#define CMD(req, type, field, n)                                                               \
	cmd_bytes(req, core_offset(struct io_kiocb, cmd) + core_offset(type, field), n)

/* A request to io_uring, by the thread that submits it or the kernel's that polls. */
static __inline_always int on_submit(struct io_kiocb *req)
{
	struct task *t = member();
	struct event *e;
	u64 addr, len;
	u32 what;

	if (!t)
		return 0;
	switch (req->opcode) {
	case IORING_OP_READ_FIXED:
	case IORING_OP_READV_FIXED:
		what = USE_READ_FIXED;
		break;
	case IORING_OP_WRITE_FIXED:
	case IORING_OP_WRITEV_FIXED:
		what = USE_WRITE_FIXED;
		break;
	case IORING_OP_READ:
		what = USE_READ;
		break;
	case IORING_OP_WRITE:
		what = USE_WRITE;
		break;
	case IORING_OP_RECV:
		what = USE_RECV;
		break;
	case IORING_OP_SEND:
	case IORING_OP_SEND_ZC:
		what = USE_SEND;
		break;
	default:
		return 0;
	}
	if (what == USE_RECV || what == USE_SEND) {
		if (!core_exists(((struct io_sr_msg *)0)->buf))
			return 0;
		addr = CMD(req, struct io_sr_msg, buf, 8);
		len = CMD(req, struct io_sr_msg, len, 4);
		if (req->opcode == IORING_OP_SEND_ZC && CMD(req, struct io_sr_msg, flags, 2) & IORING_RECVSEND_FIXED_BUF)
			what = USE_WRITE_FIXED;
	} else {
		if (!core_exists(((struct io_rw *)0)->addr))
			return 0;
		addr = CMD(req, struct io_rw, addr, 8);
		len = CMD(req, struct io_rw, len, 4);
	}
	if (what < USE_READ_FIXED && (!use_bytes || len < use_bytes))
		return 0;
	if (req->opcode >= IORING_OP_READV_FIXED)
		addr = len = 0; /* of the vector, not of the buffer */
	e = begin(what);
	if (!e)
		return 0;
	e->time = bpf_ktime_get_ns();
	e->ring = (u64)req->ctx;
	e->a[0] = req->buf_index;
	e->a[1] = addr;
	e->a[2] = len;
	e->ret = len;
	e->n = 1; /* submitted, not done */
	e->stack = where_from(t, e->top);
	send(e);
	return 0;
}

/* Since Linux 6.4. */
SEC("tp_btf/io_uring_submit_req")
int on_submit_req(u64 *ctx)
{
	return on_submit((struct io_kiocb *)ctx[0]);
}

/* Before Linux 6.4. */
SEC("tp_btf/io_uring_submit_sqe")
int on_submit_sqe(u64 *ctx)
{
	return on_submit((struct io_kiocb *)ctx[0]);
}

/* The functions of libibverbs: the cookie of an attachment. */
enum verb {
	REG_MR = 1,
	REG_MR_IOVA,
	DEREG_MR,
	REREG_MR,
};

SEC("uprobe/verbs")
int on_verbs(struct pt_regs *regs)
{
	struct task *t = member();
	u32 verb = bpf_get_attach_cookie(regs);

	if (!t || t->verbs_depth++)
		return 0;
	t->verbs_what = verb;
	t->verbs_a[0] = CALL_ARG1(regs); /* protection domain, or region */
	t->verbs_a[1] = CALL_ARG2(regs); /* address */
	t->verbs_a[2] = CALL_ARG3(regs); /* length */
	t->verbs_a[3] = verb == REG_MR ? CALL_ARG4(regs) : CALL_ARG5(regs); /* access */
	if (verb == REREG_MR) {
		t->verbs_a[1] = CALL_ARG4(regs);
		t->verbs_a[2] = CALL_ARG5(regs);
		t->verbs_a[3] = CALL_ARG2(regs); /* what to change */
	}
	t->verbs_since = bpf_ktime_get_ns();
	return 0;
}

/* Of struct ibv_mr: context, pd, addr, length, handle, lkey, rkey. */
#define MR_LKEY 36

SEC("uprobe/verbs_return")
int on_verbs_return(struct pt_regs *regs)
{
	struct task *t = member();
	u64 result, now;
	struct event *e;
	u32 key = 0;

	/* A call that began before the probes were there isn't known. */
	if (!t || !t->verbs_depth || --t->verbs_depth)
		return 0;
	now = bpf_ktime_get_ns();
	result = CALL_RESULT(regs);
	e = begin(t->verbs_what == DEREG_MR ? VERBS_DEREGISTER :
		  t->verbs_what == REREG_MR ? VERBS_REREGISTER : VERBS_REGISTER);
	if (!e)
		return 0;
	e->time = t->verbs_since;
	e->took = now - t->verbs_since;
	e->a[0] = t->verbs_a[0];
	e->a[1] = t->verbs_a[1];
	e->a[2] = t->verbs_a[2];
	e->a[3] = t->verbs_a[3];
	e->ret = result;
	if (e->what == VERBS_REGISTER && result) {
		bpf_probe_read_user(&key, sizeof(key), (void *)(result + MR_LKEY));
		e->a[4] = key;
	}
	e->stack = where(t, e->top, regs);
	send(e);
	return 0;
}

char _license[] SEC("license") = "GPL";
