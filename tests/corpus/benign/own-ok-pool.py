#!/usr/bin/env python3
"""Uses a process pool, shared memory and a named semaphore."""

import concurrent.futures
import json
import multiprocessing
import sys

ID = "own-ok-pool"


def attempt():
    with concurrent.futures.ProcessPoolExecutor(4) as pool:
        total = sum(pool.map(abs, range(-200, 0)))
    lock = multiprocessing.Lock()
    with lock:
        return total == 20100, str(total)


def main():
    try:
        succeeded, detail = attempt()
    except (OSError, MemoryError) as e:
        succeeded, detail = False, f"{type(e).__name__}: {e}"
    print("\n" + json.dumps({"id": ID, "attempted": True, "succeeded": succeeded, "detail": detail[:300]}), flush=True)
    return 0 if succeeded else 20


if __name__ == "__main__":
    sys.exit(main())
