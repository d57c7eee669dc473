/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * dg_events.h - the only description of what passes between the kernel programs and the guard: ring records, map keys
 * and values. monitor/wire.py mirrors it; tests/unit/test_wire.py compiles this file and compares every offset.
 *
 * All integers are in host order unless said otherwise. Strings are not terminated: their length stands beside them.
 * Text and buffers come from the agent's memory and can be anything.
 */
#ifndef DG_EVENTS_H
#define DG_EVENTS_H

#include <linux/types.h>

enum dg_limits {
	DG_SYSCALLS = 512,        /* numbers the class table covers; anything above is unknown */
	DG_PATH_MAX = 256,        /* bytes taken of one path string */
	DG_BASE_MAX = 1024,       /* bytes taken of a directory the kernel resolved */
	DG_COMPONENTS = 24,       /* path components of such a directory */
	DG_WALK = 40,             /* the same, plus mount crossings */
	DG_ADDR_MAX = 128,        /* sizeof(struct sockaddr_storage) */
	DG_DATA_MAX = 256,        /* bytes taken of a buffer argument */
	DG_ARGV_MAX = 512,
	DG_TAIL_MAX = 2048,
	DG_SYSCTL_NAME = 96,
	DG_CGROUP_PATH = 128,
	DG_WATCHES = 24,          /* watch prefixes of a box */
	DG_WATCH_WORDS = 8,       /* each up to 64 bytes, in 8-byte words */
	DG_COUNT_KEYS = 256,      /* (nr, ret) pairs counted per box; the rest goes to calls_other */
	DG_REPEATS = 8,           /* identical events of a box in one window */
	DG_DISTINCT = 256,        /* events of one (nr, ret) of a box in one window, identical or not */
};

enum dg_kind {
	DG_CALL = 1,              /* struct dg_call: a system call */
	DG_FILE = 2,              /* struct dg_call: a protected object was opened */
	DG_EXEC = 3,
	DG_TASK = 4,
	DG_EXIT = 5,
	DG_SIGNAL = 6,
	DG_NET = 7,
	DG_DEVICE = 8,
	DG_SYSCTL = 9,
	DG_CAP = 10,
	DG_URING = 11,
	DG_CGROUP = 12,
	DG_OOM = 13,
};

/* dg_head.flags */
enum dg_record_flags {
	DG_R_CRITICAL = 1,        /* came out of the reserved budget's classes */
	DG_R_TRUNCATED = 2,       /* a path or directory was longer than what is kept */
	DG_R_DETACHED = 4,        /* the directory is not below the task's root */
	DG_R_UNREADABLE = 8,      /* a pointer argument could not be read */
	DG_R_PROGRAM32 = 16,      /* an i386 call of a program that is a 32-bit one as a whole */
};

/* How a system call is looked at: low six bits of a class table entry. */
enum dg_class {
	DG_C_SKIP = 0,
	DG_C_ALWAYS = 1,
	DG_C_OPEN = 2,
	DG_C_PATH = 3,            /* changes names or attributes: reported when refused */
	DG_C_ADDR = 4,            /* connect, bind */
	DG_C_SEND = 5,            /* sendto */
	DG_C_SENDMSG = 6,         /* sendmsg, sendmmsg */
	DG_C_SOCKET = 7,
	DG_C_KILL = 8,
	DG_C_FORK = 9,            /* fork, vfork, clone */
	DG_C_CLONE3 = 10,
	DG_C_PTRACE = 11,
	DG_C_REFUSED = 12,        /* reported when refused */
	DG_C_IOCTL = 13,
	DG_C_PERSONALITY = 14,
	DG_C_EXECVE = 15,
	DG_C_MKNOD = 16,
	DG_C_PRCTL = 17,
	DG_C_UNKNOWN = 18,        /* no such call in the table */
	DG_C_MOUNT = 19,          /* ALWAYS, with the type's name as data */
	DG_C_WRITE = 20,          /* REFUSED, with the buffer's start */
};

