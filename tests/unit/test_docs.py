"""What the documents say against what the code does."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from dsec_guard.cli import options
from dsec_guard.model import ExitReason
from dsec_guard.policy.load import load_policy
from dsec_guard.sandbox.environment import compose_environment

REPOSITORY = Path(__file__).resolve().parents[2]
DOCUMENTS = ("README.md", "ARCHITECTURE.md", "THREAT_MODEL.md", "SECURITY.md", "CHANGELOG.md", "CONTRIBUTING.md",
             "docs/benchmarks.md", "docs/corpus.md")


def text(name: str) -> str:
    return (REPOSITORY / name).read_text("utf-8")


def table(document: str, heading: str) -> list[list[str]]:
    """Cells of the first table after `heading`, without its head."""
    after = text(document).split(heading, 1)[1]
    rows = []
    for line in after.splitlines():
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip().strip("|").split("|")])
        elif rows:
            break
    return rows[2:]


def setup_steps() -> list[tuple[str, str]]:
    """(step, reason) of the launcher's table in the source."""
    source = text("dsec_guard/native/dg_setup.c")
    body = source[source.index("dg_setup_steps[] = {"):]
    body = body[:body.index("\n};")]
    steps = []
    for line in body.splitlines():
        step = re.match(r"\s*STEP(?:_IN)?\((\w+)[^)]*\),\s*(?:/\*\s*(.*?)\s*\*/)?", line)
        if step:
            steps.append((step.group(1), step.group(2) or ""))
    return steps


def test_the_set_up_table_is_the_launchers():
    steps = setup_steps()
    assert len(steps) > 15
    assert [(row[0].strip("`"), row[1]) for row in table("ARCHITECTURE.md", "<!-- setup-steps: begin -->")] == steps


def test_both_commands_stand_in_the_readme():
    assert "make demo" in text("README.md")
    assert "make test" in text("README.md")


def test_the_exit_statuses_are_the_code():
    stated = " ".join(row[0] for row in table("README.md", "## Exit status"))
    for value in (options.EXIT_FAIL_ON, options.EXIT_WALL_LIMIT, options.EXIT_GUARD_ERROR, options.EXIT_NOT_EXECUTABLE,
                  options.EXIT_NOT_FOUND):
        assert str(value) in stated
    for reason in ExitReason:
        assert f"`{reason.value}`" in text("README.md")


def test_every_variable_of_the_inside_table_is_there_and_none_is_missing():
    inside = compose_environment(load_policy("untrusted-script"), outer={})
    rows = table("README.md", "## What a command finds inside")
    named = set(re.findall(r"`([A-Za-z_]+)`", " ".join(cell for row in rows for cell in row)))
    assert set(inside) - named == set()
    stated = {name for row in rows for name in re.findall(r"`([A-Z][A-Z_]+|npm_config_cache)`", row[0])}
    assert stated - set(inside) == set()


@pytest.mark.parametrize("name", ["LANG", "TZ", "HOSTNAME", "USER", "SHELL", "TMPDIR", "TERM", "SSL_CERT_DIR"])
def test_the_values_of_the_inside_table_are_the_codes(name):
    value = compose_environment(load_policy("untrusted-script"), outer={})[name]
    row = next(r for r in table("README.md", "## What a command finds inside") if f"`{name}`" in r[0])
    assert f"`{value}`" in row[1]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document):
    base = (REPOSITORY / document).parent
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text(document)):
        if "://" not in target:
            assert (base / target).exists(), f"{document}: {target}"


def test_every_test_that_the_threat_model_names_exists():
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text("THREAT_MODEL.md"))
    assert len(named) > 10
    for path, function in named:
        source = REPOSITORY / path
        assert source.is_file(), path
        if function:
            names = {n.name for n in ast.walk(ast.parse(source.read_text("utf-8"))) if isinstance(n, ast.FunctionDef)}
            assert function in names, f"{path}::{function}"


def test_every_command_of_the_readme_exists():
    from dsec_guard.cli.main import COMMANDS

    named = set(re.findall(r"dsec-guard ([a-z]+)", " ".join(re.findall(r"`([^`]*)`", text("README.md")))))
    assert named == set(COMMANDS)


def test_every_shipped_policy_stands_in_the_readme():
    for path in (REPOSITORY / "policies").glob("*.yaml"):
        assert f"`{path.stem}`" in text("README.md")


def test_the_changelog_knows_this_version():
    import dsec_guard

    assert f"## {dsec_guard.__version__}" in text("CHANGELOG.md")


def test_no_loose_ends_in_the_product():
    tracked = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "dsec_guard", "detectors", "policies", "profiles"],
                             cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.split()
    found = [name for name in tracked if (REPOSITORY / name).is_file()
             and re.search(rb"\b(TODO|FIXME|XXX)\b", (REPOSITORY / name).read_bytes())]
    assert not found
