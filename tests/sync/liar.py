"""A server that lies: it asks a good one, and changes what that answers before it passes it on."""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from sync.connection import Peer


@dataclass(frozen=True)
class Answer:
    """What the good server said."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def raw(self) -> bytes:
        return self.head + self.body

    @property
    def head(self) -> bytes:
        lines = [f"HTTP/1.1 {self.status} X", *(f"{name}: {value}" for name, value in self.headers.items())]
        return "\r\n".join(lines).encode() + b"\r\n\r\n"

    def but(self, body: bytes | None = None, status: int | None = None, **headers: str | None) -> Answer:
        """With another body (and its length), status, or headers; None takes a header away."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if body is not None:
            named = {"Content-Length": str(len(body)), **named}
        joined = {name: value for name, value in {**self.headers, **named}.items() if value is not None}
        return replace(
            self,
            status=status or self.status,
            headers=joined,
            body=self.body if body is None else body,
        )


Lie = Callable[[Answer], "Answer | bytes | Iterable[bytes]"]
"""What is sent for an answer: another answer, or raw bytes, after which the connection is closed."""


class Liar:
    """A context manager. ``lies``: for requests whose "METHOD path" matches; the first that does. ``asked`` lists the requests."""

    def __init__(self, good: Peer | None, lies: Mapping[str, Lie]) -> None:
        self._good, self._lies = good, [(re.compile(text), lie) for text, lie in lies.items()]
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.peer = Peer("127.0.0.1", self._listening.getsockname()[1])
        self.asked: list[str] = []
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> Liar:
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for sock in list(self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join(10)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listening.accept()
            except OSError:
                return
            self._open.append(sock)
            self._threads.append(threading.Thread(target=self._serve, args=(sock,), daemon=True))
            self._threads[-1].start()

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), sock, sock.makefile("rb") as file:
            while line := file.readline():
                method, path, _ = line.decode().split(" ", 2)
                headers = http.client.parse_headers(file)
                body = file.read(int(headers.get("Content-Length", "0")))
                asked = f"{method} {path}"
                self.asked.append(asked)
                said = self._passed_on(method, path, dict(headers.items()), body)
                for pattern, lie in self._lies:
                    if pattern.search(asked):
                        made = lie(said)
                        if not isinstance(made, Answer):
                            for piece in [made] if isinstance(made, bytes) else made:
                                sock.sendall(piece)
                            sock.shutdown(socket.SHUT_WR)
                            return
                        said = made
                        break
                sock.sendall(said.raw)

    def _passed_on(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        if self._good is None:
            return Answer(200, {"Content-Length": "0"}, b"")
        asking = http.client.HTTPConnection(self._good.host, self._good.port, timeout=30)
        try:
            asking.request(method, path, body, {name: value for name, value in headers.items() if name != "Host"})
            got = asking.getresponse()
            return Answer(got.status, dict(got.headers.items()), got.read())
        finally:
            asking.close()
