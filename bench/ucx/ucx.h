#include <stddef.h>
#include <stdint.h>

#include <ucs/memory/rcache.h>

struct peer {
	ucs_rcache_t *rcache;
	char pad0[64];
	uint64_t made; /* registrations ever, counted atomically */
	char pad1[64];
	uint64_t gone; /* and how many of them are gone */
	char pad2[64];
};

struct peer *peer_open(unsigned long max_regions, int *status);
void peer_close(struct peer *p);
int peer_run(struct peer *p, uintptr_t base, size_t length, const uint32_t *pages, size_t n);
int peer_remap(uintptr_t start, size_t length);
uint64_t peer_made(struct peer *p);
uint64_t peer_gone(struct peer *p);
