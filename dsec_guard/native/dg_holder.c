/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dg_holder.c - the process that outlives its guard.
 *
 *   dg-holder --control FD --records FD --launcher PATH --launcher-socket FD [--notify-records N] [--notify-kill N]
 *             [--open-records N] [--open-repeats N]
 *
 * It is the parent of the launcher and, since the launcher clones with CLONE_PARENT, of every box's first process; it
 * owns the descriptors whose closing would harm. End of file on the control socket without END means that the guard
 * died: everything registered is killed and removed within DG_CLEANUP_NS.
 * Boxes cannot reach it: it is in no namespace, cgroup or uid of theirs.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "dg_holder_state.h"

#define DG_CLEANUP_NS 1800000000u
#define DG_THREAD_STACK (128u << 10)

enum dg_exit { DG_EXIT_OK = 0, DG_EXIT_LEFTOVERS = 1, DG_EXIT_USAGE = 2, DG_EXIT_SETUP = 3 };

uint64_t dg_now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Called with notice_lock held. False: the guard's socket is full. A guard that is gone needs no notice. */
static bool dg_send_notice(struct dg_holder *h, const struct dg_hold_notice *notice)
{
	ssize_t n;

	do {
		n = send(h->control_fd, notice, sizeof(*notice), MSG_DONTWAIT | MSG_NOSIGNAL);
	} while (n < 0 && errno == EINTR);
	return !(n < 0 && (errno == EAGAIN || errno == ENOBUFS));
}

static void dg_queue_notice(struct dg_holder *h, const struct dg_hold_notice *notice)
{
	pthread_mutex_lock(&h->notice_lock);
	if (h->pending_count > 0 || !dg_send_notice(h, notice)) {
		/* Children are not reaped while something is pending, so only a guard that ignores hundreds loses any. */
		if (h->pending_count < DG_PENDING_MAX)
			h->pending[(h->pending_first + h->pending_count++) % DG_PENDING_MAX] = *notice;
		eventfd_write(h->pending_wake_fd, 1); /* EAGAIN: the main loop is awake already */
	}
	pthread_mutex_unlock(&h->notice_lock);
}

void dg_notice(struct dg_holder *h, uint16_t type, int32_t arg, uint64_t box_id, int32_t pid, int32_t status)
{
	struct dg_hold_notice notice = {
		.version = DG_HOLD_VERSION, .type = type, .arg = arg, .box_id = box_id, .pid = pid, .status = status,
		.at_ns = dg_now_ns(),
	};

	dg_queue_notice(h, &notice);
}

void dg_notice_totals(struct dg_holder *h, uint64_t box_id, enum dg_sensor sensor)
{
	struct dg_hold_notice notice = {
		.version = DG_HOLD_VERSION, .type = DG_NOTICE_TOTALS, .arg = sensor, .box_id = box_id,
		.at_ns = dg_now_ns(),
	};
	struct dg_box *box;

	pthread_mutex_lock(&h->lock);
	box = dg_box_by_id(h, box_id);
	if (box) {
		const struct dg_tally *tally = sensor == DG_SENSOR_FANOTIFY ? &box->opens : &box->notices;

		notice.seen = tally->seen;
		notice.recorded = tally->recorded;
		notice.lost = tally->lost;
		notice.counted = tally->counted;
	} else {
		notice.status = ENOENT;
	}
	pthread_mutex_unlock(&h->lock);
	dg_queue_notice(h, &notice);
}

/* Returns whether everything pending went out. */
static bool dg_flush_notices(struct dg_holder *h)
{
	bool empty;

	pthread_mutex_lock(&h->notice_lock);
	while (h->pending_count > 0 && dg_send_notice(h, &h->pending[h->pending_first])) {
		h->pending_first = (h->pending_first + 1) % DG_PENDING_MAX;
		h->pending_count--;
	}
	empty = h->pending_count == 0;
	pthread_mutex_unlock(&h->notice_lock);
	return empty;
}

