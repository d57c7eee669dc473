"""Whatever is wrong with the policy, the arguments, the place or the host: one clear line, a next step, the exit status
of the wrapper (125, or 126 and 127 for the program), no traceback, and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsec_guard.host.cgroup import CgroupHost

pytestmark = pytest.mark.needs("run")

REPOSITORY = Path(__file__).resolve().parents[2]
NOBODY = 65534
POLICY = "schema: dsec-guard/policy/v1\nextends: untrusted-script\n"


class Wrapper:
    """`dsec-guard run` with every place it writes to in one directory of the test's own."""

    def __init__(self, top: Path, cli: tuple[str, ...]) -> None:
        self.cli = cli
        self.top = top
        self.work = top / "work"
        self.state = top / "state"
        self.run_dir = top / "run"
        for path in (self.work, self.state, self.run_dir):
            path.mkdir(mode=0o700)
        self.base = f"dsec-guard-bad-{os.getpid()}"
        self.env = {**os.environ, "DSEC_GUARD_STATE": str(self.state), "DSEC_GUARD_RUN_DIR": str(self.run_dir),
                    "DSEC_GUARD_CGROUP": self.base, "TMPDIR": str(top / "tmp")}
        (top / "tmp").mkdir()

    def __call__(self, *words: str | bytes, env: dict[str, str] | None = None, prefix: tuple[str, ...] = (), **options: object,
                 ) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*prefix, *self.cli, "run", *words], text=True, capture_output=True, timeout=120, check=False,
                              **{"cwd": self.work, "stdin": subprocess.DEVNULL, "env": {**self.env, **(env or {})}, **options})

    def policy(self, text: str) -> str:
        path = self.top / "policy.yaml"
        path.write_text(POLICY + text)
        return str(path)

    def left(self) -> list[str]:
        found = [str(path) for path in self.run_dir.rglob("*")
                 if path.relative_to(self.run_dir).parts not in (("uids.lock",), ("instances",))]
        for base in CgroupHost.probe(environ=self.env).bases():
            found += [str(path) for path in base.rglob("*") if path.is_dir()]
        found += [str(path) for path in (self.top / "tmp").iterdir()]
        found += [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(self.top) in line]
        return found

    def runs(self) -> list[Path]:
        """Records of runs: there are none of a run that never began."""
        return sorted((self.state / "runs").glob("*"))


@pytest.fixture
def run(tmp_path: Path, dsec_guard_cli: tuple[str, ...]) -> Iterator[Wrapper]:
    wrapper = Wrapper(tmp_path, dsec_guard_cli)
    yield wrapper
    left = wrapper.left()
    for base in CgroupHost.probe(environ=wrapper.env).bases():
        if base.is_dir():
            base.rmdir()
    assert not left


def refused(done: subprocess.CompletedProcess[str], what: str, status: int = 125) -> None:
    """One line that matches `what`, then what to do next; nothing else that a user has to read."""
    assert done.returncode == status, done.stderr
    lines = done.stderr.splitlines()
    assert len([line for line in lines if line.startswith("dsec-guard: ")]) == 1, done.stderr
    assert re.search(what, lines[0]), done.stderr
    assert len(lines) >= 2, done.stderr
    assert lines[1].startswith("  next: "), done.stderr
    assert not [line for line in lines[1:] if not line.startswith("  next: ")], done.stderr
    assert "Traceback" not in done.stderr
    assert "internal error" not in done.stderr
    assert done.stdout == ""


# ------------------------------------------------------------------------------------------------------------ policy


@pytest.mark.parametrize(("text", "what"), [
    ("limts: {pids: 5}\n", r"policy.yaml:3:1: limts: .*limits"),
    ("limits: {memory: 2 parsecs}\n", r"policy.yaml:3:18: limits.memory: "),
    ("limits: {wall_time: 5MiB}\n", r"policy.yaml:3:21: limits.wall_time: "),
    ("limits: {pids: lots}\n", r"policy.yaml:3:16: limits.pids: "),
    ("limits: {pids: 5\n", r"policy.yaml:\d+:\d+: "),
    ("mode: enforce\nmode: observe\n", r"policy.yaml:4:1: .*mode"),
    ("network: open\n", r"network"),
])
def test_a_wrong_policy_names_the_place(run: Wrapper, text: str, what: str) -> None:
    refused(run("--policy", run.policy(text), "--", "true"), what)
    assert not run.runs()


