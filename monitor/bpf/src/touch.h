/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/*
 * The writer's half of the epoch table's protocol: epoch.Table.Touch in C.
 *
 * It is cut into global functions, which the verifier checks once each for any
 * arguments. As one nest of loops (levels, children, slots) it is rejected for
 * its number of paths.
 */
#ifndef PINDOWN_TOUCH_H
#define PINDOWN_TOUCH_H

#include "bpf.h"
#include "../../../epoch/layout.h"

#define SLOTS PINDOWN_EPOCH_BUCKET_SLOTS
#define FANOUT (1 << PINDOWN_EPOCH_FANOUT_SHIFT)
#define ROOT_LEVEL (PINDOWN_EPOCH_LEVELS - 1)
#define MAX_PAGE (1ULL << (PINDOWN_EPOCH_FANOUT_SHIFT * ROOT_LEVEL))

struct bucket {
	u64 tag[SLOTS];
	u64 self[SLOTS];
	u64 below[SLOTS];
	u32 want[SLOTS];
	u32 want_below[SLOTS];
};

_Static_assert(sizeof(struct bucket) == PINDOWN_EPOCH_BUCKET_SIZE, "bucket size");
_Static_assert(__builtin_offsetof(struct bucket, self) == PINDOWN_EPOCH_BUCKET_SELF, "self");
_Static_assert(__builtin_offsetof(struct bucket, below) == PINDOWN_EPOCH_BUCKET_BELOW, "below");
_Static_assert(__builtin_offsetof(struct bucket, want) == PINDOWN_EPOCH_BUCKET_WANT, "want");
_Static_assert(__builtin_offsetof(struct bucket, want_below) == PINDOWN_EPOCH_BUCKET_WANT_BELOW,
	       "want_below");

/*
 * The table is an array of bucket-sized elements, which the kernel lays out
 * without gaps. The first ones are the header.
 */
#define HEADER_BUCKETS (PINDOWN_EPOCH_HEADER_SIZE / PINDOWN_EPOCH_BUCKET_SIZE)

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, HEADER_BUCKETS + 1); /* set by the loader */
	__type(key, u32);
	__type(value, struct bucket);
} table SEC(".maps");

/* 64 - bucket bits. */
volatile const u32 bucket_shift = 61;

/* The result of touch_level. */
#define TOUCH_FOUND 1
#define TOUCH_LEFT 2  /* the block that the range's start cuts has interest below */
#define TOUCH_RIGHT 4 /* likewise its end's */

/*
 * Adds n to a counter, ordered after everything before it: the value that it
 * fetches and nobody needs makes the kernel use the ordered instruction.
 */
static __inline_always void count(u64 *counter, u64 n)
{
	u64 old = __sync_fetch_and_add(counter, n);

	asm volatile("" ::"r"(old));
}

/*
 * Orders the change of the page tables before the look for interest, as
 * ptep_get_and_clear doesn't on arm64: a reader that states interest and then
 * pins the old page must be seen here.
 */
static __inline_always void full_barrier(void)
{
#if defined(__TARGET_ARCH_arm64)
	u64 word = 0;

	count(&word, 1);
#endif
}

static __inline_always struct bucket *bucket_at(u32 n)
{
	n += HEADER_BUCKETS;
	return bpf_map_lookup_elem(&table, &n);
}

/* The slot of a tag, as bucket * SLOTS + slot; -1 if the tag isn't there. */
__noinline s64 find_slot(u64 tag)
{
	u32 n = 1 + (tag * PINDOWN_EPOCH_HASH_MULTIPLIER >> (bucket_shift & 63));
	struct bucket *b = bucket_at(n);

	if (!b)
		return -1;
#pragma unroll
	for (int i = 0; i < SLOTS; i++)
		if (READ_ONCE(b->tag[i]) == tag)
			return (s64)n * SLOTS + i;
	return -1;
}

