/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The epoch table's layout: the one place where its constants are written for
 * C. layout.go holds the same figures for Go; layout_test.go compares the two.
 *
 * Shared memory, little endian, every word naturally aligned and accessed
 * atomically:
 *
 *   header  PINDOWN_EPOCH_HEADER_SIZE bytes
 *   bucket 0                 the root's bucket (slot 0 is the root, always there)
 *   bucket 1 .. 2^bits       hash buckets of PINDOWN_EPOCH_BUCKET_SLOTS slots
 */
#ifndef PINDOWN_EPOCH_LAYOUT_H
#define PINDOWN_EPOCH_LAYOUT_H

#define PINDOWN_EPOCH_MAGIC 0x48434f5045444e50ULL /* "PNDEPOCH" */
#define PINDOWN_EPOCH_VERSION 1

#define PINDOWN_EPOCH_PAGE_SHIFT 12
#define PINDOWN_EPOCH_FANOUT_SHIFT 4
#define PINDOWN_EPOCH_LEVELS 10 /* 4 KiB << (4 * 9) = 2^48: the root */
#define PINDOWN_EPOCH_BUCKET_SLOTS 8
#define PINDOWN_EPOCH_BUCKET_SIZE 256
#define PINDOWN_EPOCH_HEADER_SIZE 4096
#define PINDOWN_EPOCH_MIN_BUCKET_BITS 3
#define PINDOWN_EPOCH_MAX_BUCKET_BITS 20

/* Byte offsets in the header. */
#define PINDOWN_EPOCH_OFF_MAGIC 0
#define PINDOWN_EPOCH_OFF_VERSION 8
#define PINDOWN_EPOCH_OFF_HEADER_SIZE 12
#define PINDOWN_EPOCH_OFF_FEATURES 16
#define PINDOWN_EPOCH_OFF_READER_FEATURES 24
#define PINDOWN_EPOCH_OFF_WRITER_FEATURES 32
#define PINDOWN_EPOCH_OFF_PAGE_SHIFT 40
#define PINDOWN_EPOCH_OFF_FANOUT_SHIFT 44
#define PINDOWN_EPOCH_OFF_LEVELS 48
#define PINDOWN_EPOCH_OFF_BUCKET_SLOTS 52
#define PINDOWN_EPOCH_OFF_BUCKET_BITS 56
#define PINDOWN_EPOCH_OFF_BUCKET_SIZE 60
#define PINDOWN_EPOCH_OFF_WORD 128

/*
 * Features. The low half of READER_FEATURES and WRITER_FEATURES says what every
 * party attached on that side understands (zero: nobody is attached), the high
 * half what one of them requires the other side to understand. A bit set in
 * FEATURES must be understood by everybody. FORMAT.md has the rules.
 */
#define PINDOWN_EPOCH_FEATURE_BASE 1ULL
#define PINDOWN_EPOCH_FEATURE_HIT_CHECK 2ULL
#define PINDOWN_EPOCH_REQUIRES_SHIFT 32

/* Byte offsets in a bucket: arrays of BUCKET_SLOTS elements. */
#define PINDOWN_EPOCH_BUCKET_TAG 0         /* u64 */
#define PINDOWN_EPOCH_BUCKET_SELF 64       /* u64 */
#define PINDOWN_EPOCH_BUCKET_BELOW 128     /* u64 */
#define PINDOWN_EPOCH_BUCKET_WANT 192       /* u32 */
#define PINDOWN_EPOCH_BUCKET_WANT_BELOW 224 /* u32 */

/*
 * The word: generation << 8 | lost << 7 | busy. A writer that found interest
 * adds GENERATION_ONE after its counters. A writer that lets an operation
 * return before it has touched (userfaultfd) adds one to busy meanwhile. lost
 * is sticky: the writer is gone and nothing may be served.
 */
#define PINDOWN_EPOCH_BUSY_MASK 0x7fULL
#define PINDOWN_EPOCH_LOST 0x80ULL
#define PINDOWN_EPOCH_GENERATION_ONE 0x100ULL

/* A slot's tag: (level + 1) << 56 | block number. Zero is a free slot. */
#define PINDOWN_EPOCH_TAG_LEVEL_SHIFT 56
#define PINDOWN_EPOCH_HASH_MULTIPLIER 0x9e3779b97f4a7c15ULL

/*
 * hash(tag) = tag * HASH_MULTIPLIER >> (64 - bucket_bits). A block is in its
 * home bucket, 1 + (hash(parent's tag) ^ (block >> 3 & 1)), or where it found
 * room otherwise: 1 + (hash(its own tag) ^ n), where n < LARGE_AWAY from level
 * LARGE_LEVEL on, and n < SMALL_AWAY below.
 * WANT_BELOW has a bit for each child in use, and shifted by FAR_SHIFT for each
 * that isn't at home.
 */
#define PINDOWN_EPOCH_FAR_SHIFT 16
#define PINDOWN_EPOCH_LARGE_LEVEL 2
#define PINDOWN_EPOCH_SMALL_AWAY 2
#define PINDOWN_EPOCH_LARGE_AWAY 4

#endif
