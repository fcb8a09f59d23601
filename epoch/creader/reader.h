/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A reader of an epoch table in C, made from FORMAT.md: it states interest in
 * ranges of addresses and tells from shared memory alone whether any VM
 * operation has touched them since. C11 and GCC's or Clang's atomic builtins;
 * no library.
 *
 * There is one reader of a table at a time. pde_watch and pde_unwatch must not
 * run at the same time as each other (hold a lock around them); the rest may be
 * called from any thread.
 *
 * The order, which is what makes it right:
 *
 *   pde_watch -> pde_take -> pin or register -> remember word and stamp
 *
 * and at each later use pde_check with what was remembered.
 */
#ifndef PINDOWN_EPOCH_READER_H
#define PINDOWN_EPOCH_READER_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "../layout.h"

struct pde_table {
	unsigned char *mem;
	unsigned bits;
	uint64_t understands; /* features */
};

/* A slot: a bucket and an index in it. */
struct pde_slot {
	uint32_t bucket;
	uint32_t index;
};

/* One block of a watch, and its ancestors up to the root. */
struct pde_block {
	int n;
	struct pde_slot path[PINDOWN_EPOCH_LEVELS];
};

struct pde_watch {
	size_t n;
	struct pde_block *blocks;
};

enum pde_verdict {
	PDE_INVALID, /* touched since */
	PDE_VALID,
	PDE_LOST, /* the writer is gone: nothing is valid any more */
	PDE_BUSY, /* only from pde_try: ask again */
};

static inline uint64_t *pde_u64(const struct pde_table *t, size_t off)
{
	return (uint64_t *)(void *)(t->mem + off);
}

static inline uint32_t *pde_u32(const struct pde_table *t, size_t off)
{
	return (uint32_t *)(void *)(t->mem + off);
}

static inline uint64_t pde_load(const uint64_t *p)
{
	return __atomic_load_n(p, __ATOMIC_SEQ_CST);
}

/* The place of a slot's field: array is one of PINDOWN_EPOCH_BUCKET_... */
static inline size_t pde_place(struct pde_slot s, size_t array, size_t width)
{
	return PINDOWN_EPOCH_HEADER_SIZE + (size_t)s.bucket * PINDOWN_EPOCH_BUCKET_SIZE + array + s.index * width;
}

#define PDE_TAG(t, s) pde_u64(t, pde_place(s, PINDOWN_EPOCH_BUCKET_TAG, 8))
#define PDE_SELF(t, s) pde_u64(t, pde_place(s, PINDOWN_EPOCH_BUCKET_SELF, 8))
#define PDE_BELOW(t, s) pde_u64(t, pde_place(s, PINDOWN_EPOCH_BUCKET_BELOW, 8))
#define PDE_WANT(t, s) pde_u32(t, pde_place(s, PINDOWN_EPOCH_BUCKET_WANT, 4))
#define PDE_WANT_BELOW(t, s) pde_u32(t, pde_place(s, PINDOWN_EPOCH_BUCKET_WANT_BELOW, 4))

/*
 * Opens a table in mem, of size bytes. Returns NULL, or the name of the header's
 * field that this reader can't agree with.
 */
