// SPDX-License-Identifier: Apache-2.0
/*
 * dg_setup.c - everything that happens between clone and the exec of dg-init, as one ordered table at the end of the file.
 * Starts as: a copy of the launcher, host root, pid 1 of a new pid namespace, in its own mount, net, ipc and uts
 *            namespaces, in its v2 cgroup since its first instruction (CLONE_INTO_CGROUP).
 * Ends as:   dg-init, uid 65533 of the box's user namespace, with a few descriptors and the capabilities it hands out.
 */
#define _GNU_SOURCE
#include "dg_kernel.h"
#include "dg_setup.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <net/if.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#ifndef PR_CAP_AMBIENT
#define PR_CAP_AMBIENT 47
#define PR_CAP_AMBIENT_RAISE 2
#endif

static int join_v1_cgroups(struct dg_box *box, struct dg_error *err)
{
	const uint32_t *tasks = dg_at(box->plan, box->plan->v1_fds);

	for (uint32_t i = 0; i < box->plan->v1_fds.len; i++)
		if (write(box->fds[tasks[i]], "0", 1) != 1)
			return dg_fail(err, "write(tasks)");
	return 0;
}

static int new_cgroup_ns(struct dg_box *box, struct dg_error *err)
{
	(void)box;
	return syscall(SYS_unshare, DG_CLONE_NEWCGROUP) < 0 ? dg_fail(err, "unshare(CLONE_NEWCGROUP)") : 0;
}

/* Its own session: no controlling terminal, no job-control signals of the host's. */
static int new_session(struct dg_box *box, struct dg_error *err)
{
	(void)box;
	return setsid() < 0 ? dg_fail(err, "setsid") : 0;
}

static int isolate_mounts(struct dg_box *box, struct dg_error *err)
{
	(void)box;
	return mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0 ? dg_fail(err, "mount(MS_PRIVATE)") : 0;
}

static int loopback_up(struct dg_box *box, struct dg_error *err)
{
	struct ifreq lo = { .ifr_name = "lo" };
	int sock = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0), failed = 0;

	(void)box;
	if (sock < 0)
		return dg_fail(err, "socket");
	lo.ifr_flags = IFF_UP | IFF_RUNNING;
	if (ioctl(sock, SIOCSIFFLAGS, &lo) < 0)
		failed = dg_fail(err, "ioctl(SIOCSIFFLAGS lo)");
	close(sock);
	return failed;
}

static int set_hostname(struct dg_box *box, struct dg_error *err)
{
	const struct dg_plan *plan = box->plan;

	if (sethostname(dg_text(plan, plan->hostname), plan->hostname.len) < 0)
		return dg_fail(err, "sethostname");
	return setdomainname("(none)", 6) < 0 ? dg_fail(err, "setdomainname") : 0;
}

/* Source: pivot_root(2), NOTES, on pivot_root(".", "."). */
static int enter_root(struct dg_box *box, struct dg_error *err)
{
	if (fchdir(box->root) < 0)
		return dg_fail(err, "fchdir(root)");
	/* Same directory twice: the old root is stacked on top, no put_old is left behind. */
	if (syscall(SYS_pivot_root, ".", ".") < 0)
		return dg_fail(err, "pivot_root");
	/* Lazy: descriptors this process still holds keep the old tree busy. */
	if (umount2(".", MNT_DETACH) < 0)
		return dg_fail(err, "umount2(old root)");
	return chdir("/") < 0 ? dg_fail(err, "chdir(/)") : 0;
}

static int enter_user_ns(struct dg_box *box, struct dg_error *err)
{
	if (syscall(SYS_setns, box->fds[box->plan->userns_fd], DG_CLONE_NEWUSER) < 0)
		return dg_fail(err, "setns(CLONE_NEWUSER)");
	return 0;
}

/* /proc/sys/user shows, at the moment of an open, the limits of the opener's user namespace: kernel/ucount.c. */
static int limit_namespaces(struct dg_box *box, struct dg_error *err)
{
	static const char *const limits[] = {
		"max_user_namespaces", "max_mnt_namespaces", "max_pid_namespaces", "max_net_namespaces",
		"max_ipc_namespaces", "max_uts_namespaces", "max_cgroup_namespaces", "max_time_namespaces",
	};

	if (!(box->plan->flags & DG_PLAN_LIMIT_NAMESPACES))
		return 0;
	for (size_t i = 0; i < sizeof(limits) / sizeof(*limits); i++) {
		int fd = openat(box->launcher->user_sysctls, limits[i], O_WRONLY | O_CLOEXEC);
		ssize_t done;

		if (fd < 0) {
			if (errno == ENOENT) /* a kernel without that kind of namespace */
				continue;
			return dg_fail_at(err, "openat", limits[i]);
		}
		done = write(fd, "0", 1);
		close(fd);
		if (done != 1)
			return dg_fail_at(err, "write", limits[i]);
	}
	return 0;
}

