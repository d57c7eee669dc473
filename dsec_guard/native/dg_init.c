// SPDX-License-Identifier: Apache-2.0
/*
 * dg_init.c - pid 1 of a box: reaps, and starts the commands that the guard sends over a socket.
 * User:    65533, never an agent's; not dumpable, and its program is unreadable inside, so nobody looks into it.
 * Holds:   the guard's socket, one Landlock ruleset a phase, the plan. All close-on-exec: no command inherits any.
 * Signals: pid 1 has no handlers, so the kernel drops whatever a process of the box sends it.
 * Ends:    at end-of-file of the socket; the kernel then kills everything in the pid namespace.
 * Starts with the descriptors listed in dg_setup.h and the plan that the launcher has checked and nobody can change.
 */
#define _GNU_SOURCE
#include "dg_kernel.h"
#include "dg_setup.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef PR_CAP_AMBIENT
#define PR_CAP_AMBIENT 47
#define PR_CAP_AMBIENT_RAISE 2
#define PR_CAP_AMBIENT_CLEAR_ALL 4
#endif

#define SCOPE_SIGNAL 2ull /* LANDLOCK_SCOPE_SIGNAL */

struct command {
	uint32_t id;
	pid_t pid;
	int trouble;  /* read end: an error before exec, or end-of-file at exec; -1 once settled */
	int failed;   /* its end was already told */
};

static const struct dg_plan *plan;
static int rulesets[DG_MAX_PHASES];
static struct command commands[DG_MAX_EXECS];
static unsigned int running;

/* Who a process shall be, and what binds it from then on. */
struct identity {
	uint32_t uid, gid;
	const uint32_t *groups;
	uint32_t ngroups;
	uint64_t caps;
	uint32_t phase;
};

static int set_caps(uint64_t caps, uint64_t inheritable)
{
	struct { uint32_t version; int pid; } head = { 0x20080522, 0 };
	struct { uint32_t effective, permitted, inheritable; } data[2] = {
		{ (uint32_t)caps, (uint32_t)caps, (uint32_t)inheritable },
		{ (uint32_t)(caps >> 32), (uint32_t)(caps >> 32), (uint32_t)(inheritable >> 32) },
	};

	return (int)syscall(SYS_capset, &head, data);
}

/* Hard limits can only go down for us: what a policy asks above the present one is cut to it. */
static int set_rlimits(struct dg_error *err)
{
	const struct dg_rlimit *limits = dg_at(plan, plan->rlimits);

	for (uint32_t i = 0; i < plan->rlimits.len; i++) {
		struct rlimit now, want = { .rlim_cur = limits[i].soft, .rlim_max = limits[i].hard };

		if (getrlimit((int)limits[i].resource, &now) < 0)
			return dg_fail(err, "getrlimit");
		if (want.rlim_max > now.rlim_max)
			want.rlim_max = now.rlim_max;
		if (want.rlim_cur > want.rlim_max)
			want.rlim_cur = want.rlim_max;
		if (setrlimit((int)limits[i].resource, &want) < 0)
			return dg_fail(err, "setrlimit");
	}
	return 0;
}

/* The bounding set first (needs CAP_SETPCAP), then groups, gid, uid, and at last the capabilities that allowed all this. */
static int become(const struct identity *who, struct dg_error *err)
{
	/* uid 0 gets the bounding set at exec; any other uid keeps capabilities over exec only as ambient ones. */
	const uint64_t inheritable = who->uid ? who->caps : 0;

	if (prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0) < 0)
		return dg_fail(err, "prctl(PR_CAP_AMBIENT_CLEAR_ALL)");
	/* All others are gone since the set-up. */
	for (unsigned int cap = 0; cap <= DG_CAP_LAST; cap++)
		if (((plan->caps | DG_INIT_CAPS) & ~who->caps) >> cap & 1 && prctl(PR_CAPBSET_DROP, cap, 0, 0, 0) < 0)
			return dg_fail(err, "prctl(PR_CAPBSET_DROP)");
	if (syscall(SYS_setgroups, (size_t)who->ngroups, who->groups) < 0)
		return dg_fail(err, "setgroups");
	if (syscall(SYS_setresgid, who->gid, who->gid, who->gid) < 0)
		return dg_fail(err, "setresgid");
	if (syscall(SYS_setresuid, who->uid, who->uid, who->uid) < 0)
		return dg_fail(err, "setresuid");
	if (set_caps(who->caps, inheritable) < 0)
		return dg_fail(err, "capset");
	for (unsigned int cap = 0; cap <= DG_CAP_LAST; cap++)
		if (inheritable >> cap & 1 && prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, cap, 0, 0) < 0)
			return dg_fail(err, "prctl(PR_CAP_AMBIENT_RAISE)");
	return 0;
}

