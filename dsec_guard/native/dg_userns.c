// SPDX-License-Identifier: Apache-2.0
/*
 * dg_userns.c - user namespaces with their maps written: a box's own, or one that only serves as an id map of mounts.
 * Source:  user_namespaces(7); kernel/user_namespace.c, create_user_ns: the creator's *effective uid* is charged.
 */
#define _GNU_SOURCE
#include "dg_kernel.h"
#include "dg_setup.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

struct text {
	char bytes[256];
	size_t len;
};

static void put(struct text *to, const char *s)
{
	while (*s && to->len + 1 < sizeof(to->bytes))
		to->bytes[to->len++] = *s++;
	to->bytes[to->len] = '\0';
}

static void put_number(struct text *to, uint32_t n)
{
	char digits[11];
	size_t at = sizeof(digits) - 1;

	digits[at] = '\0';
	do
		digits[--at] = (char)('0' + n % 10);
	while (n /= 10);
	put(to, digits + at);
}

static void put_range(struct text *to, uint32_t disk, uint32_t host, uint32_t count)
{
	if (!count)
		return;
	put_number(to, disk);
	put(to, " ");
	put_number(to, host);
	put(to, " ");
	put_number(to, count);
	put(to, "\n");
}

/* On-disk @owner shows as base+@agent; the id it displaces takes the owner's place, or the spare one if that is out of range. */
static void owner_map(struct text *to, uint32_t base, uint32_t owner, uint32_t agent)
{
	uint32_t low = owner < agent ? owner : agent;
	uint32_t high = owner < agent ? agent : owner;

	if (owner == agent) {
		put_range(to, 0, base, DG_ID_COUNT);
		return;
	}
	put_range(to, owner, base + agent, 1);
	if (owner >= DG_SPARE_ID) {
		put_range(to, agent, base + DG_SPARE_ID, 1);
		put_range(to, 0, base, agent);
		put_range(to, agent + 1, base + agent + 1, DG_SPARE_ID - agent - 1);
		return;
	}
	put_range(to, agent, base + owner, 1);
	put_range(to, 0, base, low);
	put_range(to, low + 1, base + low + 1, high - low - 1);
	put_range(to, high + 1, base + high + 1, DG_ID_COUNT - high - 1);
}

static int write_map(pid_t pid, const char *file, const struct text *map, struct dg_error *err)
{
	struct text path = { .len = 0 };
	ssize_t done;
	int fd;

	put(&path, "/proc/");
	put_number(&path, (uint32_t)pid);
	put(&path, file);
	fd = open(path.bytes, O_WRONLY | O_CLOEXEC);
	if (fd < 0)
		return dg_fail_at(err, "open", file);
	done = write(fd, map->bytes, map->len);
	if (done != (ssize_t)map->len) {
		dg_fail_at(err, "write", file);
		close(fd);
		return -1;
	}
	close(fd);
	return 0;
}

/* Holds a namespace until it is killed; never gets to anything else. */
static int hold(void *unused)
{
	(void)unused;
	while (pause() < 0)
		;
	return 0;
}

static int raise_caps(void)
{
	struct { uint32_t version; int pid; } head = { 0x20080522, 0 };
	struct { uint32_t effective, permitted, inheritable; } caps[2];

	if (syscall(SYS_capget, &head, caps) < 0)
		return -1;
	caps[0].effective = caps[0].permitted;
	caps[1].effective = caps[1].permitted;
	return (int)syscall(SYS_capset, &head, caps);
}

/*
 * A child in a new user namespace that belongs to @base. It shares our memory and need never run, so that nothing waits for
 * it. The saved uid stays 0: the permitted set survives, and hosts may refuse namespaces to the unprivileged.
 */
static pid_t clone_holder(uint32_t base, struct dg_error *err)
{
	static char stack[4096] __attribute__((aligned(16)));
	pid_t pid = -1;

	if (syscall(SYS_setresgid, -1, base, -1) < 0 || syscall(SYS_setresuid, -1, base, -1) < 0 || raise_caps() < 0) {
		dg_fail(err, "setresuid(base)");
	} else {
		pid = clone(hold, stack + sizeof(stack), CLONE_VM | CLONE_NEWUSER | SIGCHLD, NULL);
		if (pid < 0)
			dg_fail(err, "clone(CLONE_NEWUSER)");
	}
	/* Without these we cannot go on as what we are; our parent then sees us end. */
	if (syscall(SYS_setresuid, -1, 0, -1) < 0 || syscall(SYS_setresgid, -1, 0, -1) < 0 || raise_caps() < 0)
		_exit(1);
	return pid;
}

int dg_make_userns(uint32_t base, uint32_t flags, uint32_t owner_uid, uint32_t owner_gid, uint32_t agent,
		   struct dg_error *err)
{
	struct text uids = { .len = 0 }, gids = { .len = 0 }, path = { .len = 0 };
	int fd = -1;
	pid_t pid;

	dg_enter(err, "make_userns");
	if (base < DG_ID_COUNT || base > UINT32_MAX - DG_ID_COUNT || flags & ~DG_USERNS_OWNER)
		return dg_refuse(err, "base uid", EINVAL);
	if (flags & DG_USERNS_OWNER) {
		if (agent >= DG_SPARE_ID || owner_uid == UINT32_MAX || owner_gid == UINT32_MAX)
			return dg_refuse(err, "owner map", EINVAL);
		owner_map(&uids, base, owner_uid, agent);
		owner_map(&gids, base, owner_gid, agent);
	} else {
		put_range(&uids, 0, base, DG_ID_COUNT);
		gids = uids;
	}
	pid = clone_holder(base, err);
	if (pid < 0)
		return -1;
	if (write_map(pid, "/uid_map", &uids, err) == 0 && write_map(pid, "/gid_map", &gids, err) == 0) {
		put(&path, "/proc/");
		put_number(&path, (uint32_t)pid);
		put(&path, "/ns/user");
		fd = open(path.bytes, O_RDONLY | O_CLOEXEC);
		if (fd < 0)
			dg_fail(err, "open(ns/user)");
	}
	/* Reaped with the next request: its end is not worth waiting for, and its memory is ours. */
	kill(pid, SIGKILL);
	return fd;
}
