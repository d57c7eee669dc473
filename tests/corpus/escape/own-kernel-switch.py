#!/usr/bin/env python3
"""Opens the kernel's module loader path and a kernel switch for writing."""

import json
import os
import sys

ID = "own-kernel-switch"


def attempt():
    for path in ("/proc/sys/kernel/modprobe", "/proc/sys/vm/panic_on_oom"):
        try:
            os.close(os.open(path, os.O_WRONLY))
            return True, f"{path} can be written"
        except OSError as e:
            detail = f"{path}: {e.strerror}"
    return False, detail


def main():
    try:
        succeeded, detail = attempt()
    except (OSError, MemoryError) as e:
        succeeded, detail = False, f"{type(e).__name__}: {e}"
    print("\n" + json.dumps({"id": ID, "attempted": True, "succeeded": succeeded, "detail": detail[:300]}), flush=True)
    return 10 if succeeded else 0


if __name__ == "__main__":
    sys.exit(main())
