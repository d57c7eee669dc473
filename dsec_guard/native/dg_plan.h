// SPDX-License-Identifier: Apache-2.0
/*
 * dg_plan.h - the only layout of what the guard sends to the launcher and to dg-init, and of what they answer.
 * Twin:    sandbox/plan.py packs and unpacks the same records; tests/unit/test_plan.py compares every offset.
 * Rules:   little endian, natural alignment, no padding that is not named. A span is (offset, length) from the start
 *          of the plan. A text span has a NUL at offset+length that `length` does not count, and none before it.
 *          An array span is (offset, number of elements) and its offset is a multiple of 8.
 *          A descriptor is the index into the SCM_RIGHTS array of the same message; DG_NO_FD where there is none.
 */
#ifndef DG_PLAN_H
#define DG_PLAN_H

#include <stdint.h>

#define DG_PLAN_MAGIC 0x4e4c5044u    /* "DPLN" */
#define DG_EXEC_MAGIC 0x43455844u    /* "DXEC" */
#define DG_MSG_MAGIC 0x47534d44u     /* "DMSG" */
#define DG_VERSION 1u
#define DG_NO_FD 0xffffffffu

/* Limits. A plan beyond one of them is refused by name. */
#define DG_MAX_PLAN 16777216u        /* bytes */
#define DG_MAX_OPS 4096u
#define DG_MAX_FDS 250u              /* SCM_MAX_FD is 253 */
#define DG_MAX_OVERLAYS 16u
#define DG_MAX_PHASES 8u
#define DG_MAX_RULES 4096u
#define DG_MAX_RLIMITS 16u
#define DG_MAX_V1 16u
#define DG_MAX_CHECKS 16u            /* probes of system calls that the filter must answer */
#define DG_MAX_FILTER 4096u          /* BPF_MAXINSNS */
#define DG_MAX_PATH 4095u
#define DG_MAX_NAME 63u
#define DG_MAX_ARGS 65536u
#define DG_MAX_GROUPS 64u
#define DG_MAX_EXECS 1024u           /* live at one time in one box */
#define DG_ID_COUNT 65536u           /* uids of one box */
#define DG_INIT_UID 65533u           /* dg-init's own, never an agent's */
#define DG_SPARE_ID 65532u           /* where the owner map puts the id that the owner displaced */

/* enum: sandbox/spec.py OpKind */
#define DG_OP_DIR 1u
#define DG_OP_SYMLINK 2u
#define DG_OP_FILE 3u
#define DG_OP_BIND 4u
#define DG_OP_TREE 5u
#define DG_OP_TMPFS 6u
#define DG_OP_STORE 7u
#define DG_OP_OVERLAY 8u
#define DG_OP_PROC 9u
#define DG_OP_DEVPTS 10u
#define DG_OP_MQUEUE 11u
#define DG_OP_READONLY 12u
#define DG_OP_MASK_FILE 13u
#define DG_OP_MASK_DIR 14u
#define DG_OP_CGROUP 15u

/* flags: sandbox/spec.py MountFlag */
#define DG_MOUNT_RO 1u
#define DG_MOUNT_NOSUID 2u
#define DG_MOUNT_NODEV 4u
#define DG_MOUNT_NOEXEC 8u
#define DG_MOUNT_RECURSIVE 16u
#define DG_MOUNT_IDMAP_BOX 32u
#define DG_MOUNT_IDMAP_OWNER 64u
#define DG_MOUNT_OPTIONAL 128u
#define DG_MOUNT_ALL 255u

#define DG_PLAN_LIMIT_NAMESPACES 1u
#define DG_PLAN_SELF_CHECK 2u
#define DG_PLAN_ALL 3u

#define DG_EXEC_TTY 1u
#define DG_EXEC_ALL 1u

/* Requests to the launcher. */
#define DG_REQ_MAKE_USERNS 1u
#define DG_REQ_SPAWN 2u
/* Requests to dg-init. */
#define DG_REQ_EXEC 3u
#define DG_REQ_SIGNAL 4u

#define DG_USERNS_OWNER 1u           /* arg 1..3: owner uid, owner gid, agent id */
#define DG_SIGNAL_ALL 0u             /* exec id 0: every process of the box but dg-init */

