/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dg_fanotify.c - watches openings of marked files. It never denies: each answer is FAN_ALLOW, given after the opener
 * was named, since an opener that exits at once could not be named any more. A listener that dies lets all through.
 * The opener's memory is not read here: a page fault in it can wait for as long as the agent likes, and this one
 * thread holds the openers of every box.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/fanotify.h>
#include <sys/stat.h>
#include <unistd.h>

#include "dg_holder_state.h"

#define DG_GROUPS_MAX 8
#define DG_CALL_TRIES 50

struct dg_fan {
	struct dg_holder *h;
	int groups[DG_GROUPS_MAX];
	size_t count;
};

/* The `0::` line of /proc/@tid/cgroup, without its newline; NULL when the task is gone. */
static char *dg_cgroup_of(struct dg_holder *h, pid_t tid, char *buffer, size_t size)
{
	char *at, *end;

	if (dg_read_proc(h, tid, "cgroup", buffer, size) < 0)
		return NULL;
	at = strncmp(buffer, "0::", 3) ? strstr(buffer, "\n0::") : buffer - 1;
	if (!at)
		return NULL;
	at += 4;
	end = strchr(at, '\n');
	if (end)
		*end = '\0';
	return at;
}

/* Number and arguments of the call the opener is held in; absent for the worker threads of io_uring. */
static void dg_held_call(struct dg_holder *h, pid_t tid, struct dg_record *record)
{
	char text[256], *at = text, *end;
	int tries = 0;
	size_t i;
	long nr;

	/* "running": the opener has queued its event and is on its way to sleep (seen on one processor). */
	do {
		if (tries++ > 0)
			sched_yield();
		if (dg_read_proc(h, tid, "syscall", text, sizeof(text)) < 0)
			return;
	} while (!strncmp(text, "running", 7) && tries < DG_CALL_TRIES);
	nr = strtol(at, &end, 10);
	if (end == at || nr < 0)
		return;
	record->nr = (int32_t)nr;
	for (i = 0, at = end; i < 6; i++, at = end) {
		record->args[i] = strtoull(at, &end, 16);
		if (end == at)
			return;
	}
	record->flags |= DG_RECORD_CALL_KNOWN;
}

/* Whether this opening becomes a record. Called with the lock held. */
static bool dg_admit_open(struct dg_holder *h, struct dg_box *box, uint32_t tgid, uint64_t dev, uint64_t ino,
			  uint64_t mask)
{
	uint64_t hash = (ino * 0x9e3779b97f4a7c15u) ^ (dev << 7) ^ (mask << 3) ^ ((uint64_t)tgid * 0xff51afd7ed558ccdu);
	struct dg_repeat *slot = &box->repeats[(hash >> 40) % DG_REPEAT_SLOTS];

	box->opens.seen++;
	if (slot->dev != dev || slot->ino != ino || slot->mask != mask || slot->tgid != tgid)
		*slot = (struct dg_repeat){ .dev = dev, .ino = ino, .mask = mask, .tgid = tgid };
	if (slot->count >= h->open_repeats || box->opens.recorded + box->opens.lost >= h->open_records) {
		box->opens.counted++;
		return false;
	}
	slot->count++;
	return true;
}

static void dg_report_open(struct dg_holder *h, const struct fanotify_event_metadata *event)
{
	char cgroup[8192], link[32], *name;
	struct dg_record record = { .version = DG_HOLD_VERSION, .kind = DG_RECORD_OPEN, .nr = -1 };
	struct dg_box *box;
	struct stat st;
	bool admitted = false, written;

	record.at_ns = dg_now_ns();
	name = dg_cgroup_of(h, event->pid, cgroup, sizeof(cgroup));
	if (!name || fstat(event->fd, &st) < 0)
		return;
	record.dev = st.st_dev;
	record.ino = st.st_ino;
	record.mask = event->mask;
	pthread_mutex_lock(&h->lock);
	box = dg_box_by_proc_name(h, name, strlen(name));
	if (box)
		record.box_id = box->id;
	pthread_mutex_unlock(&h->lock);
	if (!box)
		return;
	dg_name_task(h, event->pid, &record);
	pthread_mutex_lock(&h->lock);
	box = dg_box_by_id(h, record.box_id);
	if (box)
		admitted = dg_admit_open(h, box, record.tgid, record.dev, record.ino, record.mask);
	pthread_mutex_unlock(&h->lock);
	if (!admitted)
		return;
	dg_held_call(h, event->pid, &record);
	snprintf(link, sizeof(link), "self/fd/%d", event->fd);
	record.path_len = dg_read_link(h->proc_fd, link, record.path, sizeof(record.path), &record.flags);
	written = dg_record_write(h, &record);
	pthread_mutex_lock(&h->lock);
	box = dg_box_by_id(h, record.box_id);
	if (box)
		*(written ? &box->opens.recorded : &box->opens.lost) += 1;
	pthread_mutex_unlock(&h->lock);
}