static void dg_reap(struct dg_holder *h)
{
	int status;
	pid_t pid;

	while (dg_flush_notices(h) && (pid = waitpid(-1, &status, WNOHANG | __WALL)) > 0) {
		if (pid == h->launcher_pid)
			h->launcher_pid = 0;
		dg_notice(h, DG_NOTICE_CHILD, 0, 0, pid, status);
	}
}

/* ---------------------------------------------------------------------------------------------------- requests */

static int dg_hold_fd(struct dg_holder *h, int fd, const char *name)
{
	struct dg_named_fd *entry = calloc(1, sizeof(*entry));

	if (!entry || !(entry->name = strdup(name))) {
		free(entry);
		close(fd);
		errno = ENOMEM;
		return -1;
	}
	entry->fd = fd;
	entry->next = h->fds;
	h->fds = entry;
	return 0;
}

static int dg_drop_fd(struct dg_holder *h, const char *name)
{
	struct dg_named_fd **link, *entry;

	for (link = &h->fds; (entry = *link); link = &entry->next) {
		if (strcmp(entry->name, name))
			continue;
		*link = entry->next;
		close(entry->fd);
		free(entry->name);
		free(entry);
		return 0;
	}
	errno = ENOENT;
	return -1;
}

static int dg_watch_fanotify(struct dg_holder *h, int fd)
{
	struct dg_job job = { .kind = DG_JOB_ADD, .fd = fd };
	int flags = fcntl(fd, F_GETFL);

	/* The thread reads until nothing is left; a blocking group would keep it from its other work. */
	if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0 || dg_mail_post(&h->fanotify_mail, &job) < 0) {
		int error = errno;

		close(fd);
		errno = error;
		return -1;
	}
	return 0;
}

static int dg_watch_notify(struct dg_holder *h, const struct dg_hold_request *request, int fd, const char *payload)
{
	struct dg_job job = {
		.kind = DG_JOB_ADD, .fd = fd, .box_id = request->box_id, .default_errno = request->arg,
		.rule_count = request->payload_len / sizeof(struct dg_errno_rule),
	};
	size_t i;

	errno = EINVAL;
	if (request->payload_len % sizeof(struct dg_errno_rule) || request->arg <= 0 || request->arg > 4095)
		goto fail;
	if (job.rule_count) {
		job.rules = malloc(request->payload_len);
		if (!job.rules)
			goto fail;
		memcpy(job.rules, payload, request->payload_len);
	}
	/* An error of 0 would let the caller believe that the call was made. */
	for (i = 0; i < job.rule_count; i++) {
		if (job.rules[i].error <= 0 || job.rules[i].error > 4095) {
			errno = EINVAL;
			goto fail;
		}
	}
	if (dg_mail_post(&h->notify_mail, &job) == 0)
		return 0;
fail:
	free(job.rules);
	i = (size_t)errno;
	close(fd);
	errno = (int)i;
	return -1;
}

static int dg_post_both(struct dg_holder *h, enum dg_job_kind kind, uint64_t box_id)
{
	struct dg_job job = { .kind = kind, .box_id = box_id };

	if (dg_mail_post(&h->notify_mail, &job) < 0)
		return -1;
	return dg_mail_post(&h->fanotify_mail, &job);
}

