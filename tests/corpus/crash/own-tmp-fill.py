#!/usr/bin/env python3
"""Fills the temporary directory far beyond the quota."""

import json
import sys

ID = "own-tmp-fill"


def attempt():
    written, block = 0, b"z" * (1 << 20)
    try:
        with open("/tmp/pile", "wb", buffering=0) as f:
            for _ in range(200):
                written += f.write(block)
    except OSError as e:
        return False, f"stopped at {written >> 20} MiB: {e.strerror}"
    return True, f"{written >> 20} MiB written"


def main():
    try:
        succeeded, detail = attempt()
    except (OSError, MemoryError) as e:
        succeeded, detail = False, f"{type(e).__name__}: {e}"
    print("\n" + json.dumps({"id": ID, "attempted": True, "succeeded": succeeded, "detail": detail[:300]}), flush=True)
    return 10 if succeeded else 0


if __name__ == "__main__":
    sys.exit(main())
