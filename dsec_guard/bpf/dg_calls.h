/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/* dg_calls.h - one look at every system call of a boxed task, made when its result is known. */
#ifndef DG_CALLS_H
#define DG_CALLS_H

#define DG_TS_COMPAT 0x2             /* arch/x86/include/asm/thread_info.h: entered by int 0x80 or sysenter */
#define DG_X32_BIT 0x40000000U       /* __X32_SYSCALL_BIT */
#define DG_BIT(errno_) (1ULL << (errno_))

/* EPERM EACCES EXDEV ETXTBSY EROFS ELOOP */
#define DG_REFUSED_ERRNOS (DG_BIT(1) | DG_BIT(13) | DG_BIT(18) | DG_BIT(26) | DG_BIT(30) | DG_BIT(40))
/* ENOMEM ENFILE EMFILE EFBIG ENOSPC; EDQUOT is above 63 */
#define DG_RESOURCE_ERRNOS (DG_BIT(12) | DG_BIT(23) | DG_BIT(24) | DG_BIT(27) | DG_BIT(28))
/* ENOENT ENXIO ENODEV ENOTDIR */
#define DG_ABSENT_ERRNOS (DG_BIT(2) | DG_BIT(6) | DG_BIT(19) | DG_BIT(20))
/* EINTR EBADF EAGAIN EPIPE: ordinary ends of a send */
#define DG_SEND_DULL_ERRNOS (DG_BIT(4) | DG_BIT(9) | DG_BIT(11) | DG_BIT(32))
#define DG_EDQUOT 122
#define DG_EMSGSIZE 90
#define DG_EISCONN 106
#define DG_ENETUNREACH 101
#define DG_ENOTCONN 107
#define DG_ECONNRESET 104
#define DG_ENOBUFS 105
#define DG_EALREADY 114
#define DG_EINPROGRESS 115
#define DG_EPERM 1
#define DG_EACCES 13
#define DG_EAGAIN 11
#define DG_ESRCH 3

#define DG_AF_UNIX 1
#define DG_AF_INET 2
#define DG_AF_INET6 10
#define DG_AF_NETLINK 16
#define DG_SOCK_RAW 3
#define DG_SOCK_PACKET 10
#define DG_PORT_DNS 53
#define DG_SLASH_PRO 0x6f72702fU         /* "/pro", little endian */
#define DG_S_IFMT 0170000
#define DG_S_IFCHR 0020000
#define DG_S_IFBLK 0060000
#define DG_S_IFSOCK 0140000
/* CLONE_NEWNS NEWCGROUP NEWUTS NEWIPC NEWUSER NEWPID NEWNET */
#define DG_CLONE_NEW 0x7e020000ULL
#define DG_CLONE_NEWTIME 0x80ULL          /* clone3 only: clone has the exit signal there */
#define DG_CLONE_INTO_CGROUP 0x200000000ULL
#define DG_PTRACE_ATTACH 16
#define DG_PTRACE_SEIZE 0x4206
#define DG_PR_SET_MM 35
/* ADDR_NO_RANDOMIZE (debuggers) and PER_LINUX32 (setarch) */
#define DG_PERSONA_PLAIN (0x0040000U | 0x8U)

enum dg_want {
	DG_WANT_NUMBERS = 16,     /* number, arguments and result alone */
	DG_WANT_PATHS = 1,
	DG_WANT_ADDR = 2,
	DG_WANT_DATA = 4,
	DG_WANT_TYPE = 8,         /* mount: the file system type as data */
};

/* What is read of struct user_msghdr; sendmmsg's vector starts with one. */
struct dg_msghdr {
	__u64 name;
	__u32 namelen;
	__u32 pad;
	__u64 iov;
	__u64 iovlen;
};

struct dg_buffers {
	__u64 addr;
	__u64 data;
	__u32 addr_len;
	__u32 data_len;
};

/* Argument number stored in three bits of a class entry, 0 = none, i + 1 = args[i]. */
DG_INLINE __u32 dg_slot(__u32 entry, __u32 shift)
{
	return (entry >> shift) & 7;
}

DG_INLINE __u64 dg_arg(const struct dg_call *call, __u32 slot)
{
	return slot >= 1 && slot <= 6 ? call->args[slot - 1] : 0;
}

DG_INLINE int dg_dir_fd(const struct dg_call *call, __u32 entry, __u32 shift)
{
	__u32 slot = dg_slot(entry, shift);

	return slot ? (int)dg_arg(call, slot) : DG_AT_FDCWD;
}