/* @text: the payload, NUL-terminated beyond its length. Takes @fd (-1: none) over. */
static int dg_carry_out(struct dg_holder *h, const struct dg_hold_request *request, const char *text, int fd)
{
	bool wants_fd = request->type == DG_HOLD_INSTANCE || request->type == DG_HOLD_BOX ||
			request->type == DG_HOLD_OWN_DIRECTORY || request->type == DG_HOLD_FD ||
			request->type == DG_HOLD_WATCH_FANOTIFY || request->type == DG_HOLD_WATCH_NOTIFY;

	if (wants_fd != (fd >= 0)) {
		if (fd >= 0)
			close(fd);
		errno = EBADMSG;
		return -1;
	}
	switch (request->type) {
	case DG_HOLD_INSTANCE:
		return dg_add_instance(h, request->arg != 0, fd, text, request->payload_len);
	case DG_HOLD_RELEASE_INSTANCE:
		return dg_release_instance(h, text);
	case DG_HOLD_BOX:
		return dg_add_box(h, request->box_id, fd, text, request->payload_len);
	case DG_HOLD_RELEASE_BOX:
		if (dg_post_both(h, DG_JOB_DROP_BOX, request->box_id) < 0)
			return -1;
		return dg_release_box(h, request->box_id);
	case DG_HOLD_OWN_DIRECTORY:
		return dg_own_directory(h, fd, text);
	case DG_HOLD_PATH:
		return dg_add_path(h, text);
	case DG_HOLD_RELEASE_PATH:
		return dg_release_path(h, text);
	case DG_HOLD_FD:
		return dg_hold_fd(h, fd, text);
	case DG_HOLD_DROP_FD:
		return dg_drop_fd(h, text);
	case DG_HOLD_WATCH_FANOTIFY:
		return dg_watch_fanotify(h, fd);
	case DG_HOLD_WATCH_NOTIFY:
		return dg_watch_notify(h, request, fd, text);
	case DG_HOLD_FLUSH:
		return dg_post_both(h, DG_JOB_FLUSH, request->box_id);
	default:
		errno = EOPNOTSUPP;
		return -1;
	}
}

/* The first descriptor of a message; surplus ones are closed. */
static int dg_take_fd(struct msghdr *message)
{
	struct cmsghdr *header;
	int taken = -1;

	for (header = CMSG_FIRSTHDR(message); header; header = CMSG_NXTHDR(message, header)) {
		size_t count, i;

		if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS)
			continue;
		count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
		for (i = 0; i < count; i++) {
			int fd;

			memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(fd));
			if (taken < 0)
				taken = fd;
			else
				close(fd);
		}
	}
	return taken;
}

enum dg_control { DG_CONTROL_MORE, DG_CONTROL_NONE, DG_CONTROL_ENDED };

static enum dg_control dg_read_request(struct dg_holder *h)
{
	static char buffer[DG_HOLD_MESSAGE_MAX + 1];
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(DG_HOLD_FDS_MAX * sizeof(int))];
	} ancillary;
	struct iovec iov = { .iov_base = buffer, .iov_len = DG_HOLD_MESSAGE_MAX };
	struct msghdr message = {
		.msg_iov = &iov, .msg_iovlen = 1, .msg_control = ancillary.bytes, .msg_controllen = sizeof(ancillary),
	};
	struct dg_hold_request request = { 0 };
	ssize_t n;
	int fd;

	n = recvmsg(h->control_fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	if (n < 0)
		return errno == EAGAIN || errno == EINTR ? DG_CONTROL_NONE : DG_CONTROL_ENDED;
	if (n == 0)
		return DG_CONTROL_ENDED;
	fd = dg_take_fd(&message);
	if ((size_t)n >= sizeof(request))
		memcpy(&request, buffer, sizeof(request));
	if (request.version != DG_HOLD_VERSION || (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) ||
	    request.payload_len != (size_t)n - sizeof(request)) {
		if (fd >= 0)
			close(fd);
		dg_notice(h, DG_NOTICE_REFUSED, request.type, request.box_id, 0, EBADMSG);
		return DG_CONTROL_MORE;
	}
	buffer[n] = '\0';
	if (request.type == DG_HOLD_END) {
		if (fd >= 0)
			close(fd);
		return DG_CONTROL_ENDED;
	}
	if (dg_carry_out(h, &request, buffer + sizeof(request), fd) < 0)
		dg_notice(h, DG_NOTICE_REFUSED, request.type, request.box_id, 0, errno);
	return DG_CONTROL_MORE;
}

/* ---------------------------------------------------------------------------------------------------- start */

static const int dg_ignored[] = {
	SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGPIPE, SIGTSTP, SIGTTIN, SIGTTOU, SIGUSR1, SIGUSR2,
};

static void dg_set_ignored(void (*handler)(int))
{
	size_t i;

	for (i = 0; i < sizeof(dg_ignored) / sizeof(*dg_ignored); i++)
		signal(dg_ignored[i], handler);
}

