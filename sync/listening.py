"""A port that is listened on: aiohttp's HTTP, with limits on what it reads, behind a `Guard`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl

from aiohttp import web

from .guard import Guard

KEEPALIVE = 30.0
READ_BUFFER = 1 << 20
"""Bytes of a body that wait in memory for their thread, at most twice as many."""
LINGERING = 2.0
"""Seconds in which the rest of a body that was refused is thrown away, so that its sender reads why."""
FILES = 8192
"""Files that a server may have open, if the system allows it: each object under way is one, and each connection."""
HANDSHAKE = 10.0
"""Seconds for TLS to begin."""
_SILENT = logging.Logger("kvferry.serve", logging.CRITICAL + 1)
"""For aiohttp, which would tell of every client that speaks no HTTP."""
GUARD = web.AppKey("guard", Guard)


def more_files() -> None:
    """Raises this process's own limit of open files to `FILES`, as far as it may. Called before `application`, which keeps to it."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # macOS has a limit of its own below the one that it tells
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class Listening:
    """A server that listens. Whoever has it calls `cleanup` at the end."""

    def __init__(self, runner: web.AppRunner, sockets: asyncio.Server) -> None:
        self._runner, self._sockets = runner, sockets

    @property
    def port(self) -> int:
        port: int = self._sockets.sockets[0].getsockname()[1]
        return port

    async def cleanup(self) -> None:
        """Takes no more connections, and waits for the requests under way."""
        self._sockets.close()
        await self._runner.cleanup()


async def listening(
    app: web.Application, host: str, port: int, tls: ssl.SSLContext | None, *, stop_seconds: float = 10.0
) -> tuple[Listening, int]:
    """Begins to serve; returns what listens, to be cleaned up, and the port (of ``port`` 0 one that is free). `OSError`."""
    runner = web.AppRunner(
        app,
        access_log=None,
        logger=_SILENT,
        keepalive_timeout=KEEPALIVE,
        read_bufsize=READ_BUFFER,
        shutdown_timeout=stop_seconds,
        max_line_size=8192,
        max_field_size=8192,
        lingering_time=LINGERING,
        auto_decompress=False,  # no body is compressed, and one that is would be larger than it says
    )
    await runner.setup()
    assert runner.server is not None
    try:
        sockets = await asyncio.get_running_loop().create_server(
            app[GUARD].around(runner.server),
            host,
            port,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else HANDSHAKE,
            backlog=256,
        )
    except BaseException:
        await runner.cleanup()
        raise
    made = Listening(runner, sockets)
    return made, made.port
