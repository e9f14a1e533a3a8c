"""The connections of a server, bounded in number and in idleness: what HTTP itself does not see.

A connection on which no request is under way, and whose answers nobody takes, ends after a while, whether it never said anything, drips headers, or
sleeps. Where an address, or all, have too many, the one that is idle for longest makes room; where none is idle the new one is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator

_REFUSAL = b'{"error": "TooMany", "message": "expected fewer connections at once, found too many. Try again in a second.", "details": {}}'
_REFUSED = (
    b"HTTP/1.1 429 Too Many Requests\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(_REFUSAL), _REFUSAL)
)


class Guard:
    """``each``: connections of one address, ``total``: of all, ``idle``: seconds. Belongs to the event loop."""

    def __init__(self, each: int, total: int, idle: float) -> None:
        self._each, self._total, self._idle = each, total, idle
        self._open: dict[_Guarded, None] = {}
        """Those that were idle for longest first, as far as they are idle."""

    def __len__(self) -> int:
        return len(self._open)

    def around(self, make: Callable[[], asyncio.Protocol]) -> Callable[[], asyncio.Protocol]:
        """A factory of protocols that are watched."""
        return lambda: _Guarded(self, make())

    @contextlib.contextmanager
    def busy(self, transport: asyncio.BaseTransport | None) -> Iterator[None]:
        """Around a request."""
        protocol = transport.get_protocol() if transport is not None else None
        if not isinstance(protocol, _Guarded):
            yield
            return
        protocol.requests += 1
        try:
            yield
        finally:
            protocol.requests -= 1
            self._active(protocol)

    async def watch(self) -> None:
        """Ends idle connections, until it is cancelled."""
        while True:
            await asyncio.sleep(min(1.0, self._idle / 4))
            for one in list(self._open):
                if one.requests or one.progressed():
                    self._active(one)
                elif time.monotonic() - one.since > self._idle:
                    one.end()

    def admit(self, new: _Guarded) -> bool:
        """Whether there is room for a new connection, after an idle one made room for it."""
        same = [one for one in self._open if one.address == new.address]
        for there, limit in ((same, self._each), (list(self._open), self._total)):
            if len(there) >= limit:
                idle = next((one for one in there if not one.requests), None)
                if idle is None:
                    return False
                idle.end()
                self._open.pop(idle, None)
        self._open[new] = None
        return True

    def gone(self, one: _Guarded) -> None:
        self._open.pop(one, None)

    def _active(self, one: _Guarded) -> None:
        one.since = time.monotonic()
        if one in self._open:
            del self._open[one]
            self._open[one] = None


class _Guarded(asyncio.Protocol):
    """A connection's protocol, and what is known of the connection."""

    def __init__(self, guard: Guard, inner: asyncio.Protocol) -> None:
        self._guard, self._inner = guard, inner
        self._transport: asyncio.Transport | None = None
        self._refused = False
        self._unsent = 0
        self.address: object = None
        self.requests = 0
        self.since = time.monotonic()

    def progressed(self) -> bool:
        """Whether some of what waited to be sent was taken since the last call."""
        assert self._transport is not None
        before, self._unsent = self._unsent, self._transport.get_write_buffer_size()
        return self._unsent < before

    def end(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        peer = transport.get_extra_info("peername")
        self.address = peer[0] if isinstance(peer, tuple) else None
        if self._guard.admit(self):
            self._inner.connection_made(transport)
        else:
            self._refused = True
            transport.write(_REFUSED)
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._guard.gone(self)
        if not self._refused:
            self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._refused:
            self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return None if self._refused else self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()