static int drop_bounding_set(struct dg_box *box, struct dg_error *err)
{
	for (unsigned int cap = 0; cap <= DG_CAP_LAST; cap++) {
		if ((box->plan->caps | DG_INIT_CAPS) >> cap & 1)
			continue;
		if (prctl(PR_CAPBSET_DROP, cap, 0, 0, 0) == 0)
			continue;
		if (errno == EINVAL) /* beyond the last one this kernel knows */
			break;
		return dg_fail(err, "prctl(PR_CAPBSET_DROP)");
	}
	return 0;
}

static int switch_user(struct dg_box *box, struct dg_error *err)
{
	const uint64_t caps = box->plan->caps | DG_INIT_CAPS;
	struct { uint32_t version; int pid; } head = { 0x20080522, 0 };
	struct { uint32_t effective, permitted, inheritable; } data[2] = {
		{ (uint32_t)caps, (uint32_t)caps, (uint32_t)caps },
		{ (uint32_t)(caps >> 32), (uint32_t)(caps >> 32), (uint32_t)(caps >> 32) },
	};

	if (syscall(SYS_setgroups, 0, NULL) < 0)
		return dg_fail(err, "setgroups");
	if (syscall(SYS_setresgid, DG_INIT_UID, DG_INIT_UID, DG_INIT_UID) < 0)
		return dg_fail(err, "setresgid");
	if (prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0) < 0)
		return dg_fail(err, "prctl(PR_SET_KEEPCAPS)");
	if (syscall(SYS_setresuid, DG_INIT_UID, DG_INIT_UID, DG_INIT_UID) < 0)
		return dg_fail(err, "setresuid");
	if (syscall(SYS_capset, &head, data) < 0)
		return dg_fail(err, "capset");
	/* Ambient: the only way a program without file capabilities keeps them over exec under a uid other than 0. */
	for (unsigned int cap = 0; cap <= DG_CAP_LAST; cap++)
		if (caps >> cap & 1 && prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, cap, 0, 0) < 0)
			return dg_fail(err, "prctl(PR_CAP_AMBIENT_RAISE)");
	return 0;
}

/* A keyring of nobody's: the one inherited belongs to the guard's session. */
static int new_keyring(struct dg_box *box, struct dg_error *err)
{
	(void)box;
	if (syscall(SYS_keyctl, 1 /* KEYCTL_JOIN_SESSION_KEYRING */, NULL, 0, 0, 0) < 0 && errno != ENOSYS)
		return dg_fail(err, "keyctl(JOIN_SESSION_KEYRING)");
	return 0;
}

static int die_with_parent(struct dg_box *box, struct dg_error *err)
{
	struct pollfd parent = { .fd = box->launcher->parent_pidfd, .events = POLLIN };

	if (prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) < 0)
		return dg_fail(err, "prctl(PR_SET_PDEATHSIG)");
	/* It may be gone already, and getppid() is 0 in a new pid namespace; the pidfd tells. */
	if (poll(&parent, 1, 0) != 0)
		return dg_refuse(err, "parent has ended", ESRCH);
	return 0;
}

static int set_no_new_privs(struct dg_box *box, struct dg_error *err)
{
	(void)box;
	return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 ? dg_fail(err, "prctl(PR_SET_NO_NEW_PRIVS)") : 0;
}

static int install_notify(struct dg_box *box, struct dg_error *err)
{
	const struct sock_fprog filter = {
		.len = (unsigned short)box->plan->notify.len,
		.filter = (struct sock_filter *)(uintptr_t)dg_at(box->plan, box->plan->notify),
	};
	unsigned int flags = DG_SECCOMP_NEW_LISTENER | DG_SECCOMP_WAIT_KILLABLE;

	if (!filter.len)
		return 0;
	box->listener = (int)syscall(SYS_seccomp, DG_SECCOMP_SET_MODE_FILTER, flags, &filter);
	if (box->listener < 0 && errno == EINVAL) /* before Linux 5.19; only means that signals interrupt a notified call */
		box->listener = (int)syscall(SYS_seccomp, DG_SECCOMP_SET_MODE_FILTER, DG_SECCOMP_NEW_LISTENER, &filter);
	return box->listener < 0 ? dg_fail(err, "seccomp(NEW_LISTENER)") : 0;
}

static int hand_over(struct dg_box *box, struct dg_error *err)
{
	int fds[3 + 2 * DG_MAX_OVERLAYS];
	unsigned int n = 0;
	struct dg_answer ans;

	dg_answer_init(&ans, DG_ANS_SPAWNED);
	fds[n++] = box->store;
	fds[n++] = box->root;
	if (box->listener >= 0)
		fds[n++] = box->listener;
	for (unsigned int i = 0; i < box->overlays; i++) {
		fds[n++] = box->merged[i];
		fds[n++] = box->upper[i];
	}
	ans.has_listener = box->listener >= 0;
	ans.overlays = box->overlays;
	return dg_send(box->report, &ans, sizeof(ans), fds, n) < 0 ? dg_fail(err, "sendmsg(handles)") : 0;
}

