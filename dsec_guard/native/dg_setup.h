// SPDX-License-Identifier: Apache-2.0
/*
 * dg_setup.h - what one box is built from, between clone and exec. Filled by dg_launch.c, used by dg_setup.c's table.
 */
#ifndef DG_SETUP_H
#define DG_SETUP_H

#include "dg_common.h"
#include "dg_kernel.h"

/* Descriptors the launcher opens once, when it starts. */
struct dg_launcher {
	int guard;               /* SEQPACKET to the guard */
	int parent_pidfd;        /* of the process that boxes must not outlive */
	int init_exe;            /* sealed copy of dg-init, executable and not readable for a box */
	int null;                /* /dev/null of the host */
	int user_sysctls;        /* /proc/sys/user; what it shows depends on the reader's user namespace */
	int overlay_index_default; /* 1: the kernel shows only "index=off" in mount options */
};

struct dg_box {
	const struct dg_launcher *launcher;
	const struct dg_plan *plan;
	const int *fds;          /* of the request */
	int report;              /* SEQPACKET to the launcher */
	int init_sock;           /* dg-init's end of its socket to the guard */
	int plan_fd;

	/* Filled by the steps. */
	int root;                /* the top of the new root */
	int store;
	int merged[DG_MAX_OVERLAYS];
	int upper[DG_MAX_OVERLAYS];
	unsigned int overlays;
	int landlock[DG_MAX_PHASES]; /* -1: none */
	int listener;            /* -1: none */
};

/* Descriptor numbers dg-init starts with; rulesets follow DG_INIT_PLAN, one for each phase that has one. */
#define DG_INIT_SOCK 3
#define DG_INIT_REPORT 4
#define DG_INIT_PLAN 5
#define DG_INIT_RULESETS 6

/* What dg-init itself needs: become the command's user, shed capabilities, signal any process of the box. */
#define DG_INIT_CAPS (1ull << DG_CAP_SETUID | 1ull << DG_CAP_SETGID | 1ull << DG_CAP_SETPCAP | 1ull << DG_CAP_KILL)

static inline uint32_t dg_host_id(const struct dg_box *box, uint32_t id)
{
	return box->plan->base_uid + id;
}

/* Runs the table; returns only on failure, with @err naming step and call. */
int dg_setup(struct dg_box *box, struct dg_error *err);

/* Prints the table, one step a line: a test compares it with ARCHITECTURE.md. */
void dg_setup_print(int fd);

/* dg_root.c: mounts the store and the scaffold, carries out the plan's operations, seals the scaffold. */
int dg_build_root(struct dg_box *box, struct dg_error *err);

/* dg_landlock.c: one ruleset for each phase that asks for one, from paths below box->root. */
int dg_make_rulesets(struct dg_box *box, struct dg_error *err);

/*
 * dg_userns.c - a user namespace mapped to base..base+65535 and charged to @base.
 * @owner_uid, @owner_gid: with @flags DG_USERNS_OWNER, on-disk ids that shall look like @agent inside.
 * Returns its descriptor, or -1 with @err.
 */
int dg_make_userns(uint32_t base, uint32_t flags, uint32_t owner_uid, uint32_t owner_gid, uint32_t agent,
		   struct dg_error *err);

#endif
