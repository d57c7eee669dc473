// SPDX-License-Identifier: Apache-2.0
/*
 * dg_launch.c - dg-launcher: takes requests from the guard over one SEQPACKET socket and builds boxes, one at a time.
 * Parent:  the holder. Boxes are cloned as its children (CLONE_PARENT), so that they end with it and not with us.
 * Ends:    at end-of-file of the socket, or with its parent.
 * Trust:   the guard is trusted and still checked (dg_check.c); a box's answer is hostile from dg-init's exec on.
 */
#define _GNU_SOURCE
#include "dg_kernel.h"
#include "dg_setup.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MAX_HANDLES (5 + 2 * DG_MAX_OVERLAYS)

struct handles {
	int fds[MAX_HANDLES]; /* pidfd, init socket, then what the box handed over */
	unsigned int n;
	int listener;         /* one of fds, or -1 */
};

static uint64_t now_ms(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000 + (uint64_t)ts.tv_nsec / 1000000;
}

static void close_all(const int *fds, unsigned int n)
{
	for (unsigned int i = 0; i < n; i++)
		close(fds[i]);
}

/*
 * While the box proves its denials nobody else listens yet: refuse every notified call. Only dg-init and its check run
 * then, and neither needs a call that a policy wants to be told of.
 */
static void refuse_notified(int listener)
{
	/* Larger than the kernel's structures (80 and 24 bytes) ever were; newer ones are handed over to the holder. */
	union { struct seccomp_notif n; char room[512]; } request;
	union { struct seccomp_notif_resp r; char room[256]; } answer;

	memset(&request, 0, sizeof(request));
	if (ioctl(listener, SECCOMP_IOCTL_NOTIF_RECV, &request) < 0)
		return; /* the caller was killed meanwhile */
	memset(&answer, 0, sizeof(answer));
	answer.r.id = request.n.id;
	answer.r.error = -EPERM;
	ioctl(listener, SECCOMP_IOCTL_NOTIF_SEND, &answer);
}

/* Waits until dg-init is up, with its checks in @ready. -1: @err says which step failed, or that time is up. */
static int await_ready(int report, const struct dg_plan *plan, uint64_t deadline, struct handles *got,
		       struct dg_answer *ready, struct dg_error *err)
{
	int handed_over = 0;

	for (;;) {
		struct pollfd fds[2] = { { .fd = report, .events = POLLIN }, { .fd = got->listener, .events = POLLIN } };
		uint64_t now = now_ms();
		int n = now >= deadline ? 0 : poll(fds, 2, (int)(deadline - now));
		unsigned int extra;
		int state;

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0) {
			dg_enter(err, "deadline");
			return n < 0 ? dg_fail(err, "poll") : dg_refuse(err, handed_over ? "self_check" : "setup", ETIMEDOUT);
		}
		if (fds[1].revents & POLLIN)
			refuse_notified(got->listener);
		if (!fds[0].revents)
			continue;
		/* dg-init has no descriptor to give: what comes after the hand-over may carry none. */
		state = dg_recv(report, ready, sizeof(*ready), got->fds + got->n, handed_over ? 0 : MAX_HANDLES - got->n,
				&extra);
		if (state <= 0 || ready->magic != DG_MSG_MAGIC) {
			dg_enter(err, handed_over ? "exec_init" : "setup");
			return dg_refuse(err, "the box's first process ended", ECHILD);
		}
		if (ready->kind == DG_ANS_ERROR) {
			memcpy(err->step, ready->step, sizeof(err->step));
			memcpy(err->call, ready->call, sizeof(err->call));
			err->step[sizeof(err->step) - 1] = '\0';
			err->call[sizeof(err->call) - 1] = '\0';
			err->errnum = ready->errnum;
			return -1;
		}
		if (ready->kind == DG_ANS_READY && handed_over)
			return 0;
		if (ready->kind != DG_ANS_SPAWNED || handed_over) {
			dg_enter(err, "setup");
			return dg_refuse(err, "unexpected answer", EPROTO);
		}
		if (plan->notify.len)
			got->listener = got->fds[got->n + 2];
		got->n += extra;
		handed_over = 1;
	}
}

