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
#define TAG_BLOCK ((1ULL << PINDOWN_EPOCH_TAG_LEVEL_SHIFT) - 1)
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

/* The way down to the blocks at both ends of a range. */
struct walk {
	u64 lo, hi; /* pages */
	/*
	 * want_below of the blocks that the range cuts at its start and at its
	 * end; 0 if there are none. A single one goes by left.
	 */
	u32 left, right;
	u32 alone; /* counters may be added to with plain stores; and ASKED */
	u32 found; /* somebody is interested */
};

/* walk.alone, once it was asked for. */
#define ASKED 2

#define CHILDREN ((1U << FANOUT) - 1)
#define HALF ((1U << SLOTS) - 1)

/*
 * Adds n to a counter, ordered after everything before it: the value that it
 * fetches and nobody needs makes the kernel use the ordered instruction.
 */
static __inline_always void count(u64 *counter, u64 n)
{
	u64 old = __sync_fetch_and_add(counter, n);

	asm volatile("" ::"r"(old));
}

static __inline_always void bump(u64 *counter, u32 alone)
{
	if (alone)
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
 * Touches those blocks that are in bucket n and in a set of eight, of which
 * first is the tag of the first one.
 */
__noinline u32 touch_run(u32 n, u64 first, u32 set, u32 alone)
{
	struct bucket *b = bucket_at(n);
	u32 missing = 0;

	if (!b)
		return 0;
	/* A block that is there is there because of interest in it or below. */
#pragma unroll
	for (u32 i = 0; i < SLOTS; i++) {
		if (!(set & 1U << i))
			continue;
		if (READ_ONCE(b->tag[i]) == first + i)
			bump(&b->self[i], alone);
		else
			missing = 1;
	}
	if (!missing)
		return 0;
	/* Not in order, as they mostly are. */
	for (u32 i = 0; i < SLOTS; i++) {
		u64 child = READ_ONCE(b->tag[i]) - first;

		if (child < SLOTS && child != i && set >> child & 1)
			bump(&b->self[i], alone);
	}
	return 0;
}

#define BLOCK_FOUND (1ULL << 32)
#define BLOCK_ABSENT (1ULL << 33)

/*
 * Touches a block, if it is in bucket n, the whole of it or a part. Returns its
 * want_below, and whether somebody is interested in the block itself.
 */
__noinline u64 touch_block(u32 n, u64 tag, u32 whole, u32 alone)
{
	struct bucket *b = bucket_at(n);
	u64 found = 0;
	u32 i = tag & (SLOTS - 1);

	if (!b)
		return BLOCK_ABSENT;
	if (READ_ONCE(b->tag[i]) != tag) {
		for (i = 0; i < SLOTS; i++)
			if (READ_ONCE(b->tag[i]) == tag)
				break;
		if (i >= SLOTS)
			return BLOCK_ABSENT;
	}
	if (whole) {
		bump(&b->self[i], alone);
		return BLOCK_FOUND;
	}
	if (READ_ONCE(b->want[i])) {
		bump(&b->below[i], alone);
		found = BLOCK_FOUND;
	}
	return found | READ_ONCE(b->want_below[i]);
}

/* touch_block for a block that isn't at home. */
__noinline u64 touch_away(u32 level, u64 tag, u32 whole, u32 alone)
{
	u64 block = BLOCK_ABSENT;

	for (u32 try = 0; try < tries(level) && block == BLOCK_ABSENT; try++)
		block = touch_block(away(tag, try), tag, whole, alone);
	return block;
}

/*
 * Touches those children of a block that are in a set. first is the tag of the
 * first child, below is the parent's want_below.
 */
__noinline u32 touch_children(u32 level, u64 first, u32 set, u32 below, u32 alone)
{
	u64 parent = make_tag(level + 1, (first & TAG_BLOCK) >> PINDOWN_EPOCH_FANOUT_SHIFT);
	u32 far = below >> PINDOWN_EPOCH_FAR_SHIFT & set, near = set & ~far;

	if (near & HALF)
		touch_run(home(parent, 0), first, near & HALF, alone);
	if (near >> SLOTS)
		touch_run(home(parent, 1), first + SLOTS, near >> SLOTS & HALF, alone);
	if (far)
		for (u32 i = 0; i < FANOUT; i++)
			if (far >> i & 1)
				touch_away(level, first + i, 1, alone);
	return 0;
}

/*
 * Touches a part of a child whose parent has this want_below. Returns the
 * child's; 0 if it isn't there.
 */
static __inline_always u32 touch_cut(struct walk *w, u32 level, u64 block, u32 below)
{
	u64 tag = make_tag(level, block), parent = make_tag(level + 1, block >> PINDOWN_EPOCH_FANOUT_SHIFT), part;
	u32 child = block & (FANOUT - 1);

	below >>= child;
	if (!(below & 1))
		return 0;
	part = below >> PINDOWN_EPOCH_FAR_SHIFT & 1 ? touch_away(level, tag, 0, w->alone & 1) :
						      touch_block(home(parent, child / SLOTS), tag, 0, w->alone & 1);
	w->found |= part >> 32 & 1;
	return part;
}

/*
 * Touches the children in a set, not empty. To be alone is asked for once there
 * are many.
 */
static __inline_always void touch_set(struct walk *w, u32 level, u64 first, u32 set, u32 below)
{
	w->found = 1;
	if (!w->alone && set & (set - 1))
		w->alone = ASKED | !__sync_val_compare_and_swap(&alone, 0, 1);
	touch_children(level, first, set, below, w->alone & 1);
}

/* Touches the blocks of one level that the range overlaps, and goes down that level. */
__noinline u32 touch_level(struct walk *w, u32 level)
{
	u32 shift = level * PINDOWN_EPOCH_FANOUT_SHIFT & 63, below_left, below_right, cut_left, cut_right, set;
	u64 left, right, rest;

	if (!w)
		return 0;
	rest = (1ULL << shift) - 1;
	left = w->lo >> shift;
	right = (w->hi - 1) >> shift;
	below_left = w->left;
	below_right = w->right;
	cut_right = (w->hi & rest) != 0;
	cut_left = (w->lo & rest) != 0 || (cut_right && left == right);
	cut_right = cut_right && left != right;
	w->left = w->right = 0;
	if (cut_left)
		w->left = touch_cut(w, level, left, below_left);

	u32 from = (left & (FANOUT - 1)) + cut_left, to = (right & (FANOUT - 1)) + 1 - cut_right;
	int one = left >> PINDOWN_EPOCH_FANOUT_SHIFT == right >> PINDOWN_EPOCH_FANOUT_SHIFT;

	if (cut_right)
		w->right = touch_cut(w, level, right, one ? below_left : below_right);
	set = (one ? 1U << (to & 31) : 1U << FANOUT) - (1U << (from & 31));
	set &= below_left & CHILDREN;
	if (set)
		touch_set(w, level, make_tag(level, left & ~(u64)(FANOUT - 1)), set, below_left);
	if (one)
		return 0;
	set = (1U << (to & 31)) - 1;
	set &= below_right & CHILDREN;
	if (set)
		touch_set(w, level, make_tag(level, right & ~(u64)(FANOUT - 1)), set, below_right);
	return 0;
}

/* Whether nobody is interested in anything. */
static __inline_always int nobody(void)
{
	struct bucket *root;

	full_barrier();
	root = bucket_at(0);
	return !root || !(READ_ONCE(root->want[0]) | READ_ONCE(root->want_below[0]));
}

/* touch, after nobody. */
__noinline u32 touch_somebody(u64 start, u64 end)
{
	struct walk w = {};
	struct bucket *root;
	u32 want, want_below;

	w.lo = start >> PINDOWN_EPOCH_PAGE_SHIFT;
	if (start == end || w.lo >= MAX_PAGE)
		return 0;
	w.hi = ((end - 1) >> PINDOWN_EPOCH_PAGE_SHIFT) + 1;
	if (end < start || w.hi > MAX_PAGE)
		w.hi = MAX_PAGE;
	root = bucket_at(0);
	if (!root)
		return 0;
	want = READ_ONCE(root->want[0]);
	want_below = READ_ONCE(root->want_below[0]);
	if (w.lo == 0 && w.hi == MAX_PAGE) {
		if (want | want_below) {
			count(&root->self[0], 1);
			w.found = 1;
		}
	} else {
		if (want) {
			count(&root->below[0], 1);
			w.found = 1;
		}
		w.left = want_below;
	}
	s32 level = ROOT_LEVEL - 1;

	/* As long as it is a part of one block. */
	for (; level > 0 && w.left; level--) {
		u32 shift = level * PINDOWN_EPOCH_FANOUT_SHIFT & 63;
		u64 block = w.lo >> shift;

		if (block != (w.hi - 1) >> shift || !((w.lo | w.hi) & ((1ULL << shift) - 1)))
			break;
		w.left = touch_cut(&w, level, block, w.left);
	}
	for (; level >= 0 && w.left | w.right; level--)
		touch_level(&w, level);
	if (w.found) {
		u32 zero = 0;
		char *header = bpf_map_lookup_elem(&table, &zero);

		if (header)
			count((u64 *)(header + PINDOWN_EPOCH_OFF_WORD), PINDOWN_EPOCH_GENERATION_ONE);
	}
	if (w.alone & 1)
		leave();
	return w.found;
}

/*
 * Records that the pages behind [start,end) changed or are about to. An end
 * below the start is one that wrapped. Returns whether there was interest.
 */
static __inline_always u32 touch(u64 start, u64 end)
{
	return nobody() ? 0 : touch_somebody(start, end);
}

#endif
