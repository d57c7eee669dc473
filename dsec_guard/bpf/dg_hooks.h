/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * dg_hooks.h - cgroup programs: they decide and report. Attached once to the instance's directory, policy by box id.
 * They hold for io_uring requests too. The exec index of their records is 0: task storage is not theirs to read, the
 * guard fills it in by process.
 */
#ifndef DG_HOOKS_H
#define DG_HOOKS_H

#define DG_ALLOW 1
#define DG_DENY 0
#define DG_LOOPBACK_NET 127

/* A box, or what to do without one. */
DG_INLINE int dg_hook_asker(struct dg_asker *who)
{
	__u64 box = bpf_get_current_ancestor_cgroup_id(dg_config.ancestor_level);

	who->box = box;
	who->cfg = bpf_map_lookup_elem(&boxes, &box);
	if (!who->cfg)
		return 0;
	who->stats = bpf_map_lookup_elem(&stats, &box);
	return who->stats != 0;
}

/* Refused attempts are evidence, allowed ones context. dg-init and a box that is not live are never reported. */
DG_INLINE void dg_hook_send(const struct dg_asker *who, void *record, __u64 size, struct dg_head *head, __u32 op, int denied,
			    __u64 hash)
{
	if (!who->cfg->live || head->tgid == who->cfg->init_tgid)
		return;
	if (!denied) {
		if (dg_fresh(who, DG_NR_HOOK + head->kind + 32 * op, 0, hash | 1, head->at_ns, DG_REPEATS) &&
		    dg_admit_context(who))
			dg_send_context(who, record, size);
		return;
	}
	if (dg_admit(who, DG_NR_HOOK + head->kind + 32 * op, -DG_EPERM, hash, head->at_ns, DG_PLAIN))
		dg_send(who, record, size, DG_PLAIN);
}

DG_INLINE int dg_ip4_local(__u32 address)
{
	return (address & bpf_htonl(0xff000000)) == bpf_htonl(DG_LOOPBACK_NET << 24);
}

DG_INLINE int dg_ip6_local(const __u32 *address)
{
	if (!address[0] && !address[1] && address[2] == bpf_htonl(0xffff))
		return dg_ip4_local(address[3]);
	return !address[0] && !address[1] && !address[2] && address[3] == bpf_htonl(1);
}

DG_INLINE int dg_address_hook(struct bpf_sock_addr *ctx, __u32 op, int v6)
{
	struct dg_net record = {};
	__u32 address[4] = {};
	struct dg_asker who;
	int local, any, allowed, error;
	__u64 hash;

	if (v6) {
		address[0] = ctx->user_ip6[0];
		address[1] = ctx->user_ip6[1];
		address[2] = ctx->user_ip6[2];
		address[3] = ctx->user_ip6[3];
		local = dg_ip6_local(address);
	} else {
		address[0] = ctx->user_ip4;
		local = dg_ip4_local(address[0]);
	}
	any = !address[0] && !address[1] && !address[2] && !address[3];
	/* Connecting to the unspecified address means this host's own loopback: ip(7), ipv6(7). */
	allowed = local || any;
	if (!dg_hook_asker(&who))
		return allowed || !dg_config.fail_closed ? DG_ALLOW : DG_DENY;
	if (who.cfg->network == DG_NETWORK_OPEN)
		allowed = 1;
	if (op == DG_NET_BIND && allowed)
		return DG_ALLOW;
	dg_fill_head(&record.head, &who, DG_NET, sizeof(record));
	record.op = op;
	record.family = v6 ? DG_AF_INET6 : DG_AF_INET;
	record.type = ctx->type;
	record.protocol = ctx->protocol;
	__builtin_memcpy(record.addr, address, sizeof(record.addr));
	record.port = bpf_ntohs((__u16)ctx->user_port);
	/* A box without a network looks like a host without one: programs know what to do then, EPERM puzzles them. */
	error = op == DG_NET_BIND ? DG_EPERM : DG_ENETUNREACH;
	record.ret = allowed ? 0 : -error;
	hash = dg_mix(dg_mix(dg_mix(record.port, address[0]), address[1] ^ ((__u64)address[2] << 32)), address[3]);
	dg_hook_send(&who, &record, sizeof(record), &record.head, op, !allowed, hash);
	if (allowed)
		return DG_ALLOW;
	bpf_set_retval(-error);
	return DG_DENY;
}

