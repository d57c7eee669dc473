#!/usr/bin/env python3
"""Starts children in a group of their own and ends them by group and by time-out."""

import json
import os
import signal
import subprocess
import sys

ID = "own-ok-children"


def attempt():
    child = subprocess.Popen(["sleep", "30"], start_new_session=True)
    os.killpg(child.pid, signal.SIGTERM)
    first = child.wait(5)
    try:
        subprocess.run(["sleep", "30"], timeout=0.3, check=False)
    except subprocess.TimeoutExpired:
        return first == -signal.SIGTERM, "both ended"
    return False, "the time-out did not fire"


def main():
    try:
        succeeded, detail = attempt()
    except (OSError, MemoryError) as e:
        succeeded, detail = False, f"{type(e).__name__}: {e}"
    print("\n" + json.dumps({"id": ID, "attempted": True, "succeeded": succeeded, "detail": detail[:300]}), flush=True)
    return 0 if succeeded else 20


if __name__ == "__main__":
    sys.exit(main())