/* Touches the blocks first..last of a level, at most FANOUT, by the pages [lo,hi). */
__noinline u32 touch_blocks(u32 level, u64 first, u64 last, u64 lo, u64 hi)
{
	u32 shift = level * PINDOWN_EPOCH_FANOUT_SHIFT & 63;
	u64 tag = (u64)(level + 1) << PINDOWN_EPOCH_TAG_LEVEL_SHIFT;
	u32 result = 0;

	for (u32 i = 0; i < FANOUT; i++) {
		u64 block = first + i;

		if (block > last)
			break;
		s64 slot = find_slot(tag | block);
		if (slot < 0)
			continue;
		struct bucket *b = bucket_at(slot / SLOTS);
		if (!b)
			continue;
		u32 s = slot & (SLOTS - 1);
		u32 want = READ_ONCE(b->want[s]);
		u32 want_below = READ_ONCE(b->want_below[s]);
		u64 from = block << shift, to = (block + 1) << shift;

		if (from >= lo && to <= hi) {
			if (want | want_below) {
				count(&b->self[s], 1);
				result |= TOUCH_FOUND;
			}
			continue;
		}
		if (want) {
			count(&b->below[s], 1);
			result |= TOUCH_FOUND;
		}
		if (want_below)
			result |= block == lo >> shift ? TOUCH_LEFT : TOUCH_RIGHT;
	}
	return result;
}

/*
 * Touches one level. edges says which of the blocks one level up, that with the
 * range's start and that with its end, have interest below; when both are one
 * block it goes by TOUCH_LEFT.
 */
__noinline u32 touch_level(u32 level, u32 edges, u64 lo, u64 hi)
{
	u32 shift = level * PINDOWN_EPOCH_FANOUT_SHIFT & 63;
	u64 left = lo >> shift, right = (hi - 1) >> shift;
	u32 result = 0;

	if (edges & TOUCH_LEFT) {
		u64 end = left | (FANOUT - 1);

		result |= touch_blocks(level, left, end < right ? end : right, lo, hi);
	}
	if (edges & TOUCH_RIGHT)
		result |= touch_blocks(level, right & ~(u64)(FANOUT - 1), right, lo, hi);
	return result;
}

/*
 * Records that the pages behind [start,end) changed or are about to. An end
 * below the start is one that wrapped. Returns whether there was interest.
 */
__noinline u32 touch(u64 start, u64 end)
{
	u64 lo = start >> PINDOWN_EPOCH_PAGE_SHIFT, hi;
	u32 edges = 0, found = 0;
	struct bucket *root;

	if (start == end || lo >= MAX_PAGE)
		return 0;
	hi = ((end - 1) >> PINDOWN_EPOCH_PAGE_SHIFT) + 1;
	if (end < start || hi > MAX_PAGE)
		hi = MAX_PAGE;
	full_barrier();
	root = bucket_at(0);
	if (!root)
		return 0;
	u32 want = READ_ONCE(root->want[0]);
	u32 want_below = READ_ONCE(root->want_below[0]);

	if (lo == 0 && hi == MAX_PAGE) {
		if (want | want_below) {
			count(&root->self[0], 1);
			found = TOUCH_FOUND;
		}
	} else {
		if (want) {
			count(&root->below[0], 1);
			found = TOUCH_FOUND;
		}
		if (want_below)
			edges = TOUCH_LEFT;
	}
	for (s32 level = ROOT_LEVEL - 1; level >= 0 && edges; level--) {
		u32 result = touch_level(level, edges, lo, hi);

		found |= result & TOUCH_FOUND;
		edges = result & (TOUCH_LEFT | TOUCH_RIGHT);
	}
	if (found) {
		u32 zero = 0;
		char *header = bpf_map_lookup_elem(&table, &zero);

		if (header)
			count((u64 *)(header + PINDOWN_EPOCH_OFF_WORD), PINDOWN_EPOCH_GENERATION_ONE);
	}
	return found;
}

#endif
