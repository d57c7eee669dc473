/* SPDX-License-Identifier: Apache-2.0 */
/* dg_holder_task.c - who a held task is, from /proc. The task is held by the kernel meanwhile, so its entry is its own. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "dg_holder_state.h"

/* Reads /proc/@tid/@name, NUL-terminated. Returns the length or -1. */
ssize_t dg_read_proc(struct dg_holder *h, pid_t tid, const char *name, char *buffer, size_t size)
{
	char path[64];
	size_t used = 0;
	ssize_t n;
	int fd;

	snprintf(path, sizeof(path), "%d/%s", tid, name);
	fd = openat(h->proc_fd, path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return -1;
	while (used + 1 < size && (n = read(fd, buffer + used, size - 1 - used)) != 0) {
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0) {
			close(fd);
			return -1;
		}
		used += (size_t)n;
	}
	close(fd);
	buffer[used] = '\0';
	return (ssize_t)used;
}

/* The number after the line start @key of a status file. `Name:` comes first and its value cannot hold a newline. */
static bool dg_status_field(const char *status, const char *key, uint32_t *value)
{
	const char *at = strstr(status, key);

	if (!at)
		return false;
	*value = (uint32_t)strtoul(at + strlen(key), NULL, 10);
	return true;
}

/* Fills tgid, ppid, uid, comm; sets DG_RECORD_VANISHED and returns false when the task is gone. */
bool dg_name_task(struct dg_holder *h, pid_t tid, struct dg_record *record)
{
	char status[4096], comm[sizeof(record->comm) + 1];
	ssize_t n;

	record->tid = (uint32_t)tid;
	if (tid <= 0 || dg_read_proc(h, tid, "status", status, sizeof(status)) < 0 ||
	    !dg_status_field(status, "\nTgid:", &record->tgid) || !dg_status_field(status, "\nPPid:", &record->ppid) ||
	    !dg_status_field(status, "\nUid:", &record->uid)) {
		record->flags |= DG_RECORD_VANISHED;
		return false;
	}
	/* From its own file: status escapes what the agent put into the name. */
	n = dg_read_proc(h, tid, "comm", comm, sizeof(comm));
	if (n > 0) {
		if (comm[n - 1] == '\n')
			n--;
		memcpy(record->comm, comm, (size_t)n);
	}
	return true;
}

/* The target of a link, cut at @size with DG_RECORD_TRUNCATED; 0 when there is none. */
uint16_t dg_read_link(int dir_fd, const char *name, char *to, size_t size, uint32_t *flags)
{
	ssize_t n = readlinkat(dir_fd, name, to, size);

	if (n < 0)
		return 0;
	if ((size_t)n == size)
		*flags |= DG_RECORD_TRUNCATED;
	return (uint16_t)n;
}
