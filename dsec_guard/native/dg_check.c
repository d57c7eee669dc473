// SPDX-License-Identifier: Apache-2.0
/*
 * dg_check.c - the checked reader: every number of a plan is judged here, before anything uses one.
 * The rest of the launcher then follows spans without a look. Nothing in here allocates or changes state.
 */
#define _GNU_SOURCE
#include "dg_common.h"

#include <errno.h>
#include <string.h>

struct reader {
	const char *data;
	size_t size;
	unsigned int nfds;
	struct dg_error *err;
};

static int array_ok(const struct reader *in, struct dg_span span, size_t element, size_t max, const char *what)
{
	if (span.len == 0)
		return 0;
	if (span.len > max)
		return dg_refuse(in->err, what, E2BIG);
	if (span.off % 8 || span.off > in->size || span.len * element > in->size - span.off)
		return dg_refuse(in->err, what, EINVAL);
	return 0;
}

static int text_ok(const struct reader *in, struct dg_span span, size_t max, const char *what)
{
	const char *nul;

	if (span.len > max)
		return dg_refuse(in->err, what, ENAMETOOLONG);
	if (span.off >= in->size || span.len >= in->size - span.off)
		return dg_refuse(in->err, what, EINVAL);
	nul = memchr(in->data + span.off, 0, (size_t)span.len + 1);
	if (nul != in->data + span.off + span.len)
		return dg_refuse(in->err, what, EINVAL);
	return 0;
}

static int bytes_ok(const struct reader *in, struct dg_span span, const char *what)
{
	if (span.len && (span.off > in->size || span.len > in->size - span.off))
		return dg_refuse(in->err, what, EINVAL);
	return 0;
}

static int fd_ok(const struct reader *in, uint32_t index, int required, const char *what)
{
	if (index == DG_NO_FD && !required)
		return 0;
	if (index >= in->nfds)
		return dg_refuse(in->err, what, EBADF);
	return 0;
}

/* A path inside: relative, each part non-empty and neither "." nor "..". The empty path is the root. */
static int target_ok(const struct reader *in, struct dg_span span)
{
	const char *at, *end;

	if (text_ok(in, span, DG_MAX_PATH, "op.target") < 0)
		return -1;
	at = in->data + span.off;
	end = at + span.len;
	while (at < end) {
		const char *slash = memchr(at, '/', (size_t)(end - at));
		size_t len = (size_t)((slash ? slash : end) - at);

		if (len == 0 || len > 255 || (len == 1 && at[0] == '.') || (len == 2 && at[0] == '.' && at[1] == '.'))
			return dg_refuse(in->err, "op.target", EINVAL);
		at += len;
		if (at < end && ++at == end)
			return dg_refuse(in->err, "op.target", EINVAL);
	}
	return 0;
}

/* A name that becomes one directory of the store; a source there may have several parts. */
static int store_name_ok(const struct reader *in, struct dg_span span, int parts, const char *what)
{
	const char *text = in->data + span.off;

	if (text_ok(in, span, DG_MAX_NAME, what) < 0)
		return -1;
	/* No dot at a part's start: neither "." nor ".." nor the launcher's own directory. */
	if (span.len == 0 || text[0] == '.' || text[0] == '/' || text[span.len - 1] == '/' || strstr(text, "//") ||
	    strstr(text, "/.") || (!parts && strchr(text, '/')) || strpbrk(text, ",:\\"))
		return dg_refuse(in->err, what, EINVAL);
	return 0;
}

/* They become mount options: names of controllers and commas, nothing else. */
static int controllers_ok(const struct reader *in, struct dg_span name)
{
	for (const char *c = dg_text(in->data, name); *c; c++)
		if (!(*c >= 'a' && *c <= 'z') && *c != '_' && *c != ',')
			return dg_refuse(in->err, "op.name: no controllers", EINVAL);
	return 0;
}

