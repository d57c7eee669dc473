/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/* dg_tasks.h - rare tracepoints: the life of processes, signals, io_uring, cgroup moves. No cost per system call. */
#ifndef DG_TASKS_H
#define DG_TASKS_H

#define DG_CLONE_THREAD 0x00010000ULL
#define DG_SIGNAL_GROUP_EXIT 0x4          /* include/linux/sched/signal.h */
#define DG_SEND_SIG_PRIV ((void *)1)
#define DG_SI_TKILL (-6)                  /* include/uapi/asm-generic/siginfo.h */

struct dg_exec_scratch {
	struct dg_exec exec;
	struct dg_call opened;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct dg_exec_scratch);
} exec_scratch SEC(".maps");

/* exec of a protected object: nothing passes open(2). */
DG_INLINE void dg_exec_opened(struct dg_exec_scratch *s, const struct dg_asker *who, struct task_struct *task,
			      struct linux_binprm *bprm)
{
	struct inode *inode = BPF_CORE_READ(bprm, file, f_inode);
	struct dg_object_key key = { .dev = BPF_CORE_READ(inode, i_sb, s_dev), .ino = BPF_CORE_READ(inode, i_ino) };
	__u64 *object = bpf_map_lookup_elem(&objects, &key);
	struct dg_call *call = &s->opened;
	__u64 size = sizeof(*call) - DG_TAIL_MAX;
	long got;

	if (!object)
		return;
	__builtin_memset(call, 0, sizeof(*call) - DG_TAIL_MAX);
	dg_fill_task_head(&call->head, who, task, DG_FILE, 0);
	call->object = *object;
	call->why = DG_W_EXEC;
	call->nr = 59;
	call->cls = DG_C_EXECVE;
	got = bpf_probe_read_kernel_str(call->tail, DG_PATH_MAX, BPF_CORE_READ(bprm, filename));
	if (got > 1) {
		call->len_path = (got - 1) & (DG_PATH_MAX - 1);
		size += call->len_path;
	}
	call->head.size = size;
	if (dg_admit(who, call->nr, 0, *object, call->head.at_ns, DG_PROTECTED))
		dg_send(who, call, size & 4095, DG_PROTECTED);
}

SEC("tp_btf/sched_process_exec")
int BPF_PROG(dg_exec, struct task_struct *task, int old_pid, struct linux_binprm *bprm)
{
	struct dg_asker who;
	struct dg_exec_scratch *s;
	__u32 zero = 0, off = 0, len;
	unsigned long start, end;
	long got;

	if (!dg_current_asker(task, &who))
		return 0;
	__sync_fetch_and_add(&who.stats->execs, 1);
	s = bpf_map_lookup_elem(&exec_scratch, &zero);
	if (!s)
		return 0;
	if (dg_global.protected_objects)
		dg_exec_opened(s, &who, task, bprm);
	if (!dg_admit_context(&who))
		return 0;
	dg_fill_task_head(&s->exec.head, &who, task, DG_EXEC, 0);
	s->exec.nlink = BPF_CORE_READ(bprm, file, f_inode, i_nlink);
	got = bpf_probe_read_kernel_str(s->exec.tail, DG_PATH_MAX, BPF_CORE_READ(bprm, filename));
	if (got > 1)
		off = (got - 1) & (DG_PATH_MAX - 1);
	s->exec.len_file = off;
	start = BPF_CORE_READ(task, mm, arg_start);
	end = BPF_CORE_READ(task, mm, arg_end);
	len = end > start ? end - start : 0;
	if (end - start > DG_ARGV_MAX)
		len = DG_ARGV_MAX;
	if (len > DG_ARGV_MAX || bpf_probe_read_user(&s->exec.tail[off & (DG_PATH_MAX - 1)], len, (void *)start))
		len = 0;
	s->exec.len_argv = len;
	len = sizeof(s->exec) - sizeof(s->exec.tail) + off + len;
	s->exec.head.size = len;
	dg_send_context(&who, &s->exec, len & 1023);
	return 0;
}

/*
 * The new task gets its mark here, before it runs: the box, and which command of the box it belongs to. A process that
 * dg-init makes is the next command; all others inherit.
 */
