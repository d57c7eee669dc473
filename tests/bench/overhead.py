"""What being guarded costs a job: its CPU time in a box, with the guard's own beside it, against the bare job's.

    python tests/bench/overhead.py [--pairs N] [--level full|cold]... [--job gcc|pytest]... [--json FILE]

Jobs: `gcc` compiles and links 20 generated C files one after the other; `pytest` runs a generated suite in pure Python.
In each round a job runs bare, in a box of each level, and bare again, in an order that changes; each starts from a fresh
copy of its files. They lie in memory on both sides, as all that a box writes does. Counted: user and system time of the
job's cgroup (bare: of its processes), and for a box all that the guard used meanwhile in this process, its holder and its
launcher, from asking for the box to having its verdict.
Printed: the median of the rounds' ratios and the bound that the true median is below with 95 % confidence (order
statistics, no assumption about the distribution). `A/A` is the second bare run against the first: what equal things differ
by on this machine. Needs root, gcc, and pytest in this environment.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from dsec_guard.model import Level, VerdictClass
from dsec_guard.policy.load import load_policy, with_level
from dsec_guard.sandbox.stdio import BoxIO, Capture
from dsec_guard.service.guard import Guard
from dsec_guard.service.request import BindRequest, KeepMode, RunRequest

POLICY = "untrusted-script"
TARGET = 1.05
C_FILES, TEST_FILES, TESTS_EACH = 20, 15, 28
_PATH = "/usr/local/bin:/usr/bin:/bin"


@dataclass(frozen=True)
class Job:
    """files: by name, relative. packages: a directory of Python packages that the job needs, or None."""

    name: str
    argv: tuple[str, ...]
    files: dict[str, str]
    packages: Path | None = None

    @property
    def environment(self) -> dict[str, str]:
        return {"PYTHONPATH": str(self.packages)} if self.packages is not None else {}

    def lay_out(self, place: Path) -> None:
        for name, text in self.files.items():
            (place / name).write_text(text)


def gcc_job() -> Job:
    """Some 20 translation units with headers, structures, loops and calls into each other."""
    files = {"all.h": "#include <stdio.h>\n#include <stdlib.h>\n#include <string.h>\n#include <math.h>\n"
             + "".join(f"int unit_{n}(int);\n" for n in range(C_FILES))}
    for n in range(C_FILES):
        body = "".join(
            f"struct s{n}_{k} {{ int a[{k + 2}]; double b; }};\n"
            f"static int work_{k}(struct s{n}_{k} *s, int x)\n{{\n\tint i, sum = 0;\n"
            f"\tfor (i = 0; i < {k + 2}; i++) {{ s->a[i] = x * i + {n}; sum += s->a[i] % {k + 3}; }}\n"
            f"\ts->b = sqrt((double)sum);\n\treturn sum + (int)s->b;\n}}\n" for k in range(18))
        calls = "".join(f"\t{{ struct s{n}_{k} s; memset(&s, 0, sizeof(s)); x += work_{k}(&s, x); }}\n" for k in range(18))
        files[f"unit_{n}.c"] = f'#include "all.h"\n{body}int unit_{n}(int x)\n{{\n{calls}\treturn x;\n}}\n'
    total = " + ".join(f"unit_{n}(c)" for n in range(C_FILES))
    files["main.c"] = f'#include "all.h"\nint main(int c, char **v)\n{{\n\t(void)v;\n\tprintf("%d\\n", {total});\n\treturn 0;\n}}\n'
    return Job("gcc", ("sh", "-ec", "for f in *.c; do gcc -O2 -Wall -c $f; done; gcc -o all *.o -lm; ./all"), files)


def pytest_job() -> Job:
    """Parametrised tests over strings, dictionaries, files and exceptions, with fixtures."""
    files = {"library.py": (
        "def words(text):\n    counts = {}\n    for word in text.split():\n"
        "        counts[word] = counts.get(word, 0) + 1\n    return counts\n\n"
        "def primes(limit):\n    return [n for n in range(2, limit) if all(n % d for d in range(2, int(n ** 0.5) + 1))]\n")}
    for n in range(TEST_FILES):
        files[f"test_{n}.py"] = (
            "import json\nimport pytest\nfrom library import primes, words\n\n\n@pytest.fixture\ndef text():\n"
            f"    return ' '.join(f'w{{i % {n + 7}}}' for i in range(2000))\n\n\n"
            f"@pytest.mark.parametrize('k', range({TESTS_EACH}))\ndef test_words(text, k, tmp_path):\n"
            "    counts = words(text)\n    (tmp_path / 'c.json').write_text(json.dumps(counts))\n"
            "    assert json.loads((tmp_path / 'c.json').read_text()) == counts\n    assert sum(counts.values()) == 2000\n\n\n"
            f"@pytest.mark.parametrize('k', range({TESTS_EACH}))\ndef test_primes(k):\n    found = primes(600 + k)\n"
            "    assert found[:4] == [2, 3, 5, 7]\n    with pytest.raises(ZeroDivisionError):\n        1 / 0\n")
    python = os.path.realpath(sys.executable)
    if not python.startswith("/usr/"):
        raise SystemExit(f"{python} is not below /usr, which is what a box shows")
    return Job("pytest", (python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", "tmp"), files,
               Path(pytest.__file__).resolve().parent.parent)


def bare(job: Job, place: Path) -> float:
    """CPU seconds of the job and all that it waited for."""
    job.lay_out(place)
    environment = {"PATH": _PATH, "LANG": "C.UTF-8", "HOME": str(place), **job.environment}
    process = subprocess.Popen(job.argv, cwd=place, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{job.name}, bare: exit status {process.returncode}")
    return usage.ru_utime + usage.ru_stime


def on_cpu(pid: int) -> float:
    """Seconds that the threads of a process have run. Source: Documentation/scheduler/sched-stats.rst, /proc/PID/schedstat."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def boxed(guard: Guard, level: Level) -> Callable[[Job, Path], float]:
    policy = with_level(load_policy(POLICY), level)

    def run(job: Job, place: Path) -> float:
        job.lay_out(place)
        binds = (BindRequest(source=job.packages, target=str(job.packages)),) if job.packages is not None else ()
        request = RunRequest(policy=policy, argv=tuple(map(os.fsencode, job.argv)), workspace=place, workspace_named=True,
                             bind_ro=binds, env=job.environment, keep=KeepMode.DISCARD)
        helpers = (guard.holder.pid, guard.holder.launcher_pid)
        before = time.process_time() + sum(map(on_cpu, helpers))
        with BoxIO(stdin=None, stdout=Capture(1 << 16), stderr=Capture(1 << 16)) as io:
            outcome = guard.run(request, io)
        own = time.process_time() + sum(map(on_cpu, helpers)) - before
        if outcome.exit.code != 0 or outcome.verdict.cls is not VerdictClass.CLEAN or not outcome.verdict.complete:
            raise SystemExit(f"{job.name}, {level.value}: {outcome.exit} {outcome.verdict}")
        return outcome.usage.cpu_s + own

    return run


