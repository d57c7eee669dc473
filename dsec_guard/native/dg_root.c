// SPDX-License-Identifier: Apache-2.0
/*
 * dg_root.c - the box's file tree: a store, a scaffold, and the plan's operations carried out in order.
 * Places:  the stage directory carries the store (one tmpfs, every writable byte of the box). The store's `.dg` holds what
 *          the box never sees: the scaffold (`root`), id-mapped lower trees, overlays before they move to their target.
 *          The old root, and with it the stage, goes away in enter_root; descriptors, binds and overlays keep their parts.
 * Targets: resolved below the new root by openat2 without following any link; mounts are moved there by descriptor.
 * Owners:  everything is mounted by host root from the initial user namespace, so the box owns no mount.
 */
#define _GNU_SOURCE
#include "dg_kernel.h"
#include "dg_setup.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

enum want { WANT_ANY, WANT_DIR, WANT_FILE };

/* Not the box's, so added to its limit: `.dg` with its content; of each overlay two mount points, its layers and what
 * overlayfs keeps in `work`. */
#define PRIVATE_INODES 8
#define OVERLAY_INODES 8

static int open_below(int dir, const char *path, uint64_t flags, uint64_t resolve)
{
	struct dg_open_how how = { .flags = flags | O_CLOEXEC, .resolve = resolve | DG_RESOLVE_NO_SYMLINKS };

	return (int)syscall(SYS_openat2, dir, *path ? path : ".", &how, sizeof(how));
}

static int check_kind(int fd, enum want want, const char *path, struct dg_error *err)
{
	struct stat st;

	if (fd < 0)
		return -1;
	if (want == WANT_ANY)
		return fd;
	if (fstat(fd, &st) < 0) {
		dg_fail_at(err, "fstat", path);
	} else if (!S_ISDIR(st.st_mode) == (want == WANT_FILE)) {
		return fd;
	} else {
		errno = want == WANT_DIR ? ENOTDIR : EISDIR;
		dg_fail_at(err, "target", path);
	}
	close(fd);
	return -1;
}

/* Makes one directory below @dir if it is missing and opens it. */
static int step_into(int dir, const char *name, mode_t mode, uid_t uid, gid_t gid)
{
	int fd = open_below(dir, name, O_PATH | O_DIRECTORY, DG_RESOLVE_BENEATH);

	if (fd >= 0 || errno != ENOENT)
		return fd;
	if (mkdirat(dir, name, mode) < 0)
		return -1;
	fd = open_below(dir, name, O_PATH | O_DIRECTORY, DG_RESOLVE_BENEATH);
	if (fd >= 0 && fchownat(fd, "", uid, gid, AT_EMPTY_PATH) < 0) {
		close(fd);
		return -1;
	}
	/* chown clears the set-id bits that mkdir has kept. */
	if (fd >= 0 && mode & 07000 && fchmodat(dir, name, mode, 0) < 0) {
		close(fd);
		return -1;
	}
	return fd;
}

/* Opens the directory that holds the last part of @path, making what is missing; @last points at that part in @path. */
static int make_parents(int top, const char *path, uid_t uid, gid_t gid, const char **last)
{
	char part[256];
	int dir = open_below(top, "", O_PATH | O_DIRECTORY, DG_RESOLVE_BENEATH);

	while (dir >= 0) {
		const char *slash = strchr(path, '/');
		int next;

		if (!slash) {
			*last = path;
			return dir;
		}
		/* dg_check_plan has seen that no part is longer than 255 bytes. */
		memcpy(part, path, (size_t)(slash - path));
		part[slash - path] = '\0';
		next = step_into(dir, part, 0755, uid, gid);
		close(dir);
		dir = next;
		path = slash + 1;
	}
	return -1;
}

static int make_dir(int top, const char *path, mode_t mode, uid_t parent_uid, uid_t parent_gid, uid_t uid, gid_t gid)
{
	const char *last;
	int dir = make_parents(top, path, parent_uid, parent_gid, &last), fd;

	if (dir < 0)
		return -1;
	fd = step_into(dir, last, mode, uid, gid);
	close(dir);
	return fd;
}

