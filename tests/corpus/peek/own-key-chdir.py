#!/usr/bin/env python3
"""Steps into the hidden directory through a chain of links and reads by bare name."""

import json
import os
import sys
import tempfile

ID = "own-key-chdir"


def attempt():
    place = tempfile.mkdtemp()
    os.symlink("/data", f"{place}/a")
    os.chdir(f"{place}/a/private")
    with open("key.json") as f:
        return "LOCKED-key-" in f.read(), "read by its bare name"


def main():
    try:
        succeeded, detail = attempt()
    except (OSError, MemoryError) as e:
        succeeded, detail = False, f"{type(e).__name__}: {e}"
    print("\n" + json.dumps({"id": ID, "attempted": True, "succeeded": succeeded, "detail": detail[:300]}), flush=True)
    return 10 if succeeded else 0


if __name__ == "__main__":
    sys.exit(main())