/* The guard's terminal, its process group and its pipes must not reach us. */
static int dg_detach(void)
{
	sigset_t child;
	int null_fd;

	dg_set_ignored(SIG_IGN);
	sigemptyset(&child);
	sigaddset(&child, SIGCHLD);
	if (sigprocmask(SIG_SETMASK, &child, NULL) < 0)
		return -1;
	if (getsid(0) != getpid() && setsid() < 0)
		return -1;
	umask(077);
	null_fd = open("/dev/null", O_RDWR | O_CLOEXEC);
	if (null_fd < 0 || dup2(null_fd, 0) < 0 || dup2(null_fd, 1) < 0 || dup2(null_fd, 2) < 0)
		return -1;
	close(null_fd);
	return chdir("/");
}

/* Closes all descriptors but 0 to 2 and @keep (any order); those are marked close-on-exec. */
static int dg_keep_only(int *keep, size_t count)
{
	unsigned int from = 3;
	size_t i, j;

	for (i = 0; i < count; i++)
		for (j = i + 1; j < count; j++)
			if (keep[j] < keep[i]) {
				int swap = keep[i];

				keep[i] = keep[j];
				keep[j] = swap;
			}
	for (i = 0; i < count; i++) {
		if (keep[i] < 3 || fcntl(keep[i], F_SETFD, FD_CLOEXEC) < 0) {
			errno = EBADF;
			return -1;
		}
		if ((unsigned int)keep[i] > from && syscall(SYS_close_range, from, keep[i] - 1, 0) < 0)
			return -1;
		from = (unsigned int)keep[i] + 1;
	}
	return (int)syscall(SYS_close_range, from, ~0u, 0);
}

static int dg_start_launcher(struct dg_holder *h)
{
	char socket_text[16];
	char *const argv[] = { (char *)"dg-launcher", (char *)"--socket", socket_text, NULL };
	char *const envp[] = { NULL };
	pid_t holder = getpid();

	snprintf(socket_text, sizeof(socket_text), "%d", h->launcher_socket);
	h->launcher_pid = fork();
	if (h->launcher_pid == 0) {
		sigset_t none;

		/* Ignored signals would be inherited by every box. */
		dg_set_ignored(SIG_DFL);
		sigemptyset(&none);
		sigprocmask(SIG_SETMASK, &none, NULL);
		if (prctl(PR_SET_PDEATHSIG, SIGKILL) < 0 || getppid() != holder || fcntl(h->launcher_socket, F_SETFD, 0) < 0)
			_exit(127);
		execve(h->launcher_path, argv, envp);
		_exit(127);
	}
	close(h->launcher_socket);
	h->launcher_socket = -1;
	return h->launcher_pid < 0 ? -1 : 0;
}

/* After the launcher was started, which would pass it on. Without CAP_SYS_RESOURCE it cannot be lowered: no harm. */
static void dg_last_to_be_killed(void)
{
	int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);

	if (fd < 0)
		return;
	dprintf(fd, "-900");
	close(fd);
}

static int dg_start_threads(struct dg_holder *h)
{
	pthread_attr_t attr;
	pthread_t thread;

	if (pthread_attr_init(&attr) || pthread_attr_setstacksize(&attr, DG_THREAD_STACK) ||
	    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED))
		return -1;
	if (pthread_create(&thread, &attr, dg_fanotify_thread, h))
		return -1;
	return pthread_create(&thread, &attr, dg_notify_thread, h) ? -1 : 0;
}

static void dg_serve(struct dg_holder *h, int signal_fd)
{
	for (;;) {
		bool drained = dg_flush_notices(h);
		struct pollfd polls[] = {
			{ .fd = h->control_fd, .events = (short)(POLLIN | (drained ? 0 : POLLOUT)) },
			{ .fd = signal_fd, .events = POLLIN },
			{ .fd = h->pending_wake_fd, .events = POLLIN },
		};
		struct signalfd_siginfo info[8];
		enum dg_control control;
		uint64_t wakes;

		if (poll(polls, sizeof(polls) / sizeof(*polls), -1) < 0 && errno != EINTR)
			return;
		while (read(signal_fd, info, sizeof(info)) > 0)
			continue;
		while (read(h->pending_wake_fd, &wakes, sizeof(wakes)) > 0)
			continue;
		do {
			control = dg_read_request(h);
		} while (control == DG_CONTROL_MORE);
		if (control == DG_CONTROL_ENDED)
			return;
		dg_reap(h);
	}
}

