/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dg_holder.h - what the guard and its holder say to each other. `sandbox/holder.py` mirrors both layouts; a test
 * compares them. x86-64, little endian, no implicit padding.
 *
 * Control (SEQPACKET): requests from the guard (struct dg_hold_request, then payload, then descriptors by SCM_RIGHTS)
 * and notices to it (struct dg_hold_notice). Requests that a dying guard still queued are carried out before its end
 * of file is seen.
 * Records (pipe): struct dg_record, each written whole (it divides PIPE_BUF), never waited for.
 */
#ifndef DG_HOLDER_H
#define DG_HOLDER_H

#include <stdint.h>

#define DG_HOLD_VERSION 1
#define DG_HOLD_MESSAGE_MAX 16384
#define DG_HOLD_FDS_MAX 4

enum dg_hold_request_type {
	DG_HOLD_INSTANCE = 1,       /* fd: v2 directory; payload: v2 path, other paths...; arg: also try the parents */
	DG_HOLD_BOX = 2,            /* box_id, fd: v2 directory; payload: name in /proc/PID/cgroup, v2 path, v1 paths... */
	DG_HOLD_RELEASE_BOX = 3,    /* box_id */
	DG_HOLD_OWN_DIRECTORY = 4,  /* fd: directory; payload: its path */
	DG_HOLD_PATH = 5,           /* payload: absolute path below an owned directory */
	DG_HOLD_RELEASE_PATH = 6,   /* payload: the same path */
	DG_HOLD_FD = 7,             /* fd; payload: name */
	DG_HOLD_DROP_FD = 8,        /* payload: name */
	DG_HOLD_WATCH_FANOTIFY = 9, /* fd: the group */
	DG_HOLD_WATCH_NOTIFY = 10,  /* box_id, fd: the listener, arg: default errno; payload: struct dg_errno_rule[] */
	DG_HOLD_FLUSH = 11,         /* box_id: one DG_NOTICE_TOTALS per sensor, after all its records so far */
	DG_HOLD_END = 12,           /* clean up what is still registered and exit */
	DG_HOLD_RELEASE_INSTANCE = 13, /* payload: v2 path */
};

struct dg_hold_request {
	uint16_t version;
	uint16_t type;
	int32_t arg;
	uint64_t box_id;
	uint32_t payload_len;
	uint32_t reserved;
};
_Static_assert(sizeof(struct dg_hold_request) == 24, "layout shared with holder.py");

struct dg_errno_rule {
	int32_t nr;  /* x86-64 number */
	int32_t error;
};

enum dg_hold_notice_type {
	DG_NOTICE_READY = 1,         /* pid: the launcher's */
	DG_NOTICE_CHILD = 2,         /* pid, status: as wait4(2) gives it (the launcher's end comes this way, too) */
	DG_NOTICE_SENSOR_DIED = 3,   /* box_id (0: all), arg: enum dg_sensor, status: errno */
	DG_NOTICE_REFUSED = 4,       /* arg: request type, status: errno */
	DG_NOTICE_FLOOD_KILLED = 5,  /* box_id: so many notified calls that the box was ended */
	DG_NOTICE_OVERFLOW = 6,      /* openings of marked files went unseen (status: errno or 0); whose is unknown */
	DG_NOTICE_TOTALS = 7,        /* box_id, arg: enum dg_sensor; seen = recorded + lost + counted */
};

struct dg_hold_notice {
	uint16_t version;
	uint16_t type;
	int32_t arg;
	uint64_t box_id;
	int32_t pid;
	int32_t status;
	uint64_t at_ns;     /* CLOCK_MONOTONIC */
	uint64_t seen;
	uint64_t recorded;
	uint64_t lost;      /* the guard did not read its records fast enough */
	uint64_t counted;   /* more of the same, or beyond the box's number of records */
};
_Static_assert(sizeof(struct dg_hold_notice) == 64, "layout shared with holder.py");

enum dg_sensor { DG_SENSOR_FANOTIFY = 1, DG_SENSOR_NOTIFY = 2 };

enum dg_record_kind { DG_RECORD_OPEN = 1, DG_RECORD_NOTIFY = 2 };

enum dg_record_flags {
	DG_RECORD_VANISHED = 1,       /* the task was gone before it could be named: tgid, uid, comm are not set */
	DG_RECORD_TRUNCATED = 2,      /* a text or buffer was longer than its field */
	DG_RECORD_CALL_KNOWN = 4,     /* nr and args are those of the held call */
	DG_RECORD_MEMORY_READ = 8,    /* path, path2, data were read from the task while its call was held */
};

/*
 * One observation. Everything that came from the task (comm, path, path2, base, data) is hostile bytes.
 * OPEN: dev, ino of the opened file; mask: FAN_OPEN_PERM, FAN_OPEN_EXEC_PERM; path: its name as the kernel shows it.
 * NOTIFY: arch, nr, args; given_errno: the answer; path...: arguments; base: where a relative path starts; mask: id.
 */
struct dg_record {
	uint16_t version;
	uint16_t kind;
	uint32_t flags;
	uint64_t box_id;
	uint64_t at_ns;  /* CLOCK_MONOTONIC */
	uint32_t tgid;
	uint32_t tid;
	uint32_t ppid;
	uint32_t uid;    /* of the host */
	char comm[16];
	uint64_t dev;
	uint64_t ino;
	uint64_t mask;
	int32_t nr;
	uint32_t arch;
	uint64_t args[6];
	int32_t given_errno;
	uint32_t reserved;
	uint16_t path_len;
	uint16_t path2_len;
	uint16_t base_len;
	uint16_t data_len;
	char path[440];
	char path2[176];
	char base[128];
	uint8_t data[128];
};
_Static_assert(sizeof(struct dg_record) == 1024, "divides PIPE_BUF, layout shared with holder.py");

#endif
