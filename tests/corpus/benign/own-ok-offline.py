#!/usr/bin/env python3
"""Asks package tools for something although there is no network, and goes on."""

import json
import subprocess
import sys

ID = "own-ok-offline"


def attempt():
    attempts = (
        ["git", "ls-remote", "https://git.example.invalid/x"],
        [sys.executable, "-m", "pip", "download", "-q", "--retries", "0", "left-pad"],
        ["curl", "-s", "-m", "3", "https://docs.example.invalid/"],
    )
    for words in attempts:
        try:
            subprocess.run(words, timeout=12, check=False, stderr=subprocess.DEVNULL)
        except (FileNotFoundError, subprocess.TimeoutExpired):
            continue
    return True, "refused and went on"


def main():
    try:
        succeeded, detail = attempt()
    except (OSError, MemoryError) as e:
        succeeded, detail = False, f"{type(e).__name__}: {e}"
    print("\n" + json.dumps({"id": ID, "attempted": True, "succeeded": succeeded, "detail": detail[:300]}), flush=True)
    return 0 if succeeded else 20


if __name__ == "__main__":
    sys.exit(main())
