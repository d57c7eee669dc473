// SPDX-License-Identifier: Apache-2.0
/*
 * dg_common.h - errors by name, messages with descriptors, and the checked plan, shared by dg-launcher and dg-init.
 */
#ifndef DG_COMMON_H
#define DG_COMMON_H

#include <stddef.h>
#include <stdint.h>

#include "dg_plan.h"

/* What failed: the step of a table, the call in it (with its object where that helps), the errno. */
struct dg_error {
	char step[32];
	char call[96];
	int errnum;
};

/* Says which step is at work: what fails from here on is told under that name. */
void dg_enter(struct dg_error *err, const char *step);

/* Records @call and the current errno. Always returns -1, so that callers can `return dg_fail(...)`. */
int dg_fail(struct dg_error *err, const char *call);

/* The same with an object, cut to what fits and freed of control characters: "call(object)". */
int dg_fail_at(struct dg_error *err, const char *call, const char *object);

/* The same with an errno of our own choice. */
int dg_refuse(struct dg_error *err, const char *what, int errnum);

/*
 * dg_send - one message with @nfds descriptors. Returns 0 or -1 with errno. Never raises SIGPIPE.
 * dg_recv - one message of exactly @len bytes. Received descriptors are close-on-exec; their number goes to @nfds.
 *           Returns 1, 0 at end-of-file, -1 with errno (EMSGSIZE: other length or more than @max_fds descriptors, all
 *           of which are closed).
 */
int dg_send(int sock, const void *data, size_t len, const int *fds, unsigned int nfds);
int dg_recv(int sock, void *data, size_t len, int *fds, unsigned int max_fds, unsigned int *nfds);

void dg_answer_init(struct dg_answer *ans, uint32_t kind);
void dg_answer_error(struct dg_answer *ans, uint32_t kind, const struct dg_error *err);

/*
 * dg_map_sealed - map a memfd that nobody can change any more.
 * Returns its address with @size set, or NULL with @err. The caller unmaps; the descriptor stays the caller's.
 */
const void *dg_map_sealed(int fd, size_t *size, struct dg_error *err);

/* A plan or an exec request whose every offset, count, text and descriptor index has been checked. */
int dg_check_plan(const void *data, size_t size, unsigned int nfds, struct dg_error *err);
int dg_check_exec(const void *data, size_t size, unsigned int phases, uint64_t caps, struct dg_error *err);

/* Element access; only for spans that a check above has passed. */
static inline const void *dg_at(const void *base, struct dg_span span)
{
	return (const char *)base + span.off;
}

static inline const char *dg_text(const void *base, struct dg_span span)
{
	return (const char *)base + span.off;
}

#endif