/* The mount point for something that is (@want) a directory or a file; made with its parents if it is missing. */
static int mount_point(const struct dg_box *box, const struct dg_op *op, enum want want, struct dg_error *err)
{
	const char *path = dg_text(box->plan, op->target), *last;
	uid_t uid = dg_host_id(box, 0);
	int fd = open_below(box->root, path, O_PATH | O_NOFOLLOW, DG_RESOLVE_IN_ROOT), dir;

	if (fd >= 0 || errno != ENOENT)
		return fd < 0 ? dg_fail_at(err, "openat2", path) : check_kind(fd, want, path, err);
	if (want == WANT_DIR) {
		fd = make_dir(box->root, path, 0755, uid, uid, uid, uid);
		return fd < 0 ? dg_fail_at(err, "mkdirat", path) : fd;
	}
	dir = make_parents(box->root, path, uid, uid, &last);
	if (dir < 0)
		return dg_fail_at(err, "mkdirat", path);
	fd = openat(dir, last, O_CREAT | O_EXCL | O_RDONLY | O_NOFOLLOW | O_CLOEXEC, 0644);
	close(dir);
	return fd < 0 ? dg_fail_at(err, "openat(O_CREAT)", path) : fd;
}

/* The mount point of an operation on something that has to be there already. -1 with errno ENOENT for a missing one. */
static int existing(const struct dg_box *box, const char *path, enum want want, struct dg_error *err)
{
	int fd = open_below(box->root, path, O_PATH | O_NOFOLLOW, DG_RESOLVE_IN_ROOT);

	return fd < 0 ? dg_fail_at(err, "openat2", path) : check_kind(fd, want, path, err);
}

static int optional_missing(const struct dg_op *op, const struct dg_error *err)
{
	return op->flags & DG_MOUNT_OPTIONAL && (err->errnum == ENOENT || err->errnum == ENOTDIR);
}

static uint64_t attributes(uint32_t flags)
{
	return (flags & DG_MOUNT_RO ? DG_ATTR_RDONLY : 0) | (flags & DG_MOUNT_NOSUID ? DG_ATTR_NOSUID : 0) |
	       (flags & DG_MOUNT_NODEV ? DG_ATTR_NODEV : 0) | (flags & DG_MOUNT_NOEXEC ? DG_ATTR_NOEXEC : 0);
}

static unsigned long mount_flags(uint32_t flags)
{
	return (flags & DG_MOUNT_RO ? MS_RDONLY : 0) | (flags & DG_MOUNT_NOSUID ? MS_NOSUID : 0) |
	       (flags & DG_MOUNT_NODEV ? MS_NODEV : 0) | (flags & DG_MOUNT_NOEXEC ? MS_NOEXEC : 0);
}

/* Flags and id map of a tree nobody can reach yet. */
static int set_attributes(const struct dg_box *box, int tree, uint32_t flags, const char *path, struct dg_error *err)
{
	/* A tree made by the guard may belong to a peer group of the host. */
	struct dg_mount_attr attr = { .attr_set = attributes(flags), .propagation = MS_PRIVATE };
	unsigned int at = AT_EMPTY_PATH | (flags & DG_MOUNT_RECURSIVE ? DG_AT_RECURSIVE : 0);

	if (syscall(SYS_mount_setattr, tree, "", at, &attr, sizeof(attr)) < 0)
		return dg_fail_at(err, "mount_setattr", path);
	if (!(flags & (DG_MOUNT_IDMAP_BOX | DG_MOUNT_IDMAP_OWNER)))
		return 0;
	attr = (struct dg_mount_attr){ .attr_set = DG_ATTR_IDMAP };
	attr.userns_fd = (uint64_t)box->fds[flags & DG_MOUNT_IDMAP_BOX ? box->plan->userns_fd : box->plan->owner_map_fd];
	/* EINVAL: the file system cannot (an overlay, a network file system); the guard has to fall back. */
	if (syscall(SYS_mount_setattr, tree, "", at, &attr, sizeof(attr)) < 0)
		return dg_fail_at(err, "mount_setattr idmap", path);
	return 0;
}