def upper_bound(values: Sequence[float], confidence: float = 0.95) -> float:
    """The smallest order statistic that the true median is below with this confidence; infinite for too few values."""
    ordered = sorted(values)
    below = 0.0
    for k in range(len(ordered)):
        below += math.comb(len(ordered), k) / 2 ** len(ordered)
        if below >= confidence:
            # k values or fewer lie below the median with this confidence: it is under the next one.
            return ordered[k]
    return math.inf


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--level", action="append", choices=[level.value for level in Level])
    parser.add_argument("--job", action="append", choices=["gcc", "pytest"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    levels = [Level(word) for word in options.level or ("full", "cold")]
    jobs = [job for job in (gcc_job(), pytest_job()) if not options.job or job.name in options.job]
    print(f"{platform.machine()} Linux {platform.release()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, "
          f"Python {platform.python_version()}, {options.pairs} pairs, {time.strftime('%Y-%m-%d', time.gmtime())}")
    results = []
    met = True
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name, Guard.open(Path(name) / "state") as guard:
        for job in jobs:
            sides = {"bare": bare, **{level.value: boxed(guard, level) for level in levels}, "A/A": bare}
            times: dict[str, list[float]] = {side: [] for side in sides}
            for number in range(options.pairs + 1):
                order = list(sides)
                random.Random(number).shuffle(order)
                for side in order:
                    place = Path(name) / "work"
                    place.mkdir(mode=0o755)
                    took = sides[side](job, place)
                    shutil.rmtree(place)
                    if number:  # the first round warms the page cache
                        times[side].append(took)
            for side in [*(level.value for level in levels), "A/A"]:
                ratios = [mine / base for mine, base in zip(times[side], times["bare"], strict=True)]
                bound = upper_bound(ratios)
                row = {"job": job.name, "side": side, "median_ratio": statistics.median(ratios), "upper_95": bound,
                       "bare_cpu_s": statistics.median(times["bare"]), "cpu_s": statistics.median(times[side]), "ratios": ratios}
                results.append(row)
                print(f"{job.name:<7} {side:<5} ratio {row['median_ratio']:.3f}, below {bound:.3f} (95 %), "
                      f"{row['cpu_s']:.3f} s CPU, bare {row['bare_cpu_s']:.3f} s", flush=True)
                met = met and (side == "A/A" or bound <= TARGET)
    print(f"target: upper bound at most {TARGET}: {'met' if met else 'not met'}")
    if options.json:
        options.json.write_text(json.dumps({"pairs": options.pairs, "results": results}, indent=1) + "\n")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