def test_a_policy_that_is_not_there(run: Wrapper) -> None:
    refused(run("--policy", "/nowhere/policy.yaml", "--", "true"), "/nowhere/policy.yaml.*No such file")


def test_a_policy_name_that_does_not_exist(run: Wrapper) -> None:
    refused(run("--policy", "untrusted-scrpt", "--", "true"), "untrusted-scrpt")


def test_a_policy_that_cannot_be_read(run: Wrapper) -> None:
    (run.top / "policy.yaml").mkdir()
    refused(run("--policy", str(run.top / "policy.yaml"), "--", "true"), "policy.yaml.*no regular file")


def test_a_policy_of_random_bytes(run: Wrapper) -> None:
    (run.top / "policy.yaml").write_bytes(bytes(range(256)))
    refused(run("--policy", str(run.top / "policy.yaml"), "--", "true"), "policy.yaml")


def test_all_mistakes_of_a_policy_are_told_together(run: Wrapper) -> None:
    done = run("--policy", run.policy("limits: {memory: 2 parsecs, pids: lots}\n"), "--", "true")
    assert done.returncode == 125
    assert "limits.memory" in done.stderr
    assert "limits.pids" in done.stderr


# --------------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(("words", "what"), [
    (("--workspace", "/nowhere/at/all", "--", "true"), "/nowhere/at/all"),
    (("--workspace", "/etc/passwd", "--", "true"), "/etc/passwd.*directory"),
    (("--limit", "pids=lots", "--", "true"), "pids.*lots"),
    (("--limit", "memory=999TiB", "--", "true"), "memory"),
    (("--wall", "soon", "--", "true"), "soon"),
    (("--bind-ro", "/nowhere", "--", "true"), "--bind-ro /nowhere"),
    (("--report", "/nowhere/report.json", "--", "true"), "--report /nowhere/report.json"),
    (("--record", "/nowhere/events.jsonl", "--", "true"), "--record /nowhere/events.jsonl"),
    (("--pack", "/nowhere/changes.tar.zst", "--", "true"), "--pack /nowhere/changes.tar.zst"),
    (("--collect", "/nowhere/out/put", "--", "true"), "--collect /nowhere/out/put"),
])
def test_wrong_arguments(run: Wrapper, words: tuple[str, ...], what: str) -> None:
    refused(run(*words), what)
    assert not run.runs()


@pytest.mark.parametrize("where", ["/", "home", "above home"])
def test_a_workspace_that_is_too_much_has_to_be_named(run: Wrapper, where: str) -> None:
    home = run.work / "home"
    home.mkdir()
    refused(run("--", "true", cwd={"/": Path("/"), "home": home, "above home": run.work}[where], env={"HOME": str(home)}),
            "workspace|directory")
    assert not run.runs()


def test_a_current_directory_that_was_deleted(run: Wrapper) -> None:
    script = 'mkdir gone && cd gone && rmdir ../gone && exec "$@"'
    refused(run("--", "true", prefix=("sh", "-c", script, "sh")), "current directory does not exist")


# -------------------------------------------------------------------------------------------------------- the program


@pytest.mark.parametrize(("argv", "status", "reason"), [
    (("no-such-program",), 127, "not_found"),
    (("/no/such/program",), 127, "not_found"),
    (("./data",), 126, "not_executable"),
    (("/etc",), 126, "not_executable"),
    (("./text-without-an-interpreter",), 126, "not_executable"),
    (("./script-of-nothing",), 127, "not_found"),
])
def test_a_program_that_cannot_be_run(run: Wrapper, argv: tuple[str, ...], status: int, reason: str) -> None:
    (run.work / "data").write_text("data\n")
    for name, text in (("text-without-an-interpreter", "\x7fnonsense\n"), ("script-of-nothing", "#!/no/such/interpreter\n")):
        (run.work / name).write_text(text)
        (run.work / name).chmod(0o755)
    report = run.top / "report.json"
    done = run("--report", str(report), "--", *argv)
    assert done.returncode == status, done.stderr
    assert json.loads(report.read_text())["exit"]["reason"] == reason
    assert argv[0] in done.stderr
    assert "Traceback" not in done.stderr