static int op_ok(const struct reader *in, const struct dg_op *op, unsigned int *overlays)
{
	int at_root;

	if (op->kind < DG_OP_DIR || op->kind > DG_OP_CGROUP)
		return dg_refuse(in->err, "op.kind", EINVAL);
	if (op->flags & ~DG_MOUNT_ALL)
		return dg_refuse(in->err, "op.flags", EINVAL);
	if ((op->flags & DG_MOUNT_IDMAP_BOX) && (op->flags & DG_MOUNT_IDMAP_OWNER))
		return dg_refuse(in->err, "op.flags: two id maps", EINVAL);
	if (op->mode > 07777)
		return dg_refuse(in->err, "op.mode", EINVAL);
	if (op->uid >= DG_ID_COUNT || op->gid >= DG_ID_COUNT)
		return dg_refuse(in->err, "op.uid", EINVAL);
	if (target_ok(in, op->target) < 0 || text_ok(in, op->source, DG_MAX_PATH, "op.source") < 0 ||
	    text_ok(in, op->name, DG_MAX_NAME, "op.name") < 0 || bytes_ok(in, op->content, "op.content") < 0 ||
	    fd_ok(in, op->fd, op->kind == DG_OP_TREE, "op.fd") < 0)
		return -1;
	at_root = op->kind == DG_OP_BIND || op->kind == DG_OP_TREE || op->kind == DG_OP_OVERLAY;
	if (op->target.len == 0 && !at_root)
		return dg_refuse(in->err, "op.target: empty", EINVAL);
	switch (op->kind) {
	case DG_OP_SYMLINK:
		if (op->source.len == 0)
			return dg_refuse(in->err, "op.source", EINVAL);
		break;
	case DG_OP_BIND:
		if (dg_text(in->data, op->source)[0] != '/')
			return dg_refuse(in->err, "op.source: not absolute", EINVAL);
		break;
	case DG_OP_OVERLAY:
		if (op->fd == DG_NO_FD && dg_text(in->data, op->source)[0] != '/')
			return dg_refuse(in->err, "op.source: not absolute", EINVAL);
		if (store_name_ok(in, op->name, 0, "op.name") < 0)
			return -1;
		if (++*overlays > DG_MAX_OVERLAYS)
			return dg_refuse(in->err, "plan.ops: overlays", E2BIG);
		break;
	case DG_OP_STORE:
		return store_name_ok(in, op->source, 1, "op.source");
	case DG_OP_TMPFS:
		if (op->size_bytes == 0 || op->inodes == 0)
			return dg_refuse(in->err, "op.size_bytes: a tmpfs without a limit", EINVAL);
		break;
	case DG_OP_CGROUP:
		return controllers_ok(in, op->name);
	default:
		break;
	}
	return 0;
}

static int phase_ok(const struct reader *in, const struct dg_phase *phase)
{
	const struct dg_rule *rules;

	/* 8 is sizeof(struct sock_filter). */
	if (array_ok(in, phase->filter, 8, DG_MAX_FILTER, "phase.filter") < 0 ||
	    array_ok(in, phase->rules, sizeof(struct dg_rule), DG_MAX_RULES, "phase.rules") < 0 ||
	    array_ok(in, phase->ports, sizeof(struct dg_port), DG_MAX_RULES, "phase.ports") < 0)
		return -1;
	if (phase->has_landlock > 1)
		return dg_refuse(in->err, "phase.has_landlock", EINVAL);
	rules = dg_at(in->data, phase->rules);
	for (uint32_t i = 0; i < phase->rules.len; i++)
		if (text_ok(in, rules[i].path, DG_MAX_PATH, "rule.path") < 0)
			return -1;
	return 0;
}