/* no_new_privs is inherited from the set-up. The filter comes last: it need not allow any call made before. */
static int bind_to_phase(uint32_t index, struct dg_error *err)
{
	const struct dg_phase *phase = (const struct dg_phase *)dg_at(plan, plan->phases) + index;
	const struct sock_fprog filter = {
		.len = (unsigned short)phase->filter.len,
		.filter = (struct sock_filter *)(uintptr_t)dg_at(plan, phase->filter),
	};

	if (phase->has_landlock && syscall(SYS_landlock_restrict_self, rulesets[index], 0) < 0)
		return dg_fail(err, "landlock_restrict_self");
	if (filter.len && syscall(SYS_seccomp, DG_SECCOMP_SET_MODE_FILTER, 0, &filter) < 0)
		return dg_fail(err, "seccomp");
	return 0;
}

static const char *search_path(char *const *env)
{
	for (; *env; env++)
		if (!strncmp(*env, "PATH=", 5))
			return *env + 5;
	return "/usr/local/bin:/usr/bin:/bin";
}

/* As execvpe(3), but without the shell for a file of no known format. Returns only on failure, with errno. */
static void exec_search(char *const *argv, char *const *env)
{
	char path[DG_MAX_PATH + 1];
	const char *dirs = search_path(env), *end;
	size_t name = strlen(argv[0]);
	int seen_eacces = 0;

	if (strchr(argv[0], '/')) {
		execve(argv[0], argv, env);
		return;
	}
	errno = ENOENT;
	if (name == 0 || name > 255)
		return;
	for (;; dirs = end + 1) {
		size_t len;

		end = dirs + strcspn(dirs, ":");
		len = (size_t)(end - dirs);
		if (len + name + 2 <= sizeof(path)) {
			memcpy(path, dirs, len);
			path[len] = '/';
			/* An empty part means the current directory. */
			memcpy(path + len + (len > 0), argv[0], name + 1);
			execve(path, argv, env);
			if (errno == EACCES)
				seen_eacces = 1;
			else if (errno != ENOENT && errno != ENOTDIR)
				return;
		}
		if (!*end)
			break;
	}
	errno = seen_eacces ? EACCES : ENOENT;
}

static char **texts(const struct dg_exec *exec, struct dg_span span)
{
	const struct dg_span *from = dg_at(exec, span);
	char **to = malloc(((size_t)span.len + 1) * sizeof(*to));

	if (!to)
		return NULL;
	for (uint32_t i = 0; i < span.len; i++)
		to[i] = (char *)(uintptr_t)dg_text(exec, from[i]);
	to[span.len] = NULL;
	return to;
}

