// SPDX-License-Identifier: Apache-2.0 OR MIT
// Stands in for libibverbs: the functions that the profiler watches, one of
// which calls another as in the real one.
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

struct ibv_mr {
	void *context, *pd, *addr;
	size_t length;
	uint32_t handle, lkey, rkey;
};

struct ibv_mr *ibv_reg_mr_iova2(void *pd, void *addr, size_t length, uint64_t iova, unsigned access)
{
	static uint32_t key = 0x100;
	struct ibv_mr *mr = calloc(1, sizeof(*mr));
	(void)iova;
	(void)access;
	mr->pd = pd;
	mr->addr = addr;
	mr->length = length;
	mr->lkey = ++key;
	return mr;
}

struct ibv_mr *ibv_reg_mr(void *pd, void *addr, size_t length, int access)
{
	return ibv_reg_mr_iova2(pd, addr, length, (uintptr_t)addr, access);
}

int ibv_dereg_mr(struct ibv_mr *mr)
{
	free(mr);
	return 0;
}
