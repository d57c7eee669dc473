// SPDX-License-Identifier: Apache-2.0
/*
 * dg_common.c - errors and messages of dg-launcher and dg-init. No allocation, no locale, no stdio.
 */
#define _GNU_SOURCE
#include "dg_common.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

static size_t append(char *to, size_t room, size_t at, const char *text)
{
	for (; *text && at + 1 < room; text++) {
		unsigned char c = (unsigned char)*text;

		to[at++] = (c < 0x20 || c >= 0x7f) ? '?' : (char)c;
	}
	to[at] = '\0';
	return at;
}

void dg_enter(struct dg_error *err, const char *step)
{
	memset(err->step, 0, sizeof(err->step)); /* it is sent as a whole */
	append(err->step, sizeof(err->step), 0, step);
}

int dg_refuse(struct dg_error *err, const char *what, int errnum)
{
	memset(err->call, 0, sizeof(err->call));
	append(err->call, sizeof(err->call), 0, what);
	err->errnum = errnum;
	return -1;
}

int dg_fail(struct dg_error *err, const char *call)
{
	return dg_refuse(err, call, errno);
}

int dg_fail_at(struct dg_error *err, const char *call, const char *object)
{
	int saved = errno;
	size_t at;

	memset(err->call, 0, sizeof(err->call));
	at = append(err->call, sizeof(err->call), 0, call);
	at = append(err->call, sizeof(err->call), at, "(");
	at = append(err->call, sizeof(err->call), at, object);
	append(err->call, sizeof(err->call), at, ")");
	err->errnum = saved;
	return -1;
}

void dg_answer_init(struct dg_answer *ans, uint32_t kind)
{
	memset(ans, 0, sizeof(*ans));
	ans->magic = DG_MSG_MAGIC;
	ans->version = DG_VERSION;
	ans->kind = kind;
}

void dg_answer_error(struct dg_answer *ans, uint32_t kind, const struct dg_error *err)
{
	dg_answer_init(ans, kind);
	ans->errnum = err->errnum;
	memcpy(ans->step, err->step, sizeof(ans->step));
	memcpy(ans->call, err->call, sizeof(ans->call));
}

int dg_send(int sock, const void *data, size_t len, const int *fds, unsigned int nfds)
{
	union {
		struct cmsghdr align;
		char room[CMSG_SPACE(DG_MAX_FDS * sizeof(int))];
	} control;
	struct iovec iov = { .iov_base = (void *)(uintptr_t)data, .iov_len = len };
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1 };
	ssize_t sent;

	if (nfds > DG_MAX_FDS) {
		errno = EINVAL;
		return -1;
	}
	if (nfds) {
		struct cmsghdr *head;

		memset(&control, 0, CMSG_SPACE(nfds * sizeof(int)));
		msg.msg_control = &control;
		msg.msg_controllen = CMSG_SPACE(nfds * sizeof(int));
		head = CMSG_FIRSTHDR(&msg);
		head->cmsg_level = SOL_SOCKET;
		head->cmsg_type = SCM_RIGHTS;
		head->cmsg_len = CMSG_LEN(nfds * sizeof(int));
		memcpy(CMSG_DATA(head), fds, nfds * sizeof(int));
	}
	do
		sent = sendmsg(sock, &msg, MSG_NOSIGNAL);
	while (sent < 0 && errno == EINTR);
	if (sent < 0)
		return -1;
	if ((size_t)sent != len) {
		errno = EMSGSIZE;
		return -1;
	}
	return 0;
}

int dg_recv(int sock, void *data, size_t len, int *fds, unsigned int max_fds, unsigned int *nfds)
{
	union {
		struct cmsghdr align;
		char room[CMSG_SPACE(253 * sizeof(int))]; /* SCM_MAX_FD: what does not fit would be lost silently */
	} control;
	struct iovec iov = { .iov_base = data, .iov_len = len };
	struct msghdr msg = {
		.msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control),
	};
	struct cmsghdr *head;
	int too_many = 0;
	ssize_t got;

	*nfds = 0;
	do
		got = recvmsg(sock, &msg, MSG_CMSG_CLOEXEC);
	while (got < 0 && errno == EINTR);
	if (got < 0)
		return -1;
	for (head = CMSG_FIRSTHDR(&msg); head; head = CMSG_NXTHDR(&msg, head)) {
		size_t bytes = head->cmsg_len - CMSG_LEN(0);

		if (head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS)
			continue;
		for (size_t at = 0; at + sizeof(int) <= bytes; at += sizeof(int)) {
			int fd;

			memcpy(&fd, CMSG_DATA(head) + at, sizeof(fd));
			if (*nfds < max_fds) {
				fds[(*nfds)++] = fd;
			} else {
				too_many = 1;
				close(fd);
			}
		}
	}
	/* An empty message cannot be told from the end; nobody sends one. */
	if (got == 0 && *nfds == 0)
		return 0;
	if ((size_t)got != len || too_many || msg.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) {
		while (*nfds)
			close(fds[--*nfds]);
		errno = EMSGSIZE;
		return -1;
	}
	return 1;
}

const void *dg_map_sealed(int fd, size_t *size, struct dg_error *err)
{
	const int need = F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW;
	int seals = fcntl(fd, F_GET_SEALS);
	struct stat st;
	void *map;

	if (seals < 0) {
		dg_fail(err, "fcntl(F_GET_SEALS)");
		return NULL;
	}
	if ((seals & need) != need) {
		dg_refuse(err, "plan is not sealed", EINVAL);
		return NULL;
	}
	if (fstat(fd, &st) < 0) {
		dg_fail(err, "fstat(plan)");
		return NULL;
	}
	if (st.st_size <= 0 || st.st_size > DG_MAX_PLAN) {
		dg_refuse(err, "plan size", E2BIG);
		return NULL;
	}
	map = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE | MAP_POPULATE, fd, 0);
	if (map == MAP_FAILED) {
		dg_fail(err, "mmap(plan)");
		return NULL;
	}
	*size = (size_t)st.st_size;
	return map;
}