/* The child's side of an exec request. Returns only on failure. */
static void run_command(const struct dg_exec *exec, const int *stdio, struct dg_error *err)
{
	const struct identity who = {
		.uid = exec->uid, .gid = exec->gid, .groups = dg_at(exec, exec->groups), .ngroups = exec->groups.len,
		.caps = exec->caps, .phase = exec->phase,
	};
	char **argv = texts(exec, exec->argv), **env = texts(exec, exec->env);
	sigset_t none;

	dg_enter(err, "prepare");
	if (!argv || !env) {
		dg_refuse(err, "malloc", ENOMEM);
		return;
	}
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	if (setsid() < 0) {
		dg_fail(err, "setsid");
		return;
	}
	for (int i = 0; i < 3; i++)
		if (dup2(stdio[i], i) < 0) {
			dg_fail(err, "dup2");
			return;
		}
	if (exec->flags & DG_EXEC_TTY && ioctl(0, TIOCSCTTY, 0) < 0) {
		dg_fail(err, "ioctl(TIOCSCTTY)");
		return;
	}
	/* All are close-on-exec one by one; this holds also for one that a later change forgets. */
	if (syscall(SYS_close_range, 3u, ~0u, 4 /* CLOSE_RANGE_CLOEXEC */) < 0) {
		dg_fail(err, "close_range");
		return;
	}
	umask(exec->umask);
	if (set_rlimits(err) < 0 || become(&who, err) < 0)
		return;
	dg_enter(err, "chdir");
	/* After the change of user: the directory has to be one it may enter. */
	if (chdir(dg_text(exec, exec->cwd)) < 0) {
		dg_fail_at(err, "chdir", dg_text(exec, exec->cwd));
		return;
	}
	dg_enter(err, "confine");
	if (bind_to_phase(who.phase, err) < 0)
		return;
	dg_enter(err, "execve");
	exec_search(argv, env);
	dg_fail_at(err, "execve", argv[0]);
}

static void tell(struct dg_answer *ans, const struct command *cmd)
{
	ans->exec_id = cmd->id;
	ans->pid = (uint32_t)cmd->pid;
	/* A guard that is gone shows as end-of-file in the loop. */
	dg_send(DG_INIT_SOCK, ans, sizeof(*ans), NULL, 0);
}

static void refuse_command(uint32_t id, const struct dg_error *err)
{
	const struct command cmd = { .id = id };
	struct dg_answer ans;

	dg_answer_error(&ans, DG_ANS_FAILED, err);
	tell(&ans, &cmd);
}

/* Reads what became of a command's exec and tells it. The writing end is closed by the exec or by the child's end. */
static void settle(struct command *cmd)
{
	struct dg_error err;
	struct dg_answer ans;
	ssize_t got;

	do
		got = read(cmd->trouble, &err, sizeof(err));
	while (got < 0 && errno == EINTR);
	close(cmd->trouble);
	cmd->trouble = -1;
	cmd->failed = got == sizeof(err);
	if (cmd->failed)
		dg_answer_error(&ans, DG_ANS_FAILED, &err);
	else
		dg_answer_init(&ans, DG_ANS_STARTED);
	tell(&ans, cmd);
}

static int start_command(const struct dg_request *req, const int *fds, unsigned int nfds, struct dg_error *err)
{
	const struct dg_exec *exec;
	struct command *cmd = &commands[running];
	int trouble[2];
	size_t size;

	if (nfds != 4)
		return dg_refuse(err, "descriptors", EBADF);
	for (unsigned int i = 0; i < running; i++)
		if (commands[i].id == req->arg[0])
			return dg_refuse(err, "exec id", EEXIST);
	if (req->arg[0] == DG_SIGNAL_ALL)
		return dg_refuse(err, "exec id", EINVAL);
	if (running == DG_MAX_EXECS)
		return dg_refuse(err, "commands", EAGAIN);
	exec = dg_map_sealed(fds[0], &size, err);
	if (!exec)
		return -1;
	if (dg_check_exec(exec, size, plan->phases.len, plan->caps, err) < 0)
		goto fail;
	if (pipe2(trouble, O_CLOEXEC) < 0) {
		dg_fail(err, "pipe2");
		goto fail;
	}
	cmd->pid = fork();
	if (cmd->pid == 0) {
		/* The largest message fits the pipe, so this never blocks. */
		run_command(exec, fds + 1, err);
		(void)!write(trouble[1], err, sizeof(*err));
		_exit(127);
	}
	close(trouble[1]);
	if (cmd->pid < 0) {
		dg_fail(err, "fork");
		close(trouble[0]);
		goto fail;
	}
	munmap((void *)(uintptr_t)exec, size);
	cmd->id = req->arg[0];
	cmd->trouble = trouble[0];
	cmd->failed = 0;
	running++;
	return 0;
fail:
	munmap((void *)(uintptr_t)exec, size);
	return -1;
}

/* Only to commands that have not been reaped: a freed number may belong to another process group. */
static void signal_commands(uint32_t id, uint32_t sig)
{
	if (sig == 0 || sig > 64)
		return;
	if (id == DG_SIGNAL_ALL) {
		kill(-1, (int)sig);
		return;
	}
	for (unsigned int i = 0; i < running; i++)
		if (commands[i].id == id)
			kill(-commands[i].pid, (int)sig);
}

