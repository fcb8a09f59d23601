// SPDX-License-Identifier: Apache-2.0 OR MIT
// Registers two buffers with io_uring and uses them, in one of several ways.
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/io_uring.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { SIZE = 64 << 10, BUFFERS = 2 };

static int ring, file;
static struct io_uring_params params;
static unsigned *sq_tail, *sq_mask, *sq_array, *sq_flags, *cq_head, *cq_tail;
static struct io_uring_sqe *sqes;
static char *buffers[BUFFERS];

static void check(int ok, const char *what)
{
	if (!ok) {
		perror(what);
		exit(9);
	}
}

static void set_up(unsigned flags)
{
	params.flags = flags;
	params.sq_thread_idle = 1000;
	ring = syscall(SYS_io_uring_setup, 8, &params);
	check(ring >= 0, "io_uring_setup");
	size_t n = params.cq_off.cqes + params.cq_entries * sizeof(struct io_uring_cqe);
	char *p = mmap(0, n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring, IORING_OFF_SQ_RING);
	check(p != MAP_FAILED, "mmap");
	sq_tail = (unsigned *)(p + params.sq_off.tail);
	sq_mask = (unsigned *)(p + params.sq_off.ring_mask);
	sq_array = (unsigned *)(p + params.sq_off.array);
	sq_flags = (unsigned *)(p + params.sq_off.flags);
	cq_head = (unsigned *)(p + params.cq_off.head);
	cq_tail = (unsigned *)(p + params.cq_off.tail);
	sqes = mmap(0, params.sq_entries * sizeof(*sqes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring, IORING_OFF_SQES);
	check(sqes != MAP_FAILED, "mmap");
}

void __attribute__((noinline)) register_them(void)
{
	struct iovec v[BUFFERS];
	for (int i = 0; i < BUFFERS; i++)
		v[i] = (struct iovec){ buffers[i], SIZE };
	check(syscall(SYS_io_uring_register, ring, IORING_REGISTER_BUFFERS, v, BUFFERS) == 0, "register");
}

void __attribute__((noinline)) use(int i)
{
	unsigned tail = *sq_tail, at = tail & *sq_mask;
	sqes[at] = (struct io_uring_sqe){
		.opcode = IORING_OP_WRITE_FIXED, .fd = file, .addr = (uintptr_t)buffers[i], .len = SIZE / 2, .buf_index = i,
	};
	sq_array[at] = at;
	__atomic_store_n(sq_tail, tail + 1, __ATOMIC_SEQ_CST);
	if (params.flags & IORING_SETUP_SQPOLL) {
		if (__atomic_load_n(sq_flags, __ATOMIC_SEQ_CST) & IORING_SQ_NEED_WAKEUP)
			syscall(SYS_io_uring_enter, ring, 0, 0, IORING_ENTER_SQ_WAKEUP, 0, 0);
		syscall(SYS_io_uring_enter, ring, 0, 1, IORING_ENTER_GETEVENTS, 0, 0);
	} else {
		check(syscall(SYS_io_uring_enter, ring, 1, 1, IORING_ENTER_GETEVENTS, 0, 0) == 1, "enter");
	}
	while (__atomic_load_n(cq_tail, __ATOMIC_SEQ_CST) == *cq_head)
		;
	++*cq_head;
}

void __attribute__((noinline)) plant(int i)
{
	check(madvise(buffers[i], SIZE / 4, MADV_DONTNEED) == 0, "madvise");
	memset(buffers[i], 'x', SIZE / 4);
}

int main(int argc, char **argv)
{
	const char *how = argc > 1 ? argv[1] : "clean";
	file = open("/dev/null", O_WRONLY);
	set_up(strcmp(how, "sqpoll") ? 0 : IORING_SETUP_SQPOLL);
	for (int i = 0; i < BUFFERS; i++) {
		buffers[i] = mmap(0, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		memset(buffers[i], 'a', SIZE);
	}
	if (!strcmp(how, "before"))
		plant(1);
	register_them();
	use(0);
	use(1);
	if (!strcmp(how, "stale") || !strcmp(how, "unused") || !strcmp(how, "sqpoll"))
		plant(1);
	if (!strcmp(how, "elsewhere"))
		free(malloc(1 << 20));
	use(0);
	if (strcmp(how, "unused"))
		use(1);
	if (!strcmp(how, "unregister"))
		check(syscall(SYS_io_uring_register, ring, IORING_UNREGISTER_BUFFERS, 0, 0) == 0, "unregister");
	if (!strcmp(how, "closed"))
		close(ring);
	if (!strcmp(how, "unregister") || !strcmp(how, "closed"))
		munmap(buffers[1], SIZE);
	return 0;
}
