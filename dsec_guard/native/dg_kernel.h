// SPDX-License-Identifier: Apache-2.0
/*
 * dg_kernel.h - kernel structures and numbers the C library's headers lack or hide.
 * Reason:  musl has no wrappers for these calls, and linux/mount.h cannot be included beside sys/mount.h.
 * Source:  include/uapi/linux of 6.12; every number here is part of the stable ABI of x86-64.
 */
#ifndef DG_KERNEL_H
#define DG_KERNEL_H

#include <stdint.h>
#include <sys/syscall.h>

#ifndef SYS_clone3
#define SYS_clone3 435
#endif
#ifndef SYS_openat2
#define SYS_openat2 437
#endif
#ifndef SYS_close_range
#define SYS_close_range 436
#endif
#ifndef SYS_mount_setattr
#define SYS_mount_setattr 442
#endif
#ifndef SYS_landlock_create_ruleset
#define SYS_landlock_create_ruleset 444
#define SYS_landlock_add_rule 445
#define SYS_landlock_restrict_self 446
#endif
#ifndef SYS_open_tree
#define SYS_open_tree 428
#define SYS_move_mount 429
#endif
#ifndef SYS_pidfd_send_signal
#define SYS_pidfd_send_signal 424
#endif
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

struct dg_clone_args {
	uint64_t flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls, set_tid, set_tid_size, cgroup;
};

struct dg_open_how {
	uint64_t flags, mode, resolve;
};

struct dg_mount_attr {
	uint64_t attr_set, attr_clr, propagation, userns_fd;
};

struct dg_landlock_ruleset {
	uint64_t handled_access_fs, handled_access_net, scoped;
};

struct dg_landlock_path {
	uint64_t allowed_access;
	int32_t parent_fd;
} __attribute__((packed));

struct dg_landlock_port {
	uint64_t allowed_access, port;
};

#define DG_LANDLOCK_RULE_PATH 1
#define DG_LANDLOCK_RULE_PORT 2
/* The rights a rule on something else than a directory may name: EXECUTE, WRITE_FILE, READ_FILE, TRUNCATE, IOCTL_DEV. */
#define DG_LANDLOCK_FILE_RIGHTS (1ull << 0 | 1ull << 1 | 1ull << 2 | 1ull << 14 | 1ull << 15)

#define DG_RESOLVE_NO_XDEV 0x01
#define DG_RESOLVE_NO_MAGICLINKS 0x02
#define DG_RESOLVE_NO_SYMLINKS 0x04
#define DG_RESOLVE_BENEATH 0x08
#define DG_RESOLVE_IN_ROOT 0x10

#define DG_OPEN_TREE_CLONE 1
#define DG_AT_RECURSIVE 0x8000
#define DG_MOVE_F_EMPTY_PATH 0x04
#define DG_MOVE_T_EMPTY_PATH 0x40

#define DG_ATTR_RDONLY 0x1
#define DG_ATTR_NOSUID 0x2
#define DG_ATTR_NODEV 0x4
#define DG_ATTR_NOEXEC 0x8
#define DG_ATTR_IDMAP 0x100000

#define DG_CLONE_PIDFD 0x1000ull
#define DG_CLONE_PARENT 0x8000ull
#define DG_CLONE_NEWNS 0x20000ull
#define DG_CLONE_NEWCGROUP 0x02000000ull
#define DG_CLONE_NEWUTS 0x04000000ull
#define DG_CLONE_NEWIPC 0x08000000ull
#define DG_CLONE_NEWUSER 0x10000000ull
#define DG_CLONE_NEWPID 0x20000000ull
#define DG_CLONE_NEWNET 0x40000000ull
#define DG_CLONE_INTO_CGROUP 0x200000000ull

#define DG_SECCOMP_SET_MODE_FILTER 1
#define DG_SECCOMP_NEW_LISTENER 0x08
#define DG_SECCOMP_WAIT_KILLABLE 0x20

/* From <linux/capability.h>, which clashes with nothing but is needed for numbers alone. */
#define DG_CAP_KILL 5
#define DG_CAP_SETGID 6
#define DG_CAP_SETUID 7
#define DG_CAP_SETPCAP 8
#define DG_CAP_LAST 63

#endif
