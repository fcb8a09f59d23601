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

/*
 * Taken, without waiting, by the program that may add to counters with plain
 * loads and stores: a locked addition costs as much as all the rest of a
 * block's touch.
 */
u64 alone;

/*
 * What a program that is alone adds. Those that aren't add one, atomically, and
 * may do so between its load and its store: what they added is lost then, but
 * the counter has grown by more. So whoever writes makes it grow, and a reader
 * never sees a value again.
 */
#define ALONE_ADDS (1ULL << 28)

/*
 * What is known of the blocks that the range cuts at its start and its end, one
 * level up. When both are one block it goes by LEFT.
 */
#define FOUND 1
#define LEFT 2      /* the block at the start has interest below */
#define LEFT_FAR 4  /* some children of it aren't where children should be */
#define RIGHT 8
#define RIGHT_FAR 16
/* How to touch. */
#define ALONE 32

/*
 * Adds n to a counter, ordered after everything before it: the value that it
 * fetches and nobody needs makes the kernel use the ordered instruction.
 */
static __inline_always void count(u64 *counter, u64 n)
{
	u64 old = __sync_fetch_and_add(counter, n);

	asm volatile("" ::"r"(old));
}

static __inline_always void bump(u64 *counter, u32 how)
{
	if (how & ALONE)
		*(volatile u64 *)counter = READ_ONCE(*counter) + ALONE_ADDS;
	else
		count(counter, 1);
}