static const char *pde_open(struct pde_table *t, void *mem, size_t size, uint64_t understands)
{
	t->mem = (unsigned char *)mem;
	t->understands = understands | PINDOWN_EPOCH_FEATURE_BASE;
	if (size < PINDOWN_EPOCH_HEADER_SIZE || (uintptr_t)mem % 8 != 0)
		return "memory";
	if (pde_load(pde_u64(t, PINDOWN_EPOCH_OFF_MAGIC)) != PINDOWN_EPOCH_MAGIC)
		return "magic";
	if (*pde_u32(t, PINDOWN_EPOCH_OFF_VERSION) != PINDOWN_EPOCH_VERSION)
		return "version";
	if (*pde_u32(t, PINDOWN_EPOCH_OFF_HEADER_SIZE) != PINDOWN_EPOCH_HEADER_SIZE)
		return "header_size";
	if (*pde_u32(t, PINDOWN_EPOCH_OFF_PAGE_SHIFT) != PINDOWN_EPOCH_PAGE_SHIFT)
		return "page_shift";
	if (*pde_u32(t, PINDOWN_EPOCH_OFF_FANOUT_SHIFT) != PINDOWN_EPOCH_FANOUT_SHIFT)
		return "fanout_shift";
	if (*pde_u32(t, PINDOWN_EPOCH_OFF_LEVELS) != PINDOWN_EPOCH_LEVELS)
		return "levels";
	if (*pde_u32(t, PINDOWN_EPOCH_OFF_BUCKET_SLOTS) != PINDOWN_EPOCH_BUCKET_SLOTS)
		return "bucket_slots";
	if (*pde_u32(t, PINDOWN_EPOCH_OFF_BUCKET_SIZE) != PINDOWN_EPOCH_BUCKET_SIZE)
		return "bucket_size";
	t->bits = *pde_u32(t, PINDOWN_EPOCH_OFF_BUCKET_BITS);
	if (t->bits < PINDOWN_EPOCH_MIN_BUCKET_BITS || t->bits > PINDOWN_EPOCH_MAX_BUCKET_BITS)
		return "bucket_bits";
	if (size < PINDOWN_EPOCH_HEADER_SIZE + (((size_t)1 << t->bits) + 1) * PINDOWN_EPOCH_BUCKET_SIZE)
		return "memory";
	if (pde_load(pde_u64(t, PINDOWN_EPOCH_OFF_FEATURES)) & ~t->understands)
		return "features";
	return NULL;
}

/* Reports whether the writers that are attached can be agreed with. */
static int pde_fits(const struct pde_table *t, uint64_t required)
{
	uint64_t w = pde_load(pde_u64(t, PINDOWN_EPOCH_OFF_WRITER_FEATURES));

	return w == 0 || (((w >> PINDOWN_EPOCH_REQUIRES_SHIFT) & ~t->understands) == 0 &&
			  (required & ~(w & 0xffffffffULL)) == 0);
}

/*
 * Announces the reader, which requires these features of writers. Returns NULL,
 * or "writer_features".
 */
