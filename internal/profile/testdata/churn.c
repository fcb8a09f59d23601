// SPDX-License-Identifier: Apache-2.0 OR MIT
// A deterministic program: the same VM operations at every run, in itself, in
// children, and in a program that a child executes.
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAGE = 4096 };

static void __attribute__((noinline)) give_back(char *p, size_t n)
{
	madvise(p, n, MADV_DONTNEED);
}

static void churn(int rounds)
{
	for (int i = 0; i < rounds; i++) {
		size_t n = (size_t)(i % 7 + 1) * 16 * PAGE;
		char *p = mmap(0, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		p[0] = 1;
		give_back(p, n);
		p = mremap(p, n, 2 * n, MREMAP_MAYMOVE);
		mprotect(p, PAGE, PROT_READ);
		if (i % 5 == 0)
			mmap(p, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
		munmap(p, 2 * n);
		munmap((void *)1, PAGE); /* fails */
	}
	for (int i = 0; i < rounds; i++) {
		void *p = sbrk(64 * PAGE);
		(void)p;
		sbrk(-64 * PAGE);
	}
}

int main(int argc, char **argv)
{
	if (argc > 1) {
		churn(30);
		return 0;
	}
	churn(200);
	for (int i = 0; i < 3; i++) {
		if (fork() == 0) {
			churn(50);
			if (i == 1)
				execl("/proc/self/exe", argv[0], "again", (char *)0);
			_exit(0);
		}
	}
	while (wait(0) > 0)
		;
	return 3;
}