/* Moves what dg-init gets to the numbers it expects and closes all else; its program goes away with the exec. */
static int close_fds(struct dg_box *box, struct dg_error *err)
{
	int keep[DG_INIT_RULESETS + DG_MAX_PHASES + 1], n = 0, last;

	for (int i = 0; i < 3; i++)
		keep[n++] = box->launcher->null;
	keep[n++] = box->init_sock;
	keep[n++] = box->report;
	keep[n++] = box->plan_fd;
	for (unsigned int i = 0; i < DG_MAX_PHASES; i++)
		if (box->landlock[i] >= 0)
			keep[n++] = box->landlock[i];
	keep[n++] = box->launcher->init_exe;
	/* First out of the way of the targets, then to them. */
	for (int i = 0; i < n; i++) {
		keep[i] = fcntl(keep[i], F_DUPFD_CLOEXEC, 512);
		if (keep[i] < 0)
			return dg_fail(err, "fcntl(F_DUPFD)");
	}
	last = n - 1;
	for (int i = 0; i < n; i++)
		if (dup3(keep[i], i, i == last ? O_CLOEXEC : 0) < 0)
			return dg_fail(err, "dup3");
	box->report = DG_INIT_REPORT;
	if (syscall(SYS_close_range, (unsigned int)n, ~0u, 0) < 0)
		return dg_fail(err, "close_range");
	/* exec_init finds the program after the last kept descriptor. */
	box->init_sock = last;
	return 0;
}

static int exec_init(struct dg_box *box, struct dg_error *err)
{
	char *const argv[] = { "init", NULL };
	char *const env[] = { NULL };

	syscall(SYS_execveat, box->init_sock, "", argv, env, AT_EMPTY_PATH);
	return dg_fail(err, "execveat(dg-init)");
}

struct dg_step {
	const char *name;
	int (*run)(struct dg_box *box, struct dg_error *err);
};

#define STEP(name) { #name, name }
#define STEP_IN(name, file) { #name, file }

static const struct dg_step dg_setup_steps[] = { /* we start in our v2 cgroup, pid, mount, net, ipc and uts namespaces */
	STEP(join_v1_cgroups),   /* hybrid hosts only; through `tasks`: cgroup.procs waits for a grace period */
	STEP(new_cgroup_ns),     /* after the last join, else /proc/self/cgroup shows host paths */
	STEP(new_session),       /* before anything can signal us through the guard's terminal */
	STEP(isolate_mounts),    /* before the first mount, so that none reaches the host */
	STEP_IN(build_root, dg_build_root),       /* uses host descriptors and paths, so before enter_root */
	STEP_IN(make_rulesets, dg_make_rulesets), /* after the last mount: a rule does not cover one made over its path */
	STEP(loopback_up),       /* needs CAP_NET_ADMIN over the net namespace: host root's, so before enter_user_ns */
	STEP(set_hostname),      /* the same for the uts namespace */
	STEP(enter_root),        /* no host path can be opened from here on */
	STEP(enter_user_ns),     /* after the last mount: root inside must not own any of them */
	STEP(limit_namespaces),  /* acts on the writer's user namespace, so after enter_user_ns; before any agent */
	STEP(drop_bounding_set), /* needs CAP_SETPCAP, so before switch_user */
	STEP(switch_user),       /* groups, then gid, then uid, then capabilities */
	STEP(new_keyring),       /* after switch_user: its quota is the box's */
	STEP(die_with_parent),   /* changing the uid clears the setting: prctl(2), PR_SET_PDEATHSIG */
	STEP(set_no_new_privs),  /* seccomp and Landlock ask it of a task without CAP_SYS_ADMIN */
	STEP(install_notify),    /* after no_new_privs; covers dg-init and every command, one listener a box */
	STEP(hand_over),         /* the listener must not pass through dg-init; before close_fds */
	STEP(close_fds),         /* an inherited descriptor is not bound by Landlock path rules */
	STEP(exec_init),
};

#define STEPS (sizeof(dg_setup_steps) / sizeof(*dg_setup_steps))

int dg_setup(struct dg_box *box, struct dg_error *err)
{
	for (size_t i = 0; i < STEPS; i++)
		if (dg_setup_steps[i].run(box, err) < 0) {
			dg_enter(err, dg_setup_steps[i].name);
			break;
		}
	return -1;
}

void dg_setup_print(int fd)
{
	for (size_t i = 0; i < STEPS; i++)
		if (write(fd, dg_setup_steps[i].name, strlen(dg_setup_steps[i].name)) < 0 || write(fd, "\n", 1) < 0)
			return;
}
