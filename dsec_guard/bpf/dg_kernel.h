/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * dg_kernel.h - the members of kernel types that the programs read, and nothing else.
 *
 * `preserve_access_index` makes the compiler record each access by name; libbpf relocates it to the running kernel's
 * layout at load (CO-RE). So order, padding and left-out members do not matter here, names do.
 */
#ifndef DG_KERNEL_H
#define DG_KERNEL_H

#include <linux/types.h>

#define DG_CORE __attribute__((preserve_access_index))

typedef _Bool bool;
enum { false, true };

struct inode;
struct dentry;
struct file;
struct task_struct;

struct pt_regs {
	unsigned long r10, r9, r8, bp, bx, cx, dx, si, di, orig_ax;
} DG_CORE;

struct thread_info {
	__u32 status;
} DG_CORE;

struct super_block {
	__u32 s_dev;
} DG_CORE;

struct inode {
	__u16 i_mode;
	struct super_block *i_sb;
	unsigned long i_ino;
	unsigned int i_nlink;
} DG_CORE;

struct qstr {
	const unsigned char *name;
} DG_CORE;

struct dentry {
	struct dentry *d_parent;
	struct qstr d_name;
} DG_CORE;

struct vfsmount {
	struct dentry *mnt_root;
} DG_CORE;

struct mount {
	struct mount *mnt_parent;
	struct dentry *mnt_mountpoint;
	struct vfsmount mnt;
} DG_CORE;

struct path {
	struct vfsmount *mnt;
	struct dentry *dentry;
} DG_CORE;

struct file {
	struct path f_path;
	struct inode *f_inode;
	unsigned int f_flags;
	void *private_data;
} DG_CORE;

struct fdtable {
	unsigned int max_fds;
	struct file **fd;
} DG_CORE;

struct files_struct {
	struct fdtable *fdt;
} DG_CORE;

struct fs_struct {
	struct path root;
	struct path pwd;
} DG_CORE;

struct kernfs_node {
	__u64 id;
} DG_CORE;

struct cgroup {
	struct kernfs_node *kn;
	int level;
	struct cgroup *ancestors[0];
} DG_CORE;

struct css_set {
	struct cgroup *dfl_cgrp;
} DG_CORE;

typedef struct {
	int counter;
} atomic_t;

struct signal_struct {
	atomic_t live;
	int group_exit_code;
	unsigned int flags;
} DG_CORE;

struct mm_struct {
	unsigned long task_size;
	unsigned long arg_start;
	unsigned long arg_end;
} DG_CORE;

struct task_struct {
	struct thread_info thread_info;
	int pid;
	int tgid;
	int exit_code;
	struct task_struct *real_parent;
	struct signal_struct *signal;
	struct files_struct *files;
	struct fs_struct *fs;
	struct mm_struct *mm;
	struct css_set *cgroups;
} DG_CORE;

struct linux_binprm {
	struct file *file;
	const char *filename;
} DG_CORE;

struct kernel_siginfo {
	int si_code;
} DG_CORE;

struct cred;
struct user_namespace;

struct io_kiocb {
	__u8 opcode;
} DG_CORE;

struct sock_common {
	unsigned short skc_family;
	__be16 skc_dport;
} DG_CORE;

struct sock {
	struct sock_common __sk_common;
} DG_CORE;

struct socket {
	struct sock *sk;
} DG_CORE;

#endif