SEC("tp_btf/task_newtask")
int BPF_PROG(dg_newtask, struct task_struct *child, __u64 clone_flags)
{
	struct task_struct *task = bpf_get_current_task_btf();
	struct dg_task_mark *mark, *parent;
	struct dg_task record = {};
	struct dg_asker who;
	__u32 exec = 0;

	if (!dg_current_asker(task, &who))
		return 0;
	parent = bpf_task_storage_get(&tasks, task, 0, 0);
	if (parent)
		exec = parent->exec;
	if ((__u32)task->tgid == who.cfg->init_tgid && !(clone_flags & DG_CLONE_THREAD))
		exec = __sync_fetch_and_add(&who.stats->exec_counter, 1) + 1;
	mark = bpf_task_storage_get(&tasks, child, 0, BPF_LOCAL_STORAGE_GET_F_CREATE);
	if (mark) {
		mark->box = who.box;
		mark->exec = exec;
	}
	if (clone_flags & DG_CLONE_THREAD)
		__sync_fetch_and_add(&who.stats->threads, 1);
	else
		__sync_fetch_and_add(&who.stats->forks, 1);
	if (!dg_admit_context(&who))
		return 0;
	dg_fill_task_head(&record.head, &who, task, DG_TASK, sizeof(record));
	record.clone_flags = clone_flags;
	record.child_tgid = child->tgid;
	record.child_tid = child->pid;
	record.child_exec = exec;
	dg_send_context(&who, &record, sizeof(record));
	return 0;
}

SEC("tp_btf/sched_process_exit")
int BPF_PROG(dg_exit, struct task_struct *task)
{
	struct dg_exit record = {};
	struct dg_asker who;

	if (!dg_current_asker(task, &who) || BPF_CORE_READ(task, signal, live.counter))
		return 0;
	__sync_fetch_and_add(&who.stats->exits, 1);
	if (!dg_admit_context(&who))
		return 0;
	dg_fill_task_head(&record.head, &who, task, DG_EXIT, sizeof(record));
	record.status = BPF_CORE_READ(task, signal, flags) & DG_SIGNAL_GROUP_EXIT ?
			BPF_CORE_READ(task, signal, group_exit_code) : task->exit_code;
	dg_send_context(&who, &record, sizeof(record));
	return 0;
}

/*
 * A signal that carries a negative si_code was either sent by one of three calls, whose caller chooses the code, or made
 * by the kernel on its own: a timer of anybody's runs out while this task happens to be on the CPU.
 */
DG_INLINE int dg_sent_by_call(struct task_struct *task, int code)
{
	struct pt_regs *regs;
	unsigned long nr;

	if (code >= 0 || code == DG_SI_TKILL)
		return 1;
	regs = (struct pt_regs *)bpf_task_pt_regs(task);
	nr = regs->orig_ax;
	return nr == 129 || nr == 297 || nr == 424; /* rt_sigqueueinfo, rt_tgsigqueueinfo, pidfd_send_signal */
}

/*
 * Signals that were really made. To the own box: only counted. To dg-init or out of the box: evidence. Faults the
 * kernel answers with a signal (SIGSYS from seccomp, SIGSEGV ...) are context.
 */
SEC("tp_btf/signal_generate")
int BPF_PROG(dg_signal, int sig, struct kernel_siginfo *info, struct task_struct *target, int group, int result)
{
	struct task_struct *task = bpf_get_current_task_btf();
	struct dg_signal record = {};
	struct dg_asker who;
	__u32 tgid;
	int code = 0, from_kernel = 0, in_box, is_init;

	if (!dg_current_asker(task, &who))
		return 0;
	if (info == DG_SEND_SIG_PRIV) {
		from_kernel = 1;
	} else if (info) {
		bpf_core_read(&code, sizeof(code), &info->si_code);
		from_kernel = code > 0 || !dg_sent_by_call(task, code);
	}
	tgid = BPF_CORE_READ(target, tgid);
	in_box = dg_box_id_of(target) == who.box;
	is_init = tgid == who.cfg->init_tgid;
	if (from_kernel) {
		/* SIGILL SIGBUS SIGFPE SIGSEGV SIGSYS: a fault of the task itself */
		if (target != task || !(sig == 4 || sig == 7 || sig == 8 || sig == 11 || sig == 31))
			return 0;
	} else if ((__u32)task->tgid == who.cfg->init_tgid || (in_box && !is_init)) {
		__sync_fetch_and_add(&who.stats->signals, 1);
		return 0;
	}
	dg_fill_task_head(&record.head, &who, task, DG_SIGNAL, sizeof(record));
	record.sig = sig;
	record.code = code;
	record.target_tgid = tgid;
	record.in_box = in_box;
	record.is_init = is_init;
	record.from_kernel = from_kernel;
	record.result = result;
	if (from_kernel) {
		if (dg_admit_context(&who))
			dg_send_context(&who, &record, sizeof(record));
	} else if (dg_admit(&who, DG_NR_HOOK + DG_SIGNAL, -sig, tgid, record.head.at_ns, DG_CRITICAL)) {
		dg_send(&who, &record, sizeof(record), DG_CRITICAL);
	}
	return 0;
}