/* One path argument with its directory appended to the tail; returns the new end of the tail. */
DG_CHECKED __u32 dg_put_pair(struct dg_scratch *s, __u32 off, __u32 entry, __u32 second)
{
	__u32 path_slot = dg_slot(entry, second ? DG_E_PATH2 : DG_E_PATH);
	__u32 dir_shift = second ? DG_E_DIR2 : DG_E_DIR;
	int len = -1, base = 0;

	if (!s)
		return 0;
	if (!path_slot && !dg_slot(entry, dir_shift))
		return off;
	if (path_slot) {
		len = dg_read_path(s, dg_arg(&s->call, path_slot));
		if (len < 0)
			s->call.head.flags |= DG_R_UNREADABLE;
	}
	if (!path_slot || (len >= 0 && s->path[0] != '/')) {
		int fd = dg_dir_fd(&s->call, entry, dir_shift);

		if (path_slot || fd >= 0)
			base = dg_put_base(s, off, fd);
	} else if (len > 0 && *(__u32 *)s->path == DG_SLASH_PRO) {
		/* /proc/self/cwd is only as good as the directory beside it. */
		base = dg_put_base(s, off, DG_AT_FDCWD);
	}
	if (base < 0)
		base = 0;
	off = (off + base) & DG_TAIL_MASK;
	if (len > 0) {
		dg_put_path(s, off, len);
		dg_hash_path(s);
		off = (off + len) & DG_TAIL_MASK;
	} else {
		len = 0;
	}
	if (second) {
		s->call.len_base2 = base;
		s->call.len_path2 = len;
	} else {
		s->call.len_base = base;
		s->call.len_path = len;
	}
	return off;
}

/* Append at most @max bytes of user memory at tail[@off]; returns how many. */
DG_CHECKED __u32 dg_put_user(struct dg_scratch *s, __u32 off, __u64 ptr, __u32 len)
{
	if (!s)
		return 0;
	if (!ptr || !len)
		return 0;
	if (len > DG_DATA_MAX)
		len = DG_DATA_MAX;
	if (bpf_probe_read_user(&s->call.tail[off & DG_TAIL_MASK], len, (void *)ptr))
		return 0;
	return len;
}

DG_INLINE void dg_find_buffers(const struct dg_call *call, __u32 cls, struct dg_buffers *b)
{
	struct dg_msghdr msg = {};
	__u64 iov[2] = {};

	b->addr = b->data = 0;
	b->addr_len = b->data_len = 0;
	if (cls == DG_C_ADDR) {
		b->addr = call->args[1];
		b->addr_len = call->args[2];
	} else if (cls == DG_C_WRITE) {
		b->data = call->args[1];
		b->data_len = call->args[2] > DG_DATA_MAX ? DG_DATA_MAX : call->args[2];
	} else if (cls == DG_C_SEND) {
		b->data = call->args[1];
		b->data_len = call->args[2] > DG_DATA_MAX ? DG_DATA_MAX : call->args[2];
		b->addr = call->args[4];
		b->addr_len = call->args[5];
	} else if (!bpf_probe_read_user(&msg, sizeof(msg), (void *)call->args[1])) {
		b->addr = msg.name;
		b->addr_len = msg.namelen;
		if (msg.iovlen && !bpf_probe_read_user(iov, sizeof(iov), (void *)msg.iov)) {
			b->data = iov[0];
			b->data_len = iov[1] > DG_DATA_MAX ? DG_DATA_MAX : iov[1];
		}
	}
	if (b->addr_len > DG_ADDR_MAX)
		b->addr_len = DG_ADDR_MAX;
}

DG_INLINE int dg_family_odd(__u16 family)
{
	return family != DG_AF_UNIX && family != DG_AF_INET && family != DG_AF_INET6 && family != DG_AF_NETLINK;
}

DG_INLINE __u16 dg_user_family(__u64 addr, __u32 len)
{
	__u16 family = DG_AF_INET;

	if (addr && len >= sizeof(family))
		bpf_probe_read_user(&family, sizeof(family), (void *)addr);
	return family;
}

