#!/usr/bin/env python3
"""Forks a tree of sleepers far beyond the task limit."""

import json
import os
import sys
import time

ID = "own-fork-tree"


def attempt():
    made, refused = 0, 0
    while refused < 200 and made < 400:
        try:
            if os.fork() == 0:
                time.sleep(6)
                os._exit(0)
            made += 1
        except OSError:
            refused += 1
    return made > 200, f"{made} made, {refused} refused"


def main():
    try:
        succeeded, detail = attempt()
    except (OSError, MemoryError) as e:
        succeeded, detail = False, f"{type(e).__name__}: {e}"
    print("\n" + json.dumps({"id": ID, "attempted": True, "succeeded": succeeded, "detail": detail[:300]}), flush=True)
    return 10 if succeeded else 0


if __name__ == "__main__":
    sys.exit(main())