/* Refused capability checks happen all the time in honest work: the first of each kind is context. */
SEC("tp_btf/cap_capable")
int BPF_PROG(dg_capable, const struct cred *cred, struct user_namespace *target_ns, const struct user_namespace *capable_ns,
	     int cap, int ret)
{
	struct task_struct *task = bpf_get_current_task_btf();
	struct dg_cap record = {};
	struct dg_asker who;
	__u64 bit = 1ULL << (cap & 63);

	if (!ret || !dg_current_asker(task, &who) || (who.stats->caps_seen & bit) ||
	    (__u32)task->tgid == who.cfg->init_tgid)
		return 0;
	if ((__sync_fetch_and_or(&who.stats->caps_seen, bit) & bit) || !dg_admit_context(&who))
		return 0;
	dg_fill_task_head(&record.head, &who, task, DG_CAP, sizeof(record));
	record.cap = cap;
	dg_send_context(&who, &record, sizeof(record));
	return 0;
}

DG_INLINE int dg_uring_used(__u32 op, __u32 opcode)
{
	struct task_struct *task = bpf_get_current_task_btf();
	struct dg_uring record = {};
	struct dg_asker who;

	if (!dg_current_asker(task, &who))
		return 0;
	dg_fill_task_head(&record.head, &who, task, DG_URING, sizeof(record));
	record.op = op;
	record.opcode = opcode;
	if (dg_admit(&who, DG_NR_HOOK + DG_URING + 32 * op, 0, opcode, record.head.at_ns, DG_CRITICAL))
		dg_send(&who, &record, sizeof(record), DG_CRITICAL);
	return 0;
}

SEC("tp_btf/io_uring_create")
int BPF_PROG(dg_uring_create)
{
	return dg_uring_used(1, 0);
}

SEC("tp_btf/io_uring_submit_req")
int BPF_PROG(dg_uring_submit, struct io_kiocb *req)
{
	return dg_uring_used(2, BPF_CORE_READ(req, opcode));
}

/* Runs after the move: the mark says which box the task belonged to. */
SEC("tp_btf/cgroup_attach_task")
int BPF_PROG(dg_attach_task, struct cgroup *cgrp, const char *path, struct task_struct *moved)
{
	struct dg_task_mark *mark = bpf_task_storage_get(&tasks, moved, 0, 0);
	struct dg_cgroup record = {};
	struct dg_asker who;
	long got;

	if (!mark || !dg_asker_of(mark->box, &who))
		return 0;
	if (dg_box_id_of(moved) != who.box)
		__sync_fetch_and_add(&dg_global.strayed, 1);
	dg_fill_task_head(&record.head, &who, bpf_get_current_task_btf(), DG_CGROUP, sizeof(record));
	record.destination = BPF_CORE_READ(cgrp, kn, id);
	record.moved_tgid = BPF_CORE_READ(moved, tgid);
	got = bpf_probe_read_kernel_str(record.path, sizeof(record.path), path);
	record.len_path = got > 1 ? got - 1 : 0;
	if (dg_admit(&who, DG_NR_HOOK + DG_CGROUP, 0, record.destination, record.head.at_ns, DG_CRITICAL))
		dg_send(&who, &record, sizeof(record), DG_CRITICAL);
	return 0;
}

/* The current task is whoever needed memory, so the victim's own cgroup decides. */
SEC("tp_btf/mark_victim")
int BPF_PROG(dg_oom_victim, struct task_struct *victim)
{
	struct dg_oom record = {};
	struct dg_asker who;

	if (!dg_asker_of(dg_box_id_of(victim), &who))
		return 0;
	dg_fill_task_head(&record.head, &who, bpf_get_current_task_btf(), DG_OOM, sizeof(record));
	record.victim_tgid = BPF_CORE_READ(victim, tgid);
	if (dg_admit(&who, DG_NR_HOOK + DG_OOM, 0, record.victim_tgid, record.head.at_ns, DG_CRITICAL))
		dg_send(&who, &record, sizeof(record), DG_CRITICAL);
	return 0;
}

#endif
