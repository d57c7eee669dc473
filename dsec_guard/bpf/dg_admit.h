/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/* dg_admit.h - maps, whose task this is, and whether an event may still be sent. */
#ifndef DG_ADMIT_H
#define DG_ADMIT_H

#define DG_WINDOW_NS 1000000000ULL

/* Alone in its section, so that the loader can write it without knowing the other constants' places. */
const volatile struct dg_config dg_config SEC(".rodata.dg");

struct dg_global dg_global SEC(".bss.dg");

#define DG_MAP(name, map_type, entries, key_type, value_type)	\
	struct {						\
		__uint(type, map_type);				\
		__uint(max_entries, entries);			\
		__type(key, key_type);				\
		__type(value, value_type);			\
	} name SEC(".maps")

/* The sizes of boxes, stats, counts, watches, objects, evidence and context are set by the loader. */
DG_MAP(boxes, BPF_MAP_TYPE_HASH, 64, __u64, struct dg_box);
DG_MAP(stats, BPF_MAP_TYPE_HASH, 64, __u64, struct dg_stats);
DG_MAP(watches, BPF_MAP_TYPE_HASH, 64, __u64, struct dg_watch);
DG_MAP(objects, BPF_MAP_TYPE_HASH, 1024, struct dg_object_key, __u64);
DG_MAP(counts, BPF_MAP_TYPE_HASH, 16384, struct dg_count_key, __u64);
DG_MAP(repeats, BPF_MAP_TYPE_LRU_HASH, 16384, struct dg_repeat_key, struct dg_repeat);
DG_MAP(ioctls, BPF_MAP_TYPE_HASH, 256, __u32, __u32);

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 4 << 20);
} evidence SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 20);
} context SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct dg_task_mark);
} tasks SEC(".maps");

/* What an event's admission needs to know. */
struct dg_asker {
	__u64 box;
	const struct dg_box *cfg;
	struct dg_stats *stats;
};

#define DG_INLINE static __always_inline

/* Is this a live box? Leaves the counters for later: most calls of honest work end without them. */
DG_INLINE int dg_live_box(__u64 box, struct dg_asker *who)
{
	who->box = box;
	who->cfg = bpf_map_lookup_elem(&boxes, &box);
	return who->cfg && who->cfg->live;
}

DG_INLINE int dg_find_stats(struct dg_asker *who)
{
	who->stats = bpf_map_lookup_elem(&stats, &who->box);
	return who->stats != 0;
}

DG_INLINE int dg_asker_of(__u64 box, struct dg_asker *who)
{
	return dg_live_box(box, who) && dg_find_stats(who);
}

/* The box directory above @task's v2 cgroup, 0 if there is none. Needs no helper: @task need not be current. */
DG_INLINE __u64 dg_box_id_of(struct task_struct *task)
{
	struct cgroup *cgrp = BPF_CORE_READ(task, cgroups, dfl_cgrp);
	__u32 level = dg_config.ancestor_level;
	struct cgroup *above = 0;

	if (!cgrp || BPF_CORE_READ(cgrp, level) < (int)level)
		return 0;
	bpf_core_read(&above, sizeof(above), &cgrp->ancestors[level]);
	return above ? BPF_CORE_READ(above, kn, id) : 0;
}

/*
 * Second line: a task that left its box's cgroup keeps its mark. Looked up only once such a move was seen
 * (cgroup_attach_task), so that an unboxed task costs one hash look-up and no more.
 */
DG_INLINE __u64 dg_strayed_box(struct task_struct *task)
{
	struct dg_task_mark *mark;

	if (!dg_global.strayed)
		return 0;
	mark = bpf_task_storage_get(&tasks, task, 0, 0);
	return mark ? mark->box : 0;
}

/* The live box of the current task, for tracing programs. */
DG_INLINE int dg_current_box(struct task_struct *task, struct dg_asker *who)
{
	if (dg_live_box(bpf_get_current_ancestor_cgroup_id(dg_config.ancestor_level), who))
		return 1;
	return dg_global.strayed && dg_live_box(dg_strayed_box(task), who);
}

DG_INLINE int dg_current_asker(struct task_struct *task, struct dg_asker *who)
{
	return dg_current_box(task, who) && dg_find_stats(who);
}

DG_INLINE void dg_count(const struct dg_asker *who, __u32 nr, __s32 ret)
{
	struct dg_count_key key = { .box = who->box, .nr = nr, .ret = ret };
	__u64 *count = bpf_map_lookup_elem(&counts, &key);
	__u64 zero = 0;

	if (!count && __sync_fetch_and_add(&who->stats->count_keys, 1) < DG_COUNT_KEYS) {
		bpf_map_update_elem(&counts, &key, &zero, BPF_NOEXIST);
		count = bpf_map_lookup_elem(&counts, &key);
	}
	__sync_fetch_and_add(count ? count : &who->stats->calls_other, 1);
}

