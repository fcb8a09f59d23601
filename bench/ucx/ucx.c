#include "ucx.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <ucm/api/ucm.h>

static ucs_status_t mem_reg(void *context, ucs_rcache_t *rcache, void *arg,
			    ucs_rcache_region_t *region, uint16_t flags)
{
	struct peer *p = context;

	__atomic_fetch_add(&p->made, 1, __ATOMIC_RELAXED);
	return UCS_OK;
}

static void mem_dereg(void *context, ucs_rcache_t *rcache, ucs_rcache_region_t *region)
{
	struct peer *p = context;

	__atomic_fetch_add(&p->gone, 1, __ATOMIC_RELAXED);
}

static void dump_region(void *context, ucs_rcache_t *rcache, ucs_rcache_region_t *region,
			char *buf, size_t max)
{
	if (max > 0)
		buf[0] = '\0';
}

static const ucs_rcache_ops_t ops = {
	.mem_reg = mem_reg,
	.mem_dereg = mem_dereg,
	.dump_region = dump_region,
};

struct peer *peer_open(unsigned long max_regions, int *status)
{
	struct peer *p = calloc(1, sizeof(*p));
	ucs_rcache_params_t params = {
		.region_struct_size = sizeof(ucs_rcache_region_t),
		.alignment = 4096,
		.max_alignment = 4096,
		.ucm_events = UCM_EVENT_VM_UNMAPPED,
		.ucm_event_priority = 1000,
		.ops = &ops,
		.context = p,
		/* No flags: with UCS_RCACHE_FLAG_NO_PFN_CHECK 1.13 evicts nothing. */
		.max_regions = max_regions,
		.max_size = SIZE_MAX,
		.max_unreleased = SIZE_MAX,
	};

	if (p == NULL) {
		*status = UCS_ERR_NO_MEMORY;
		return NULL;
	}
	*status = ucs_rcache_create(&params, "bench", NULL, &p->rcache);
	if (*status != UCS_OK) {
		free(p);
		return NULL;
	}
	return p;
}

void peer_close(struct peer *p)
{
	ucs_rcache_destroy(p->rcache);
	free(p);
}

/* The loop is that of the other workers; it is in C so that a cgo call is made
 * for each thousand of operations, not for each. */
int peer_run(struct peer *p, uintptr_t base, size_t length, const uint32_t *pages, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		uintptr_t start = base + ((uintptr_t)pages[i] << 12);
		ucs_rcache_region_t *region;
		ucs_status_t status;

		status = ucs_rcache_get(p->rcache, (void *)start, length, PROT_READ | PROT_WRITE,
					NULL, &region);
		if (status != UCS_OK)
			return status;
		ucs_rcache_region_put(p->rcache, region);
	}
	return UCS_OK;
}

/* UCX sees what goes through libc. */
int peer_remap(uintptr_t start, size_t length)
{
	void *at = mmap((void *)start, length, PROT_NONE,
			MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);

	return at == MAP_FAILED ? errno : 0;
}

uint64_t peer_made(struct peer *p) { return __atomic_load_n(&p->made, __ATOMIC_RELAXED); }
uint64_t peer_gone(struct peer *p) { return __atomic_load_n(&p->gone, __ATOMIC_RELAXED); }
