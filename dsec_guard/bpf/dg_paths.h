/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * dg_paths.h - path arguments: the string the task gave, and the directory it is relative to as the kernel knows it.
 * Memory may change after it is read, so a string shows intent only; effects are judged by inode (dg_calls.h).
 */
#ifndef DG_PATHS_H
#define DG_PATHS_H

/*
 * Not static: the verifier checks such a function once, for any arguments, instead of once for every way that leads to
 * it. It must then test its pointers itself and may take no pointers to kernel objects or map values.
 */
#define DG_CHECKED __noinline

#define DG_AT_FDCWD (-100)
#define DG_TAIL_MASK (DG_TAIL_MAX - 1)
#define DG_NAME_MAX 256
#define DG_COMPONENTS_MAP 32              /* the next power of two, so that an index can be masked */

/* One per CPU and used by sys_exit only: the kernel never enters a program again on the CPU that runs it. */
struct dg_scratch {
	struct dg_call call;
	__u8 beyond[DG_NAME_MAX];                 /* a copy that starts at the last byte of `tail` ends in here */
	__u8 path[DG_PATH_MAX];
	__u64 probe[DG_WATCH_WORDS];              /* start of the absolute path, zero-padded */
	const unsigned char *name[DG_COMPONENTS_MAP]; /* leaf first */
	volatile __u32 names, skip;               /* dg_walk */
	volatile __u32 left, end;                 /* dg_compose */
	volatile __u32 lead, up;                  /* dg_leading_up */
	__u64 hash;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct dg_scratch);
} scratch SEC(".maps");

DG_INLINE struct file *dg_file_of(struct task_struct *task, int fd)
{
	struct fdtable *fdt = BPF_CORE_READ(task, files, fdt);
	struct file **slots;
	struct file *file = 0;

	if (fd < 0 || (__u32)fd >= BPF_CORE_READ(fdt, max_fds))
		return 0;
	slots = BPF_CORE_READ(fdt, fd);
	bpf_probe_read_kernel(&file, sizeof(file), &slots[fd]);
	return file;
}

/*
 * dg_walk - the names from (@mnt_ptr, @dentry_ptr) up to the task's root, leaf first, into s->name.
 * @skip leading names are left out: the `..` a relative string starts with.
 * Returns how many. Crosses mounts upwards; stops at the root of a detached tree (DG_R_DETACHED). The counters live in
 * memory, see dg_leading_up.
 */
DG_CHECKED int dg_walk(struct dg_scratch *s, __u64 mnt_ptr, __u64 dentry_ptr, __u32 skip)
{
	struct vfsmount *mnt = (void *)mnt_ptr;
	struct dentry *dentry = (void *)dentry_ptr;
	struct task_struct *task = bpf_get_current_task_btf();
	struct dentry *top = BPF_CORE_READ(task, fs, root.dentry);
	struct vfsmount *top_mnt = BPF_CORE_READ(task, fs, root.mnt);

	if (!s)
		return 0;
	s->names = 0;
	s->skip = skip;
	for (int i = 0; i < DG_WALK; i++) {
		struct dentry *parent;

		if (!dentry || (dentry == top && mnt == top_mnt))
			return s->names;
		parent = BPF_CORE_READ(dentry, d_parent);
		if (dentry == BPF_CORE_READ(mnt, mnt_root) || dentry == parent) {
			struct mount *self = (void *)mnt - bpf_core_field_offset(struct mount, mnt);
			struct mount *above = BPF_CORE_READ(self, mnt_parent);

			if (!above || above == self) {
				s->call.head.flags |= DG_R_DETACHED;
				return s->names;
			}
			dentry = BPF_CORE_READ(self, mnt_mountpoint);
			mnt = (void *)above + bpf_core_field_offset(struct mount, mnt);
			continue;
		}
		if (s->skip) {
			s->skip--;
		} else if (s->names < DG_COMPONENTS) {
			s->name[s->names & (DG_COMPONENTS_MAP - 1)] = BPF_CORE_READ(dentry, d_name.name);
			s->names++;
		} else {
			break;
		}
		dentry = parent;
	}
	s->call.head.flags |= DG_R_TRUNCATED;
	return s->names;
}

/* Write the @n names of dg_walk as text at tail[@off], from the root down; returns the length. */
DG_CHECKED int dg_compose(struct dg_scratch *s, __u32 off, __u32 n)
{
	if (!s)
		return 0;
	off &= DG_TAIL_MASK;
	s->end = off;
	s->left = n;
	if (!n) {
		s->call.tail[off] = '/';
		return 1;
	}
	for (int i = 0; i < DG_COMPONENTS && s->left; i++) {
		__u32 at = (s->left - 1) & (DG_COMPONENTS_MAP - 1);
		__u32 end = s->end;
		long got;

		if (end - off > DG_BASE_MAX - DG_NAME_MAX) {
			s->call.head.flags |= DG_R_TRUNCATED;
			break;
		}
		s->call.tail[end & DG_TAIL_MASK] = '/';
		end = (end + 1) & DG_TAIL_MASK;
		got = bpf_probe_read_kernel_str(&s->call.tail[end], DG_NAME_MAX, s->name[at]);
		if (got > 1)
			end += (got - 1) & (DG_NAME_MAX - 1);
		s->end = end;
		s->left--;
	}
	return s->end - off;
}

/*
 * Find the `..` that the string in s->path starts with: s->up of them in s->lead bytes; `./` counts as nothing.
 * Both are kept in memory (volatile), so that the verifier knows nothing of their values: one turn of the loop is like
 * another to it, and it looks at one instead of at every way through all of them.
 */
