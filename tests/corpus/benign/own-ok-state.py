#!/usr/bin/env python3
"""Reads the environment's state, as the task allows."""

import json
import sys

ID = "own-ok-state"


def attempt():
    with open("/data/world/turn.json") as f:
        return json.load(f)["turn"] == 1, "read"


def main():
    try:
        succeeded, detail = attempt()
    except (OSError, MemoryError) as e:
        succeeded, detail = False, f"{type(e).__name__}: {e}"
    print("\n" + json.dumps({"id": ID, "attempted": True, "succeeded": succeeded, "detail": detail[:300]}), flush=True)
    return 0 if succeeded else 20


if __name__ == "__main__":
    sys.exit(main())
