"""What being watched costs per system call: ratios of CPU time, full level to none.

    python tests/bench/monitor_cost.py [--pairs N] [--json FILE]

Two loops in C (getpid; open+read+close of an ordinary file) and a job (a small C compilation) run alternately in these
situations, and each is compared with the run before it in `bare`:
  bare      no monitor at all
  bare2     the same again: how far two equal things differ here
  host      a monitor with a full box elsewhere: what other tasks of the host pay
  cold      in a box of level cold
  full      in a box of level full
  guarded   in a box of level full with an object protected, records taken in by this process
User and system time of the children; the job's ratio includes this process's own time for draining. Needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import select
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from dsec_guard.host.probe import cgroup_mounts
from dsec_guard.model import Level
from dsec_guard.monitor.loader import BoxConfig, KernelMonitor
from dsec_guard.monitor.pump import BoxStream, ProtectedObject

_LOOPS = r"""
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
int main(int argc, char **argv)
{
    long n = atol(argv[2]);
    char byte;
    if (!strcmp(argv[1], "getpid")) {
        while (n--)
            syscall(SYS_getpid);
        return 0;
    }
    while (n--) {
        int fd = open("/etc/passwd", O_RDONLY);
        if (fd < 0 || read(fd, &byte, 1) != 1 || close(fd) < 0)
            return 1;
    }
    return 0;
}
"""
_JOB = "#include <stdio.h>\n#include <stdlib.h>\n#include <string.h>\nint main(void) { puts(\"x\"); return 0; }\n"
_SITUATIONS = ("bare", "bare2", "host", "cold", "full", "guarded")


def _cpu(argv: list[str], procs: Path | None, drain: Callable[[], None] | None) -> float:
    """CPU seconds of one child, plus ours while it ran when something is drained."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    fd = os.open(procs, os.O_WRONLY) if procs else -1
    child = subprocess.Popen(argv, preexec_fn=(lambda: os.write(fd, b"0") and None) if procs else None)
    if fd >= 0:
        os.close(fd)
    pidfd = os.pidfd_open(child.pid)
    waiter = select.poll()
    waiter.register(pidfd, select.POLLIN)
    while not waiter.poll(250):
        if drain:
            drain()
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    os.close(pidfd)
    if child.returncode:
        raise SystemExit(f"{argv} ended with {child.returncode}")
    seconds = used.ru_utime + used.ru_stime
    if drain:
        drain()
        now = resource.getrusage(resource.RUSAGE_SELF)
        seconds += now.ru_utime + now.ru_stime - own.ru_utime - own.ru_stime
    return seconds


def measure(argv: list[str], pairs: int, place: Path) -> dict[str, float]:
    """Median ratio to `bare` by situation."""
    mounts = cgroup_mounts()
    if mounts.v2 is None:
        raise SystemExit("no cgroup v2 tree is mounted")
    top = mounts.v2 / f"dsec-guard-bench-{os.getpid()}"
    box = top / "b"
    box.mkdir(parents=True)
    level = len(box.relative_to(mounts.v2).parts)
    fd = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    marked = place / "protected"
    marked.write_text("x")
    ratios: dict[str, list[float]] = {name: [] for name in _SITUATIONS}

    def one(situation: str) -> float:
        if situation.startswith("bare"):
            return _cpu(argv, None, None)
        with KernelMonitor.load(fd, level) as monitor:
            box_id = box.stat().st_ino
            monitor.add_box(BoxConfig(box_id, level=Level.COLD if situation == "cold" else Level.FULL))
            monitor.go_live(box_id)
            if situation != "guarded":
                return _cpu(argv, None if situation == "host" else box / "cgroup.procs", None)
            status = marked.stat()
            number = monitor.protect(status.st_dev, status.st_ino)
            stream = BoxStream(box_id, 0, 0, {number: ProtectedObject(str(marked), "hidden")})

            def drain() -> None:
                for record in monitor.drain():
                    stream.ingest(record)

            return _cpu(argv, box / "cgroup.procs", drain)

    try:
        one("bare")
        for _ in range(pairs):
            for situation in _SITUATIONS:
                bare = one("bare")
                ratios[situation].append(one(situation) / bare)
    finally:
        os.close(fd)
        box.rmdir()
        top.rmdir()
    return {name: round(statistics.median(values), 3) for name, values in ratios.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dsec-guard-bench-") as name:
        place = Path(name)
        (place / "loops.c").write_text(_LOOPS)
        (place / "job.c").write_text(_JOB)
        subprocess.run(["gcc", "-O2", "-o", place / "loops", place / "loops.c"], check=True)
        result: dict[str, object] = {
            "command": " ".join(["python", *sys.argv]),
            "kernel": platform.release(),
            "pairs": options.pairs,
            "getpid": measure([str(place / "loops"), "getpid", "1000000"], options.pairs, place),
            "open_read_close": measure([str(place / "loops"), "open", "100000"], options.pairs, place),
            "compile": measure(
                ["sh", "-c", f"for i in 1 2 3 4 5; do gcc -O1 -o {place}/job {place}/job.c; done"], options.pairs, place
            ),
        }
    text = json.dumps(result, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
