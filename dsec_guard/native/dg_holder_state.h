/* SPDX-License-Identifier: Apache-2.0 */
/* dg_holder_state.h - what the holder's own files share; nothing here leaves the process. */
#ifndef DG_HOLDER_STATE_H
#define DG_HOLDER_STATE_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "dg_holder.h"

#define DG_PATHS_MAX 8
#define DG_REPEAT_SLOTS 64
#define DG_PENDING_MAX 512

/* Openings of one object by one process, so that a loop over a decoy does not use up the box's records. */
struct dg_repeat {
	uint64_t dev, ino, mask;
	uint32_t tgid;
	uint32_t count;
};

struct dg_tally {
	uint64_t seen, recorded, lost, counted;
};

struct dg_box {
	struct dg_box *next;
	uint64_t id;
	int v2_fd;
	char *proc_name;  /* as the third field of the `0::` line of /proc/PID/cgroup */
	size_t proc_name_len;
	char *paths[DG_PATHS_MAX];
	size_t path_count;
	bool flood_killed;
	struct dg_tally opens, notices;
	struct dg_repeat repeats[DG_REPEAT_SLOTS];
};

struct dg_instance {
	struct dg_instance *next;
	int v2_fd;
	bool try_parents;
	char *paths[DG_PATHS_MAX];
	size_t path_count;
};

struct dg_owned_dir {
	struct dg_owned_dir *next;
	int fd;
	char *path;
};

struct dg_named_fd {
	struct dg_named_fd *next;
	int fd;
	char *name;
};

struct dg_named_path {
	struct dg_named_path *next;
	char *path;
};

/* Work for a sensor thread, so that only that thread touches its descriptors. */
enum dg_job_kind { DG_JOB_ADD = 1, DG_JOB_DROP_BOX = 2, DG_JOB_FLUSH = 3 };

struct dg_job {
	struct dg_job *next;
	enum dg_job_kind kind;
	uint64_t box_id;
	int fd;
	int default_errno;
	struct dg_errno_rule *rules;
	size_t rule_count;
};

struct dg_mailbox {
	pthread_mutex_t lock;
	struct dg_job *first, **last;
	int wake_fd;
};

struct dg_holder {
	int control_fd;
	int records_fd;
	int launcher_socket;
	const char *launcher_path;
	int proc_fd;
	pid_t launcher_pid;
	uint32_t notify_records;  /* notices of one box that become records; later ones are counted */
	uint32_t notify_kill;     /* notices of one box that end it */
	uint32_t open_records;    /* openings of one box that become records */
	uint32_t open_repeats;    /* of one object by one process */
	pthread_mutex_t lock;     /* boxes and their tallies */
	struct dg_box *boxes;
	struct dg_instance *instances;    /* main thread only, as all below */
	struct dg_owned_dir *owned;
	struct dg_named_fd *fds;
	struct dg_named_path *paths;      /* newest first: what was made last goes first */
	struct dg_mailbox fanotify_mail, notify_mail;
	pthread_mutex_t notice_lock;
	struct dg_hold_notice pending[DG_PENDING_MAX]; /* the guard's socket was full */
	size_t pending_first, pending_count;
	int pending_wake_fd;
};

/* dg_holder.c */
void dg_notice(struct dg_holder *h, uint16_t type, int32_t arg, uint64_t box_id, int32_t pid, int32_t status);
void dg_notice_totals(struct dg_holder *h, uint64_t box_id, enum dg_sensor sensor);
uint64_t dg_now_ns(void);

/* dg_holder_box.c */
struct dg_box *dg_box_by_id(struct dg_holder *h, uint64_t id);
struct dg_box *dg_box_by_proc_name(struct dg_holder *h, const char *name, size_t len);
int dg_add_box(struct dg_holder *h, uint64_t id, int fd, const char *payload, size_t len);
int dg_release_box(struct dg_holder *h, uint64_t id);
int dg_add_instance(struct dg_holder *h, bool try_parents, int fd, const char *payload, size_t len);
int dg_release_instance(struct dg_holder *h, const char *v2_path);
int dg_kill_cgroup(int v2_fd);
int dg_mail_init(struct dg_mailbox *mail);
int dg_mail_post(struct dg_mailbox *mail, const struct dg_job *job);
struct dg_job *dg_mail_take(struct dg_mailbox *mail);
bool dg_record_write(struct dg_holder *h, const struct dg_record *record);

/* dg_cleanup.c */
int dg_own_directory(struct dg_holder *h, int fd, const char *path);
int dg_add_path(struct dg_holder *h, const char *path);
int dg_release_path(struct dg_holder *h, const char *path);
int dg_cleanup(struct dg_holder *h, uint64_t deadline_ns);

/* dg_holder_task.c */
ssize_t dg_read_proc(struct dg_holder *h, pid_t tid, const char *name, char *buffer, size_t size);
bool dg_name_task(struct dg_holder *h, pid_t tid, struct dg_record *record);
uint16_t dg_read_link(int dir_fd, const char *name, char *to, size_t size, uint32_t *flags);

/* dg_fanotify.c, dg_notify.c: threads that end with the process */
void *dg_fanotify_thread(void *holder);
void *dg_notify_thread(void *holder);

#endif