int dg_check_plan(const void *data, size_t size, unsigned int nfds, struct dg_error *err)
{
	const struct reader in = { .data = data, .size = size, .nfds = nfds, .err = err };
	const struct dg_plan *plan = data;
	const struct dg_phase *phases;
	const struct dg_op *ops;
	const uint32_t *v1;
	unsigned int overlays = 0;
	const char *stage;

	if (size < sizeof(*plan) || plan->magic != DG_PLAN_MAGIC)
		return dg_refuse(err, "plan.magic", EINVAL);
	if (plan->version != DG_VERSION)
		return dg_refuse(err, "plan.version", EPROTONOSUPPORT);
	if (plan->size != size)
		return dg_refuse(err, "plan.size", EINVAL);
	if (plan->flags & ~DG_PLAN_ALL)
		return dg_refuse(err, "plan.flags", EINVAL);
	/* 0 would make host root the box's owner; the last id of the range has to stay below (uid_t)-1. */
	if (plan->base_uid < DG_ID_COUNT || plan->base_uid > UINT32_MAX - DG_ID_COUNT)
		return dg_refuse(err, "plan.base_uid", EINVAL);
	if (plan->deadline_ms == 0 || plan->deadline_ms > 600000)
		return dg_refuse(err, "plan.deadline_ms", EINVAL);
	if (plan->store_bytes == 0 || plan->store_bytes > INT64_MAX || plan->store_inodes == 0 ||
	    plan->store_inodes > INT32_MAX)
		return dg_refuse(err, "plan.store_bytes", EINVAL);
	if (fd_ok(&in, plan->cgroup_fd, 1, "plan.cgroup_fd") < 0 || fd_ok(&in, plan->userns_fd, 1, "plan.userns_fd") < 0 ||
	    fd_ok(&in, plan->owner_map_fd, 0, "plan.owner_map_fd") < 0)
		return -1;
	if (text_ok(&in, plan->name, DG_MAX_NAME, "plan.name") < 0 ||
	    text_ok(&in, plan->hostname, DG_MAX_NAME, "plan.hostname") < 0 ||
	    text_ok(&in, plan->stage_dir, DG_MAX_PATH, "plan.stage_dir") < 0)
		return -1;
	stage = dg_text(data, plan->stage_dir);
	if (stage[0] != '/' || stage[1] == '\0')
		return dg_refuse(err, "plan.stage_dir", EINVAL);
	if (array_ok(&in, plan->ops, sizeof(struct dg_op), DG_MAX_OPS, "plan.ops") < 0 ||
	    array_ok(&in, plan->v1_fds, sizeof(uint32_t), DG_MAX_V1, "plan.v1_fds") < 0 ||
	    array_ok(&in, plan->rlimits, sizeof(struct dg_rlimit), DG_MAX_RLIMITS, "plan.rlimits") < 0 ||
	    array_ok(&in, plan->phases, sizeof(struct dg_phase), DG_MAX_PHASES, "plan.phases") < 0 ||
	    array_ok(&in, plan->checks, sizeof(struct dg_check), DG_MAX_CHECKS, "plan.checks") < 0 ||
	    array_ok(&in, plan->notify, 8, DG_MAX_FILTER, "plan.notify") < 0)
		return -1;
	v1 = dg_at(data, plan->v1_fds);
	for (uint32_t i = 0; i < plan->v1_fds.len; i++)
		if (fd_ok(&in, v1[i], 1, "plan.v1_fds") < 0)
			return -1;
	phases = dg_at(data, plan->phases);
	for (uint32_t i = 0; i < plan->phases.len; i++)
		if (phase_ok(&in, &phases[i]) < 0)
			return -1;
	if (plan->phases.len == 0 || plan->check_phase >= plan->phases.len)
		return dg_refuse(err, "plan.check_phase", EINVAL);
	ops = dg_at(data, plan->ops);
	for (uint32_t i = 0; i < plan->ops.len; i++) {
		if (op_ok(&in, &ops[i], &overlays) < 0)
			return -1;
		if ((ops[i].flags & DG_MOUNT_IDMAP_OWNER) && plan->owner_map_fd == DG_NO_FD)
			return dg_refuse(err, "op.flags: no owner map", EINVAL);
	}
	return 0;
}

static int texts_ok(const struct reader *in, struct dg_span span, const char *what)
{
	const struct dg_span *texts = dg_at(in->data, span);

	if (array_ok(in, span, sizeof(struct dg_span), DG_MAX_ARGS, what) < 0)
		return -1;
	for (uint32_t i = 0; i < span.len; i++)
		if (text_ok(in, texts[i], in->size, what) < 0)
			return -1;
	return 0;
}

int dg_check_exec(const void *data, size_t size, unsigned int phases, uint64_t caps, struct dg_error *err)
{
	const struct reader in = { .data = data, .size = size, .nfds = 0, .err = err };
	const struct dg_exec *exec = data;
	const uint32_t *groups;

	if (size < sizeof(*exec) || exec->magic != DG_EXEC_MAGIC)
		return dg_refuse(err, "exec.magic", EINVAL);
	if (exec->version != DG_VERSION)
		return dg_refuse(err, "exec.version", EPROTONOSUPPORT);
	if (exec->size != size)
		return dg_refuse(err, "exec.size", EINVAL);
	if (exec->flags & ~DG_EXEC_ALL)
		return dg_refuse(err, "exec.flags", EINVAL);
	if (exec->uid >= DG_ID_COUNT || exec->gid >= DG_ID_COUNT || exec->uid == DG_INIT_UID)
		return dg_refuse(err, "exec.uid", EINVAL);
	if (exec->caps & ~caps)
		return dg_refuse(err, "exec.caps: more than the box may hold", EPERM);
	if (exec->umask > 0777)
		return dg_refuse(err, "exec.umask", EINVAL);
	if (exec->phase >= phases)
		return dg_refuse(err, "exec.phase", EINVAL);
	if (array_ok(&in, exec->groups, sizeof(uint32_t), DG_MAX_GROUPS, "exec.groups") < 0)
		return -1;
	groups = dg_at(data, exec->groups);
	for (uint32_t i = 0; i < exec->groups.len; i++)
		if (groups[i] >= DG_ID_COUNT)
			return dg_refuse(err, "exec.groups", EINVAL);
	if (exec->argv.len == 0)
		return dg_refuse(err, "exec.argv: empty", EINVAL);
	if (texts_ok(&in, exec->argv, "exec.argv") < 0 || texts_ok(&in, exec->env, "exec.env") < 0)
		return -1;
	if (text_ok(&in, exec->cwd, DG_MAX_PATH, "exec.cwd") < 0 || dg_text(data, exec->cwd)[0] != '/')
		return dg_refuse(err, "exec.cwd", EINVAL);
	return 0;
}