static bool dg_number(const char *text, long min, long max, long *value)
{
	char *end;

	errno = 0;
	*value = strtol(text, &end, 10);
	return errno == 0 && end != text && *end == '\0' && *value >= min && *value <= max;
}

static bool dg_parse(struct dg_holder *h, int argc, char **argv)
{
	int i;

	for (i = 1; i + 1 < argc; i += 2) {
		const char *name = argv[i], *value = argv[i + 1];
		long number;

		if (!strcmp(name, "--launcher")) {
			h->launcher_path = value;
			continue;
		}
		if (!dg_number(value, 1, 0x7fffffff, &number))
			return false;
		if (!strcmp(name, "--control"))
			h->control_fd = (int)number;
		else if (!strcmp(name, "--records"))
			h->records_fd = (int)number;
		else if (!strcmp(name, "--launcher-socket"))
			h->launcher_socket = (int)number;
		else if (!strcmp(name, "--notify-records"))
			h->notify_records = (uint32_t)number;
		else if (!strcmp(name, "--notify-kill"))
			h->notify_kill = (uint32_t)number;
		else if (!strcmp(name, "--open-records"))
			h->open_records = (uint32_t)number;
		else if (!strcmp(name, "--open-repeats"))
			h->open_repeats = (uint32_t)number;
		else
			return false;
	}
	return i == argc && h->launcher_path && h->control_fd > 2 && h->records_fd > 2 && h->launcher_socket > 2;
}

int main(int argc, char **argv)
{
	static struct dg_holder holder = {
		.control_fd = -1, .records_fd = -1, .launcher_socket = -1, .notify_records = 256,
		.notify_kill = 100000, .open_records = 1024, .open_repeats = 8,
		.lock = PTHREAD_MUTEX_INITIALIZER, .notice_lock = PTHREAD_MUTEX_INITIALIZER,
	};
	struct dg_holder *h = &holder;
	sigset_t child;
	int signal_fd, flags;

	if (!dg_parse(h, argc, argv)) {
		fputs("dg-holder is started by dsec-guard, not by hand\n", stderr);
		return DG_EXIT_USAGE;
	}
	if (dg_detach() < 0 || dg_keep_only((int[]){ h->control_fd, h->records_fd, h->launcher_socket }, 3) < 0)
		return DG_EXIT_SETUP;
	sigemptyset(&child);
	sigaddset(&child, SIGCHLD);
	h->proc_fd = open("/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	signal_fd = signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK);
	h->pending_wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	flags = fcntl(h->records_fd, F_GETFL);
	if (h->proc_fd < 0 || signal_fd < 0 || h->pending_wake_fd < 0 || flags < 0 ||
	    fcntl(h->records_fd, F_SETFL, flags | O_NONBLOCK) < 0 || dg_mail_init(&h->fanotify_mail) < 0 ||
	    dg_mail_init(&h->notify_mail) < 0)
		return DG_EXIT_SETUP;
	/* What a dying launcher leaves half made comes to us, not to the host's init. */
	if (prctl(PR_SET_CHILD_SUBREAPER, 1) < 0 || prctl(PR_SET_DUMPABLE, 0) < 0)
		return DG_EXIT_SETUP;
	/* By this thread, which stays to the end: the death signal follows the thread that forked. */
	if (dg_start_launcher(h) < 0)
		return DG_EXIT_SETUP;
	dg_last_to_be_killed();
	if (dg_start_threads(h) < 0)
		return DG_EXIT_SETUP;
	dg_notice(h, DG_NOTICE_READY, 0, 0, h->launcher_pid, 0);
	dg_serve(h, signal_fd);
	return dg_cleanup(h, dg_now_ns() + DG_CLEANUP_NS) < 0 ? DG_EXIT_LEFTOVERS : DG_EXIT_OK;
}
