"""The native part of the build: C helpers and the BPF object are made by make and put beside the Python modules.

Everything else is in pyproject.toml. A wheel carries what `make -C dsec_guard/native` built, so that a host that
installs it needs no compiler; it is for x86-64 Linux and any Python 3, since nothing links against the interpreter.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
NATIVE = HERE / "dsec_guard" / "_native"
NATIVE_OUTPUTS = ("dg-launcher", "dg-init", "dg-holder", "libdgdrain.so", "dg_guard.bpf.o")
DATA = ("policies", "profiles", "detectors", "replays")


def build_native() -> None:
    """Run make; its own output says what is missing when it fails."""
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        raise SystemExit("dsec-guard builds on x86-64 Linux only")
    tools = [tool for tool in ("make", "gcc", "clang-14") if shutil.which(tool) is None]
    if tools:
        raise SystemExit(f"dsec-guard's native part needs {', '.join(tools)}: apt-get install make gcc clang-14 llvm-14")
    subprocess.run(["make", "-C", str(HERE / "dsec_guard" / "native"), "all"], check=True)


class BuildWithNative(build_py):
    """build_py, with the native outputs and the shipped data copied into the package."""

    def run(self) -> None:
        build_native()
        super().run()
        if self.editable_mode:  # the checkout itself is on the path, data included
            return
        package = Path(self.build_lib) / "dsec_guard"
        (package / "_native").mkdir(parents=True, exist_ok=True)
        for name in NATIVE_OUTPUTS:
            shutil.copy(NATIVE / name, package / "_native" / name)
        for kind in DATA:
            # The tree is made anew: a file deleted since the last build must not ship.
            shutil.rmtree(package / "data" / kind, ignore_errors=True)
            shutil.copytree(HERE / kind, package / "data" / kind)


class PlatformWheel(bdist_wheel):
    """Binaries inside, but none of them tied to a Python version."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", "linux_x86_64"


class BinaryDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True


setup(cmdclass={"build_py": BuildWithNative, "bdist_wheel": PlatformWheel}, distclass=BinaryDistribution)
