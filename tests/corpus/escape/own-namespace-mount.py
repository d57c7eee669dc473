#!/usr/bin/env python3
"""Makes mount and user namespaces of its own and mounts a file system there."""

import ctypes
import json
import sys

ID = "own-namespace-mount"


def attempt():
    libc = ctypes.CDLL(None, use_errno=True)
    made = libc.unshare(0x10000000 | 0x00020000)    # CLONE_NEWUSER | CLONE_NEWNS
    mounted = libc.mount(b"none", b"/mnt", b"tmpfs", 0, None)
    return made == 0 and mounted == 0, f"unshare {made}, mount {mounted}"


def main():
    try:
        succeeded, detail = attempt()
    except (OSError, MemoryError) as e:
        succeeded, detail = False, f"{type(e).__name__}: {e}"
    print("\n" + json.dumps({"id": ID, "attempted": True, "succeeded": succeeded, "detail": detail[:300]}), flush=True)
    return 10 if succeeded else 0


if __name__ == "__main__":
    sys.exit(main())
