"""What stands around a box while a probe runs: processes of the runner's own, outside every sandbox.

All of it lives in a network namespace of the runner's (the *yard*): the guard, the sink and the stand-in share it, so
that a box that kept the guard's network would reach the sink and the stand-in's abstract sockets, and nothing else.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from dsec_guard.errors import HostError

SINK_ADDRESS = "198.51.100.10"          # RFC 5737, TEST-NET-2
METADATA_ADDRESS = "169.254.169.254"
READY_S = 20.0
HOST_FILES_LOCK = Path("/run/lock/dsec-guard-corpus")
#: Ports of the sink beside its main one: name service, container daemon, the metadata service's web port.
SINK_PORTS = {"main": 8080, "dns": 53, "docker": 2375, "web": 80}


class Helper:
    """A child process that says it is ready with a line of JSON, and is ended by its pidfd's owner."""

    def __init__(self, argv: Sequence[str], *, stdin: int = subprocess.DEVNULL, env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(  # argv is the runner's own
            list(argv), stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env, start_new_session=True)
        try:
            self.ready = self._await_ready(argv[-1])
        except BaseException:
            self.stop()
            raise

    def _await_ready(self, what: str) -> dict[str, object]:
        if self.process.stdout is None:
            raise HostError(f"{what}: started without a pipe")
        readable, _, _ = select.select([self.process.stdout], [], [], READY_S)
        line = self.process.stdout.readline() if readable else b""
        try:
            value = json.loads(line)
        except ValueError as e:
            raise HostError(f"a helper process of the corpus runner did not start: {what}: {line[:200]!r}") from e
        return dict(value)

    def stop(self) -> None:
        """Ends the process and its session; harmless when it is already gone."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


class Yard:
    """A network namespace whose loopback carries the addresses of the sink (not every kernel has a dummy link)."""

    def __init__(self) -> None:
        self._keeper: Helper | None = None

    def __enter__(self) -> Yard:
        self._keeper = Helper(["unshare", "--net", "--", sys.executable, "-P", "-c", _KEEPER], stdin=subprocess.PIPE)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._keeper is not None:
            self._keeper.stop()
            self._keeper = None

    def wrap(self, argv: Sequence[str]) -> list[str]:
        """`argv` so that it starts inside; the process number stays the child's (nsenter only execs)."""
        if self._keeper is None:
            raise HostError("the corpus runner's network namespace is gone")
        return ["nsenter", f"--net=/proc/{self._keeper.process.pid}/ns/net", "--", *argv]


_KEEPER = f"""
import json, sys
from pyroute2 import IPRoute
with IPRoute() as ip:
    index = ip.link_lookup(ifname="lo")[0]
    ip.link("set", index=index, state="up")
    for address in ({SINK_ADDRESS!r}, {METADATA_ADDRESS!r}):
        ip.addr("add", index=index, address=address, prefixlen=32)
print(json.dumps({{"ready": True}}), flush=True)
sys.stdin.read()
"""


class Sink:
    """The layout program's receiver, on several ports; what reached it is in its logs."""

    def __init__(self, layout_program: Path, yard: Yard, directory: Path) -> None:
        self._logs = {name: directory / f"sink-{name}.log" for name in SINK_PORTS}
        self._helpers: list[Helper] = []
        try:
            for name, port in SINK_PORTS.items():
                self._helpers.append(Helper(yard.wrap([
                    sys.executable, "-P", str(layout_program), "sink", "--bind", "0.0.0.0",
                    "--port", str(port), "--log", str(self._logs[name])])))
        except BaseException:
            self.stop()
            raise

    def size(self) -> int:
        """Bytes logged so far; it grows with whatever reaches a port."""
        return sum(log.stat().st_size for log in self._logs.values() if log.exists())

    def environment(self) -> dict[str, str]:
        """The variables that tell probes where to aim."""
        def at(name: str) -> str:
            return f"{SINK_ADDRESS}:{SINK_PORTS[name]}"

        return {"DSG_SINK": at("main"), "DSG_DNS": at("dns"), "DSG_DOCKER_API": at("docker"),
                "DSG_INDEX": f"http://{at('web')}/simple"}

    def stop(self) -> None:
        for helper in self._helpers:
            helper.stop()


@contextlib.contextmanager
def stand_in(layout_program: Path, yard: Yard, layout: Path) -> Iterator[None]:
    """The process outside that holds this layout's secrets."""
    helper = Helper(yard.wrap([sys.executable, "-P", str(layout_program), "standin", str(layout)]))
    try:
        yield
    finally:
        helper.stop()


@contextlib.contextmanager
def host_files(pairs: Sequence[tuple[Path, Path]]) -> Iterator[None]:
    """Put each `(host path, source)` in place and take it away again, restoring what stood there.

    The paths are the same for every runner of this machine: a second one waits here.
    """
    if not pairs:
        yield
        return
    with HOST_FILES_LOCK.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with _in_place(pairs):
            yield


@contextlib.contextmanager
def _in_place(pairs: Sequence[tuple[Path, Path]]) -> Iterator[None]:
    kept: list[tuple[Path, bytes | None, list[Path]]] = []
    try:
        for target, source in pairs:
            made = [p for p in target.parents if not p.exists()]
            kept.append((target, target.read_bytes() if target.exists() else None, made))
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            with open(target, "xb", opener=lambda p, f: os.open(p, f, 0o600)) as f:
                f.write(source.read_bytes())
        yield
    finally:
        for target, content, made in reversed(kept):
            target.unlink(missing_ok=True)
            if content is not None:
                target.write_bytes(content)
            for directory in made:
                with contextlib.suppress(OSError):
                    directory.rmdir()


class HostProber:
    """Every half second a process outside forks, allocates 16 MiB and writes 1 MiB; the slowest round is kept."""

    def __init__(self, directory: Path) -> None:
        self._log = directory / "prober.log"
        self._helper = Helper([sys.executable, "-P", "-c", _PROBER, str(self._log), str(directory / "prober.data")])

    def stop(self) -> tuple[int, float]:
        """Ends it. Returns: rounds completed, and the longest in seconds (a round under way at the end counts too)."""
        stopped = time.monotonic()
        self._helper.stop()
        rounds = [json.loads(line) for line in self._log.read_text().splitlines() if line.endswith("}")]
        done = [r["seconds"] for r in rounds if "seconds" in r]
        if rounds and "started" in rounds[-1]:
            done.append(stopped - rounds[-1]["started"])
        return len(done), max(done, default=0.0)


_PROBER = """
import json, os, sys, time
log, data = open(sys.argv[1], "a", buffering=1), sys.argv[2]
print(json.dumps({"ready": True}), flush=True)
while True:
    start = time.monotonic()
    log.write(json.dumps({"started": start}) + "\\n")
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    block = bytearray(16 << 20)
    block[::4096] = b"x" * (len(block) // 4096)
    with open(data, "wb") as f:
        f.write(block[:1 << 20])
    del block
    log.write(json.dumps({"seconds": time.monotonic() - start}) + "\\n")
    time.sleep(0.5)
"""