DG_CHECKED int dg_leading_up(struct dg_scratch *s)
{
	if (!s)
		return 0;
	s->lead = 0;
	s->up = 0;
	for (int round = 0; round < DG_COMPONENTS; round++) {
		__u32 i = s->lead & (DG_PATH_MAX - 1);

		if (i > DG_PATH_MAX - 4 || s->path[i] != '.')
			break;
		if (s->path[i + 1] == '/') {
			s->lead += 2;
		} else if (s->path[i + 1] == '.' && (s->path[i + 2] == '/' || !s->path[i + 2])) {
			s->up++;
			s->lead += 3;
		} else {
			break;
		}
	}
	return 0;
}

/* Read a path argument into s->path (zero-padded). Returns its length without the end, or -1. */
DG_CHECKED int dg_read_path(struct dg_scratch *s, __u64 ptr)
{
	long got;

	if (!s)
		return 0;
	__builtin_memset(s->path, 0, sizeof(s->path));
	got = bpf_probe_read_user_str(s->path, sizeof(s->path), (void *)ptr);
	if (got < 0)
		return -1;
	if (got >= DG_PATH_MAX)
		s->call.head.flags |= DG_R_TRUNCATED;
	return got ? got - 1 : 0;
}

DG_INLINE int dg_base_of(struct task_struct *task, int fd, struct vfsmount **mnt, struct dentry **dentry)
{
	struct file *file;

	if (fd == DG_AT_FDCWD) {
		*mnt = BPF_CORE_READ(task, fs, pwd.mnt);
		*dentry = BPF_CORE_READ(task, fs, pwd.dentry);
		return 1;
	}
	file = dg_file_of(task, fd);
	if (!file)
		return 0;
	*mnt = BPF_CORE_READ(file, f_path.mnt);
	*dentry = BPF_CORE_READ(file, f_path.dentry);
	return 1;
}

/* Append the directory of descriptor @fd (or the working directory) at tail[@off]; returns the length. */
DG_CHECKED int dg_put_base(struct dg_scratch *s, __u32 off, int fd)
{
	struct vfsmount *mnt = 0;
	struct dentry *dentry = 0;

	if (!s)
		return 0;
	if (!dg_base_of(bpf_get_current_task_btf(), fd, &mnt, &dentry))
		return 0;
	return dg_compose(s, off, dg_walk(s, (__u64)mnt, (__u64)dentry, 0));
}

/* Append s->path at tail[@off]. */
DG_CHECKED int dg_put_path(struct dg_scratch *s, __u32 off, int len)
{
	if (!s)
		return 0;
	if (len > 0)
		bpf_probe_read_kernel(&s->call.tail[off & DG_TAIL_MASK], len & (DG_PATH_MAX - 1), s->path);
	return 0;
}

DG_CHECKED int dg_hash_path(struct dg_scratch *s)
{
	__u64 *word = (__u64 *)s->path;

	if (!s)
		return 0;
	for (int i = 0; i < DG_PATH_MAX / 8; i++)
		s->hash = dg_mix(s->hash, word[i]);
	return 0;
}

/* Does s->probe start with one of the box's watch prefixes? */
DG_CHECKED int dg_below_watch(struct dg_scratch *s, struct dg_watch *watch, __u32 n)
{
	if (!s || !watch)
		return 0;
	for (__u32 i = 0; i < DG_WATCHES; i++) {
		__u64 differ = 0;

		if (i >= n)
			break;
		for (int w = 0; w < DG_WATCH_WORDS; w++)
			differ |= (s->probe[w] ^ watch->word[i][w]) & watch->mask[i][w];
		if (!differ)
			return 1;
	}
	return 0;
}

/*
 * dg_watched - is the path in s->path below a watch prefix, once made absolute?
 * Takes into account the task's directory and leading `..`; `..` further on is left to the guard's own look at what is
 * reported, so `/usr/../srv` under an absolute prefix `/srv` is not seen here.
 */
DG_CHECKED int dg_watched(struct dg_scratch *s, __u64 box, int fd, __u32 n)
{
	struct dg_watch *watch = bpf_map_lookup_elem(&watches, &box);
	struct vfsmount *mnt = 0;
	struct dentry *dentry = 0;
	__u32 len;

	if (!s)
		return 0;
	if (!watch || !n)
		return 0;
	if (s->path[0] == '/') {
		__builtin_memcpy(s->probe, s->path, sizeof(s->probe));
		return dg_below_watch(s, watch, n);
	}
	if (!dg_base_of(bpf_get_current_task_btf(), fd, &mnt, &dentry))
		return 0;
	dg_leading_up(s);
	len = dg_compose(s, 0, dg_walk(s, (__u64)mnt, (__u64)dentry, s->up));
	/* The rest of the string goes behind the directory; only the first 64 bytes of the whole matter. */
	if (len > 1) {
		s->call.tail[len & DG_TAIL_MASK] = '/';
		len++;
	}
	bpf_probe_read_kernel_str(&s->call.tail[len & DG_TAIL_MASK], DG_NAME_MAX, &s->path[s->lead & (DG_PATH_MAX - 1)]);
	__builtin_memset(s->probe, 0, sizeof(s->probe));
	bpf_probe_read_kernel_str(s->probe, sizeof(s->probe), s->call.tail);
	return dg_below_watch(s, watch, n);
}

#endif
