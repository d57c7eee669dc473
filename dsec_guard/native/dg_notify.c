/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dg_notify.c - answers system calls that a filter hands over (SECCOMP_RET_USER_NOTIF). Each is refused with the errno
 * of the box's table and never continued: the arguments in memory can change after they were looked at
 * (seccomp_unotify(2), NOTES), so what is read here shows intent and decides nothing.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "dg_holder_state.h"

#define DG_AT_NONE (-1)

/*
 * Which arguments of a call say what it was about. Positions are argument numbers, DG_AT_NONE where there is none.
 * data: a buffer of data_len bytes; 0: a string; negative: as many bytes as argument -data_len says.
 */
struct dg_call_shape {
	int16_t nr;
	int8_t dir, path, path2, data;
	int16_t data_len;
};

#define N DG_AT_NONE
static const struct dg_call_shape dg_shapes[] = {
	{ SYS_acct, N, 0, N, N, 0 },
	{ SYS_add_key, N, 0, 1, N, 0 },
	{ SYS_bind, N, N, N, 1, -2 },
	{ SYS_bpf, N, N, N, 1, -2 },
	{ SYS_chmod, N, 0, N, N, 0 },
	{ SYS_chown, N, 0, N, N, 0 },
	{ SYS_chroot, N, 0, N, N, 0 },
	{ SYS_clock_settime, N, N, N, 1, 16 },
	{ SYS_clone3, N, N, N, 0, -1 },
	{ SYS_connect, N, N, N, 1, -2 },
	{ SYS_delete_module, N, 0, N, N, 0 },
	{ SYS_execve, N, 0, N, N, 0 },
	{ SYS_execveat, 0, 1, N, N, 0 },
	{ SYS_fchmodat, 0, 1, N, N, 0 },
	{ SYS_fchownat, 0, 1, N, N, 0 },
	{ SYS_finit_module, 0, N, N, N, 0 },
	{ SYS_fsconfig, N, 2, 3, N, 0 },
	{ SYS_fsopen, N, 0, N, N, 0 },
	{ SYS_fspick, 0, 1, N, N, 0 },
	{ SYS_init_module, N, N, 2, 0, 64 },
	{ SYS_io_uring_setup, N, N, N, 1, 64 },
	{ SYS_kexec_file_load, 0, N, N, N, 0 },
	{ SYS_lchown, N, 0, N, N, 0 },
	{ SYS_link, N, 0, 1, N, 0 },
	{ SYS_linkat, 0, 1, 3, N, 0 },
	{ SYS_mkdir, N, 0, N, N, 0 },
	{ SYS_mkdirat, 0, 1, N, N, 0 },
	{ SYS_mknod, N, 0, N, N, 0 },
	{ SYS_mknodat, 0, 1, N, N, 0 },
	{ SYS_mount, N, 1, 0, 2, 0 },
	{ SYS_mount_setattr, 0, 1, N, 3, -4 },
	{ SYS_move_mount, 0, 1, 3, N, 0 },
	{ SYS_name_to_handle_at, 0, 1, N, N, 0 },
	{ SYS_open, N, 0, N, N, 0 },
	{ SYS_open_by_handle_at, 0, N, N, 1, 24 },
	{ SYS_open_tree, 0, 1, N, N, 0 },
	{ SYS_openat, 0, 1, N, N, 0 },
	{ SYS_openat2, 0, 1, N, 2, -3 },
	{ SYS_perf_event_open, N, N, N, 0, 64 },
	{ SYS_pivot_root, N, 0, 1, N, 0 },
	{ SYS_quotactl, N, 1, N, N, 0 },
	{ SYS_removexattr, N, 0, 1, N, 0 },
	{ SYS_rename, N, 0, 1, N, 0 },
	{ SYS_renameat2, 0, 1, 3, N, 0 },
	{ SYS_request_key, N, 0, 1, N, 0 },
	{ SYS_sched_setattr, N, N, N, 1, 48 },
	{ SYS_sendto, N, N, N, 4, -5 },
	{ SYS_setdomainname, N, N, N, 0, -1 },
	{ SYS_sethostname, N, N, N, 0, -1 },
	{ SYS_settimeofday, N, N, N, 0, 16 },
	{ SYS_setxattr, N, 0, 1, N, 0 },
	{ SYS_swapoff, N, 0, N, N, 0 },
	{ SYS_swapon, N, 0, N, N, 0 },
	{ SYS_symlink, N, 1, 0, N, 0 },
	{ SYS_symlinkat, 1, 2, 0, N, 0 },
	{ SYS_truncate, N, 0, N, N, 0 },
	{ SYS_umount2, N, 0, N, N, 0 },
	{ SYS_unlink, N, 0, N, N, 0 },
	{ SYS_unlinkat, 0, 1, N, N, 0 },
};
#undef N

