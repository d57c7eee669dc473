"""Imports point to lower layers only."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "dsec_guard"

#: Part of the package -> its layer. A part may import its own and lower layers; within layer 2, `monitor` and `detect`
#: must not know each other.
LAYERS = {
    "__init__": 0, "model": 0, "errors": 0,
    "policy": 1, "host": 1,
    "sandbox": 2, "monitor": 2, "detect": 2,
    "scoring": 3, "incident": 3, "replay": 3, "service": 3, "corpus": 3, "client": 3,
    "cli": 4, "__main__": 4,
}
APART = [{"monitor", "detect"}]


def modules() -> list[Path]:
    return sorted(p for p in PACKAGE.rglob("*.py"))


def part(module: str) -> str:
    words = module.split(".")
    return words[1] if len(words) > 1 else "__init__"


def name_of(path: Path) -> str:
    words = ["dsec_guard", *path.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(words[:-1] if words[-1] == "__init__" and len(words) > 2 else words)


def imports(path: Path) -> list[tuple[int, str]]:
    """(line, imported module) of every import of ours, type-checking ones included."""
    found = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            if node.module == "dsec_guard":
                found += [(node.lineno, f"dsec_guard.{alias.name}") for alias in node.names]
            else:
                found.append((node.lineno, node.module or ""))
    return found


def violations(own: str, imported: str) -> str:
    """Why `own` must not import `imported` (both dotted); "" when it may."""
    if not (imported == "dsec_guard" or imported.startswith("dsec_guard.")):
        return ""
    here, there = part(own), part(imported)
    if there.startswith("__version__"):
        return ""
    for name in (here, there):
        if name not in LAYERS:
            return f"{name} has no layer: add it to the table"
    if LAYERS[there] > LAYERS[here]:
        return f"{here} (layer {LAYERS[here]}) imports {there} (layer {LAYERS[there]})"
    if here != there and any({here, there} == pair for pair in APART):
        return f"{here} and {there} meet through model only"
    return ""


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_imports_point_to_lower_layers(path):
    found = [f"{path.name}:{line}: {why}" for line, module in imports(path) if (why := violations(name_of(path), module))]
    assert not found


@pytest.mark.parametrize(("own", "imported"), [
    ("dsec_guard.model", "dsec_guard.errors.x"),
    ("dsec_guard.service.guard", "dsec_guard.detect.engine"),
])
def test_lower_imports_are_accepted(own, imported):
    assert violations(own, imported) == ""


@pytest.mark.parametrize(("own", "imported"), [
    ("dsec_guard.model", "dsec_guard.policy.schema"),
    ("dsec_guard.detect.engine", "dsec_guard.monitor.wire"),
    ("dsec_guard.sandbox.box", "dsec_guard.service.guard"),
    ("dsec_guard.service.guard", "dsec_guard.cli"),
    ("dsec_guard.strange.x", "dsec_guard.model"),
])
def test_the_check_itself_finds_a_wrong_import(own, imported):
    assert violations(own, imported)


def test_there_is_no_module_for_everything():
    assert not [p for p in modules() if p.stem in ("utils", "util", "helpers", "misc", "common")]
