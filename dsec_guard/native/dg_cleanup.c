/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dg_cleanup.c - removes what a guard left: processes first, then cgroup directories, then registered trees.
 * Trees are walked by descriptor, without following links or crossing mounts, below directories the guard named as its
 * own. A killed cgroup cannot be removed until its last task has been reaped, so both are tried in turn.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <linux/openat2.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include "dg_holder_state.h"

#define DG_DEPTH_MAX 256
#define DG_REKILL_NS 40000000u

static bool dg_is_prefix(const char *dir, const char *path)
{
	size_t len = strlen(dir);

	return strncmp(path, dir, len) == 0 && path[len] == '/' && path[len + 1] != '\0';
}

/* Takes @fd over, also when it fails. */
int dg_own_directory(struct dg_holder *h, int fd, const char *path)
{
	struct dg_owned_dir *dir = calloc(1, sizeof(*dir));
	int error;

	if (!dir || path[0] != '/' || path[1] == '\0' || !(dir->path = strdup(path))) {
		error = dir ? EINVAL : ENOMEM;
		free(dir);
		close(fd);
		errno = error;
		return -1;
	}
	dir->fd = fd;
	dir->next = h->owned;
	h->owned = dir;
	return 0;
}

static const struct dg_owned_dir *dg_owner_of(const struct dg_holder *h, const char *path)
{
	const struct dg_owned_dir *dir;

	for (dir = h->owned; dir; dir = dir->next)
		if (dg_is_prefix(dir->path, path))
			return dir;
	return NULL;
}

int dg_add_path(struct dg_holder *h, const char *path)
{
	struct dg_named_path *entry;

	if (!dg_owner_of(h, path)) {
		errno = EPERM;
		return -1;
	}
	entry = calloc(1, sizeof(*entry));
	if (!entry || !(entry->path = strdup(path))) {
		free(entry);
		errno = ENOMEM;
		return -1;
	}
	entry->next = h->paths;
	h->paths = entry;
	return 0;
}

int dg_release_path(struct dg_holder *h, const char *path)
{
	struct dg_named_path **link, *entry;

	for (link = &h->paths; (entry = *link); link = &entry->next) {
		if (strcmp(entry->path, path))
			continue;
		*link = entry->next;
		free(entry->path);
		free(entry);
		return 0;
	}
	errno = ENOENT;
	return -1;
}

static int dg_open_beneath(int dir_fd, const char *name)
{
	struct open_how how = {
		.flags = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC,
		.resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_XDEV | RESOLVE_NO_MAGICLINKS,
	};

	return (int)syscall(SYS_openat2, dir_fd, name, &how, sizeof(how));
}

/*
 * Removes what is in @dir_fd (taken over); with @dirs_only its directories alone, as cgroup file systems want it.
 * Goes on after a failure; -1 when anything stayed.
 */
static int dg_empty_directory(int dir_fd, bool dirs_only, int depth)
{
	DIR *dir = fdopendir(dir_fd);
	struct dirent *entry;
	int result = 0;

	if (!dir) {
		close(dir_fd);
		return -1;
	}
	while ((entry = readdir(dir))) {
		int child;

		if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, ".."))
			continue;
		if (entry->d_type != DT_DIR && entry->d_type != DT_UNKNOWN) {
			if (!dirs_only && unlinkat(dirfd(dir), entry->d_name, 0) < 0 && errno != ENOENT)
				result = -1;
			continue;
		}
		child = depth < DG_DEPTH_MAX ? dg_open_beneath(dirfd(dir), entry->d_name) : -1;
		if (child >= 0) {
			dg_empty_directory(child, dirs_only, depth + 1);
			if (unlinkat(dirfd(dir), entry->d_name, AT_REMOVEDIR) < 0 && errno != ENOENT)
				result = -1;
		} else if (dirs_only || (unlinkat(dirfd(dir), entry->d_name, 0) < 0 && errno != ENOENT)) {
			result = -1;
		}
	}
	closedir(dir);
	return result;
}

/* A cgroup directory with all below it; 0 also when it is gone already. */
static int dg_remove_cgroup(const char *path)
{
	int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	struct statfs fs;

	if (fd < 0)
		return errno == ENOENT ? 0 : -1;
	/* A path that is no cgroup is not ours to empty, whatever was registered. */
	if (fstatfs(fd, &fs) < 0 || (fs.f_type != CGROUP_SUPER_MAGIC && fs.f_type != CGROUP2_SUPER_MAGIC)) {
		close(fd);
		return -1;
	}
	dg_empty_directory(fd, true, 0);
	return rmdir(path) < 0 && errno != ENOENT ? -1 : 0;
}

