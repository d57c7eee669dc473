// SPDX-License-Identifier: Apache-2.0
/*
 * dg_landlock.c - the box's Landlock rulesets, made once after its last mount and applied by dg-init to each command.
 * Reason:  a rule names a file hierarchy as it is mounted now; a mount made over a path later is not covered.
 * Source:  landlock(7); Documentation/userspace-api/landlock.rst.
 */
#define _GNU_SOURCE
#include "dg_kernel.h"
#include "dg_setup.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

/* A missing path needs no rule: without one nothing is allowed there. */
static int add_path(const struct dg_box *box, int ruleset, const struct dg_rule *rule, struct dg_error *err)
{
	const char *path = dg_text(box->plan, rule->path);
	/* Symbolic links are followed: the tree is ours or the host's, no agent has run in it, and nothing leaves the root. */
	struct dg_open_how how = {
		.flags = O_PATH | O_CLOEXEC, .resolve = DG_RESOLVE_IN_ROOT | DG_RESOLVE_NO_MAGICLINKS,
	};
	struct dg_landlock_path attr = { .allowed_access = rule->access };
	struct stat st;
	int failed = 0;

	attr.parent_fd = (int)syscall(SYS_openat2, box->root, *path ? path : "/", &how, sizeof(how));
	if (attr.parent_fd < 0)
		return errno == ENOENT || errno == ENOTDIR ? 0 : dg_fail_at(err, "openat2", path);
	if (fstat(attr.parent_fd, &st) < 0)
		failed = dg_fail_at(err, "fstat", path);
	else if (!S_ISDIR(st.st_mode))
		attr.allowed_access &= DG_LANDLOCK_FILE_RIGHTS;
	if (!failed && attr.allowed_access &&
	    syscall(SYS_landlock_add_rule, ruleset, DG_LANDLOCK_RULE_PATH, &attr, 0) < 0)
		failed = dg_fail_at(err, "landlock_add_rule", path);
	close(attr.parent_fd);
	return failed;
}

static int make_ruleset(const struct dg_box *box, const struct dg_phase *phase, struct dg_error *err)
{
	const struct dg_rule *rules = dg_at(box->plan, phase->rules);
	const struct dg_port *ports = dg_at(box->plan, phase->ports);
	const struct dg_landlock_ruleset attr = {
		.handled_access_fs = phase->handled_fs,
		.handled_access_net = phase->handled_net,
		.scoped = phase->scoped,
	};
	/* Older kernels know a shorter structure and refuse a longer one only if its tail is not zero. */
	int fd = (int)syscall(SYS_landlock_create_ruleset, &attr, sizeof(attr), 0);

	if (fd < 0)
		return dg_fail(err, "landlock_create_ruleset");
	for (uint32_t i = 0; i < phase->rules.len; i++)
		if (add_path(box, fd, &rules[i], err) < 0)
			goto fail;
	for (uint32_t i = 0; i < phase->ports.len; i++) {
		const struct dg_landlock_port port = { .allowed_access = ports[i].access, .port = ports[i].port };

		if (syscall(SYS_landlock_add_rule, fd, DG_LANDLOCK_RULE_PORT, &port, 0) < 0) {
			dg_fail(err, "landlock_add_rule(port)");
			goto fail;
		}
	}
	return fd;
fail:
	close(fd);
	return -1;
}

int dg_make_rulesets(struct dg_box *box, struct dg_error *err)
{
	const struct dg_phase *phases = dg_at(box->plan, box->plan->phases);

	for (uint32_t i = 0; i < box->plan->phases.len; i++) {
		if (!phases[i].has_landlock)
			continue;
		box->landlock[i] = make_ruleset(box, &phases[i], err);
		if (box->landlock[i] < 0)
			return -1;
	}
	return 0;
}
