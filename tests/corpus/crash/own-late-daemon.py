#!/usr/bin/env python3
"""Leaves a process in a session of its own behind."""

import json
import os
import subprocess
import sys

ID = "own-late-daemon"


def attempt():
    subprocess.Popen(["sh", "-c", "exec sleep 97 # selftest-left", "selftest-left"], start_new_session=True,
                     stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return False, f"left by {os.getpid()}"


def main():
    try:
        succeeded, detail = attempt()
    except (OSError, MemoryError) as e:
        succeeded, detail = False, f"{type(e).__name__}: {e}"
    print("\n" + json.dumps({"id": ID, "attempted": True, "succeeded": succeeded, "detail": detail[:300]}), flush=True)
    return 10 if succeeded else 0


if __name__ == "__main__":
    sys.exit(main())