static int dg_remove_path(const struct dg_holder *h, const char *path)
{
	const struct dg_owned_dir *owner = dg_owner_of(h, path);
	const char *relative, *name;
	char *parent;
	int parent_fd, fd, result;

	if (!owner)
		return -1;
	relative = path + strlen(owner->path) + 1;
	name = strrchr(relative, '/');
	if (name) {
		parent = strndup(relative, (size_t)(name - relative));
		if (!parent)
			return -1;
		parent_fd = dg_open_beneath(owner->fd, parent);
		free(parent);
		name++;
	} else {
		parent_fd = fcntl(owner->fd, F_DUPFD_CLOEXEC, 3);
		name = relative;
	}
	if (parent_fd < 0)
		return errno == ENOENT ? 0 : -1;
	fd = dg_open_beneath(parent_fd, name);
	if (fd >= 0) {
		dg_empty_directory(fd, false, 0);
		result = unlinkat(parent_fd, name, AT_REMOVEDIR);
	} else {
		result = unlinkat(parent_fd, name, 0);
	}
	if (result < 0 && errno == ENOENT)
		result = 0;
	close(parent_fd);
	return result;
}

static void dg_kill_all(const struct dg_holder *h)
{
	const struct dg_instance *instance;
	const struct dg_box *box;

	/* A cgroup that cannot be killed shows below: its directory stays, and the holder says so by its status. */
	for (instance = h->instances; instance; instance = instance->next)
		(void)dg_kill_cgroup(instance->v2_fd);
	for (box = h->boxes; box; box = box->next)
		(void)dg_kill_cgroup(box->v2_fd);
}

/* Children that are in no registered cgroup: a launcher that was stopped half way leaves such. */
static void dg_kill_children(const struct dg_holder *h)
{
	char buffer[4096];
	struct dirent *entry;
	int fd = openat(h->proc_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	DIR *dir = fd < 0 ? NULL : fdopendir(fd);

	if (!dir) {
		if (fd >= 0)
			close(fd);
		return;
	}
	while ((entry = readdir(dir))) {
		pid_t pid = (pid_t)strtol(entry->d_name, NULL, 10);
		const char *parent;

		if (pid <= 0 || dg_read_proc((struct dg_holder *)h, pid, "status", buffer, sizeof(buffer)) < 0)
			continue;
		parent = strstr(buffer, "\nPPid:");
		/* Our children keep their numbers until we reap them, so this hits none but them. */
		if (parent && strtol(parent + 6, NULL, 10) == getpid())
			kill(pid, SIGKILL);
	}
	closedir(dir);
}

/* Returns whether no child is left. */
static bool dg_reap_all(struct dg_holder *h)
{
	pid_t pid;

	while ((pid = waitpid(-1, NULL, WNOHANG | __WALL)) > 0)
		if (pid == h->launcher_pid)
			h->launcher_pid = 0;
	return pid < 0 && errno == ECHILD;
}

static bool dg_remove_cgroups(const struct dg_holder *h)
{
	const struct dg_instance *instance;
	const struct dg_box *box;
	bool all = true;
	size_t i;

	for (box = h->boxes; box; box = box->next)
		for (i = 0; i < box->path_count; i++)
			if (dg_remove_cgroup(box->paths[i]) < 0)
				all = false;
	for (instance = h->instances; instance; instance = instance->next)
		for (i = 0; i < instance->path_count; i++)
			if (dg_remove_cgroup(instance->paths[i]) < 0)
				all = false;
	return all;
}

/* The common parents, made for the first instance and of use to none after the last: EBUSY says others use them. */
static void dg_try_parents(const struct dg_holder *h)
{
	const struct dg_instance *instance;
	size_t i;

	for (instance = h->instances; instance; instance = instance->next) {
		for (i = 0; instance->try_parents && i < instance->path_count; i++) {
			char *end = strrchr(instance->paths[i], '/');

			*end = '\0';
			rmdir(instance->paths[i]);
			*end = '/';
		}
	}
}

/* Returns 0 when nothing is left, -1 when the deadline came first (paths are removed all the same). */
int dg_cleanup(struct dg_holder *h, uint64_t deadline_ns)
{
	uint64_t now = dg_now_ns(), rekill_ns = DG_REKILL_NS, next_kill = now + rekill_ns;
	bool childless = false, removed = false;
	struct dg_named_path *path;
	int pause_us = 50, result = 0;

	/* The launcher first, so that it makes no further box. */
	if (h->launcher_pid > 0)
		kill(h->launcher_pid, SIGKILL);
	dg_kill_all(h);
	for (;;) {
		childless = dg_reap_all(h);
		/* Removing while the launcher lives could race with a box it is just making. */
		removed = h->launcher_pid == 0 && dg_remove_cgroups(h);
		if (removed && childless)
			break;
		now = dg_now_ns();
		if (now >= deadline_ns)
			break;
		if (now >= next_kill) {
			dg_kill_all(h);
			/* Looks at every process of the host: rarely needed, so not at first and ever more rarely. */
			if (!childless)
				dg_kill_children(h);
			rekill_ns *= 2;
			next_kill = dg_now_ns() + rekill_ns;
		}
		/* SIGCHLD tells of most ends; other tasks of a cgroup end without a word to us. */
		usleep((useconds_t)pause_us);
		if (pause_us < 2000)
			pause_us *= 2;
	}
	dg_try_parents(h);
	for (path = h->paths; path; path = path->next)
		if (dg_remove_path(h, path->path) < 0)
			result = -1;
	return removed && childless ? result : -1;
}