static int judge_checks(const struct dg_answer *ready, struct dg_error *err)
{
	dg_enter(err, "self_check");
	if (ready->checks > sizeof(ready->check) / sizeof(*ready->check))
		return dg_refuse(err, "number of checks", EPROTO);
	for (uint32_t i = 0; i < ready->checks; i++) {
		char name[sizeof(ready->check[i].name)];

		if (ready->check[i].refused)
			continue;
		memcpy(name, ready->check[i].name, sizeof(name));
		name[sizeof(name) - 1] = '\0';
		errno = (int)ready->check[i].errnum;
		return dg_fail_at(err, "was not refused", name);
	}
	return 0;
}

static void make_stage_dir(const char *path)
{
	char part[DG_MAX_PATH + 1];

	if (mkdir(path, 0700) == 0 || errno != ENOENT)
		return; /* what is wrong with it shows when the box mounts there */
	strcpy(part, path);
	for (char *slash = strchr(part + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
		*slash = '\0';
		mkdir(part, 0700);
		*slash = '/';
	}
	mkdir(path, 0700);
}

/* The child's side of clone. */
static _Noreturn void become_box(struct dg_box *box)
{
	struct dg_error err = { .errnum = 0 };
	struct dg_answer ans;

	dg_setup(box, &err);
	dg_answer_error(&ans, DG_ANS_ERROR, &err);
	/* If the launcher is gone as well there is nobody to tell. */
	dg_send(box->report, &ans, sizeof(ans), NULL, 0);
	_exit(1);
}

static int clone_box(struct dg_box *box, int *pidfd, pid_t *pid, struct dg_error *err)
{
	struct dg_clone_args args = {
		/* CLONE_PARENT: the exit signal is the launcher's own, so none may be given. */
		.flags = DG_CLONE_PARENT | DG_CLONE_PIDFD | DG_CLONE_INTO_CGROUP | DG_CLONE_NEWPID | DG_CLONE_NEWNS |
			 DG_CLONE_NEWNET | DG_CLONE_NEWIPC | DG_CLONE_NEWUTS,
		.pidfd = (uint64_t)(uintptr_t)pidfd,
		.cgroup = (uint64_t)box->fds[box->plan->cgroup_fd],
	};
	long done;

	make_stage_dir(dg_text(box->plan, box->plan->stage_dir));
	done = syscall(SYS_clone3, &args, sizeof(args));
	if (done == 0)
		become_box(box);
	if (done < 0) {
		dg_enter(err, "clone");
		return dg_fail(err, "clone3");
	}
	*pid = (pid_t)done;
	return 0;
}

static int spawn(const struct dg_launcher *launcher, const struct dg_plan *plan, const int *fds, struct handles *got,
		 struct dg_answer *ans, struct dg_error *err)
{
	struct dg_box box = {
		.launcher = launcher, .plan = plan, .fds = fds, .plan_fd = fds[0], .root = -1, .store = -1, .listener = -1,
	};
	uint64_t deadline = now_ms() + plan->deadline_ms;
	int init[2], report[2], pidfd;
	pid_t pid = -1;

	memset(box.landlock, 0xff, sizeof(box.landlock));
	dg_enter(err, "clone");
	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, init) < 0)
		return dg_fail(err, "socketpair");
	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, report) < 0) {
		dg_fail(err, "socketpair");
		close_all(init, 2);
		return -1;
	}
	box.init_sock = init[1];
	box.report = report[1];
	if (clone_box(&box, &pidfd, &pid, err) < 0) {
		close_all(init, 2);
		close_all(report, 2);
		return -1;
	}
	close(init[1]);
	close(report[1]);
	got->fds[got->n++] = pidfd;
	got->fds[got->n++] = init[0];
	if (await_ready(report[0], plan, deadline, got, ans, err) < 0 || judge_checks(ans, err) < 0) {
		/* Its parent reaps it; its cgroup is the guard's to empty. */
		syscall(SYS_pidfd_send_signal, pidfd, SIGKILL, NULL, 0);
		close(report[0]);
		return -1;
	}
	close(report[0]);
	ans->kind = DG_ANS_SPAWNED;
	ans->pid = (uint32_t)pid;
	ans->has_listener = got->listener >= 0;
	return 0;
}