/* Is the message for a name server? By its own address, or by the peer its socket is connected to. */
DG_CHECKED int dg_to_name_server(struct dg_scratch *s, __u64 addr, __u32 addr_len)
{
	struct task_struct *task = bpf_get_current_task_btf();
	struct file *file;
	struct socket *sock;
	struct sock *sk;
	__be16 where[2] = {};
	__u16 family;

	if (!s)
		return 0;
	if (addr && addr_len >= sizeof(where)) {
		if (bpf_probe_read_user(where, sizeof(where), (void *)addr))
			return 0;
		return (where[0] == DG_AF_INET || where[0] == DG_AF_INET6) && where[1] == bpf_htons(DG_PORT_DNS);
	}
	file = dg_file_of(task, (int)s->call.args[0]);
	if (!file || (BPF_CORE_READ(file, f_inode, i_mode) & DG_S_IFMT) != DG_S_IFSOCK)
		return 0;
	sock = BPF_CORE_READ(file, private_data);
	sk = BPF_CORE_READ(sock, sk);
	family = BPF_CORE_READ(sk, __sk_common.skc_family);
	return (family == DG_AF_INET || family == DG_AF_INET6) &&
	       BPF_CORE_READ(sk, __sk_common.skc_dport) == bpf_htons(DG_PORT_DNS);
}

/* Network calls: which of them leave the kernel, and why. Returns the dg_want bits, 0 for none. */
DG_CHECKED __u32 dg_judge_network(struct dg_scratch *s, __u32 cls, __u32 entry, __u32 err)
{
	struct dg_buffers b;
	__u16 family;

	if (!s)
		return 0;
	dg_find_buffers(&s->call, cls, &b);
	family = dg_user_family(b.addr, b.addr_len);
	if (cls == DG_C_ADDR) {
		if (dg_family_odd(family))
			return DG_WANT_ADDR;
		if (entry & DG_E_BIND)
			return err == DG_EPERM || err == DG_EACCES ? DG_WANT_ADDR : 0;
		if (family == DG_AF_UNIX)
			return DG_WANT_ADDR;
		return err && err != 4 && err != DG_EAGAIN && err != DG_EINPROGRESS && err != DG_EALREADY &&
		       err != DG_EISCONN ? DG_WANT_ADDR : 0;
	}
	if (err && !(err < 64 && (DG_BIT(err) & DG_SEND_DULL_ERRNOS)) && err != DG_EMSGSIZE && err != DG_ENOTCONN &&
	    err != DG_ECONNRESET && err != DG_ENOBUFS)
		return DG_WANT_ADDR | DG_WANT_DATA;
	if (b.addr && (family == DG_AF_UNIX || dg_family_odd(family)))
		return DG_WANT_ADDR | DG_WANT_DATA;
	return dg_to_name_server(s, b.addr, b.addr_len) ? DG_WANT_ADDR | DG_WANT_DATA : 0;
}

/* The protected object behind descriptor @fd. Returns 1 and its number, 0 for none, -1 if the slot is empty. */
DG_CHECKED int dg_protected(struct dg_scratch *s, int fd)
{
	struct file *file = dg_file_of(bpf_get_current_task_btf(), fd);
	struct dg_object_key key = {};
	struct inode *inode;
	__u64 *object;

	if (!s)
		return 0;
	if (!file)
		return -1;
	inode = BPF_CORE_READ(file, f_inode);
	key.dev = BPF_CORE_READ(inode, i_sb, s_dev);
	key.ino = BPF_CORE_READ(inode, i_ino);
	object = bpf_map_lookup_elem(&objects, &key);
	if (!object)
		return 0;
	s->call.object = *object;
	s->call.file_flags = BPF_CORE_READ(file, f_flags);
	return 1;
}