struct dg_watch {
	struct dg_watch *next;
	uint64_t box_id;
	int fd;
	int default_errno;
	struct dg_errno_rule *rules;
	size_t rule_count;
};

struct dg_notify {
	struct dg_holder *h;
	int epoll_fd;
	struct dg_watch *watches;
	struct seccomp_notif *request;
	struct seccomp_notif_resp *response;
	size_t request_size, response_size;
};

static int dg_errno_for(const struct dg_watch *watch, const struct seccomp_data *data)
{
	size_t i;

	if (data->arch == AUDIT_ARCH_X86_64)
		for (i = 0; i < watch->rule_count; i++)
			if (watch->rules[i].nr == data->nr)
				return watch->rules[i].error;
	return watch->default_errno;
}

/* A string of the task, page by page: the next page need not exist. Returns its length without the NUL. */
static uint16_t dg_task_string(int mem_fd, uint64_t address, char *to, size_t size, uint32_t *flags)
{
	size_t used = 0;

	while (address && used < size) {
		size_t want = 4096 - ((address + used) & 4095);
		ssize_t n;
		char *end;

		if (want > size - used)
			want = size - used;
		n = pread(mem_fd, to + used, want, (off_t)(address + used));
		if (n <= 0)
			return (uint16_t)used;
		end = memchr(to + used, '\0', (size_t)n);
		if (end) {
			/* What lies behind the string is not part of it. */
			memset(end, 0, size - (size_t)(end - to));
			return (uint16_t)(end - to);
		}
		used += (size_t)n;
	}
	if (address)
		*flags |= DG_RECORD_TRUNCATED;
	return (uint16_t)used;
}

static uint16_t dg_task_bytes(int mem_fd, uint64_t address, uint64_t len, struct dg_record *record)
{
	ssize_t n;

	if (!address)
		return 0;
	if (len > sizeof(record->data)) {
		len = sizeof(record->data);
		record->flags |= DG_RECORD_TRUNCATED;
	}
	n = pread(mem_fd, record->data, len, (off_t)address);
	return n > 0 ? (uint16_t)n : 0;
}

static bool dg_still_waits(const struct dg_watch *watch, uint64_t id)
{
	return ioctl(watch->fd, SECCOMP_IOCTL_NOTIF_ID_VALID, &id) == 0;
}

/* What the call was about. Without effect when the task stopped waiting: its number may be another's by now. */
static void dg_read_arguments(struct dg_notify *n, const struct dg_watch *watch, const struct seccomp_notif *request,
			      struct dg_record *record)
{
	const struct dg_call_shape *shape = NULL;
	const uint64_t *args = (const uint64_t *)request->data.args;
	struct dg_record filled = *record;
	char name[64];
	int mem_fd;
	size_t i;

	if (request->data.arch != AUDIT_ARCH_X86_64)
		return;
	for (i = 0; i < sizeof(dg_shapes) / sizeof(*dg_shapes) && !shape; i++)
		if (dg_shapes[i].nr == request->data.nr)
			shape = &dg_shapes[i];
	if (!shape)
		return;
	snprintf(name, sizeof(name), "%d/mem", request->pid);
	mem_fd = openat(n->h->proc_fd, name, O_RDONLY | O_CLOEXEC);
	if (mem_fd < 0)
		return;
	/* Between naming the file and opening it the number could have been given to another task. */
	if (!dg_still_waits(watch, request->id)) {
		close(mem_fd);
		return;
	}
	if (shape->path >= 0)
		filled.path_len = dg_task_string(mem_fd, args[shape->path], filled.path, sizeof(filled.path),
						 &filled.flags);
	if (shape->path2 >= 0)
		filled.path2_len = dg_task_string(mem_fd, args[shape->path2], filled.path2, sizeof(filled.path2),
						  &filled.flags);
	if (shape->data >= 0 && shape->data_len == 0)
		filled.data_len = dg_task_string(mem_fd, args[shape->data], (char *)filled.data, sizeof(filled.data),
						 &filled.flags);
	else if (shape->data >= 0)
		filled.data_len = dg_task_bytes(mem_fd, args[shape->data],
						shape->data_len < 0 ? args[-shape->data_len] : (uint64_t)shape->data_len,
						&filled);
	close(mem_fd);
	if (shape->dir >= 0 && (int32_t)args[shape->dir] >= 0)
		snprintf(name, sizeof(name), "%d/fd/%d", request->pid, (int32_t)args[shape->dir]);
	else
		snprintf(name, sizeof(name), "%d/cwd", request->pid);
	filled.base_len = dg_read_link(n->h->proc_fd, name, filled.base, sizeof(filled.base), &filled.flags);
	if (!dg_still_waits(watch, request->id))
		return;
	filled.flags |= DG_RECORD_MEMORY_READ;
	*record = filled;
}