def test_one_argument_of_more_than_the_kernel_takes(run: Wrapper) -> None:
    """MAX_ARG_STRLEN is 128 KiB, so that such an argument cannot come in by the command line; as many as fit pass."""
    many = ["x" * 1000] * 1500
    done = run("--quiet", "--", "sh", "-c", 'echo $#; printf %s "$@" | wc -c', *many)
    assert done.stdout.split() == ["1499", "1499000"], done.stderr


# ---------------------------------------------------------------------------------------------------------- the place


def in_mount_ns(script: str) -> tuple[str, ...]:
    """Run what follows after `script` in a mount namespace of its own."""
    return ("unshare", "--mount", "--propagation", "private", "sh", "-ec", script + '\nexec "$@"', "sh")


def test_a_full_state_directory(run: Wrapper) -> None:
    full = in_mount_ns('mount -t tmpfs -o size=64k,nr_inodes=16,mode=700 none "$DSEC_GUARD_STATE"\n'
                       'head -c 64k /dev/zero > "$DSEC_GUARD_STATE/filler" || true\n'
                       'for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14; do : > "$DSEC_GUARD_STATE/$i" || break; done 2>/dev/null')
    refused(run("--", "true", prefix=full), "state|space")


def test_a_state_directory_that_fills_up_during_the_run(run: Wrapper) -> None:
    """There is an inode for the run, and no block for its records: the command ran, and the result cannot be kept."""
    full = in_mount_ns('mount -t tmpfs -o size=64k,mode=700 none "$DSEC_GUARD_STATE"\nmkdir -m 700 "$DSEC_GUARD_STATE/runs"\n'
                       'head -c 64k /dev/zero > "$DSEC_GUARD_STATE/filler" || true')
    refused(run("--quiet", "--", "true", prefix=full), "space|cannot write")


def test_a_read_only_state_directory(run: Wrapper) -> None:
    read_only = in_mount_ns('mount --bind "$DSEC_GUARD_STATE" "$DSEC_GUARD_STATE"\nmount -o remount,bind,ro "$DSEC_GUARD_STATE"')
    refused(run("--", "true", prefix=read_only), "state.*[Rr]ead-only")


def test_a_state_directory_of_somebody_else(run: Wrapper) -> None:
    os.chown(run.state, NOBODY, NOBODY)
    refused(run("--", "true"), f"belongs to uid {NOBODY}")


def test_a_state_directory_that_others_may_write_to(run: Wrapper) -> None:
    run.state.chmod(0o777)
    refused(run("--", "true"), "others may write")


def test_a_relative_state_directory(run: Wrapper) -> None:
    refused(run("--", "true", env={"DSEC_GUARD_STATE": "state"}), "absolute")


def test_a_relative_run_directory(run: Wrapper) -> None:
    refused(run("--", "true", env={"DSEC_GUARD_RUN_DIR": "run"}), "DSEC_GUARD_RUN_DIR=run.*absolute")


# ----------------------------------------------------------------------------------------------------------- the host