/* Collect what was asked for, ask for admission, send. */
static __noinline int dg_report(struct dg_scratch *s, struct dg_asker *who, __u32 entry, __u32 want)
{
	struct dg_call *call = &s->call;
	__u32 cls = entry & DG_E_CLASS, off = 0, key_nr = call->nr;
	enum dg_weight weight = DG_PLAIN;
	__u64 size;

	dg_fill_task_head(&call->head, who, bpf_get_current_task_btf(), call->head.kind, 0);
	s->hash = call->object;
	call->len_base = call->len_path = call->len_base2 = call->len_path2 = call->len_addr = call->len_data = 0;
	if (want & DG_WANT_PATHS) {
		off = dg_put_pair(s, off, entry, 0);
		off = dg_put_pair(s, off, entry, 1);
	}
	if (!call->len_path && !(want & DG_WANT_ADDR)) {
		for (int i = 0; i < 4; i++)
			s->hash = dg_mix(s->hash, call->args[i]);
	}
	if (want & (DG_WANT_ADDR | DG_WANT_DATA)) {
		struct dg_buffers b;
		__u32 got;

		dg_find_buffers(call, cls, &b);
		/* A socket's path can be relative, too. */
		if (cls == DG_C_ADDR && dg_user_family(b.addr, b.addr_len) == DG_AF_UNIX) {
			call->len_base = dg_put_base(s, off, DG_AT_FDCWD);
			off = (off + call->len_base) & DG_TAIL_MASK;
		}
		__builtin_memset(s->path, 0, sizeof(s->path));
		got = dg_put_user(s, off, b.addr, b.addr_len);
		bpf_probe_read_kernel(s->path, got & (DG_PATH_MAX - 1), &call->tail[off & DG_TAIL_MASK]);
		call->len_addr = got;
		off = (off + got) & DG_TAIL_MASK;
		dg_hash_path(s);
		if (want & DG_WANT_DATA) {
			__builtin_memset(s->path, 0, sizeof(s->path));
			got = dg_put_user(s, off, b.data, b.data_len);
			bpf_probe_read_kernel(s->path, got & (DG_PATH_MAX - 1), &call->tail[off & DG_TAIL_MASK]);
			call->len_data = got;
			off = (off + got) & DG_TAIL_MASK;
			dg_hash_path(s);
		}
	}
	if (want & DG_WANT_TYPE) {
		int got = dg_read_path(s, call->args[2]);

		if (got > 0) {
			dg_put_path(s, off, got);
			call->len_data = got;
			off = (off + got) & DG_TAIL_MASK;
			dg_hash_path(s);
		}
	}
	if (call->head.kind == DG_FILE)
		weight = DG_PROTECTED;
	else if ((entry & DG_E_CRITICAL) || call->why == DG_W_ABI || call->why == DG_W_UNKNOWN)
		weight = DG_CRITICAL;
	if (weight == DG_CRITICAL)
		call->head.flags |= DG_R_CRITICAL;
	if (call->abi == DG_ABI_I386) {
		key_nr |= DG_NR_I386;
		/* A 32-bit program cannot call otherwise; a 64-bit one that does so looks for a gap in a filter. */
		if (BPF_CORE_READ(bpf_get_current_task_btf(), mm, task_size) <= 0xffffffffUL)
			call->head.flags |= DG_R_PROGRAM32;
	}
	/* An open that works has its descriptor as result: one kind of event whatever the number. */
	if (!dg_admit(who, key_nr, call->ret < 0 ? call->ret : 0, s->hash, call->head.at_ns, weight))
		return 0;
	size = sizeof(*call) - DG_TAIL_MAX + (off & DG_TAIL_MASK);
	call->head.size = size;
	dg_send(who, call, size, weight);
	return 0;
}

/* OPEN class: a protected object opened, a refusal, or nothing there below a watch prefix. */
DG_INLINE __u32 dg_judge_open(struct dg_scratch *s, struct dg_asker *who, __u32 entry, __u32 err)
{
	int found;

	if (!err) {
		if (!dg_global.protected_objects)
			return 0;
		found = dg_protected(s, (int)s->call.ret);
		if (found > 0) {
			s->call.head.kind = DG_FILE;
			s->call.why = DG_W_PROTECTED;
			return DG_WANT_PATHS;
		}
		/* Closed by another thread before we looked. What it was, only the string can say. */
		if (!found || !dg_slot(entry, DG_E_PATH) ||
		    dg_read_path(s, dg_arg(&s->call, dg_slot(entry, DG_E_PATH))) < 0 ||
		    !dg_watched(s, who->box, dg_dir_fd(&s->call, entry, DG_E_DIR), who->cfg->watches))
			return 0;
		s->call.head.kind = DG_FILE;
		s->call.why = DG_W_SLOT;
		return DG_WANT_PATHS;
	}
	if (err >= 64)
		return 0;
	if (DG_BIT(err) & DG_REFUSED_ERRNOS) {
		s->call.why = DG_W_REFUSED;
		return DG_WANT_PATHS;
	}
	if (!(DG_BIT(err) & DG_ABSENT_ERRNOS))
		return 0;
	if (!who->cfg->watches || !dg_slot(entry, DG_E_PATH) ||
	    dg_read_path(s, dg_arg(&s->call, dg_slot(entry, DG_E_PATH))) < 0 ||
	    !dg_watched(s, who->box, dg_dir_fd(&s->call, entry, DG_E_DIR), who->cfg->watches)) {
		/* Every interpreter looks for files that are not there; how often is all that can matter. */
		dg_count(who, s->call.nr, -(__s32)err);
		return 0;
	}
	s->call.why = DG_W_ABSENT;
	return DG_WANT_PATHS;
}

