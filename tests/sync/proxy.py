"""A TCP proxy on loopback that does one thing wrong: it cuts, stalls, resets, flips, rewrites, loses or doubles what passes."""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

DOWN, UP = "down", "up"


@dataclass(frozen=True, slots=True)
class Fault:
    """``kind`` of fault, at byte ``at`` of all that passes ``way`` (server to client is `DOWN`), over all connections, once.

    cut: both sides are closed. reset: with RST. stall: nothing passes any more on this connection. flip: one bit of that byte. double: the piece with that byte
    passes twice. lose: it doesn't pass, and the connection is closed. ``ranges``: None, or what is done to each range asked for: ``ignored`` (the server is
    not told), ``lied`` (its Content-Range is changed), ``short`` (its status is 200).
    """

    kind: str | None = None
    at: int = 0
    way: str = DOWN
    ranges: str | None = None


class Proxy:
    """Passes connections on to ``target``. A context manager; ``passed`` counts the bytes of each way."""

    def __init__(self, target: tuple[str, int], fault: Fault) -> None:
        self._target, self._fault = target, fault
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._lock = threading.Lock()
        self.passed = {DOWN: 0, UP: 0}
        self.fired = False
        self._open: list[socket.socket] = []
        self._over = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._listening.shutdown(socket.SHUT_RDWR)  # wakes who waits in accept
        self._listening.close()
        with self._lock:
            for sock in self._open:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
                sock.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
                server = socket.create_connection(self._target)
            except OSError:
                return
            with self._lock:
                self._open += [client, server]
            for source, sink, way in ((client, server, UP), (server, client, DOWN)):
                threading.Thread(target=self._pass, args=(source, sink, way), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                for out in self._changed(self._rewritten(piece, way), way):
                    if isinstance(out, str):
                        self._end(out, source, sink)
                        return
                    sink.sendall(out)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _end(self, how: str, *sockets: socket.socket) -> None:
        if how == "stall":
            self._over.wait()
            return
        for sock in sockets:
            with contextlib.suppress(OSError):
                if how == "reset":
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                else:
                    sock.shutdown(socket.SHUT_RDWR)
            if how == "reset":
                sock.close()

    def _changed(self, piece: bytes, way: str) -> Iterator[bytes | str]:
        fault = self._fault
        with self._lock:
            start = self.passed[way]
            self.passed[way] += len(piece)
            fires = (
                not self.fired
                and fault.kind is not None
                and way == fault.way
                and start <= fault.at < start + len(piece)
            )
            self.fired |= fires
        if not fires:
            yield piece
            return
        at = fault.at - start
        if fault.kind == "flip":
            yield piece[:at] + bytes([piece[at] ^ 1 << fault.at % 8]) + piece[at + 1 :]
        elif fault.kind == "double":
            yield piece
            yield piece
        elif fault.kind == "lose":
            yield "cut"
        else:
            yield piece[:at]
            yield fault.kind or ""

    def _rewritten(self, piece: bytes, way: str) -> bytes:
        ranges = self._fault.ranges
        if ranges == "ignored" and way == UP:
            return re.sub(rb"\r\nRange: bytes=", b"\r\nX-Not: bytes=", piece)
        if ranges == "lied" and way == DOWN:
            return re.sub(rb"\r\nContent-Range: bytes (\d+)-", _other_start, piece)
        if ranges == "short" and way == DOWN:
            return piece.replace(b"HTTP/1.1 206 Partial Content", b"HTTP/1.1 200 OK             ")
        return piece


def _other_start(found: re.Match[bytes]) -> bytes:
    digit = b"1" if found[1][-1:] != b"1" else b"2"
    return found[0][:-2] + digit + b"-"


def measured(target: tuple[str, int], run: Callable[[int], object]) -> dict[str, int]:
    """How many bytes pass each way when nothing goes wrong."""
    with Proxy(target, Fault()) as proxy:
        run(proxy.port)
        return dict(proxy.passed)