static void dg_record_notice(struct dg_notify *n, const struct dg_watch *watch, const struct seccomp_notif *request,
			     int error)
{
	struct dg_record record = {
		.version = DG_HOLD_VERSION, .kind = DG_RECORD_NOTIFY, .flags = DG_RECORD_CALL_KNOWN,
		.box_id = watch->box_id, .at_ns = dg_now_ns(), .mask = request->id, .nr = request->data.nr,
		.arch = request->data.arch, .given_errno = error,
	};
	struct dg_box *box;
	bool written;

	memcpy(record.args, request->data.args, sizeof(record.args));
	if (dg_name_task(n->h, (pid_t)request->pid, &record)) {
		if (dg_still_waits(watch, request->id)) {
			dg_read_arguments(n, watch, request, &record);
		} else {
			record.flags |= DG_RECORD_VANISHED;
			record.tgid = record.ppid = record.uid = 0;
			memset(record.comm, 0, sizeof(record.comm));
		}
	}
	written = dg_record_write(n->h, &record);
	pthread_mutex_lock(&n->h->lock);
	box = dg_box_by_id(n->h, watch->box_id);
	if (box)
		*(written ? &box->notices.recorded : &box->notices.lost) += 1;
	pthread_mutex_unlock(&n->h->lock);
}

/* Counts a notice; whether it becomes a record. Ends the box that only wants to be noticed. */
static bool dg_admit_notice(struct dg_holder *h, uint64_t box_id)
{
	struct dg_box *box;
	bool admitted = false, flooded = false;

	pthread_mutex_lock(&h->lock);
	box = dg_box_by_id(h, box_id);
	if (box) {
		box->notices.seen++;
		admitted = box->notices.recorded + box->notices.lost < h->notify_records;
		if (!admitted)
			box->notices.counted++;
		flooded = box->notices.seen >= h->notify_kill && !box->flood_killed;
		if (flooded) {
			box->flood_killed = true;
			if (dg_kill_cgroup(box->v2_fd) < 0)
				dg_notice(h, DG_NOTICE_REFUSED, DG_HOLD_WATCH_NOTIFY, box_id, 0, errno);
		}
	}
	pthread_mutex_unlock(&h->lock);
	if (flooded)
		dg_notice(h, DG_NOTICE_FLOOD_KILLED, 0, box_id, 0, 0);
	return admitted;
}

/* Answers one call. Returns -1 when the listener cannot be used any more. */
static int dg_answer(struct dg_notify *n, struct dg_watch *watch)
{
	int error;

	memset(n->request, 0, n->request_size);
	if (ioctl(watch->fd, SECCOMP_IOCTL_NOTIF_RECV, n->request) < 0)
		return errno == ENOENT || errno == EINTR ? 0 : -1;
	error = dg_errno_for(watch, &n->request->data);
	if (dg_admit_notice(n->h, watch->box_id))
		dg_record_notice(n, watch, n->request, error);
	memset(n->response, 0, n->response_size);
	n->response->id = n->request->id;
	n->response->error = -error;
	if (ioctl(watch->fd, SECCOMP_IOCTL_NOTIF_SEND, n->response) < 0 && errno != ENOENT && errno != EINTR)
		return -1;
	return 0;
}

static void dg_free_watch(struct dg_notify *n, struct dg_watch *watch)
{
	struct dg_watch **link;

	for (link = &n->watches; *link; link = &(*link)->next) {
		if (*link == watch) {
			*link = watch->next;
			break;
		}
	}
	close(watch->fd);
	free(watch->rules);
	free(watch);
}

