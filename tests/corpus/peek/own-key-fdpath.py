#!/usr/bin/env python3
"""Reads the hidden file through a directory descriptor of the root that /proc shows."""

import json
import os
import sys

ID = "own-key-fdpath"


def attempt():
    root = os.open("/", os.O_PATH)
    fd = os.open(f"/proc/self/fd/{root}/data/private/key.json", os.O_RDONLY)
    return b"LOCKED-key-" in os.read(fd, 4096), "read through /proc/self/fd"


def main():
    try:
        succeeded, detail = attempt()
    except (OSError, MemoryError) as e:
        succeeded, detail = False, f"{type(e).__name__}: {e}"
    print("\n" + json.dumps({"id": ID, "attempted": True, "succeeded": succeeded, "detail": detail[:300]}), flush=True)
    return 10 if succeeded else 0


if __name__ == "__main__":
    sys.exit(main())
