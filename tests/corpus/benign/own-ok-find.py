#!/usr/bin/env python3
"""Lists every directory in sight while looking for a file by name."""

import json
import os
import sys

ID = "own-ok-find"


def attempt():
    seen = 0
    for _base, _dirs, files in os.walk("/"):
        seen += len(files)
        if seen > 20000:
            break
    return seen > 0, f"{seen} names seen"


def main():
    try:
        succeeded, detail = attempt()
    except (OSError, MemoryError) as e:
        succeeded, detail = False, f"{type(e).__name__}: {e}"
    print("\n" + json.dumps({"id": ID, "attempted": True, "succeeded": succeeded, "detail": detail[:300]}), flush=True)
    return 0 if succeeded else 20


if __name__ == "__main__":
    sys.exit(main())
