#!/usr/bin/env python3
"""Leaves a link to a file of the host in the directory that is collected."""

import json
import os
import sys

ID = "own-handin-link"


def attempt():
    os.symlink("/var/lib/dsec-guard-selftest/host_note", "/workspace/handin/result.txt")
    os.symlink("../../../../etc/shadow", "/workspace/handin/users")
    return False, "links made; what is collected decides"


def main():
    try:
        succeeded, detail = attempt()
    except (OSError, MemoryError) as e:
        succeeded, detail = False, f"{type(e).__name__}: {e}"
    print("\n" + json.dumps({"id": ID, "attempted": True, "succeeded": succeeded, "detail": detail[:300]}), flush=True)
    return 10 if succeeded else 0


if __name__ == "__main__":
    sys.exit(main())