static const char *pde_attach(struct pde_table *t, uint64_t required)
{
	uint64_t *mine = pde_u64(t, PINDOWN_EPOCH_OFF_READER_FEATURES);
	uint64_t before = pde_load(mine), after;

	if (!pde_fits(t, required))
		return "writer_features";
	do {
		uint64_t understood = t->understands & 0xffffffffULL, needed = required;

		if (before != 0) {
			understood &= before;
			needed |= before >> PINDOWN_EPOCH_REQUIRES_SHIFT;
		}
		after = needed << PINDOWN_EPOCH_REQUIRES_SHIFT | understood;
	} while (!__atomic_compare_exchange_n(mine, &before, after, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
	/* A writer may have attached in between. */
	return pde_fits(t, required) ? NULL : "writer_features";
}

static inline uint64_t pde_tag(int level, uint64_t block)
{
	return (uint64_t)(level + 1) << PINDOWN_EPOCH_TAG_LEVEL_SHIFT | block;
}

/* The buckets that a block may be in, its home first. Returns how many. */
static int pde_buckets(const struct pde_table *t, int level, uint64_t block, uint32_t where[3])
{
	uint64_t own = pde_tag(level, block) * PINDOWN_EPOCH_HASH_MULTIPLIER >> (64 - t->bits);
	uint64_t above = pde_tag(level + 1, block >> PINDOWN_EPOCH_FANOUT_SHIFT) * PINDOWN_EPOCH_HASH_MULTIPLIER >> (64 - t->bits);

	if (level == PINDOWN_EPOCH_LEVELS - 1) {
		where[0] = 0;
		return 1;
	}
	where[0] = 1 + (uint32_t)(above ^ (block >> 3 & 1));
	where[1] = 1 + (uint32_t)own;
	where[2] = 1 + (uint32_t)(own ^ 1);
	return 3;
}

/* Finds a slot with this tag, 0 for a free one, in the buckets of a block. */
static int pde_find(const struct pde_table *t, int level, uint64_t block, uint64_t tag, struct pde_slot *s)
{
	uint32_t where[3];
	int i, n = pde_buckets(t, level, block, where);

	for (i = 0; i < n; i++) {
		s->bucket = where[i];
		for (s->index = 0; s->index < PINDOWN_EPOCH_BUCKET_SLOTS; s->index++)
			if (pde_load(PDE_TAG(t, *s)) == tag)
				return 1;
	}
	return 0;
}

/* What a block in a slot adds to its parent's want_below. */
static uint32_t pde_bits(const struct pde_table *t, int level, uint64_t block, struct pde_slot s)
{
	uint32_t where[3];

	pde_buckets(t, level, block, where);
	return (s.bucket == where[0] ? 1 : 1 | 1U << PINDOWN_EPOCH_FAR_SHIFT) << (block & ((1 << PINDOWN_EPOCH_FANOUT_SHIFT) - 1));
}

/* Watches one block, or the nearest ancestor for which there is room. */
static void pde_watch_block(struct pde_table *t, int level, uint64_t block, struct pde_block *out)
{
	struct pde_slot path[PINDOWN_EPOCH_LEVELS]; /* by level */
	int have = level, l;

	for (;; have++) { /* the root is always there */
		uint64_t b = block >> (PINDOWN_EPOCH_FANOUT_SHIFT * (have - level));

		if (pde_find(t, have, b, pde_tag(have, b), &path[have]))
			break;
	}
	for (l = have + 1; l < PINDOWN_EPOCH_LEVELS; l++) {
		uint64_t b = block >> (PINDOWN_EPOCH_FANOUT_SHIFT * (l - level));

		if (!pde_find(t, l, b, pde_tag(l, b), &path[l]))
			abort(); /* a block in use without its parent: not our table */
	}
	for (l = have - 1; l >= level; l--) {
		uint64_t b = block >> (PINDOWN_EPOCH_FANOUT_SHIFT * (l - level));

		if (!pde_find(t, l, b, 0, &path[l]))
			break; /* full: the parent stands in */
		__atomic_store_n(PDE_TAG(t, path[l]), pde_tag(l, b), __ATOMIC_SEQ_CST);
		__atomic_fetch_add(PDE_WANT_BELOW(t, path[l + 1]), pde_bits(t, l, b, path[l]), __ATOMIC_SEQ_CST);
		have = l;
	}
	__atomic_fetch_add(PDE_WANT(t, path[have]), 1, __ATOMIC_SEQ_CST);
	out->n = 0;
	for (l = have; l < PINDOWN_EPOCH_LEVELS; l++)
		out->path[out->n++] = path[l];
}

/*
 * Watches [start, end), rounded outward to pages of 4 KiB. Returns 0, or -1 if
 * the range is empty, reaches beyond 2^48 or there is no memory.
 */
static int pde_watch(struct pde_table *t, struct pde_watch *w, uint64_t start, uint64_t end)
{
	const uint64_t page = 1ULL << PINDOWN_EPOCH_PAGE_SHIFT;
	uint64_t lo = start / page, hi = (end + page - 1) / page, pos;
	size_t n;
	int pass;

	w->n = 0;
	w->blocks = NULL;
	if (start >= end || end > 1ULL << 48)
		return -1;
	for (pass = 0; pass < 2; pass++) { /* count, then watch */
		for (pos = lo, n = 0; pos < hi; n++) {
			int l = 0;

			/* The largest aligned block that fits. */
			while (l < PINDOWN_EPOCH_LEVELS - 1) {
				uint64_t size = 1ULL << (PINDOWN_EPOCH_FANOUT_SHIFT * (l + 1));

				if (pos % size != 0 || hi - pos < size)
					break;
				l++;
			}
			if (pass == 1)
				pde_watch_block(t, l, pos >> (PINDOWN_EPOCH_FANOUT_SHIFT * l), &w->blocks[n]);
			pos += 1ULL << (PINDOWN_EPOCH_FANOUT_SHIFT * l);
		}
		if (pass == 0 && (w->blocks = (struct pde_block *)calloc(n, sizeof *w->blocks)) == NULL)
			return -1;
	}
	w->n = n;
	return 0;
}

/* Ends a watch. */
static void pde_unwatch(struct pde_table *t, struct pde_watch *w)
{
	size_t i;

	for (i = 0; i < w->n; i++) {
		struct pde_block *b = &w->blocks[i];
		int k = 0;

		__atomic_fetch_sub(PDE_WANT(t, b->path[0]), 1, __ATOMIC_SEQ_CST);
		while (k < b->n - 1 && *PDE_WANT(t, b->path[k]) == 0 && *PDE_WANT_BELOW(t, b->path[k]) == 0) {
			uint64_t tag = *PDE_TAG(t, b->path[k]);
			int level = (int)(tag >> PINDOWN_EPOCH_TAG_LEVEL_SHIFT) - 1;
			uint64_t block = tag & ((1ULL << PINDOWN_EPOCH_TAG_LEVEL_SHIFT) - 1);

			__atomic_store_n(PDE_TAG(t, b->path[k]), 0, __ATOMIC_SEQ_CST);
			__atomic_fetch_sub(PDE_WANT_BELOW(t, b->path[k + 1]), pde_bits(t, level, block, b->path[k]), __ATOMIC_SEQ_CST);
			k++;
		}
	}
	free(w->blocks);
	w->blocks = NULL;
	w->n = 0;
}

/* The sum that changes when, and only when, a touch overlapped the watch. */
static uint64_t pde_stamp(const struct pde_table *t, const struct pde_watch *w)
{
	uint64_t sum = 0;
	size_t i;

	for (i = 0; i < w->n; i++) {
		const struct pde_block *b = &w->blocks[i];
		int k;

		sum += pde_load(PDE_SELF(t, b->path[0])) + pde_load(PDE_BELOW(t, b->path[0]));
		for (k = 1; k < b->n; k++)
			sum += pde_load(PDE_SELF(t, b->path[k]));
	}
	return sum;
}

static inline uint64_t pde_word(const struct pde_table *t)
{
	return pde_load(pde_u64(t, PINDOWN_EPOCH_OFF_WORD));
}

/* Takes word and stamp, before pinning. Waits while a writer is busy. */
static uint64_t pde_take(const struct pde_table *t, const struct pde_watch *w, uint64_t *stamp)
{
	uint64_t word;

	while ((word = pde_word(t)) & PINDOWN_EPOCH_BUSY_MASK && !(word & PINDOWN_EPOCH_LOST))
		;
	*stamp = pde_stamp(t, w);
	return word & PINDOWN_EPOCH_LOST ? 0 : word; /* no table has the word 0 */
}

/* pde_check without waiting. */
static enum pde_verdict pde_try(const struct pde_table *t, const struct pde_watch *w, uint64_t stamp, uint64_t *seen)
{
	uint64_t word = pde_word(t);

	if (word == __atomic_load_n(seen, __ATOMIC_SEQ_CST))
		return PDE_VALID;
	if (word & PINDOWN_EPOCH_LOST)
		return PDE_LOST;
	if (word & PINDOWN_EPOCH_BUSY_MASK)
		return PDE_BUSY;
	if (pde_stamp(t, w) != stamp)
		return PDE_INVALID;
	__atomic_store_n(seen, word, __ATOMIC_SEQ_CST);
	return PDE_VALID;
}

/*
 * Reports whether what was published with this word and stamp is valid still.
 * The word is brought up to date, so that the next check is one load.
 */
static inline enum pde_verdict pde_check(const struct pde_table *t, const struct pde_watch *w, uint64_t stamp, uint64_t *seen)
{
	enum pde_verdict v;

	while ((v = pde_try(t, w, stamp, seen)) == PDE_BUSY)
		;
	return v;
}

#endif