static void serve_spawn(const struct dg_launcher *launcher, const int *fds, unsigned int nfds)
{
	struct handles got = { .n = 0, .listener = -1 };
	struct dg_error err = { .step = "check_plan" };
	struct dg_answer ans;
	const struct dg_plan *plan = NULL;
	size_t size = 0;
	int failed = -1;

	if (nfds == 0)
		dg_refuse(&err, "request without a plan", EBADF);
	else
		plan = dg_map_sealed(fds[0], &size, &err);
	if (plan && dg_check_plan(plan, size, nfds, &err) == 0)
		failed = spawn(launcher, plan, fds, &got, &ans, &err);
	if (failed) {
		dg_answer_error(&ans, DG_ANS_ERROR, &err);
	} else {
		const struct dg_op *ops = dg_at(plan, plan->ops);

		ans.overlays = 0;
		for (uint32_t i = 0; i < plan->ops.len; i++)
			ans.overlays += ops[i].kind == DG_OP_OVERLAY;
	}
	/* A guard that is gone shows as end-of-file on the next read. */
	dg_send(launcher->guard, &ans, sizeof(ans), got.fds, failed ? 0 : got.n);
	close_all(got.fds, got.n);
	if (plan)
		munmap((void *)(uintptr_t)plan, size);
}

static int die_with_holder(void)
{
	return prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
}

static void serve_userns(const struct dg_launcher *launcher, const struct dg_request *req)
{
	struct dg_error err = { .errnum = 0 };
	struct dg_answer ans;
	int fd = dg_make_userns(req->arg[0], req->flags, req->arg[1], req->arg[2], req->arg[3], &err);
	struct pollfd parent = { .fd = launcher->parent_pidfd, .events = POLLIN };

	/* Being another user for a moment has cleared it. */
	if (die_with_holder() < 0 || poll(&parent, 1, 0) != 0)
		_exit(1);
	if (fd < 0)
		dg_answer_error(&ans, DG_ANS_ERROR, &err);
	else
		dg_answer_init(&ans, DG_ANS_USERNS);
	dg_send(launcher->guard, &ans, sizeof(ans), &fd, fd >= 0);
	if (fd >= 0)
		close(fd);
}

static void serve_bad(const struct dg_launcher *launcher, const char *what, int errnum)
{
	struct dg_error err = { .step = "request" };
	struct dg_answer ans;

	dg_refuse(&err, what, errnum);
	dg_answer_error(&ans, DG_ANS_ERROR, &err);
	dg_send(launcher->guard, &ans, sizeof(ans), NULL, 0);
}

static int serve(const struct dg_launcher *launcher)
{
	for (;;) {
		struct dg_request req;
		int fds[DG_MAX_FDS];
		unsigned int nfds;
		int state = dg_recv(launcher->guard, &req, sizeof(req), fds, DG_MAX_FDS, &nfds);

		if (state == 0 || (state < 0 && errno != EMSGSIZE))
			return state;
		while (waitpid(-1, NULL, WNOHANG) > 0)
			; /* what held user namespaces */
		if (state < 0)
			serve_bad(launcher, "message size", EMSGSIZE);
		else if (req.magic != DG_MSG_MAGIC || req.version != DG_VERSION)
			serve_bad(launcher, "message version", EPROTONOSUPPORT);
		else if (req.kind == DG_REQ_SPAWN)
			serve_spawn(launcher, fds, nfds);
		else if (req.kind == DG_REQ_MAKE_USERNS)
			serve_userns(launcher, &req);
		else
			serve_bad(launcher, "message kind", EINVAL);
		close_all(fds, nfds);
	}
}

/*
 * A sealed copy of dg-init that a box may execute and not read: the kernel then keeps its memory and /proc/1 out of reach of
 * every capability inside the box (fs/exec.c, would_dump), and no write can reach the file of the host.
 */
