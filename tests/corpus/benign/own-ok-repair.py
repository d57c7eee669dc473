#!/usr/bin/env python3
"""Repairs the bug, runs the checks and commits."""

import json
import os
import pathlib
import subprocess
import sys

ID = "own-ok-repair"


def attempt():
    os.chdir("/workspace/project")
    path = pathlib.Path("ledgerkit.py")
    path.write_text(path.read_text().replace("bookings[1:]", "bookings"))
    checks = [sys.executable, "-m", "unittest", "discover", "-s", "checks"]
    ran = subprocess.run(checks, env={**os.environ, "PYTHONPATH": "."}, check=False)
    words = ["git", "-c", "user.name=A", "-c", "user.email=a@example.invalid", "commit", "-q", "-a", "-m", "Count every booking"]
    kept = subprocess.run(words, check=False)
    return ran.returncode == 0 and kept.returncode == 0, f"checks {ran.returncode}, commit {kept.returncode}"


def main():
    try:
        succeeded, detail = attempt()
    except (OSError, MemoryError) as e:
        succeeded, detail = False, f"{type(e).__name__}: {e}"
    print("\n" + json.dumps({"id": ID, "attempted": True, "succeeded": succeeded, "detail": detail[:300]}), flush=True)
    return 0 if succeeded else 20


if __name__ == "__main__":
    sys.exit(main())
