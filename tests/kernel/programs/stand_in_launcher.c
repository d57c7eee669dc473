/* SPDX-License-Identifier: Apache-2.0 */
/*
 * stand_in_launcher.c - what the holder's tests start instead of the real launcher. Each message on the socket is an
 * argument vector (NUL-terminated words) with the box's v2 directory and `tasks` files attached; the answer is the pid.
 */
#define _GNU_SOURCE
#include <linux/sched.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	int sock = argc == 3 && !strcmp(argv[1], "--socket") ? atoi(argv[2]) : -1;

	for (;;) {
		char text[4096], control[CMSG_SPACE(8 * sizeof(int))];
		struct iovec iov = { text, sizeof(text) - 1 };
		struct msghdr message = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control,
					  .msg_controllen = sizeof(control) };
		ssize_t n = recvmsg(sock, &message, MSG_CMSG_CLOEXEC);
		struct cmsghdr *header = CMSG_FIRSTHDR(&message);
		int fds[8], count, i;
		char *words[64], *at = text;
		int32_t pid;

		if (n <= 0 || !header)
			return n < 0;
		count = (int)((header->cmsg_len - CMSG_LEN(0)) / sizeof(int));
		memcpy(fds, CMSG_DATA(header), (size_t)count * sizeof(int));
		text[n] = '\0';
		for (i = 0; i < 63 && at < text + n; i++, at += strlen(at) + 1)
			words[i] = at;
		words[i] = NULL;
		struct clone_args args = { .flags = CLONE_PARENT | CLONE_INTO_CGROUP | CLONE_NEWPID,
					   .cgroup = (uint64_t)fds[0] };
		pid = (int32_t)syscall(SYS_clone3, &args, sizeof(args));
		if (pid == 0) {
			for (i = 1; i < count; i++)
				if (write(fds[i], "0", 1) != 1)
					_exit(126);
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			close_range(3, ~0u, 0);
			execv(words[0], words);
			_exit(127);
		}
		for (i = 0; i < count; i++)
			close(fds[i]);
		if (send(sock, &pid, sizeof(pid), 0) < 0)
			return 1;
	}
}