SEC("cgroup/connect4")
int dg_connect4(struct bpf_sock_addr *ctx)
{
	return dg_address_hook(ctx, DG_NET_CONNECT, 0);
}

SEC("cgroup/connect6")
int dg_connect6(struct bpf_sock_addr *ctx)
{
	return dg_address_hook(ctx, DG_NET_CONNECT, 1);
}

SEC("cgroup/sendmsg4")
int dg_sendmsg4(struct bpf_sock_addr *ctx)
{
	return dg_address_hook(ctx, DG_NET_SENDMSG, 0);
}

SEC("cgroup/sendmsg6")
int dg_sendmsg6(struct bpf_sock_addr *ctx)
{
	return dg_address_hook(ctx, DG_NET_SENDMSG, 1);
}

SEC("cgroup/bind4")
int dg_bind4(struct bpf_sock_addr *ctx)
{
	return dg_address_hook(ctx, DG_NET_BIND, 0);
}

SEC("cgroup/bind6")
int dg_bind6(struct bpf_sock_addr *ctx)
{
	return dg_address_hook(ctx, DG_NET_BIND, 1);
}

/* Called for AF_INET and AF_INET6 only; other families are seccomp's and sys_exit's. */
SEC("cgroup/sock_create")
int dg_sock_create(struct bpf_sock *ctx)
{
	struct dg_net record = {};
	struct dg_asker who;

	if (ctx->type != DG_SOCK_RAW && ctx->type != DG_SOCK_PACKET)
		return DG_ALLOW;
	if (!dg_hook_asker(&who))
		return dg_config.fail_closed ? DG_DENY : DG_ALLOW;
	dg_fill_head(&record.head, &who, DG_NET, sizeof(record));
	record.op = DG_NET_SOCKET;
	record.family = ctx->family;
	record.type = ctx->type;
	record.protocol = ctx->protocol;
	record.ret = -DG_EPERM;
	dg_hook_send(&who, &record, sizeof(record), &record.head, DG_NET_SOCKET, 1, ctx->protocol);
	return DG_DENY;
}

/* null zero full random urandom; tty ptmx console; pts. Character devices only. */
DG_INLINE int dg_device_allowed(__u32 type, __u32 access, __u32 major, __u32 minor)
{
	if (type != BPF_DEVCG_DEV_CHAR)
		return 0;
	/* An overlay marks a removed name with a 0:0 node. */
	if (access & BPF_DEVCG_ACC_MKNOD)
		return !major && !minor;
	if (major == 1)
		return minor == 3 || minor == 5 || minor == 7 || minor == 8 || minor == 9;
	return (major == 5 && minor <= 2) || (major >= 136 && major <= 143);
}

SEC("cgroup/dev")
int dg_device(struct bpf_cgroup_dev_ctx *ctx)
{
	__u32 type = ctx->access_type & 0xffff, access = ctx->access_type >> 16;
	struct dg_device record = {};
	struct dg_asker who;

	if (dg_device_allowed(type, access, ctx->major, ctx->minor))
		return DG_ALLOW;
	/* What builds a box makes nodes before the box is live. */
	if (!dg_hook_asker(&who) || !who.cfg->live)
		return DG_ALLOW;
	dg_fill_head(&record.head, &who, DG_DEVICE, sizeof(record));
	record.dev_type = type;
	record.access = access;
	record.major = ctx->major;
	record.minor = ctx->minor;
	record.ret = -DG_EPERM;
	dg_hook_send(&who, &record, sizeof(record), &record.head, 0, 1,
		     ((__u64)ctx->major << 32 | ctx->minor) << 8 | access);
	return DG_DENY;
}

/* Reading is the mount's business; no box writes a kernel setting once it is live. */
SEC("cgroup/sysctl")
int dg_sysctl_hook(struct bpf_sysctl *ctx)
{
	struct dg_sysctl record = {};
	struct dg_asker who;
	__u64 hash = 0;

	if (!ctx->write || !dg_hook_asker(&who) || !who.cfg->live)
		return DG_ALLOW;
	bpf_sysctl_get_name(ctx, record.name, sizeof(record.name), 0);
	dg_fill_head(&record.head, &who, DG_SYSCTL, sizeof(record));
	record.ret = -DG_EPERM;
	record.write = 1;
	for (int i = 0; i < DG_SYSCTL_NAME; i++)
		hash = dg_mix(hash, record.name[i]);
	dg_hook_send(&who, &record, sizeof(record), &record.head, 0, 1, hash);
	return DG_DENY;
}

#endif