/* 1 if this is one of the first @limit of its kind in the running window. */
DG_INLINE int dg_fresh(const struct dg_asker *who, __u32 nr, __s32 ret, __u64 hash, __u64 now, __u64 limit)
{
	struct dg_repeat_key key = { .box = who->box, .nr = nr, .ret = ret, .hash = hash };
	struct dg_repeat first = { .window = now, .n = 1 };
	struct dg_repeat *seen = bpf_map_lookup_elem(&repeats, &key);

	if (!seen) {
		bpf_map_update_elem(&repeats, &key, &first, BPF_ANY);
		return 1;
	}
	if (now - seen->window > DG_WINDOW_NS) {
		seen->window = now;
		seen->n = 1;
		return 1;
	}
	return __sync_fetch_and_add(&seen->n, 1) < limit;
}

enum dg_weight { DG_PLAIN, DG_CRITICAL, DG_PROTECTED };

/*
 * dg_admit - may one more event of this box enter the evidence ring?
 * Every call that asks is either admitted, or counted under (nr, ret): the sum is exact. Beyond its budget a box's
 * plain events are only counted and it is `over_budget`; critical ones and protected objects have a reserve each, so
 * that a flood of one cannot use up the other's.
 */
DG_INLINE int dg_admit(const struct dg_asker *who, __u32 nr, __s32 ret, __u64 hash, __u64 now, enum dg_weight weight)
{
	struct dg_stats *st = who->stats;
	__u64 used;

	if (!dg_fresh(who, nr, ret, hash | 1, now, DG_REPEATS) ||
	    (weight != DG_PROTECTED && !dg_fresh(who, nr, ret, 0, now, DG_DISTINCT))) {
		__sync_fetch_and_add(&st->suppressed, 1);
		dg_count(who, nr, ret);
		return 0;
	}
	used = __sync_fetch_and_add(&st->events, 1);
	if (used < who->cfg->event_budget)
		return 1;
	if (weight == DG_CRITICAL && __sync_fetch_and_add(&st->reserved, 1) < who->cfg->reserved_budget)
		return 1;
	if (weight == DG_PROTECTED && __sync_fetch_and_add(&st->protected_seen, 1) < who->cfg->reserved_budget)
		return 1;
	__sync_fetch_and_add(&st->over_budget, 1);
	dg_count(who, nr, ret);
	return 0;
}

DG_INLINE int dg_admit_context(const struct dg_asker *who)
{
	if (__sync_fetch_and_add(&who->stats->context, 1) < who->cfg->context_budget)
		return 1;
	__sync_fetch_and_add(&who->stats->lost_context, 1);
	return 0;
}

/*
 * Plain events stop at three quarters of the ring, so that one box's burst leaves room for what matters of the others.
 * The loss is the box's own.
 */
DG_INLINE void dg_send(const struct dg_asker *who, void *record, __u64 size, enum dg_weight weight)
{
	__u64 full = bpf_ringbuf_query(&evidence, BPF_RB_AVAIL_DATA);
	__u64 room = bpf_ringbuf_query(&evidence, BPF_RB_RING_SIZE);

	if ((weight != DG_PLAIN || full < room - room / 4) && !bpf_ringbuf_output(&evidence, record, size, 0)) {
		__sync_fetch_and_add(&who->stats->emitted, 1);
		return;
	}
	__sync_fetch_and_add(&who->stats->lost_evidence, 1);
	__sync_fetch_and_add(&dg_global.lost_evidence, 1);
}

/* Context wakes nobody until the ring is a quarter full: whoever reads evidence takes it along. */
DG_INLINE void dg_send_context(const struct dg_asker *who, void *record, __u64 size)
{
	__u64 full = bpf_ringbuf_query(&context, BPF_RB_AVAIL_DATA);
	__u64 room = bpf_ringbuf_query(&context, BPF_RB_RING_SIZE);
	__u64 flags = full > room / 4 ? BPF_RB_FORCE_WAKEUP : BPF_RB_NO_WAKEUP;

	if (!bpf_ringbuf_output(&context, record, size, flags))
		return;
	__sync_fetch_and_add(&who->stats->lost_context, 1);
	__sync_fetch_and_add(&dg_global.lost_context, 1);
}

/* The head's part that every program type can fill. */
DG_INLINE void dg_fill_head(struct dg_head *head, const struct dg_asker *who, __u16 kind, __u32 size)
{
	__u64 ids = bpf_get_current_pid_tgid();

	head->at_ns = bpf_ktime_get_ns();
	head->box = who->box;
	head->kind = kind;
	head->flags = 0;
	head->size = size;
	head->exec = 0;
	head->phase = who->cfg->phase;
	head->tgid = ids >> 32;
	head->tid = ids;
	head->ppid = 0;
	head->uid = bpf_get_current_uid_gid();
	bpf_get_current_comm(head->comm, sizeof(head->comm));
}

/* The same with what only tracing programs can see. */
DG_INLINE void dg_fill_task_head(struct dg_head *head, const struct dg_asker *who, struct task_struct *task, __u16 kind,
				 __u32 size)
{
	struct dg_task_mark *mark = bpf_task_storage_get(&tasks, task, 0, 0);

	dg_fill_head(head, who, kind, size);
	head->exec = mark ? mark->exec : 0;
	head->ppid = BPF_CORE_READ(task, real_parent, tgid);
}

DG_INLINE __u64 dg_mix(__u64 hash, __u64 word)
{
	hash = (hash ^ word) * 0x9e3779b97f4a7c15ULL;
	return hash ^ (hash >> 29);
}

#endif