@pytest.fixture
def for_everyone(run: Wrapper) -> Iterator[Callable[[Path], None]]:
    """The code under test in a place that any user may read, where the checkout is not."""
    place = Path(f"/var/tmp/dsec-guard-test-{os.getpid()}")
    place.mkdir(mode=0o755)
    shutil.copytree(REPOSITORY / "dsec_guard", place / "dsec_guard", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("policies", "profiles", "detectors"):
        shutil.copytree(REPOSITORY / name, place / name)
    run.env["PYTHONPATH"] = str(place)
    run.env["PYTHONDONTWRITEBYTECODE"] = "1"
    yield lambda path: os.chown(path, NOBODY, NOBODY)
    shutil.rmtree(place)


def _readable_for_all(path: Path) -> bool:
    return all(parent.stat().st_mode & 0o005 == 0o005 for parent in (path, *path.parents))


@pytest.mark.skipif(not _readable_for_all(Path(sys.prefix)), reason="another user cannot run this Python environment")
def test_without_privilege(run: Wrapper, for_everyone: Callable[[Path], None]) -> None:
    for path in (run.work, run.state, run.run_dir):
        for_everyone(path)
    for parent in (run.top, *run.top.parents):
        if parent != Path("/tmp") and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o011)
    done = run("--", "true", user=NOBODY, group=NOBODY, extra_groups=[])
    refused(done, f"needs root's privileges: uid {NOBODY}")
    assert not run.runs()


@pytest.mark.parametrize("feature", ["btf", "bpf_tracing", "landlock", "cgroup_v2", "user_namespaces", "overlay", "seccomp"])
def test_a_feature_that_is_missing_refuses_the_run(run: Wrapper, feature: str) -> None:
    refused(run("--", "true", env={"DSEC_GUARD_PRETEND_MISSING": feature}), "")
    assert not run.runs()


@pytest.mark.parametrize("feature", ["btf", "bpf_tracing"])
def test_degrade_runs_without_bpf_binds_and_is_never_clean(run: Wrapper, feature: str) -> None:
    report = run.top / "report.json"
    done = run("--policy", run.policy("if_unsupported: degrade\n"), "--report", str(report), "--", "sh", "-c",
               "echo ran; mount -t tmpfs x /tmp 2>/dev/null && echo MOUNTED; cat /proc/1/environ 2>/dev/null && echo READ; exit 0",
               env={"DSEC_GUARD_PRETEND_MISSING": feature})
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr
    result = json.loads(report.read_text())
    assert result["verdict"]["class"] == "inconclusive"
    assert not result["verdict"]["complete"]
    states = {layer["name"]: layer["state"] for layer in result["layers"]}
    assert states["monitor"] == "missing"
    assert states["seccomp"] == states["landlock"] == "enforced"


def test_degrade_runs_without_landlock_and_says_so(run: Wrapper) -> None:
    report = run.top / "report.json"
    done = run("--policy", run.policy("if_unsupported: degrade\n"), "--report", str(report), "--", "true",
               env={"DSEC_GUARD_PRETEND_MISSING": "landlock"})
    assert done.returncode == 0, done.stderr
    states = {layer["name"]: layer["state"] for layer in json.loads(report.read_text())["layers"]}
    assert states["landlock"] == "missing"
    assert states["seccomp"] == "enforced"


@pytest.mark.parametrize("place", ["state", "state/runs", "run"])
def test_what_verdicts_are_made_from_is_no_workspace(run: Wrapper, place: str) -> None:
    """The command could change the log of its own incidents, or of others'."""
    (run.state / "runs").mkdir(exist_ok=True)
    refused(run("--workspace", str(run.top / place), "--", "true"), "lies in dsec-guard's own directory")
    assert not (run.state / "incidents.jsonl").exists()


def test_a_workspace_around_the_records_shows_none_of_them(run: Wrapper) -> None:
    log = run.state / "incidents.jsonl"
    log.write_text("kept\n")
    done = run("--workspace", str(run.top), "--", "sh", "-c",
               f"ls -A {run.state} {run.run_dir}; echo > {log}; mv {run.state} {run.top}/else; echo done > {run.top}/made")
    assert "incidents" not in done.stdout
    assert "uids" not in done.stdout
    assert (run.top / "made").read_text() == "done\n"
    assert log.read_text().startswith("kept\n")


def test_a_current_directory_that_was_removed(run: Wrapper) -> None:
    gone = run.top / "gone"
    gone.mkdir()
    done = run("--workspace", str(run.work), "--", "true", cwd=gone, preexec_fn=gone.rmdir)
    assert (done.returncode, "internal error" in done.stderr) == (0, False), done.stderr