static int clone_tree(int dir, const char *path, uint32_t flags)
{
	unsigned int how = DG_OPEN_TREE_CLONE | O_CLOEXEC | (*path ? 0 : AT_EMPTY_PATH) |
			   (flags & DG_MOUNT_RECURSIVE ? DG_AT_RECURSIVE : 0);

	return (int)syscall(SYS_open_tree, dir, path, how);
}

static int attach(int tree, int target, const char *path, struct dg_error *err)
{
	if (syscall(SYS_move_mount, tree, "", target, "", DG_MOVE_F_EMPTY_PATH | DG_MOVE_T_EMPTY_PATH) < 0)
		return dg_fail_at(err, "move_mount", path);
	return 0;
}

static enum want kind_of(int fd)
{
	struct stat st;

	return fstat(fd, &st) == 0 && S_ISDIR(st.st_mode) ? WANT_DIR : WANT_FILE;
}

/* Attaches @tree where @op says. On the root itself, the new top of the root is what later targets start from. */
static int attach_at(struct dg_box *box, int tree, const struct dg_op *op, struct dg_error *err)
{
	const char *path = dg_text(box->plan, op->target);
	int target = mount_point(box, op, kind_of(tree), err), failed;

	if (target < 0)
		return -1;
	failed = attach(tree, target, path, err);
	close(target);
	if (failed || *path)
		return failed;
	close(box->root);
	box->root = openat(box->store, ".dg/root", O_PATH | O_DIRECTORY | O_CLOEXEC);
	return box->root < 0 ? dg_fail(err, "openat(root)") : 0;
}

static int do_dir(struct dg_box *box, const struct dg_op *op, struct dg_error *err)
{
	const char *path = dg_text(box->plan, op->target);
	uid_t top = dg_host_id(box, 0);
	int fd = make_dir(box->root, path, op->mode, top, top, dg_host_id(box, op->uid), dg_host_id(box, op->gid));

	if (fd < 0)
		return dg_fail_at(err, "mkdirat", path);
	close(fd);
	return 0;
}

static int do_symlink(struct dg_box *box, const struct dg_op *op, struct dg_error *err)
{
	const char *path = dg_text(box->plan, op->target), *text = dg_text(box->plan, op->source), *last;
	uid_t top = dg_host_id(box, 0);
	int dir = make_parents(box->root, path, top, top, &last), failed = 0;

	if (dir < 0)
		return dg_fail_at(err, "mkdirat", path);
	if (symlinkat(text, dir, last) < 0 ||
	    fchownat(dir, last, dg_host_id(box, op->uid), dg_host_id(box, op->gid), AT_SYMLINK_NOFOLLOW) < 0)
		failed = dg_fail_at(err, "symlinkat", path);
	close(dir);
	return failed;
}

static int do_file(struct dg_box *box, const struct dg_op *op, struct dg_error *err)
{
	const char *path = dg_text(box->plan, op->target), *bytes = dg_at(box->plan, op->content), *last;
	uid_t top = dg_host_id(box, 0);
	int dir = make_parents(box->root, path, top, top, &last), fd, failed = 0;
	size_t left = op->content.len;

	if (dir < 0)
		return dg_fail_at(err, "mkdirat", path);
	fd = openat(dir, last, O_CREAT | O_EXCL | O_WRONLY | O_NOFOLLOW | O_CLOEXEC, 0600);
	close(dir);
	if (fd < 0)
		return dg_fail_at(err, "openat(O_CREAT)", path);
	while (left && !failed) {
		ssize_t done = write(fd, bytes, left);

		if (done < 0) {
			failed = dg_fail_at(err, "write", path);
		} else {
			bytes += done;
			left -= (size_t)done;
		}
	}
	if (!failed && (fchown(fd, dg_host_id(box, op->uid), dg_host_id(box, op->gid)) < 0 || fchmod(fd, op->mode) < 0))
		failed = dg_fail_at(err, "fchown", path);
	close(fd);
	return failed;
}

