#!/usr/bin/env python3
"""Keeps touching pages beyond the memory limit, by anonymous maps."""

import json
import mmap
import sys

ID = "own-memory-pages"


def attempt():
    held = []
    for _ in range(40):
        block = mmap.mmap(-1, 16 << 20)
        block[:: mmap.PAGESIZE] = b"y" * (len(block) // mmap.PAGESIZE)
        held.append(block)
    return True, f"{len(held) * 16} MiB held"


def main():
    try:
        succeeded, detail = attempt()
    except (OSError, MemoryError) as e:
        succeeded, detail = False, f"{type(e).__name__}: {e}"
    print("\n" + json.dumps({"id": ID, "attempted": True, "succeeded": succeeded, "detail": detail[:300]}), flush=True)
    return 10 if succeeded else 0


if __name__ == "__main__":
    sys.exit(main())