static void dg_add_watch(struct dg_notify *n, struct dg_job *job)
{
	struct dg_watch *watch = calloc(1, sizeof(*watch));
	struct epoll_event event = { .events = EPOLLIN, .data.ptr = watch };

	if (!watch || epoll_ctl(n->epoll_fd, EPOLL_CTL_ADD, job->fd, &event) < 0) {
		dg_notice(n->h, DG_NOTICE_SENSOR_DIED, DG_SENSOR_NOTIFY, job->box_id, 0, errno);
		close(job->fd);
		free(job->rules);
		free(watch);
		return;
	}
	watch->box_id = job->box_id;
	watch->fd = job->fd;
	watch->default_errno = job->default_errno;
	watch->rules = job->rules;
	watch->rule_count = job->rule_count;
	watch->next = n->watches;
	n->watches = watch;
}

/* True when a notice may still wait to be taken. */
static bool dg_has_notice(const struct dg_watch *watch)
{
	struct pollfd poll_fd = { .fd = watch->fd, .events = POLLIN };

	return poll(&poll_fd, 1, 0) > 0 && poll_fd.revents & POLLIN;
}

static void dg_do_jobs(struct dg_notify *n)
{
	struct dg_watch *watch, *next;
	struct dg_job *job;
	uint64_t wakes;

	if (read(n->h->notify_mail.wake_fd, &wakes, sizeof(wakes)) < 0 && errno != EAGAIN)
		return;
	while ((job = dg_mail_take(&n->h->notify_mail))) {
		if (job->kind == DG_JOB_ADD)
			dg_add_watch(n, job);
		for (watch = n->watches; watch && job->kind != DG_JOB_ADD; watch = next) {
			next = watch->next;
			if (watch->box_id != job->box_id)
				continue;
			if (job->kind == DG_JOB_DROP_BOX)
				dg_free_watch(n, watch);
			else
				while (dg_has_notice(watch) && dg_answer(n, watch) == 0)
					continue;
		}
		if (job->kind == DG_JOB_FLUSH)
			dg_notice_totals(n->h, job->box_id, DG_SENSOR_NOTIFY);
		free(job);
	}
}

/* The kernel says how large its structures are; a newer one may write more than our headers know. */
static int dg_size_buffers(struct dg_notify *n)
{
	struct seccomp_notif_sizes sizes;

	if (syscall(SYS_seccomp, SECCOMP_GET_NOTIF_SIZES, 0, &sizes) < 0)
		return -1;
	n->request_size = sizes.seccomp_notif > sizeof(*n->request) ? sizes.seccomp_notif : sizeof(*n->request);
	n->response_size = sizes.seccomp_notif_resp > sizeof(*n->response) ? sizes.seccomp_notif_resp :
									     sizeof(*n->response);
	n->request = calloc(1, n->request_size);
	n->response = calloc(1, n->response_size);
	return n->request && n->response ? 0 : -1;
}

void *dg_notify_thread(void *holder)
{
	struct dg_notify n = { .h = holder };
	struct epoll_event wake = { .events = EPOLLIN, .data.ptr = NULL };
	struct epoll_event events[32];
	int count, i;

	n.epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	if (n.epoll_fd < 0 || dg_size_buffers(&n) < 0 ||
	    epoll_ctl(n.epoll_fd, EPOLL_CTL_ADD, n.h->notify_mail.wake_fd, &wake) < 0)
		goto dead;
	for (;;) {
		bool mail = false;

		count = epoll_wait(n.epoll_fd, events, sizeof(events) / sizeof(*events), -1);
		if (count < 0 && errno != EINTR)
			goto dead;
		for (i = 0; i < count; i++) {
			struct dg_watch *watch = events[i].data.ptr;

			if (!watch) {
				mail = true;
			} else if (events[i].events & EPOLLIN) {
				if (dg_answer(&n, watch) < 0) {
					dg_notice(n.h, DG_NOTICE_SENSOR_DIED, DG_SENSOR_NOTIFY, watch->box_id, 0, errno);
					dg_free_watch(&n, watch);
				}
			} else if (events[i].events & (EPOLLHUP | EPOLLERR)) {
				/* The last task under this filter is gone. */
				dg_free_watch(&n, watch);
			}
		}
		/* After the events, which point at watches that a job may free. */
		if (mail)
			dg_do_jobs(&n);
	}
dead:
	dg_notice(n.h, DG_NOTICE_SENSOR_DIED, DG_SENSOR_NOTIFY, 0, 0, errno);
	return NULL;
}