DG_INLINE int dg_refused(__u32 err)
{
	return err == DG_EPERM || err == DG_EACCES;
}

/* Does this call matter, and if so, what is to be collected? 0: it does not. */
static __noinline __u32 dg_judge_call(struct dg_scratch *s, struct dg_asker *who, __u32 entry, __u32 err)
{
	struct dg_call *call = &s->call;
	__u64 *args = call->args;
	__u64 word = 0;
	__u32 cmd, mode;

	switch (entry & DG_E_CLASS) {
	case DG_C_ALWAYS:
		return DG_WANT_PATHS | DG_WANT_NUMBERS;
	case DG_C_MOUNT:
		return DG_WANT_PATHS | DG_WANT_TYPE;
	case DG_C_OPEN:
		return dg_judge_open(s, who, entry, err);
	case DG_C_PATH:
		call->why = DG_W_REFUSED;
		return err && err < 64 && (DG_BIT(err) & DG_REFUSED_ERRNOS) ? DG_WANT_PATHS : 0;
	case DG_C_ADDR:
	case DG_C_SEND:
	case DG_C_SENDMSG:
		return dg_judge_network(s, entry & DG_E_CLASS, entry, err);
	case DG_C_SOCKET:
		if (err == 24 || err == 23)
			return 0;
		if (err || dg_family_odd(args[0]) || (args[1] & 0xf) == DG_SOCK_PACKET ||
		    (args[0] != DG_AF_NETLINK && (args[1] & 0xf) == DG_SOCK_RAW))
			return DG_WANT_NUMBERS;
		/* NETLINK_ROUTE, SOCK_DIAG, KOBJECT_UEVENT: what libraries open by themselves */
		return args[0] == DG_AF_NETLINK && args[2] != 0 && args[2] != 4 && args[2] != 15 ? DG_WANT_NUMBERS : 0;
	case DG_C_KILL:
		if (dg_refused(err) || (int)args[0] == 1 || (int)args[0] == -1)
			return DG_WANT_NUMBERS;
		if (err == DG_ESRCH)
			dg_count(who, call->nr, -DG_ESRCH);
		return 0;
	case DG_C_FORK:
		/* The child returns 0 from the same call: told by the parent. */
		if (call->nr == 56 && call->ret && (args[0] & DG_CLONE_NEW))
			return DG_WANT_NUMBERS;
		return dg_refused(err) ? DG_WANT_NUMBERS : 0;
	case DG_C_CLONE3:
		if (!call->ret)
			return 0;
		bpf_probe_read_user(&word, sizeof(word), (void *)args[0]);
		call->extra = word;
		if (word & (DG_CLONE_NEW | DG_CLONE_NEWTIME | DG_CLONE_INTO_CGROUP))
			return DG_WANT_NUMBERS;
		return dg_refused(err) ? DG_WANT_NUMBERS : 0;
	case DG_C_PTRACE:
		if (args[0] == DG_PTRACE_ATTACH || args[0] == DG_PTRACE_SEIZE || (args[0] && (int)args[1] == 1))
			return DG_WANT_NUMBERS;
		return dg_refused(err) ? DG_WANT_NUMBERS : 0;
	case DG_C_REFUSED:
		call->why = DG_W_REFUSED;
		return dg_refused(err) ? DG_WANT_PATHS | DG_WANT_NUMBERS : 0;
	case DG_C_WRITE:
		call->why = DG_W_REFUSED;
		return dg_refused(err) ? DG_WANT_PATHS | DG_WANT_DATA : 0;
	case DG_C_IOCTL:
		cmd = args[1];
		if (bpf_map_lookup_elem(&ioctls, &cmd) || dg_refused(err))
			return DG_WANT_PATHS;
		return 0;
	case DG_C_PERSONALITY:
		if ((__u32)args[0] != 0xffffffffU && ((__u32)args[0] & ~DG_PERSONA_PLAIN))
			return DG_WANT_NUMBERS;
		return dg_refused(err) ? DG_WANT_NUMBERS : 0;
	case DG_C_EXECVE:
		call->why = DG_W_REFUSED;
		return dg_refused(err) ? DG_WANT_PATHS : 0;
	case DG_C_MKNOD:
		mode = dg_arg(call, dg_slot(entry, DG_E_MODE)) & DG_S_IFMT;
		if (mode == DG_S_IFCHR || mode == DG_S_IFBLK)
			return DG_WANT_PATHS;
		call->why = DG_W_REFUSED;
		return err && err < 64 && (DG_BIT(err) & DG_REFUSED_ERRNOS) ? DG_WANT_PATHS : 0;
	case DG_C_PRCTL:
		return args[0] == DG_PR_SET_MM || dg_refused(err) ? DG_WANT_NUMBERS : 0;
	case DG_C_UNKNOWN:
		call->why = DG_W_UNKNOWN;
		return DG_WANT_NUMBERS;
	}
	return 0;
}

