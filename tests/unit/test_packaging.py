"""What is built, what it carries, and what it needs from the machine that installs it."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import dsec_guard

tomllib = pytest.importorskip("tomllib")
REPOSITORY = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))
PURE = ("dsec_guard", "dsec_guard.model", "dsec_guard.errors", "dsec_guard.client")
SUPPORTED = ("3.10", "3.11", "3.12", "3.13")


def interpreters() -> dict[str, str]:
    """The supported Python versions that are on this machine, by version."""
    found: dict[str, str] = {}
    places = [Path(p) for p in os.environ.get("PATH", "").split(os.pathsep) if p]
    places += sorted((Path.home() / ".pyenv" / "versions").glob("*/bin"))
    for place in places:
        for version in SUPPORTED:
            program = place / f"python{version}"
            if version in found or not os.access(program, os.X_OK):
                continue
            told = subprocess.run([program, "-I", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
                                  capture_output=True, text=True, timeout=60, check=False)
            if told.stdout.strip() == version:
                found[version] = str(program)
    return found


def test_the_package_itself_needs_nothing():
    assert PROJECT["project"]["dependencies"] == []
    assert PROJECT["project"]["requires-python"] == ">=3.10"


def test_the_guards_dependencies_are_asked_for_only_where_they_work():
    for requirement in PROJECT["project"]["optional-dependencies"]["guard"]:
        assert "python_version >= '3.11'" in requirement, requirement


def test_every_third_party_import_is_a_declared_dependency():
    names = {"yaml": "pyyaml"}
    declared = {r.split(";")[0].split(">")[0].strip() for r in PROJECT["project"]["optional-dependencies"]["guard"]}
    missing = set()
    for path in (REPOSITORY / "dsec_guard").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            modules = ([a.name for a in node.names] if isinstance(node, ast.Import)
                       else [node.module or ""] if isinstance(node, ast.ImportFrom) else [])
            for module in modules:
                top = module.split(".")[0]
                if top not in sys.stdlib_module_names and top not in ("dsec_guard", "annotated_types"):
                    missing |= {names.get(top, top)} - declared
    assert not missing      # annotated_types comes with pydantic, whose constraints are its types


def test_the_entry_point_exists():
    module, _, name = PROJECT["project"]["scripts"]["dsec-guard"].partition(":")
    assert (REPOSITORY / Path(*module.split("."))).with_suffix(".py").is_file()
    imported = __import__(module, fromlist=[name])
    assert callable(getattr(imported, name))


@pytest.mark.parametrize("version", SUPPORTED)
def test_what_a_trainer_imports_works_beside_an_incompatible_pydantic(version, tmp_path):
    program = interpreters().get(version)
    if program is None:
        pytest.skip(f"no python{version} on this machine")
    for broken in ("pydantic", "click", "rich", "yaml", "pyroute2", "pyseccomp"):
        (tmp_path / f"{broken}.py").write_text("raise ImportError('an incompatible version')\n")
    code = f"import importlib, sys\nfor name in {PURE!r}: importlib.import_module(name)\nprint(sys.version_info[:2])"
    done = subprocess.run([program, "-S", "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False,
                          env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{tmp_path}:{REPOSITORY}",
                               "PYTHONDONTWRITEBYTECODE": "1"})
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of a copy of this checkout, native part included."""
    place = tmp_path_factory.mktemp("wheel")
    source = place / "source"
    shutil.copytree(REPOSITORY, source, symlinks=True, ignore=shutil.ignore_patterns(
        ".venv", ".git", "build", "dist", "*.egg-info", "__pycache__", "_native", ".*_cache", "tests"))
    done = subprocess.run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(place / "out"), str(source)],
                          capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (built,) = (place / "out").glob("*.whl")
    return built


@pytest.mark.slow
@pytest.mark.needs("gcc")
@pytest.mark.needs("clang")
def test_the_wheel_carries_data_and_native_parts(wheel):
    assert wheel.name == f"dsec_guard-{dsec_guard.__version__}-py3-none-linux_x86_64.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    for kind in ("policies", "profiles", "detectors", "replays"):
        shipped = {str(p.relative_to(REPOSITORY)) for p in (REPOSITORY / kind).rglob("*") if p.is_file()}
        assert shipped
        assert {f"dsec_guard/data/{name}" for name in shipped} <= names
    for name in ("dg-launcher", "dg-init", "dg-holder", "libdgdrain.so", "dg_guard.bpf.o"):
        assert f"dsec_guard/_native/{name}" in names
    assert not [n for n in names if n.endswith((".c", ".h", ".pyc")) or n.startswith(("tests/", "demo/"))]
    mode = zipfile.ZipFile(wheel).getinfo("dsec_guard/_native/dg-launcher").external_attr >> 16
    assert mode & 0o111


@pytest.mark.slow
@pytest.mark.needs("gcc")
@pytest.mark.needs("clang")
def test_an_installed_wheel_finds_its_data(wheel, tmp_path):
    target = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(target)
    code = ("from dsec_guard.policy.data import data_dir; from dsec_guard.policy.load import load_policy\n"
            "print(data_dir('policies')); print(load_policy('untrusted-script').name)")
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True,
                          env={**os.environ, "PYTHONPATH": str(target)}, cwd=tmp_path)
    assert done.stdout.split() == [str(target / "dsec_guard" / "data" / "policies"), "untrusted-script"]


def test_nothing_built_is_kept_in_git():
    if not (REPOSITORY / ".git").exists():
        pytest.skip("no git checkout")
    tracked = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.split()
    assert not [t for t in tracked if t.endswith((".o", ".so", ".whl", ".pyc")) or "/_native/" in t]
