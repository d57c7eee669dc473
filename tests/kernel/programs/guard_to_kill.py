"""A guard in miniature that waits to be killed: one instance, one box with a tree of processes, registered paths.

argv: native directory, launcher, run directory, number of processes, `shared` to treat the base directory as the
default one. Prints one JSON line when all is up.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import time
from pathlib import Path

from dsec_guard.host import cgroup
from dsec_guard.host.cgroup import CgroupHost, CgroupLimits
from dsec_guard.host.uids import UidRange
from dsec_guard.sandbox.holder import Holder
from dsec_guard.service.reaper import Ownership

native, launcher, run_dir, count = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
if sys.argv[5:] == ["shared"]:
    cgroup.DEFAULT_BASE = os.environ[cgroup.BASE_VARIABLE]
owner = Ownership.take(run_dir)
instance = CgroupHost.probe().instance(owner.name)
holder = Holder.start(native, instance, launcher=launcher)
holder.own_directory(run_dir)
holder.register_path(owner.lock_path)
holder.register_path(owner.directory)
holder.register_path(owner.directory / "tree/link/deeper/keep")  # through a link that leads out
holder.hold_fd("instance", owner.fd)
uids = UidRange.acquire(run_dir, count=1)
holder.hold_fd("uids", uids.fd)
box = instance.create_box("box", CgroupLimits(memory=256 << 20, pids=count + 8, cpus=1))
holder.register_box(box.id, box)
instance.create_box("unregistered", CgroupLimits(memory=64 << 20, pids=8, cpus=1))
holder.settle(box.id)

(owner.directory / "tree/below").mkdir(parents=True)
(owner.directory / "tree/below/file").write_text("x")
(owner.directory / "tree/link").symlink_to(run_dir / "outside", target_is_directory=True)

# Half of them ignore what can be ignored, all sit below the box's first process.
script = f"trap '' TERM HUP; i=1; while [ $i -lt {count} ]; do sleep 1000 & i=$((i+1)); done; exec sleep 1000"
socket.send_fds(holder.launcher_socket, [b"/bin/sh\0-c\0" + script.encode() + b"\0"], [box.dir_fd, *box.v1_tasks_fds])
(pid,) = struct.unpack("i", holder.launcher_socket.recv(4))
deadline = time.monotonic() + 20
while box.usage().pids_current < count and time.monotonic() < deadline:
    time.sleep(0.005)
pids = [int(p) for p in (box.v2_dir / "cgroup.procs").read_text().split()]
print(json.dumps({
    "holder": holder.pid, "launcher": holder.launcher_pid, "init": pid, "pids": pids, "paths": [str(p) for p in instance.paths],
    "directory": str(owner.directory), "lock": str(owner.lock_path), "name": owner.name,
}), flush=True)
sys.stdin.read()