static void reap(void)
{
	int status;
	pid_t pid;

	while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
		struct dg_answer ans;
		unsigned int i = 0;

		while (i < running && commands[i].pid != pid)
			i++;
		if (i == running)
			continue; /* an orphan of the agent's */
		if (commands[i].trouble >= 0)
			settle(&commands[i]);
		if (!commands[i].failed) {
			dg_answer_init(&ans, DG_ANS_EXITED);
			ans.status = status;
			tell(&ans, &commands[i]);
		}
		commands[i] = commands[--running];
	}
}

/* One message of the guard. 0: it is gone. */
static int serve_guard(void)
{
	struct dg_error err = { .step = "prepare" };
	struct dg_request req;
	unsigned int nfds;
	int fds[4], state = dg_recv(DG_INIT_SOCK, &req, sizeof(req), fds, 4, &nfds);

	if (state <= 0 || req.magic != DG_MSG_MAGIC || req.version != DG_VERSION)
		return 0;
	if (req.kind == DG_REQ_EXEC && start_command(&req, fds, nfds, &err) < 0)
		refuse_command(req.arg[0], &err);
	else if (req.kind == DG_REQ_SIGNAL)
		signal_commands(req.arg[0], req.arg[1]);
	while (nfds)
		close(fds[--nfds]);
	return 1;
}

static int loop(int signals)
{
	static struct pollfd wait[2 + DG_MAX_EXECS];

	for (;;) {
		unsigned int n = 2;

		wait[0] = (struct pollfd){ .fd = DG_INIT_SOCK, .events = POLLIN };
		wait[1] = (struct pollfd){ .fd = signals, .events = POLLIN };
		for (unsigned int i = 0; i < running; i++)
			if (commands[i].trouble >= 0)
				wait[n++] = (struct pollfd){ .fd = commands[i].trouble, .events = POLLIN };
		if (poll(wait, n, -1) < 0) {
			if (errno == EINTR)
				continue;
			return 1;
		}
		for (unsigned int at = 2; at < n; at++)
			for (unsigned int i = 0; wait[at].revents && i < running; i++)
				if (commands[i].trouble == wait[at].fd) {
					settle(&commands[i]);
					break;
				}
		if (wait[1].revents) {
			struct signalfd_siginfo info;

			(void)!read(signals, &info, sizeof(info));
			reap();
		}
		if (wait[0].revents && !serve_guard())
			return 0;
	}
}

/* ---- the proof before any agent code: what must fail is tried, as root of the box with all it may ever hold ---- */

static void note(struct dg_answer *to, const char *name, int refused, int errnum)
{
	struct dg_check_result *result = &to->check[to->checks];

	if (to->checks == sizeof(to->check) / sizeof(*to->check))
		_exit(1); /* dg_check_plan bounds the plan's own, so there is room */
	result->refused = (uint32_t)refused;
	result->errnum = (uint32_t)errnum;
	memcpy(result->name, name, strnlen(name, sizeof(result->name) - 1));
	to->checks++;
}

static void try(struct dg_answer *to, const char *name, long result)
{
	note(to, name, result < 0, result < 0 ? errno : 0);
}

static int root_is_scaffold(void)
{
	const struct dg_op *ops = dg_at(plan, plan->ops);

	for (uint32_t i = 0; i < plan->ops.len; i++)
		if (ops[i].target.len == 0)
			return 0;
	return 1;
}

