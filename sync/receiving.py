"""A body that comes in: piece by piece, for a thread that takes it or for the event loop, and not too slowly."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

from aiohttp import web

from kvstore.errors import InputInvalid

from .metering import Metering

SILENCE = 30.0
"""Seconds that a client may take for the next piece of a body."""
SLOWEST = 4096
"""Bytes a second that a body has to come with, after the first `SILENCE` seconds."""


def pieces_of(request: web.Request, loop: asyncio.AbstractEventLoop, metering: Metering) -> Iterator[bytes]:
    """A body's pieces, for a thread. `InputInvalid` from a client that is too slow, `ConnectionError` when it went away."""
    started, total = time.monotonic(), 0

    while True:
        piece = asyncio.run_coroutine_threadsafe(next_piece(request), loop).result()
        if not piece:
            return
        total += len(piece)
        require_pace(total, started)
        metering.received(len(piece))
        yield piece


async def next_piece(request: web.Request) -> bytes:
    """What has come of a body; empty at its end. `InputInvalid` after too long a silence."""
    try:
        return await asyncio.wait_for(request.content.readany(), SILENCE)
    except TimeoutError as error:
        raise InputInvalid(f"the body: expected its next bytes within {SILENCE:g} s, found none") from error


def require_pace(total: int, started: float) -> None:
    over = time.monotonic() - started - SILENCE
    if over > 0 and total < over * SLOWEST:
        raise InputInvalid(f"the body: expected at least {SLOWEST} bytes a second, found fewer")
