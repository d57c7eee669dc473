// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
/*
 * dg_guard.bpf.c - what boxed tasks attempt and what became of it; network and device decisions for boxes.
 * Attach:  tp_btf/sys_exit while a box of level full lives; cold tracepoints always; cgroup programs once, on the
 *          directory of the guard's instance (monitor/loader.py).   Kernel: BTF and task storage, tried by loading.
 * Scope:   tasks below a v2 directory whose id is in `boxes` and whose entry says live; any other task costs one hash
 *          look-up. dg-init (init_tgid) is not reported.
 * Loss:    a full ring drops the record and counts it on the box that sent it; no task ever waits.
 * Blind:   work that an io_uring does by itself (only its creation and submissions show); memory arguments may change
 *          after they are read (no verdict from them alone); a descriptor that another thread swaps between the open and
 *          its exit (fanotify is the authority for protected objects).
 * Numbers: x86-64, x32 (bit 30) and i386 (TS_COMPAT) are told apart; the last two are always reported.
 */
#include "dg_kernel.h"

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_tracing.h>

#include "dg_events.h"

char LICENSE[] SEC("license") = "GPL";

#include "dg_admit.h"
#include "dg_paths.h"
#include "dg_calls.h"
#include "dg_tasks.h"
#include "dg_hooks.h"
