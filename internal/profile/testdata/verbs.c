// SPDX-License-Identifier: Apache-2.0 OR MIT
// Registers memory through a library that looks like libibverbs.
#include <stddef.h>
#include <stdlib.h>
#include <sys/mman.h>

struct ibv_pd;
struct ibv_mr;
struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access);
int ibv_dereg_mr(struct ibv_mr *mr);

void __attribute__((noinline)) register_it(char *p, size_t n, struct ibv_mr **mr)
{
	*mr = ibv_reg_mr((struct ibv_pd *)0x1000, p, n, 1);
}

int main(void)
{
	size_t n = 1 << 16;
	struct ibv_mr *mr;
	char *p = mmap(0, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	register_it(p, n, &mr);
	if (ibv_dereg_mr(mr))
		return 1;
	register_it(p, n, &mr);
	munmap(p, n);
	return ibv_dereg_mr(mr);
}