DG_INLINE int dg_limit_reached(__u32 entry, __u32 err)
{
	__u32 cls = entry & DG_E_CLASS;

	if (err < 64 && (DG_BIT(err) & DG_RESOURCE_ERRNOS))
		return 1;
	return err == DG_EDQUOT || (err == DG_EAGAIN && (cls == DG_C_FORK || cls == DG_C_CLONE3));
}

/* Past the box look-up: most calls of honest work end here, before anything is copied. */
DG_INLINE int dg_look(struct pt_regs *regs, long ret, struct task_struct *task, struct dg_asker *who)
{
	__u32 zero = 0, nr = regs->orig_ax, entry, want, abi = DG_ABI_X64;
	__u32 err = ret < 0 && ret > -4096 ? -ret : 0;
	struct dg_scratch *s;

	/* rt_sigreturn restores -1 here; a tracer or filter that skips a call writes it too. */
	if (nr == 0xffffffffU)
		return 0;
	if (task->thread_info.status & DG_TS_COMPAT) {
		abi = DG_ABI_I386;
		entry = nr < DG_SYSCALLS ? dg_config.classes_i386[nr] : DG_C_UNKNOWN;
	} else {
		if (nr & DG_X32_BIT)
			abi = DG_ABI_X32;
		nr &= ~DG_X32_BIT;
		entry = nr < DG_SYSCALLS ? dg_config.classes[nr] : DG_C_UNKNOWN;
	}
	if (abi == DG_ABI_X64 && !(entry & DG_E_CLASS) && !err)
		return 0;
	if (abi == DG_ABI_X64 && (entry & DG_E_CLASS) == DG_C_OPEN && !err && !dg_global.protected_objects)
		return 0;

	s = bpf_map_lookup_elem(&scratch, &zero);
	if (!s || !dg_find_stats(who))
		return 0;
	s->call.head.kind = DG_CALL;
	s->call.head.flags = 0;
	s->call.ret = ret;
	s->call.nr = regs->orig_ax;
	s->call.abi = abi;
	s->call.cls = entry & DG_E_CLASS;
	s->call.why = DG_W_CLASS;
	s->call.extra = 0;
	s->call.object = 0;
	s->call.file_flags = 0;
	if (abi == DG_ABI_I386) {
		s->call.args[0] = (__u32)regs->bx;
		s->call.args[1] = (__u32)regs->cx;
		s->call.args[2] = (__u32)regs->dx;
		s->call.args[3] = (__u32)regs->si;
		s->call.args[4] = (__u32)regs->di;
		s->call.args[5] = (__u32)regs->bp;
	} else {
		s->call.args[0] = regs->di;
		s->call.args[1] = regs->si;
		s->call.args[2] = regs->dx;
		s->call.args[3] = regs->r10;
		s->call.args[4] = regs->r8;
		s->call.args[5] = regs->r9;
	}

	want = dg_judge_call(s, who, entry, err);
	if (abi != DG_ABI_X64 && s->call.head.kind != DG_FILE) {
		s->call.why = DG_W_ABI;
		/* Network classes lay out their memory differently there. */
		want = DG_WANT_PATHS | DG_WANT_NUMBERS;
	} else if (!want && err && dg_limit_reached(entry, err)) {
		s->call.why = DG_W_RESOURCE;
		want = DG_WANT_NUMBERS;
	}
	if (!want)
		return 0;
	if ((entry & DG_E_CLASS) == DG_C_OPEN && nr == 437)
		bpf_probe_read_user(&s->call.extra, sizeof(s->call.extra), (void *)s->call.args[2]);
	return dg_report(s, who, entry, want);
}

SEC("tp_btf/sys_exit")
int BPF_PROG(dg_sys_exit, struct pt_regs *regs, long ret)
{
	struct task_struct *task = bpf_get_current_task_btf();
	struct dg_asker who;

	if (!dg_current_box(task, &who) || who.cfg->level != DG_LEVEL_FULL || (__u32)task->tgid == who.cfg->init_tgid)
		return 0;
	return dg_look(regs, ret, task, &who);
}

#endif