/* Answers of the launcher. */
#define DG_ANS_ERROR 1u
#define DG_ANS_USERNS 2u
#define DG_ANS_SPAWNED 3u
/* Answers of dg-init. */
#define DG_ANS_READY 4u
#define DG_ANS_STARTED 5u
#define DG_ANS_FAILED 6u
#define DG_ANS_EXITED 7u

struct dg_span {
	uint32_t off;
	uint32_t len;
};

struct dg_plan {
	uint32_t magic;
	uint32_t version;
	uint32_t size;               /* of the whole plan */
	uint32_t flags;              /* DG_PLAN_* */
	uint32_t base_uid;
	uint32_t deadline_ms;
	uint64_t store_bytes;
	uint64_t store_inodes;
	uint64_t caps;               /* the most that any command of the box may hold */
	uint32_t cgroup_fd;
	uint32_t userns_fd;
	uint32_t owner_map_fd;
	uint32_t check_phase;        /* the self-check is confined like a command of this phase */
	struct dg_span name;         /* text */
	struct dg_span hostname;     /* text */
	struct dg_span stage_dir;    /* text */
	struct dg_span ops;          /* dg_op[] */
	struct dg_span v1_fds;       /* uint32_t[] */
	struct dg_span rlimits;      /* dg_rlimit[] */
	struct dg_span phases;       /* dg_phase[] */
	struct dg_span checks;       /* dg_check[] */
	struct dg_span notify;       /* sock_filter[] */
};

struct dg_op {
	uint32_t kind;
	uint32_t flags;
	uint32_t mode;
	uint32_t uid;
	uint32_t gid;
	uint32_t fd;
	struct dg_span target;       /* text */
	struct dg_span source;       /* text */
	struct dg_span name;         /* text */
	struct dg_span content;      /* bytes */
	uint64_t size_bytes;
	uint64_t inodes;
};

struct dg_rlimit {
	uint32_t resource;
	uint32_t reserved;
	uint64_t soft;
	uint64_t hard;
};

struct dg_phase {
	struct dg_span filter;       /* sock_filter[]; none: no filter */
	struct dg_span rules;        /* dg_rule[] */
	struct dg_span ports;        /* dg_port[] */
	uint32_t has_landlock;
	uint32_t reserved;
	uint64_t handled_fs;
	uint64_t handled_net;
	uint64_t scoped;
};

struct dg_rule {
	struct dg_span path;         /* text */
	uint64_t access;
};

struct dg_port {
	uint64_t port;
	uint64_t access;
};

struct dg_check {
	uint32_t number;
	uint32_t errnum;             /* what the phase's filter answers */
};

struct dg_exec {
	uint32_t magic;
	uint32_t version;
	uint32_t size;
	uint32_t flags;              /* DG_EXEC_* */
	uint64_t caps;
	uint32_t uid;
	uint32_t gid;
	uint32_t umask;
	uint32_t phase;
	struct dg_span groups;       /* uint32_t[] */
	struct dg_span argv;         /* dg_span[] of texts, at least one */
	struct dg_span env;          /* dg_span[] of texts */
	struct dg_span cwd;          /* text */
};

struct dg_request {
	uint32_t magic;
	uint32_t version;
	uint32_t kind;               /* DG_REQ_* */
	uint32_t flags;
	uint32_t arg[4];             /* MAKE_USERNS: base uid; SIGNAL: exec id, signal; EXEC: exec id */
};

struct dg_check_result {
	char name[24];
	uint32_t refused;
	uint32_t errnum;             /* 0: it worked */
};

/*
 * DG_ANS_SPAWNED carries pidfd, dg-init's socket, store, root, then the listener if `has_listener`, then for each
 * OVERLAY of the plan in order its merged and its upper directory.
 */
struct dg_answer {
	uint32_t magic;
	uint32_t version;
	uint32_t kind;               /* DG_ANS_* */
	int32_t errnum;
	char step[32];
	char call[96];
	uint32_t exec_id;
	uint32_t pid;                /* SPAWNED: as the launcher sees it; STARTED, EXITED: inside */
	int32_t status;              /* as wait(2) gives it */
	uint32_t has_listener;
	uint32_t overlays;
	uint32_t checks;
	struct dg_check_result check[DG_MAX_CHECKS + 8];
};

_Static_assert(sizeof(struct dg_plan) == 136 && sizeof(struct dg_op) == 72, "plan layout");
_Static_assert(sizeof(struct dg_phase) == 56 && sizeof(struct dg_exec) == 72, "phase and exec layout");

#endif
