/* SPDX-License-Identifier: Apache-2.0 */
/* dg_holder_box.c - which boxes and instances the holder answers for, and the way their records take to the guard. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include "dg_holder_state.h"

struct dg_box *dg_box_by_id(struct dg_holder *h, uint64_t id)
{
	struct dg_box *box;

	for (box = h->boxes; box; box = box->next)
		if (box->id == id)
			return box;
	return NULL;
}

/* The box whose cgroup is @name or an ancestor of it. */
struct dg_box *dg_box_by_proc_name(struct dg_holder *h, const char *name, size_t len)
{
	struct dg_box *box;

	for (box = h->boxes; box; box = box->next) {
		if (len < box->proc_name_len || memcmp(name, box->proc_name, box->proc_name_len))
			continue;
		if (len == box->proc_name_len || name[box->proc_name_len] == '/')
			return box;
	}
	return NULL;
}

/* Copies the NUL-terminated strings of @payload; -1 with errno when there are too many or one does not end. */
static int dg_split(const char *payload, size_t len, char **out, size_t *count)
{
	*count = 0;
	while (len > 0) {
		size_t piece = strnlen(payload, len);

		if (piece == len || piece == 0 || *count == DG_PATHS_MAX) {
			errno = EINVAL;
			goto fail;
		}
		out[*count] = strdup(payload);
		if (!out[*count])
			goto fail;
		*count += 1;
		payload += piece + 1;
		len -= piece + 1;
	}
	return 0;
fail:
	while (*count > 0)
		free(out[--*count]);
	return -1;
}

static void dg_free_box(struct dg_box *box)
{
	close(box->v2_fd);
	free(box->proc_name);
	while (box->path_count > 0)
		free(box->paths[--box->path_count]);
	free(box);
}

/* Takes @fd over, also when it fails. */
int dg_add_box(struct dg_holder *h, uint64_t id, int fd, const char *payload, size_t len)
{
	struct dg_box *box = calloc(1, sizeof(*box));
	char *parts[DG_PATHS_MAX];
	size_t count = 0;
	struct stat st;
	int error;

	if (!box || fstat(fd, &st) < 0 || dg_split(payload, len, parts, &count) < 0)
		goto fail;
	/* The id is the directory's inode number: a mismatch would book one box's acts on another. */
	if (count < 2 || st.st_ino != id || !S_ISDIR(st.st_mode)) {
		errno = EINVAL;
		goto fail;
	}
	box->id = id;
	box->v2_fd = fd;
	box->proc_name = parts[0];
	box->proc_name_len = strlen(parts[0]);
	box->path_count = count - 1;
	memcpy(box->paths, parts + 1, (count - 1) * sizeof(*parts));
	pthread_mutex_lock(&h->lock);
	if (dg_box_by_id(h, id)) {
		pthread_mutex_unlock(&h->lock);
		dg_free_box(box);
		errno = EEXIST;
		return -1;
	}
	box->next = h->boxes;
	h->boxes = box;
	pthread_mutex_unlock(&h->lock);
	return 0;
fail:
	error = errno;
	while (count > 0)
		free(parts[--count]);
	free(box);
	close(fd);
	errno = error;
	return -1;
}

int dg_release_box(struct dg_holder *h, uint64_t id)
{
	struct dg_box **link, *box = NULL;

	pthread_mutex_lock(&h->lock);
	for (link = &h->boxes; *link; link = &(*link)->next) {
		if ((*link)->id == id) {
			box = *link;
			*link = box->next;
			break;
		}
	}
	pthread_mutex_unlock(&h->lock);
	if (!box) {
		errno = ENOENT;
		return -1;
	}
	dg_free_box(box);
	return 0;
}

/* Takes @fd over, also when it fails. */
int dg_add_instance(struct dg_holder *h, bool try_parents, int fd, const char *payload, size_t len)
{
	struct dg_instance *instance = calloc(1, sizeof(*instance));
	int error;

	if (!instance || dg_split(payload, len, instance->paths, &instance->path_count) < 0)
		goto fail;
	if (instance->path_count == 0) {
		errno = EINVAL;
		goto fail;
	}
	instance->v2_fd = fd;
	instance->try_parents = try_parents;
	instance->next = h->instances;
	h->instances = instance;
	return 0;
fail:
	error = errno;
	free(instance);
	close(fd);
	errno = error;
	return -1;
}

int dg_release_instance(struct dg_holder *h, const char *v2_path)
{
	struct dg_instance **link, *instance;

	for (link = &h->instances; (instance = *link); link = &instance->next) {
		if (strcmp(instance->paths[0], v2_path))
			continue;
		*link = instance->next;
		close(instance->v2_fd);
		while (instance->path_count > 0)
			free(instance->paths[--instance->path_count]);
		free(instance);
		return 0;
	}
	errno = ENOENT;
	return -1;
}

/* Ends every task of the cgroup and of all below it, also one that is being forked meanwhile (cgroup_post_fork). */
int dg_kill_cgroup(int v2_fd)
{
	int fd = openat(v2_fd, "cgroup.kill", O_WRONLY | O_CLOEXEC);
	int result = -1, error;

	if (fd < 0)
		return -1;
	if (write(fd, "1", 1) == 1)
		result = 0;
	error = errno;
	close(fd);
	errno = error;
	return result;
}

int dg_mail_init(struct dg_mailbox *mail)
{
	mail->first = NULL;
	mail->last = &mail->first;
	mail->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (mail->wake_fd < 0)
		return -1;
	return pthread_mutex_init(&mail->lock, NULL) ? -1 : 0;
}

/* Takes over the job's descriptor and rules. */
int dg_mail_post(struct dg_mailbox *mail, const struct dg_job *job)
{
	struct dg_job *copy = malloc(sizeof(*copy));
	uint64_t one = 1;

	if (!copy)
		return -1;
	*copy = *job;
	copy->next = NULL;
	pthread_mutex_lock(&mail->lock);
	*mail->last = copy;
	mail->last = &copy->next;
	pthread_mutex_unlock(&mail->lock);
	/* Only a counter at its limit refuses, and then the thread is awake already. */
	return write(mail->wake_fd, &one, sizeof(one)) == sizeof(one) || errno == EAGAIN ? 0 : -1;
}

/* The oldest job or NULL; the caller frees it. */
struct dg_job *dg_mail_take(struct dg_mailbox *mail)
{
	struct dg_job *job;

	pthread_mutex_lock(&mail->lock);
	job = mail->first;
	if (job) {
		mail->first = job->next;
		if (!mail->first)
			mail->last = &mail->first;
	}
	pthread_mutex_unlock(&mail->lock);
	return job;
}

/* False when the guard's pipe is full or gone: the caller counts it, nobody waits. */
bool dg_record_write(struct dg_holder *h, const struct dg_record *record)
{
	ssize_t n;

	do {
		n = write(h->records_fd, record, sizeof(*record));
	} while (n < 0 && errno == EINTR);
	return n == (ssize_t)sizeof(*record);
}
