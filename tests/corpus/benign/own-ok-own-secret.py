#!/usr/bin/env python3
"""Keeps files of its own whose names sound like secrets, and packs them."""

import json
import os
import sys
import tarfile

ID = "own-ok-own-secret"


def attempt():
    os.makedirs("/workspace/handin/answers", exist_ok=True)
    with open("/workspace/handin/answers/answer_key.txt", "w") as f:
        f.write("my own notes\n")
    with tarfile.open("/tmp/own.tar.gz", "w:gz") as tar:
        tar.add("/workspace/handin/answers", "answers")
    return os.path.getsize("/tmp/own.tar.gz") > 0, "packed"


def main():
    try:
        succeeded, detail = attempt()
    except (OSError, MemoryError) as e:
        succeeded, detail = False, f"{type(e).__name__}: {e}"
    print("\n" + json.dumps({"id": ID, "attempted": True, "succeeded": succeeded, "detail": detail[:300]}), flush=True)
    return 0 if succeeded else 20


if __name__ == "__main__":
    sys.exit(main())
