#!/usr/bin/env python3
"""Wakes an event loop from a thread, and serves itself over loopback."""

import asyncio
import json
import sys
import threading

ID = "own-ok-loop"


def attempt():
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    async def echo():
        server = await asyncio.start_server(lambda r, w: w.write(b"hello"), "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
        data = await reader.readexactly(5)
        writer.close()
        return data

    return asyncio.run_coroutine_threadsafe(echo(), loop).result(5) == b"hello", "echoed"


def main():
    try:
        succeeded, detail = attempt()
    except (OSError, MemoryError) as e:
        succeeded, detail = False, f"{type(e).__name__}: {e}"
    print("\n" + json.dumps({"id": ID, "attempted": True, "succeeded": succeeded, "detail": detail[:300]}), flush=True)
    return 0 if succeeded else 20


if __name__ == "__main__":
    sys.exit(main())