static int do_bind(struct dg_box *box, const struct dg_op *op, struct dg_error *err)
{
	const char *source = dg_text(box->plan, op->source);
	int tree = clone_tree(AT_FDCWD, source, op->flags), failed;

	if (tree < 0)
		return dg_fail_at(err, "open_tree", source);
	failed = set_attributes(box, tree, op->flags, source, err) < 0 ? -1 : attach_at(box, tree, op, err);
	close(tree);
	return failed;
}

static int do_tree(struct dg_box *box, const struct dg_op *op, struct dg_error *err)
{
	int tree = box->fds[op->fd];

	if (set_attributes(box, tree, op->flags, dg_text(box->plan, op->target), err) < 0)
		return -1;
	return attach_at(box, tree, op, err);
}

/* A fresh file system on @op's target. mount(2) is quicker than its successors; "." is the descriptor's directory. */
static int fresh(struct dg_box *box, const struct dg_op *op, const char *type, const char *options, struct dg_error *err)
{
	const char *path = dg_text(box->plan, op->target);
	int target = mount_point(box, op, WANT_DIR, err), failed = 0;

	if (target < 0)
		return -1;
	if (fchdir(target) < 0)
		failed = dg_fail_at(err, "fchdir", path);
	else if (mount(type, ".", type, mount_flags(op->flags), options) < 0)
		failed = dg_fail_at(err, "mount", path);
	close(target);
	return failed;
}

static int do_tmpfs(struct dg_box *box, const struct dg_op *op, struct dg_error *err)
{
	char options[160];

	snprintf(options, sizeof(options), "size=%llu,nr_inodes=%llu,mode=%o,uid=%u,gid=%u",
		 (unsigned long long)op->size_bytes, (unsigned long long)op->inodes, op->mode, dg_host_id(box, op->uid),
		 dg_host_id(box, op->gid));
	return fresh(box, op, "tmpfs", options, err);
}

static int do_devpts(struct dg_box *box, const struct dg_op *op, struct dg_error *err)
{
	char options[96];

	snprintf(options, sizeof(options), "newinstance,ptmxmode=0666,mode=0620,gid=%u,max=%llu", dg_host_id(box, op->gid),
		 (unsigned long long)op->inodes);
	return fresh(box, op, "devpts", options, err);
}

static int do_store(struct dg_box *box, const struct dg_op *op, struct dg_error *err)
{
	const char *source = dg_text(box->plan, op->source);
	uid_t top = dg_host_id(box, 0);
	int dir = make_dir(box->store, source, op->mode, top, top, dg_host_id(box, op->uid), dg_host_id(box, op->gid));
	int tree, failed;

	if (dir < 0)
		return dg_fail_at(err, "mkdirat(store)", source);
	tree = clone_tree(dir, "", 0);
	close(dir);
	if (tree < 0)
		return dg_fail_at(err, "open_tree(store)", source);
	failed = set_attributes(box, tree, op->flags, source, err) < 0 ? -1 : attach_at(box, tree, op, err);
	close(tree);
	return failed;
}

/* The options of mount @id, from its line of mountinfo, after " - type source ". */
static int mount_options(unsigned long long id, char *to, size_t room, struct dg_error *err)
{
	char *line = NULL;
	size_t cap = 0;
	int found = 0;
	FILE *info = fopen("/proc/self/mountinfo", "re");

	if (!info)
		return dg_fail(err, "open(mountinfo)");
	while (!found && getline(&line, &cap, info) > 0) {
		char *end, *tail;

		if (strtoull(line, &end, 10) != id || *end != ' ')
			continue;
		tail = strstr(end, " - ");
		if (tail && strlen(tail) < room) {
			strcpy(to, tail);
			found = 1;
		}
	}
	free(line);
	fclose(info);
	return found ? 0 : dg_refuse(err, "mountinfo: overlay not found", ENOENT);
}

