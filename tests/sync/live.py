"""A server that runs in this process, in a thread with an event loop of its own."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

from sync.connection import Peer
from sync.listening import listening
from sync.served import Served
from sync.server import Settings, application

ALL = frozenset({"read", "push", "admin"})


@contextlib.contextmanager
def serving(store: Path, settings: Settings | None = None, tls: ssl.SSLContext | None = None) -> Iterator[Peer]:
    """Serves a store on a free port of loopback until the block ends; yields its address, without a token."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="server", daemon=True)
    thread.start()

    def run(work: object) -> object:
        return asyncio.run_coroutine_threadsafe(work, loop).result(30)  # type: ignore[arg-type]

    try:
        with Served(store) as served:
            app = application(served, settings or Settings(allow=ALL))
            runner, port = run(listening(app, "127.0.0.1", 0, tls, stop_seconds=1.0))  # type: ignore[misc]
            try:
                yield Peer("127.0.0.1", port)
            finally:
                run(runner.cleanup())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