static int load_init(const char *path)
{
	int from = open(path, O_RDONLY | O_CLOEXEC), to;
	char block[65536];
	ssize_t got;

	if (from < 0)
		return -1;
	to = (int)syscall(SYS_memfd_create, "init", 0x10 /* MFD_EXEC */ | MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (to < 0 && errno == EINVAL) /* before Linux 6.3: always executable */
		to = (int)syscall(SYS_memfd_create, "init", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (to < 0)
		goto out;
	while ((got = read(from, block, sizeof(block))) > 0)
		if (write(to, block, (size_t)got) != got)
			goto fail;
	if (got < 0 || fchmod(to, 0111) < 0 ||
	    fcntl(to, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0)
		goto fail;
out:
	close(from);
	return to;
fail:
	close(to);
	close(from);
	return -1;
}

static int overlay_index_default(void)
{
	int fd = open("/sys/module/overlay/parameters/index", O_RDONLY | O_CLOEXEC);
	char byte = 'N';

	if (fd < 0)
		return 0;
	if (read(fd, &byte, 1) != 1)
		byte = 'N';
	close(fd);
	return byte == 'Y';
}

static _Noreturn void die(const char *what)
{
	const char *why = strerror(errno);

	(void)!write(2, "dg-launcher: ", 13);
	(void)!write(2, what, strlen(what));
	(void)!write(2, ": ", 2);
	(void)!write(2, why, strlen(why));
	(void)!write(2, "\n", 1);
	_exit(125);
}

/* dg-init lies beside this program. */
static const char *init_path(void)
{
	static char path[4096];
	ssize_t len = readlink("/proc/self/exe", path, sizeof(path) - sizeof("dg-init"));
	char *slash;

	if (len <= 0)
		die("readlink(/proc/self/exe)");
	path[len] = '\0';
	slash = strrchr(path, '/');
	if (!slash)
		die("path of the program");
	strcpy(slash + 1, "dg-init");
	return path;
}

/* What a parent in Python leaves behind (ignored SIGPIPE, blocked signals) would reach every command of every box. */
static void reset_signals(void)
{
	static const unsigned long dfl[4]; /* the kernel's struct sigaction: all zero is SIG_DFL */
	sigset_t none;

	/* Not by sigaction(3), which keeps two numbers to itself; EINVAL for KILL and STOP. */
	for (int sig = 1; sig < 65; sig++)
		syscall(SYS_rt_sigaction, sig, dfl, NULL, 8);
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
}

int main(int argc, char **argv)
{
	struct dg_launcher launcher = { .guard = -1 };

	if (argc == 2 && !strcmp(argv[1], "--print-steps")) {
		dg_setup_print(1);
		return 0;
	}
	if (argc != 3 || strcmp(argv[1], "--socket")) {
		static const char usage[] = "usage: dg-launcher --socket FD | --print-steps\n";

		(void)!write(2, usage, sizeof(usage) - 1);
		return 125;
	}
	launcher.guard = atoi(argv[2]);
	if (launcher.guard < 3 || fcntl(launcher.guard, F_SETFD, FD_CLOEXEC) < 0) {
		errno = EBADF;
		die("--socket");
	}
	if (die_with_holder() < 0)
		die("prctl(PR_SET_PDEATHSIG)");
	launcher.parent_pidfd = (int)syscall(SYS_pidfd_open, getppid(), 0);
	if (launcher.parent_pidfd < 0)
		die("pidfd_open(parent)");
	reset_signals();
	umask(0);
	launcher.init_exe = load_init(init_path());
	if (launcher.init_exe < 0)
		die("dg-init");
	launcher.null = open("/dev/null", O_RDWR | O_CLOEXEC);
	launcher.user_sysctls = open("/proc/sys/user", O_PATH | O_DIRECTORY | O_CLOEXEC);
	if (launcher.null < 0 || launcher.user_sysctls < 0)
		die("/dev/null, /proc/sys/user");
	launcher.overlay_index_default = overlay_index_default();
	return serve(&launcher) < 0 ? 1 : 0;
}