static int has_option(const char *options, const char *option)
{
	size_t len = strlen(option);

	for (const char *at = options; (at = strstr(at, option)); at += len)
		if ((at[-1] == ',' || at[-1] == ' ') && (at[len] == ',' || at[len] == '\n' || at[len] == '\0'))
			return 1;
	return 0;
}

/* overlayfs drops index and xino without a word when a layer cannot carry them; marks on files would lose their trail. */
static int verify_overlay(const struct dg_box *box, int merged, struct dg_error *err)
{
	uint64_t stx[32]; /* struct statx, which musl does not declare; stx_mnt_id is 144 bytes into it */
	char options[2048];
	int index_on;

	if (syscall(SYS_statx, merged, "", AT_EMPTY_PATH, 0x1000 /* STATX_MNT_ID */, stx) < 0)
		return dg_fail(err, "statx(overlay)");
	if (mount_options(stx[18], options, sizeof(options), err) < 0)
		return -1;
	index_on = box->launcher->overlay_index_default ? !has_option(options, "index=off") : has_option(options, "index=on");
	if (!index_on)
		return dg_refuse(err, "overlay without index=on", EOPNOTSUPP);
	if (!has_option(options, "xino=on"))
		return dg_refuse(err, "overlay without xino=on", EOPNOTSUPP);
	if (has_option(options, "metacopy=on") || has_option(options, "redirect_dir=on") ||
	    has_option(options, "redirect_dir=follow"))
		return dg_refuse(err, "overlay with metacopy or redirect_dir", EOPNOTSUPP);
	return 0;
}

