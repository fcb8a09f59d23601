/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/*
 * The little of the BPF environment that the programs use: helper numbers from
 * the kernel's uapi (enum bpf_func_id, never reused for something else), and
 * the compiler's CO-RE built-ins.
 */
#ifndef PINDOWN_PROFILE_BPF_H
#define PINDOWN_PROFILE_BPF_H

typedef unsigned char u8;
typedef unsigned short u16;
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
#define BPF_MAP_TYPE_HASH 1
#define BPF_MAP_TYPE_PERCPU_ARRAY 6
#define BPF_MAP_TYPE_RINGBUF 27
#define BPF_MAP_TYPE_TASK_STORAGE 29
#define BPF_F_NO_PREALLOC 1
#define BPF_LOCAL_STORAGE_GET_F_CREATE 1
#define BPF_RB_NO_WAKEUP 1
#define BPF_ANY 0

/* __builtin_preserve_field_info's kinds. */
#define CORE_FIELD_BYTE_OFFSET 0
#define CORE_FIELD_EXISTS 2
#define core_exists(field) __builtin_preserve_field_info(field, CORE_FIELD_EXISTS)

#define core_offset(type, field) \
	__builtin_preserve_field_info(((type *)0)->field, CORE_FIELD_BYTE_OFFSET)

struct task_struct;
struct pt_regs;

static void *(*bpf_map_lookup_elem)(void *map, const void *key) = (void *)1;
static long (*bpf_map_update_elem)(void *map, const void *key, const void *value, u64 flags) = (void *)2;
static long (*bpf_map_delete_elem)(void *map, const void *key) = (void *)3;
static u64 (*bpf_ktime_get_ns)(void) = (void *)5;
static u64 (*bpf_get_current_pid_tgid)(void) = (void *)14;
static long (*bpf_get_current_comm)(void *buf, u32 size) = (void *)16;
static long (*bpf_probe_read_user)(void *dst, u32 size, const void *src) = (void *)112;
static long (*bpf_get_ns_current_pid_tgid)(u64 dev, u64 ino, void *ids, u32 size) = (void *)120;
static void *(*bpf_ringbuf_reserve)(void *ring, u64 size, u64 flags) = (void *)131;
static void (*bpf_ringbuf_submit)(void *data, u64 flags) = (void *)132;
static void *(*bpf_task_storage_get)(void *map, struct task_struct *task, void *value, u64 flags) = (void *)156;
static struct task_struct *(*bpf_get_current_task_btf)(void) = (void *)158;
static u64 (*bpf_get_attach_cookie)(void *ctx) = (void *)174;
static struct pt_regs *(*bpf_task_pt_regs)(struct task_struct *task) = (void *)175;

/* Read once, in the size that is written. */
#define READ_ONCE(x) (*(const volatile typeof(x) *)&(x))

#endif
