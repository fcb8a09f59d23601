/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the Go test talks to: a reader of the table in the memory at descriptor
 * 3, which watches and checks what it is told on standard input.
 *
 *   W id start end   watch, and take word and stamp
 *   U id             end the watch
 *   C id             check, and take anew unless valid; answers the verdict
 *   B id             check without waiting, nothing else; answers the verdict
 *   F                flush the answers
 *
 * All numbers are 64 bits, little endian; an answer is a byte.
 */
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "reader.h"

#define MAX_ID 4096

static struct entry {
	struct pde_watch w;
	uint64_t seen, stamp;
} entries[MAX_ID];

static uint64_t number(void)
{
	uint64_t n;

	if (fread(&n, sizeof n, 1, stdin) != 1)
		exit(3);
	return n;
}

static struct entry *entry(void)
{
	uint64_t id = number();

	if (id >= MAX_ID)
		exit(3);
	return &entries[id];
}

int main(int argc, char **argv)
{
	struct pde_table t;
	struct stat st;
	const char *why;
	uint64_t understands = PINDOWN_EPOCH_FEATURE_BASE;
	void *mem;
	int c;

	if (argc > 1 && strcmp(argv[1], "hit-check") == 0)
		understands |= PINDOWN_EPOCH_FEATURE_HIT_CHECK;
	if (fstat(3, &st) != 0)
		return 2;
	mem = mmap(NULL, st.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, 3, 0);
	if (mem == MAP_FAILED)
		return 2;
	if ((why = pde_open(&t, mem, st.st_size, understands)) != NULL || (why = pde_attach(&t, 0)) != NULL) {
		printf("%s", why);
		return 1;
	}
	while ((c = getchar()) != EOF) {
		struct entry *e;
		uint64_t start;
		enum pde_verdict v;

		switch (c) {
		case 'W':
			e = entry();
			start = number();
			if (pde_watch(&t, &e->w, start, number()) != 0)
				return 3;
			e->seen = pde_take(&t, &e->w, &e->stamp);
			break;
		case 'U':
			pde_unwatch(&t, &entry()->w);
			break;
		case 'C':
			e = entry();
			v = pde_check(&t, &e->w, e->stamp, &e->seen);
			if (v == PDE_INVALID)
				e->seen = pde_take(&t, &e->w, &e->stamp);
			putchar(v);
			break;
		case 'B':
			e = entry();
			putchar(pde_try(&t, &e->w, e->stamp, &e->seen));
			break;
		case 'F':
			fflush(stdout);
			break;
		default:
			return 3;
		}
	}
	return 0;
}
