/* Asks for a user namespace by the 32-bit entry and by the x32 numbering, whose numbers a 64-bit list misreads. */
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static long int80(long nr, long arg)
{
	long ret;

	__asm__ volatile("int $0x80" : "=a"(ret) : "a"(nr), "b"(arg) : "memory", "r8", "r9", "r10", "r11");
	return ret;
}

int main(void)
{
	long x32 = syscall(0x40000000L | 272, CLONE_NEWUSER);
	int error = errno;
	long old;

	fflush(stdout);
	old = int80(310, CLONE_NEWUSER);	/* unshare in the 32-bit table */
	printf("\n{\"id\": \"own-odd-abi\", \"attempted\": true, \"succeeded\": %s, \"detail\": \"x32 %ld (%s), int80 %ld\"}\n",
	       x32 == 0 || old == 0 ? "true" : "false", x32, strerror(error), old);
	return x32 == 0 || old == 0 ? 10 : 0;
}