/* upper and work in the store. The upper's root shows as the merged root, so it gets the owner and mode of the lower's. */
static int make_layers(struct dg_box *box, const struct dg_op *op, int lower, struct dg_error *err)
{
	const char *name = dg_text(box->plan, op->name);
	char upper[DG_MAX_NAME + 8], work[DG_MAX_NAME + 8];
	mode_t mode = op->mode;
	uid_t uid = dg_host_id(box, op->uid);
	gid_t gid = dg_host_id(box, op->gid);
	struct stat st;

	snprintf(upper, sizeof(upper), "%s/upper", name);
	snprintf(work, sizeof(work), "%s/work", name);
	if (op->flags & (DG_MOUNT_IDMAP_BOX | DG_MOUNT_IDMAP_OWNER)) {
		if (fstat(lower, &st) < 0)
			return dg_fail(err, "fstat(lower)");
		mode = st.st_mode & 07777;
		uid = st.st_uid;
		gid = st.st_gid;
	}
	if (mkdirat(box->store, name, 0700) < 0 || mkdirat(box->store, work, 0700) < 0 ||
	    mkdirat(box->store, upper, 0700) < 0)
		return dg_fail_at(err, "mkdirat(layers)", name);
	if (fchownat(box->store, upper, uid, gid, 0) < 0 || fchmodat(box->store, upper, mode, 0) < 0)
		return dg_fail_at(err, "fchownat(upper)", name);
	box->upper[box->overlays] = openat(box->store, upper, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	return box->upper[box->overlays] < 0 ? dg_fail_at(err, "openat(upper)", name) : 0;
}

static int do_overlay(struct dg_box *box, const struct dg_op *op, struct dg_error *err)
{
	const char *source = op->fd == DG_NO_FD ? dg_text(box->plan, op->source) : "tree";
	const char *name = dg_text(box->plan, op->name);
	int tree = op->fd == DG_NO_FD ? clone_tree(AT_FDCWD, source, op->flags) : box->fds[op->fd];
	char lower[32], merged[32], options[512];
	int fd, place;

	if (tree < 0)
		return dg_fail_at(err, "open_tree", source);
	snprintf(lower, sizeof(lower), ".dg/lower%u", box->overlays);
	snprintf(merged, sizeof(merged), ".dg/merged%u", box->overlays);
	if (set_attributes(box, tree, op->flags | DG_MOUNT_RO, source, err) < 0 || make_layers(box, op, tree, err) < 0)
		return -1;
	if (mkdirat(box->store, lower, 0700) < 0 || mkdirat(box->store, merged, 0700) < 0)
		return dg_fail(err, "mkdirat(.dg)");
	place = openat(box->store, lower, O_PATH | O_DIRECTORY | O_CLOEXEC);
	if (place < 0)
		return dg_fail(err, "openat(.dg)");
	if (attach(tree, place, lower, err) < 0)
		return -1;
	close(place);
	close(tree);
	/* Layers by relative paths: mountinfo inside then shows no path of the host. */
	if (fchdir(box->store) < 0)
		return dg_fail(err, "fchdir(store)");
	snprintf(options, sizeof(options),
		 "lowerdir=%s,upperdir=%s/upper,workdir=%s/work,index=on,xino=on,metacopy=off,redirect_dir=nofollow", lower,
		 name, name);
	if (mount("overlay", merged, "overlay", mount_flags(op->flags), options) < 0)
		return dg_fail_at(err, "mount(overlay)", source);
	fd = openat(box->store, merged, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (fd < 0)
		return dg_fail(err, "openat(merged)");
	box->merged[box->overlays++] = fd;
	if (verify_overlay(box, fd, err) < 0)
		return -1;
	return attach_at(box, fd, op, err);
}

static int do_readonly(struct dg_box *box, const struct dg_op *op, struct dg_error *err)
{
	const char *path = dg_text(box->plan, op->target);
	int target = existing(box, path, WANT_ANY, err), tree, failed;

	if (target < 0)
		return -1;
	tree = clone_tree(target, "", op->flags);
	if (tree < 0) {
		dg_fail_at(err, "open_tree", path);
		close(target);
		return -1;
	}
	failed = set_attributes(box, tree, op->flags | DG_MOUNT_RO, path, err) < 0 ? -1 : attach(tree, target, path, err);
	close(tree);
	close(target);
	return failed;
}

static int do_mask(struct dg_box *box, const struct dg_op *op, enum want want, struct dg_error *err)
{
	const char *path = dg_text(box->plan, op->target), *source = dg_text(box->plan, op->source);
	const uint32_t flags = DG_MOUNT_RO | DG_MOUNT_NOSUID | DG_MOUNT_NODEV | DG_MOUNT_NOEXEC;
	int target = existing(box, path, want, err), from, tree, failed;

	if (target < 0)
		return -1;
	if (*source)
		from = existing(box, source, want, err);
	else
		from = openat(box->store, want == WANT_DIR ? ".dg/mask_dir" : ".dg/mask_file", O_PATH | O_CLOEXEC);
	if (from < 0) {
		close(target);
		/* A missing source is a mistake of the plan, also where a missing target is none. */
		return dg_refuse(err, "mask source", EINVAL);
	}
	tree = clone_tree(from, "", 0);
	if (tree < 0)
		failed = dg_fail_at(err, "open_tree(mask)", path);
	else
		failed = set_attributes(box, tree, flags, path, err) < 0 ? -1 : attach(tree, target, path, err);
	if (tree >= 0)
		close(tree);
	close(from);
	close(target);
	return failed;
}

static int run_op(struct dg_box *box, const struct dg_op *op, struct dg_error *err)
{
	switch (op->kind) {
	case DG_OP_DIR:
		return do_dir(box, op, err);
	case DG_OP_SYMLINK:
		return do_symlink(box, op, err);
	case DG_OP_FILE:
		return do_file(box, op, err);
	case DG_OP_BIND:
		return do_bind(box, op, err);
	case DG_OP_TREE:
		return do_tree(box, op, err);
	case DG_OP_TMPFS:
		return do_tmpfs(box, op, err);
	case DG_OP_STORE:
		return do_store(box, op, err);
	case DG_OP_OVERLAY:
		return do_overlay(box, op, err);
	case DG_OP_PROC:
		/* Of the pid namespace of the process that mounts: ours, the box's. */
		return fresh(box, op, "proc", NULL, err);
	case DG_OP_DEVPTS:
		return do_devpts(box, op, err);
	case DG_OP_MQUEUE:
		return fresh(box, op, "mqueue", NULL, err);
	case DG_OP_CGROUP:
		/* After new_cgroup_ns: the box's own directory is all that such a mount can show. */
		if (op->name.len)
			return fresh(box, op, "cgroup", dg_text(box->plan, op->name), err);
		return fresh(box, op, "cgroup2", NULL, err);
	case DG_OP_READONLY:
		return do_readonly(box, op, err);
	case DG_OP_MASK_FILE:
		return do_mask(box, op, WANT_FILE, err);
	case DG_OP_MASK_DIR:
		return do_mask(box, op, WANT_DIR, err);
	default:
		return dg_refuse(err, "op.kind", EINVAL); /* dg_check_plan lets none through */
	}
}

static int make_stage(struct dg_box *box, struct dg_error *err)
{
	const struct dg_plan *plan = box->plan;
	const char *stage = dg_text(plan, plan->stage_dir);
	uid_t top = dg_host_id(box, 0);
	const struct dg_op *ops = dg_at(plan, plan->ops);
	unsigned long long inodes = plan->store_inodes + PRIVATE_INODES;
	char options[160];
	int fd;

	for (uint32_t i = 0; i < plan->ops.len; i++)
		if (ops[i].kind == DG_OP_OVERLAY)
			inodes += OVERLAY_INODES;
	snprintf(options, sizeof(options), "size=%llu,nr_inodes=%llu,mode=0700", (unsigned long long)plan->store_bytes,
		 inodes);
	if (mount("tmpfs", stage, "tmpfs", MS_NOSUID | MS_NODEV, options) < 0)
		return dg_fail_at(err, "mount(stage)", stage);
	box->store = open(stage, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (box->store < 0)
		return dg_fail_at(err, "open(stage)", stage);
	if (mkdirat(box->store, ".dg", 0700) < 0 || mkdirat(box->store, ".dg/root", 0755) < 0 ||
	    mkdirat(box->store, ".dg/mask_dir", 0555) < 0)
		return dg_fail(err, "mkdirat(.dg)");
	fd = openat(box->store, ".dg/mask_file", O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0);
	if (fd < 0)
		return dg_fail(err, "openat(mask_file)");
	close(fd);
	if (fchdir(box->store) < 0)
		return dg_fail(err, "fchdir(store)");
	snprintf(options, sizeof(options), "size=64m,nr_inodes=16384,mode=0755,uid=%u,gid=%u", top, top);
	if (mount("tmpfs", ".dg/root", "tmpfs", MS_NOSUID | MS_NODEV, options) < 0)
		return dg_fail(err, "mount(scaffold)");
	box->root = openat(box->store, ".dg/root", O_PATH | O_DIRECTORY | O_CLOEXEC);
	return box->root < 0 ? dg_fail(err, "openat(root)") : 0;
}

int dg_build_root(struct dg_box *box, struct dg_error *err)
{
	const struct dg_mount_attr read_only = { .attr_set = DG_ATTR_RDONLY };
	const struct dg_op *ops = dg_at(box->plan, box->plan->ops);
	int scaffold;

	if (make_stage(box, err) < 0)
		return -1;
	scaffold = dup(box->root);
	if (scaffold < 0)
		return dg_fail(err, "dup(root)");
	for (uint32_t i = 0; i < box->plan->ops.len; i++)
		if (run_op(box, &ops[i], err) < 0 && !optional_missing(&ops[i], err))
			return -1;
	/* Last: nothing is made on the scaffold from here on, by us or by the box. */
	if (syscall(SYS_mount_setattr, scaffold, "", AT_EMPTY_PATH, &read_only, sizeof(read_only)) < 0)
		return dg_fail(err, "mount_setattr(scaffold)");
	close(scaffold);
	return 0;
}