/* Lets others be alone, after all stores to counters. */
static __inline_always void leave(void)
{
#if defined(__TARGET_ARCH_arm64)
	count(&alone, -1ULL);
#else
	*(volatile u64 *)&alone = 0; /* stores stay in order */
#endif
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

static __inline_always u64 make_tag(u32 level, u64 block)
{
	return (u64)(level + 1) << PINDOWN_EPOCH_TAG_LEVEL_SHIFT | block;
}

static __inline_always u32 hash(u64 tag)
{
	return tag * PINDOWN_EPOCH_HASH_MULTIPLIER >> (bucket_shift & 63);
}

/* The bucket where the children of a block should be, of one half (0 or 1). */
static __inline_always u32 home(u64 parent, u32 half)
{
	return 1 + (hash(parent) ^ half);
}

/* The buckets where a block is that found no room at home, and their number. */
static __inline_always u32 tries(u32 level)
{
	return level < PINDOWN_EPOCH_LARGE_LEVEL ? PINDOWN_EPOCH_SMALL_AWAY : PINDOWN_EPOCH_LARGE_AWAY;
}

static __inline_always u32 away(u64 tag, u32 try)
{
	return 1 + (hash(tag) ^ try);
}

/*
 * Touches those children of a block that are in bucket n and in the set
 * covered. first is the tag of the first child. Returns which they were.
 */
__noinline u32 touch_run(u32 n, u64 first, u32 covered, u32 how)
{
	struct bucket *b = bucket_at(n);
	u32 found = 0;

	if (!b)
		return 0;
	for (u32 i = 0; i < SLOTS; i++) {
		u64 child = READ_ONCE(b->tag[i]) - first;

		/* A block that is there is there because of interest in it or below. */
		if (child >= FANOUT || !(covered >> child & 1))
			continue;
		bump(&b->self[i], how);
		found |= 1 << child;
	}
	return found;
}

/*
 * Touches a part of a block, if it is in bucket n. Returns FOUND, LEFT and
 * LEFT_FAR; ALONE if the block isn't there.
 */
__noinline u32 touch_part(u32 n, u64 tag, u32 how)
{
	struct bucket *b = bucket_at(n);
	u32 i, want_below, result = 0;

	if (!b)
		return ALONE;
	for (i = 0; i < SLOTS; i++)
		if (READ_ONCE(b->tag[i]) == tag)
			break;
	if (i >= SLOTS)
		return ALONE;
	if (READ_ONCE(b->want[i])) {
		bump(&b->below[i], how);
		result = FOUND;
	}
	want_below = READ_ONCE(b->want_below[i]);
	if (want_below)
		result |= LEFT;
	if (want_below >> PINDOWN_EPOCH_FAR_SHIFT)
		result |= LEFT_FAR;
	return result;
}

/*
 * Touches the children of a block that overlap the pages [lo,hi). level is the
 * children's; how has ALONE, and LEFT_FAR if some children are elsewhere.
 */
__noinline u32 touch_children(u32 level, u64 block, u32 how, u64 lo, u64 hi)
{
	u32 shift = level * PINDOWN_EPOCH_FANOUT_SHIFT & 63;
	u64 left = lo >> shift, right = (hi - 1) >> shift, base = block << PINDOWN_EPOCH_FANOUT_SHIFT;
	u64 parent = make_tag(level + 1, block), first = make_tag(level, base);
	u64 from = left > base ? left : base, to = right < base + FANOUT - 1 ? right : base + FANOUT - 1;
	u32 covered, found = 0, result = 0, far = how & LEFT_FAR;

	if (from > to)
		return 0;
	covered = (2U << ((to - base) & (FANOUT - 1))) - (1U << ((from - base) & (FANOUT - 1)));
	if (from == left && (left << shift < lo || (left + 1) << shift > hi)) {
		u32 child = (left - base) & (FANOUT - 1), part;

		covered &= ~(1U << child);
		part = touch_part(home(parent, child / SLOTS), first + child, how);
		for (u32 try = 0; try < tries(level) && part == ALONE && far; try++)
			part = touch_part(away(first + child, try), first + child, how);
		if (part != ALONE)
			result = part;
	}
	if (to == right && right != left && (right + 1) << shift > hi) {
		u32 child = (right - base) & (FANOUT - 1), part;

		covered &= ~(1U << child);
		part = touch_part(home(parent, child / SLOTS), first + child, how);
		for (u32 try = 0; try < tries(level) && part == ALONE && far; try++)
			part = touch_part(away(first + child, try), first + child, how);
		if (part != ALONE)
			result |= (part & FOUND) | (part & (LEFT | LEFT_FAR)) << 2;
	}
	if (covered & ((1 << SLOTS) - 1))
		found = touch_run(home(parent, 0), first, covered, how);
	if ((covered & ~found) >> SLOTS)
		found |= touch_run(home(parent, 1), first, covered & ~found, how);
	if (far)
		for (u32 i = 0; i < FANOUT; i++)
			for (u32 try = 0; try < tries(level) && (covered & ~found) >> i & 1; try++)
				found |= touch_run(away(first + i, try), first, 1U << i, how);
	return result | (found & covered ? FOUND : 0);
}

/*
 * Records that the pages behind [start,end) changed or are about to. An end
 * below the start is one that wrapped. Returns whether there was interest.
 */
__noinline u32 touch(u64 start, u64 end)
{
	u64 lo = start >> PINDOWN_EPOCH_PAGE_SHIFT, hi;
	u32 edges = 0, found = 0, how = 0;
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
			found = FOUND;
		}
	} else {
		if (want) {
			count(&root->below[0], 1);
			found = FOUND;
		}
		if (want_below)
			edges = LEFT;
		if (want_below >> PINDOWN_EPOCH_FAR_SHIFT)
			edges |= LEFT_FAR;
	}
	if (edges && !__sync_val_compare_and_swap(&alone, 0, 1))
		how = ALONE;
	for (s32 level = ROOT_LEVEL - 1; level >= 0 && edges; level--) {
		u32 shift = (level + 1) * PINDOWN_EPOCH_FANOUT_SHIFT & 63, result = 0;

		if (edges & LEFT)
			result = touch_children(level, lo >> shift, how | (edges & LEFT_FAR), lo, hi);
		if (edges & RIGHT)
			result |= touch_children(level, (hi - 1) >> shift, how | (edges & RIGHT_FAR) >> 2, lo, hi);
		found |= result & FOUND;
		edges = result & ~FOUND;
	}
	if (found) {
		u32 zero = 0;
		char *header = bpf_map_lookup_elem(&table, &zero);

		if (header)
			count((u64 *)(header + PINDOWN_EPOCH_OFF_WORD), PINDOWN_EPOCH_GENERATION_ONE);
	}
	if (how)
		leave();
	return found;
}

#endif