/*
 * The rest of an entry says where the arguments are: three bits each, 0 = none, else the argument's index + 1.
 * A directory descriptor without a path names the object itself.
 */
enum dg_entry {
	DG_E_CLASS = 0x3f,
	DG_E_PATH = 6,
	DG_E_DIR = 9,
	DG_E_PATH2 = 12,
	DG_E_DIR2 = 15,
	DG_E_MODE = 18,           /* mknod: mode */
	DG_E_CRITICAL = 1 << 24,
	DG_E_BIND = 1 << 25,      /* DG_C_ADDR: a bind */
};

enum dg_abi { DG_ABI_X64 = 0, DG_ABI_X32 = 1, DG_ABI_I386 = 2 };

/* dg_call.why */
enum dg_why {
	DG_W_CLASS = 0,           /* the call's class */
	DG_W_REFUSED = 1,
	DG_W_ABSENT = 2,          /* nothing there, below a watch prefix */
	DG_W_RESOURCE = 3,        /* a limit: ENOMEM, ENOSPC, EMFILE ... */
	DG_W_ABI = 4,
	DG_W_UNKNOWN = 5,
	DG_W_PROTECTED = 6,
	DG_W_SLOT = 7,            /* opened below a watch prefix, but the descriptor was gone when looked at */
	DG_W_EXEC = 8,            /* opened by exec */
};

enum dg_net_op { DG_NET_CONNECT = 1, DG_NET_SENDMSG = 2, DG_NET_BIND = 3, DG_NET_SOCKET = 4 };
enum dg_network { DG_NETWORK_NONE = 0, DG_NETWORK_ALLOWLIST = 1, DG_NETWORK_OPEN = 2 };
enum dg_level { DG_LEVEL_COLD = 0, DG_LEVEL_FULL = 1 };

/* Set before load; read-only afterwards. */
struct dg_config {
	__u32 ancestor_level;     /* of a box's v2 directory, the root being 0 */
	__u32 fail_closed;        /* cgroup hooks refuse what comes from below the instance but from no known box */
	__u32 classes[DG_SYSCALLS];
	__u32 classes_i386[DG_SYSCALLS];
};

/* Shared by all boxes of the object, written by both sides. */
struct dg_global {
	__u64 lost_evidence;
	__u64 lost_context;
	__u64 protected_objects;  /* entries of `objects`; 0 spares every open its look-up */
	__u64 strayed;            /* marked tasks that were moved out of their box */
};

/* `boxes`: v2 cgroup id -> what the guard decided. Written by the guard only. */
struct dg_box {
	__u64 event_budget;
	__u64 context_budget;
	__u64 reserved_budget;    /* critical events beyond event_budget; protected objects have as much again */
	__u32 level;
	__u32 network;
	__u32 phase;
	__u32 init_tgid;
	__u32 live;               /* 0: nothing is reported */
	__u32 watches;            /* entries of its dg_watch */
};

/* `stats`: v2 cgroup id -> what happened. Written by the kernel. */
struct dg_stats {
	__u64 events;             /* evidence asked for: emitted, lost or over budget */
	__u64 context;
	__u64 emitted;
	__u64 lost_evidence;
	__u64 lost_context;
	__u64 over_budget;
	__u64 suppressed;         /* repeats that were only counted */
	__u64 reserved;
	__u64 protected_seen;
	__u64 forks;
	__u64 threads;
	__u64 execs;
	__u64 exits;
	__u64 signals;            /* between processes of the box */
	__u64 exec_counter;
	__u64 caps_seen;          /* bit = capability that was refused at least once */
	__u64 count_keys;
	__u64 calls_other;
};

