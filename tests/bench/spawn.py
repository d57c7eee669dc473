"""From asking for `/bin/true` to its exit: the Python API against bubblewrap with the same namespaces.

    python tests/bench/spawn.py [--runs N] [--json FILE]

One process at a time, taken in turn, so that a busy moment hits all alike. The target is for boxes made ahead:
  ready-full, ready-cold
               `Guard.run` of one open guard, policy untrusted-script, changes discarded: all layers, a verdict each time;
               up to the moment when the guard knows of the exit. The box was made ahead by `Guard.prepare`
  full, cold   the same, the box made in the call
  judged       the same up to the end of the call: judged, recorded, box given back. prepare: making a box ahead
  bwrap        bubblewrap: all namespaces, no capabilities, the same seccomp filter, whole directories bound
  bwrap-root   the same with the root that our boxes have, entry by entry
bubblewrap is started by posix_spawn(3), which costs it less than `subprocess` would. The ratios are of medians. Needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from dsec_guard.model import Level, Phase, VerdictClass
from dsec_guard.policy.compile import compile_policy
from dsec_guard.policy.load import load_policy, with_level
from dsec_guard.sandbox.rootfs import RootContext, compose_root
from dsec_guard.sandbox.spec import OpKind, RootOp
from dsec_guard.sandbox.stdio import BoxIO, Capture
from dsec_guard.service.guard import Guard
from dsec_guard.service.request import KeepMode, RunRequest

POLICY = "untrusted-script"
TARGET = 0.6
ARGV = (b"/bin/true",)
_NAMESPACES = ["--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup",
               "--die-with-parent", "--hostname", "box", "--cap-drop", "ALL", "--uid", "1000", "--gid", "1000", "--clearenv"]
_PLACES = ["--ro-bind", "/usr", "/usr", "--ro-bind", "/etc", "/etc", "--ro-bind", "/opt", "/opt",
           "--ro-bind", "/var/lib/dpkg", "/var/lib/dpkg", "--symlink", "usr/bin", "/bin", "--symlink", "usr/sbin", "/sbin",
           "--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64", "--proc", "/proc", "--dev", "/dev",
           "--tmpfs", "/tmp", "--tmpfs", "/var/tmp", "--tmpfs", "/run", "--tmpfs", "/home/agent"]


def guarded(guard: Guard, level: Level, judged: list[float], made: list[float] | None = None) -> Callable[[], float]:
    """One run; returns the milliseconds until the guard knew of the exit. Fails unless the command exited 0 and was judged
    clean.

    judged: the milliseconds until the call returned, box given back, are added here. made: the box is made ahead, and what
    that took is added here.
    """
    policy = with_level(load_policy(POLICY), level)
    request = RunRequest(policy=policy, argv=ARGV, keep=KeepMode.DISCARD)

    def run() -> float:
        if made is not None:
            began = time.perf_counter()
            if guard.prepare(request, 1) != 1:
                raise SystemExit("the box of the run before was not used")
            made.append((time.perf_counter() - began) * 1000)
        began_ns = time.time_ns()
        with BoxIO(stdin=None, stdout=Capture(4096), stderr=Capture(4096)) as io:
            outcome = guard.run(request, io)
        judged.append((time.time_ns() - began_ns) / 1e6)
        if outcome.exit.code != 0 or outcome.verdict.cls is not VerdictClass.CLEAN or not outcome.verdict.complete:
            raise SystemExit(f"{level.value}: {outcome.exit} {outcome.verdict}")
        return (outcome.exited_ns - began_ns) / 1e6

    return run


def _translated(op: RootOp, file_of: Callable[[bytes], int]) -> list[str]:
    """The closest that bubblewrap has to one step of ours."""
    to = f"/{op.target}"
    if op.kind is OpKind.BIND:
        return ["--dev-bind" if to.startswith("/dev/") else "--ro-bind", op.source, to]
    if op.kind is OpKind.DIR:
        return ["--dir", to]
    if op.kind is OpKind.SYMLINK:
        return ["--symlink", op.source, to]
    if op.kind is OpKind.FILE:
        return ["--perms", f"{op.mode or 0o444:04o}", "--file", str(file_of(op.content)), to]
    if op.kind is OpKind.PROC:
        return ["--proc", to]
    if op.kind in (OpKind.TMPFS, OpKind.STORE):
        return ["--tmpfs", to]
    if op.kind is OpKind.MQUEUE:
        return ["--mqueue", to]
    if op.kind is OpKind.READONLY:
        return ["--ro-bind-try", to, to]
    if op.kind is OpKind.MASK_FILE:
        return ["--ro-bind", "/dev/null", to] if os.path.exists(to) else []
    if op.kind is OpKind.MASK_DIR:
        return ["--tmpfs", to, "--remount-ro", to] if os.path.isdir(to) else []
    return []


def bubblewrap(guard: Guard, place: Path, *, same_root: bool) -> Callable[[], float]:
    """As `guarded`. place: a scratch directory."""
    program = shutil.which("bwrap")
    if program is None:
        raise SystemExit("bubblewrap is not installed: apt-get install bubblewrap")
    policy = with_level(load_policy(POLICY), Level.FULL)
    plan = compile_policy(policy, guard.features(policy))
    seccomp = place / "filter"
    seccomp.write_bytes(plan.exec_filters[Phase.AGENT])
    files: list[Path] = []
    first_fd = 10

    def file_of(content: bytes) -> int:
        files.append(place / f"{same_root}-{len(files)}")
        files[-1].write_bytes(content)
        return first_fd + len(files)

    words = list(_PLACES)
    if same_root:
        root = compose_root(policy, RootContext(workspace=None, agent_uid=1000, agent_gid=1000, hostname="box", binds=()))
        words = [word for op in root.ops for word in _translated(op, file_of)]
    argv = [program, *_NAMESPACES, *words, "--seccomp", str(first_fd), "--", *map(os.fsdecode, ARGV)]

    def run() -> float:
        opened = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in (seccomp, *files)]
        # Out of the way of each other first: a number may be both taken and wanted.
        high = [os.dup2(fd, 400 + n, inheritable=False) for n, fd in enumerate(opened)]
        actions = [(os.POSIX_SPAWN_DUP2, fd, first_fd + n) for n, fd in enumerate(high)]
        began = time.perf_counter()
        pid = os.posix_spawn(program, argv, {}, file_actions=actions)
        status = os.waitpid(pid, 0)[1]
        took = time.perf_counter() - began
        for fd in (*opened, *high):
            os.close(fd)
        if status:
            raise SystemExit(f"bubblewrap ended with status {status}")
        return took * 1000

    return run


def summary(name: str, times: list[float]) -> dict[str, float | str]:
    ordered = sorted(times)
    return {"name": name, "median_ms": statistics.median(ordered), "p99_ms": ordered[int(len(ordered) * 0.99)],
            "min_ms": ordered[0]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=240)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        with Guard.open(place / "state") as guard:
            made: dict[str, list[float]] = {"full": [], "cold": []}
            judged: dict[str, list[float]] = {name: [] for name in ("ready-full", "ready-cold", "full", "cold")}
            sides = {
                "ready-full": guarded(guard, Level.FULL, judged["ready-full"], made["full"]),
                "ready-cold": guarded(guard, Level.COLD, judged["ready-cold"], made["cold"]),
                "full": guarded(guard, Level.FULL, judged["full"]),
                "cold": guarded(guard, Level.COLD, judged["cold"]),
                "bwrap": bubblewrap(guard, place, same_root=False),
                "bwrap-root": bubblewrap(guard, place, same_root=True),
            }
            times: dict[str, list[float]] = {side: [] for side in sides}
            cpu = dict.fromkeys(sides, 0.0)
            for run in sides.values():
                for _ in range(5):
                    run()
            for _ in range(options.runs):
                for side, run in sides.items():
                    before = resource.getrusage(resource.RUSAGE_SELF)
                    times[side].append(run())
                    after = resource.getrusage(resource.RUSAGE_SELF)
                    cpu[side] += (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) * 1000 / options.runs
    version = subprocess.run(["bwrap", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    rows = [summary(side, values) for side, values in times.items()]
    print(f"{platform.machine()} Linux {platform.release()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, {version}, "
          f"Python {platform.python_version()}, {options.runs} runs each, {time.strftime('%Y-%m-%d', time.gmtime())}")
    by_name = {str(row["name"]): row for row in rows}
    base = float(by_name["bwrap"]["median_ms"])
    met = True
    for row in rows:
        ratio = float(row["median_ms"]) / base
        row["ratio"], row["caller_cpu_ms"] = ratio, cpu[str(row["name"])]
        print(f"{row['name']:<18} median {row['median_ms']:7.2f} ms  p99 {row['p99_ms']:7.2f}  min {row['min_ms']:7.2f}  "
              f"caller's CPU {row['caller_cpu_ms']:6.2f}  ratio to bwrap {ratio:5.2f}")
        met = met and (not str(row["name"]).startswith("ready") or ratio <= TARGET)
    others = [(f"{name}, judged", values) for name, values in judged.items()]
    others += [(f"prepare-{level}", values) for level, values in made.items()]
    for name, values in others:
        row = summary(name, values[5:])
        rows.append(row)
        print(f"{name:<18} median {row['median_ms']:7.2f} ms  p99 {row['p99_ms']:7.2f}  min {row['min_ms']:7.2f}  "
              f"ratio to bwrap {float(row['median_ms']) / base:5.2f}")
    print(f"target: a box made ahead takes at most {TARGET} of bwrap: {'met' if met else 'not met'}")
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "bubblewrap": version, "runs": options.runs}, indent=1) + "\n")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
