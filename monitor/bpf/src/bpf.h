/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/*
 * The little of the BPF environment that the programs use: helper numbers from
 * the kernel's uapi (enum bpf_func_id, never reused for something else), and
 * the compiler's CO-RE built-ins.
 */
#ifndef PINDOWN_BPF_H
#define PINDOWN_BPF_H

typedef unsigned char u8;
typedef unsigned int u32;
typedef int s32;
typedef unsigned long long u64;
typedef long long s64;

#define SEC(name) __attribute__((section(name), used))
#define __inline_always inline __attribute__((always_inline))
#define __noinline __attribute__((noinline))
#define __core __attribute__((preserve_access_index))

#define __uint(name, val) int(*name)[val]
#define __type(name, val) val *name

/* Members of BTF-defined maps and values of uapi enumerations. */
#define BPF_MAP_TYPE_ARRAY 2
#define BPF_MAP_TYPE_RINGBUF 27
#define BPF_F_MMAPABLE 1024
#define BPF_RB_NO_WAKEUP 1
#define BPF_RB_FORCE_WAKEUP 2
#define BPF_RB_AVAIL_DATA 0

/* __builtin_preserve_field_info's kinds. */
#define CORE_FIELD_BYTE_OFFSET 0
#define CORE_FIELD_EXISTS 2
#define core_exists(field) __builtin_preserve_field_info(field, CORE_FIELD_EXISTS)
#define core_offset(type, field) \
	__builtin_preserve_field_info(((type *)0)->field, CORE_FIELD_BYTE_OFFSET)

static void *(*bpf_map_lookup_elem)(void *map, const void *key) = (void *)1;
static long (*bpf_probe_read_kernel)(void *dst, u32 size, const void *src) = (void *)113;
static long (*bpf_ringbuf_output)(void *ring, void *data, u64 size, u64 flags) = (void *)130;
static u64 (*bpf_ringbuf_query)(void *ring, u64 flags) = (void *)134;
static struct task_struct *(*bpf_get_current_task_btf)(void) = (void *)158;
static struct pt_regs *(*bpf_task_pt_regs)(struct task_struct *task) = (void *)175;
static u64 (*bpf_jiffies64)(void) = (void *)118;

/* The kernel may change the value at any time; read it once, as written. */
#define READ_ONCE(x) (*(const volatile typeof(x) *)&(x))

#endif