/* Only what this plan claims is tried. Every attempt is harmless should it work: the box is killed then. */
static void attempt_all(struct dg_answer *to)
{
	const struct dg_phase *phase = (const struct dg_phase *)dg_at(plan, plan->phases) + plan->check_phase;
	const struct dg_check *checks = dg_at(plan, plan->checks);

	try(to, "mount", mount("none", "/", "tmpfs", 0, NULL));
	try(to, "umount", umount2("/", MNT_DETACH));
	try(to, "init_memory", open("/proc/1/mem", O_RDONLY | O_CLOEXEC));
	try(to, "ptrace_init", ptrace(PTRACE_SEIZE, 1, NULL, NULL));
	if (plan->flags & DG_PLAN_LIMIT_NAMESPACES)
		try(to, "user_namespace", syscall(SYS_unshare, DG_CLONE_NEWUSER));
	if (root_is_scaffold())
		try(to, "root_write", mkdir("/.dsec-guard-check", 0));
	if (phase->has_landlock && phase->scoped & SCOPE_SIGNAL)
		try(to, "signal_init", kill(1, 0));
	for (uint32_t i = 0; i < plan->checks.len; i++) {
		char name[24];
		/* Pointers that point nowhere: a call that is not refused fails with another errno. */
		long result = syscall((long)checks[i].number, -1L, -1L, -1L, -1L, -1L, -1L);
		int errnum = result < 0 ? errno : 0;

		snprintf(name, sizeof(name), "syscall_%u", checks[i].number);
		note(to, name, errnum == (int)checks[i].errnum, errnum);
	}
}

/* A process of its own: what it gives up and what binds it stay with it. It must not share dg-init's memory, which would
 * open /proc/1/mem to it; one shared page carries the results, so that nobody waits for each of them. */
static int self_check(struct dg_answer *ans, struct dg_error *err)
{
	const struct identity root = { .caps = plan->caps, .phase = plan->check_phase };
	struct dg_answer *results;
	int status;
	pid_t pid;

	dg_enter(err, "self_check");
	results = mmap(NULL, sizeof(*results), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (results == MAP_FAILED)
		return dg_fail(err, "mmap");
	pid = fork();
	if (pid == 0) {
		if (become(&root, err) < 0 || bind_to_phase(root.phase, err) < 0)
			_exit(1);
		attempt_all(results);
		_exit(0);
	}
	if (pid < 0)
		return dg_fail(err, "fork");
	while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
		;
	ans->checks = results->checks;
	memcpy(ans->check, results->check, sizeof(ans->check));
	munmap(results, sizeof(*results));
	if (!WIFEXITED(status) || WEXITSTATUS(status))
		return dg_refuse(err, "the check ended early", ECHILD);
	return 0;
}

static int start(struct dg_error *err)
{
	const struct dg_phase *phases;
	int next = DG_INIT_RULESETS;
	size_t size;

	dg_enter(err, "start_init");
	if (prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) < 0)
		return dg_fail(err, "prctl(PR_SET_DUMPABLE)");
	prctl(PR_SET_NAME, "init", 0, 0, 0);
	plan = dg_map_sealed(DG_INIT_PLAN, &size, err);
	if (!plan)
		return -1;
	close(DG_INIT_PLAN);
	phases = dg_at(plan, plan->phases);
	for (uint32_t i = 0; i < plan->phases.len; i++)
		rulesets[i] = phases[i].has_landlock ? next++ : -1;
	for (int fd = DG_INIT_SOCK; fd < next; fd++)
		if (fd != DG_INIT_PLAN && fcntl(fd, F_SETFD, FD_CLOEXEC) < 0)
			return dg_fail(err, "fcntl(FD_CLOEXEC)");
	return 0;
}

int main(void)
{
	struct dg_error err = { .errnum = 0 };
	struct dg_answer ready;
	sigset_t child;
	int signals;

	dg_answer_init(&ready, DG_ANS_READY);
	sigemptyset(&child);
	sigaddset(&child, SIGCHLD);
	if (start(&err) < 0)
		goto fail;
	if (plan->flags & DG_PLAN_SELF_CHECK && self_check(&ready, &err) < 0)
		goto fail;
	dg_enter(&err, "start_init");
	if (sigprocmask(SIG_BLOCK, &child, NULL) < 0 ||
	    (signals = signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK)) < 0) {
		dg_fail(&err, "signalfd");
		goto fail;
	}
	if (dg_send(DG_INIT_REPORT, &ready, sizeof(ready), NULL, 0) < 0)
		return 1;
	close(DG_INIT_REPORT);
	return loop(signals);
fail:
	dg_answer_error(&ready, DG_ANS_ERROR, &err);
	dg_send(DG_INIT_REPORT, &ready, sizeof(ready), NULL, 0);
	return 1;
}
