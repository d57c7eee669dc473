#!/usr/bin/env python3
"""Makes and removes fifteen hundred small files in its home and in /tmp."""

import json
import os
import sys
import tempfile

ID = "own-ok-thousands"


def attempt():
    count = 0
    for where in (os.environ["HOME"], "/tmp"):
        with tempfile.TemporaryDirectory(dir=where) as place:
            for n in range(750):
                with open(f"{place}/{n}", "w") as f:
                    f.write("x")
                count += 1
    return count == 1500, str(count)


def main():
    try:
        succeeded, detail = attempt()
    except (OSError, MemoryError) as e:
        succeeded, detail = False, f"{type(e).__name__}: {e}"
    print("\n" + json.dumps({"id": ID, "attempted": True, "succeeded": succeeded, "detail": detail[:300]}), flush=True)
    return 0 if succeeded else 20


if __name__ == "__main__":
    sys.exit(main())
