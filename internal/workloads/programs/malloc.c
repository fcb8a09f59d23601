// SPDX-License-Identifier: Apache-2.0 OR MIT
// Reads a file into buffers from malloc, writes them, and frees them in
// another order: what a program does that receives and passes on messages.
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { POOL = 32, SMALLEST = 14, LARGEST = 22, BURST = 400 };

static uint64_t state = 1;

static uint64_t next(void)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return state;
}

// A size between two powers of two, each order of magnitude as likely.
static size_t size(void)
{
	unsigned order = SMALLEST + next() % (LARGEST - SMALLEST);

	return ((size_t)1 << order) + (next() & (((size_t)1 << order) - 1));
}

static void handle(char *p, size_t n, int in, int out, off_t at)
{
	if (pread(in, p, n, at) != (ssize_t)n || write(out, p, n) != (ssize_t)n) {
		perror("transfer");
		exit(1);
	}
}

int main(int argc, char **argv)
{
	char *pool[POOL] = { 0 };
	long rounds = argc > 2 ? atol(argv[2]) : 1000;
	int in = open(argc > 1 ? argv[1] : "/dev/zero", O_RDONLY), out = open("/dev/null", O_WRONLY);

	for (long i = 0; i < rounds; i++) {
		unsigned at = next() % POOL;
		size_t n = size();

		free(pool[at]);
		pool[at] = malloc(n);
		if (!pool[at])
			return 1;
		handle(pool[at], n, in, out, (off_t)(next() % (48 << 20)));
		if (i % BURST == BURST - 1) { // quiet after a burst
			for (int j = 0; j < POOL; j++) {
				free(pool[j]);
				pool[j] = 0;
			}
		}
	}
	return 0;
}