/* Answers what is queued. Returns -1 when the group can no longer be read. */
static int dg_drain_group(struct dg_holder *h, int group)
{
	char buffer[4096] __attribute__((aligned(__alignof__(struct fanotify_event_metadata))));
	const struct fanotify_event_metadata *event;
	ssize_t n;

	for (;;) {
		n = read(group, buffer, sizeof(buffer));
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0 && errno == EAGAIN)
			return 0;
		if (n <= 0) {
			/* A descriptor for one event could not be made; the kernel has answered that event itself. */
			if (n < 0 && errno != EBADF && errno != EINVAL && errno != EFAULT) {
				dg_notice(h, DG_NOTICE_OVERFLOW, errno, 0, 0, 0);
				return 0;
			}
			return -1;
		}
		for (event = (void *)buffer; FAN_EVENT_OK(event, n); event = FAN_EVENT_NEXT(event, n)) {
			struct fanotify_response answer = { .fd = event->fd, .response = FAN_ALLOW };

			if (event->vers != FANOTIFY_METADATA_VERSION) {
				errno = EINVAL;
				return -1;
			}
			if (event->mask & FAN_Q_OVERFLOW)
				dg_notice(h, DG_NOTICE_OVERFLOW, 0, 0, 0, 0);
			if (event->fd < 0)
				continue;
			/* Recorded before the opener goes on: once it has ended, nothing about it is still to come. */
			dg_report_open(h, event);
			if (event->mask & (FAN_OPEN_PERM | FAN_OPEN_EXEC_PERM | FAN_ACCESS_PERM) &&
			    write(group, &answer, sizeof(answer)) < 0 && errno != ENOENT) {
				/* ENOENT: the opener was killed while it waited. */
				close(event->fd);
				return -1;
			}
			close(event->fd);
		}
	}
}

static void dg_drop_group(struct dg_fan *fan, size_t i)
{
	dg_notice(fan->h, DG_NOTICE_SENSOR_DIED, DG_SENSOR_FANOTIFY, 0, 0, errno);
	close(fan->groups[i]);
	fan->groups[i] = fan->groups[--fan->count];
}

static void dg_drain_all(struct dg_fan *fan)
{
	size_t i;

	for (i = fan->count; i-- > 0;)
		if (dg_drain_group(fan->h, fan->groups[i]) < 0)
			dg_drop_group(fan, i);
}

static void dg_do_jobs(struct dg_fan *fan)
{
	struct dg_job *job;
	uint64_t wakes;

	if (read(fan->h->fanotify_mail.wake_fd, &wakes, sizeof(wakes)) < 0 && errno != EAGAIN)
		return;
	while ((job = dg_mail_take(&fan->h->fanotify_mail))) {
		if (job->kind == DG_JOB_ADD && fan->count < DG_GROUPS_MAX) {
			fan->groups[fan->count++] = job->fd;
		} else if (job->kind == DG_JOB_ADD) {
			close(job->fd);
			dg_notice(fan->h, DG_NOTICE_REFUSED, DG_HOLD_WATCH_FANOTIFY, 0, 0, ENOSPC);
		} else if (job->kind == DG_JOB_FLUSH) {
			dg_drain_all(fan);
			dg_notice_totals(fan->h, job->box_id, DG_SENSOR_FANOTIFY);
		}
		free(job);
	}
}

void *dg_fanotify_thread(void *holder)
{
	struct dg_fan fan = { .h = holder };
	struct pollfd polls[DG_GROUPS_MAX + 1];
	size_t i;

	for (;;) {
		polls[0] = (struct pollfd){ .fd = fan.h->fanotify_mail.wake_fd, .events = POLLIN };
		for (i = 0; i < fan.count; i++)
			polls[i + 1] = (struct pollfd){ .fd = fan.groups[i], .events = POLLIN };
		if (poll(polls, fan.count + 1, -1) < 0 && errno != EINTR) {
			dg_notice(fan.h, DG_NOTICE_SENSOR_DIED, DG_SENSOR_FANOTIFY, 0, 0, errno);
			return NULL;
		}
		dg_drain_all(&fan);
		if (polls[0].revents)
			dg_do_jobs(&fan);
	}
}