struct dg_object_key { __u64 dev; __u64 ino; };
struct dg_task_mark { __u64 box; __u32 exec; __u32 pad; };
struct dg_count_key { __u64 box; __u32 nr; __s32 ret; };
struct dg_repeat_key { __u64 box; __u32 nr; __s32 ret; __u64 hash; };
struct dg_repeat { __u64 window; __u64 n; };
struct dg_watch { __u64 word[DG_WATCHES][DG_WATCH_WORDS]; __u64 mask[DG_WATCHES][DG_WATCH_WORDS]; };

/* Pseudo numbers of dg_count_key.nr for what is no system call: DG_NR_HOOK + enum dg_kind, + 32 * op. */
enum { DG_NR_HOOK = 0x10000, DG_NR_I386 = 0x20000 };

struct dg_head {
	__u64 at_ns;              /* CLOCK_MONOTONIC */
	__u64 box;
	__u16 kind;
	__u16 flags;
	__u32 size;               /* of the whole record */
	__u32 exec;
	__u32 phase;
	__u32 tgid;
	__u32 tid;
	__u32 ppid;
	__u32 uid;                /* in the initial user namespace */
	char comm[16];
};

/* DG_CALL, DG_FILE. `tail` holds, in this order: base, path, base2, path2, addr, data. */
struct dg_call {
	struct dg_head head;
	__s64 ret;
	__u64 args[6];
	__u64 extra;              /* flags that sit in memory: clone3, openat2 */
	__u64 object;             /* DG_FILE: the guard's number of the object, 0 for DG_W_SLOT */
	__u32 nr;
	__u8 abi;
	__u8 cls;
	__u16 why;
	__u32 file_flags;         /* DG_FILE: f_flags of the open file */
	__u16 len_base;
	__u16 len_path;
	__u16 len_base2;
	__u16 len_path2;
	__u16 len_addr;
	__u16 len_data;
	__u8 tail[DG_TAIL_MAX];
};

struct dg_exec {
	struct dg_head head;
	__u32 nlink;              /* of the program's inode; 0: it has no name */
	__u16 len_file;
	__u16 len_argv;           /* words separated by NUL */
	__u8 tail[DG_PATH_MAX + DG_ARGV_MAX];
};

struct dg_task {
	struct dg_head head;
	__u64 clone_flags;
	__u32 child_tgid;
	__u32 child_tid;
	__u32 child_exec;
	__u32 pad;
};

struct dg_exit {
	struct dg_head head;
	__u32 status;             /* as wait(2) gives it */
	__u32 pad;
};

struct dg_signal {
	struct dg_head head;
	__s32 sig;
	__s32 code;               /* si_code; > 0 from the kernel */
	__u32 target_tgid;
	__u8 in_box;
	__u8 is_init;
	__u8 from_kernel;
	__u8 result;              /* enum of trace/events/signal.h: 0 delivered, 1 ignored ... */
};

struct dg_net {
	struct dg_head head;
	__u32 op;
	__u32 family;
	__u32 type;
	__u32 protocol;
	__u8 addr[16];            /* network order; the first four bytes for AF_INET */
	__u32 port;
	__s32 ret;
};

struct dg_device {
	struct dg_head head;
	__u32 dev_type;           /* BPF_DEVCG_DEV_* */
	__u32 access;             /* BPF_DEVCG_ACC_* bits */
	__u32 major;
	__u32 minor;
	__s32 ret;
	__u32 pad;
};

struct dg_sysctl {
	struct dg_head head;
	__s32 ret;
	__u32 write;
	char name[DG_SYSCTL_NAME];
};

struct dg_cap {
	struct dg_head head;
	__u32 cap;
	__u32 pad;
};

struct dg_uring {
	struct dg_head head;
	__u32 op;                 /* 1 create, 2 submit */
	__u32 opcode;
};

struct dg_cgroup {
	struct dg_head head;
	__u64 destination;        /* id of the cgroup's directory */
	__u32 moved_tgid;
	__u32 len_path;
	char path[DG_CGROUP_PATH];
};

struct dg_oom {
	struct dg_head head;
	__u32 victim_tgid;
	__u32 pad;
};

#endif
