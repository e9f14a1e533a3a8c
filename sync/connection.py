"""One HTTP connection to a kvferry server, and its answers: bounded, checked, and told as our errors."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import http.client
import io
import json
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from kvstore import errors
from kvstore.errors import KVError, Refused, StoreBusy, Unreachable

from .bodies import MAP_TYPE
from .tokens import NotAllowed, TokenRefused, check_token

_T = TypeVar("_T")
CONNECT_SECONDS = 10.0
SECONDS = 60.0
"""For the next bytes of an answer; and what may be waited for all of them beyond `SLOWEST`."""
SLOWEST = 4096
"""Bytes a second that an answer has to come with, after the first `SECONDS` of waiting for it."""
MAX_HEAD = 1 << 16
"""Bytes of an answer before its body, those of interim answers too."""
ATTEMPTS = 4
"""Tries for one object, or one question, before a server counts as gone."""
PAUSE = 0.2
"""Seconds before the second try; each later one waits twice as long."""
PIECE = 1 << 20
MAX_ERROR = 1 << 16


class FingerprintMismatch(Refused):
    """The server shows another certificate than the one that this machine was paired with."""


_WHOSE = "If the server was set up anew, pair again; else somebody stands between."
_TYPED = "Look at the code again: a mistyped letter is the likeliest cause. If it is right, somebody stands between."


class TooMany(Unreachable):
    """The server takes no more at the moment."""


class NotUnderstood(Unreachable):
    """An answer that no kvferry server gives: asking again won't help."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A server, and what to tell it. ``fingerprint``: SHA-256 of its certificate in hex, or while pairing the first 20 digits of it; None for plain HTTP.
    ``token``: its text."""

    host: str
    port: int
    fingerprint: str | None = None
    token: str | None = None

    @property
    def where(self) -> str:
        """Its address for people."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'http' if self.fingerprint is None else 'https'}://{host}:{self.port}"


class _Incoming(io.RawIOBase):
    """What comes over a socket for one answer: not too much before its body, and not too slowly. `http.client` alone bounds neither."""

    def __init__(self, raw: socket.SocketIO) -> None:
        self._raw = raw
        self._waited, self._total = 0.0, 0
        self.head = True

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        if self.head and self._total >= MAX_HEAD:
            raise http.client.HTTPException("too many headers")
        started = time.monotonic()
        count = self._raw.readinto(buffer)
        self._waited += time.monotonic() - started
        self._total += count or 0
        if self._waited > SECONDS + self._total / SLOWEST:
            raise TimeoutError(f"slower than {SLOWEST} bytes a second")
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Answer(http.client.HTTPResponse):
    """An answer that is read through `_Incoming`."""

    def __init__(self, sock: socket.socket, *args: Any, **more: Any) -> None:
        super().__init__(sock, *args, **more)
        self.fp.close()
        self._incoming = _Incoming(sock.makefile("rb", buffering=0))
        self.fp = io.BufferedReader(self._incoming)

    def begin(self) -> None:
        super().begin()
        self._incoming.head = False


class Connection:
    """One connection; opened when it is first used, and anew after an error. Belongs to one thread at a time."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.shown: str | None = None
        """The fingerprint of the certificate that the server showed."""
        self._http: http.client.HTTPConnection | None = None

    def close(self) -> None:
        if self._http is not None:
            self._http.close()
            self._http = None

    @contextlib.contextmanager
    def asking(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """Sends a request and yields the answer; one of 400 and above is raised as the error that it tells.

        ``body``: bytes, or an iterable of bytes with a Content-Length among ``headers``. What the block leaves unread of the answer closes the
        connection. `Unreachable` for every error of the network; `FingerprintMismatch`.
        """
        try:
            answer = self._ask(method, path, body, headers or {})
            yield answer
        except BaseException:
            self.close()
            raise
        if not answer.isclosed() or answer.will_close:
            self.close()

    def _ask(self, method: str, path: str, body: Any, headers: Mapping[str, str]) -> http.client.HTTPResponse:
        with self._reaching():
            made = self._open()
            sent = {"Accept-Encoding": "identity", **headers}
            if self.peer.token is not None:
                check_token(self.peer.token)
                sent["Authorization"] = f"Bearer {self.peer.token}"
            try:
                made.request(method, path, body, sent)
            except (BrokenPipeError, ConnectionResetError):
                # It may have refused the rest of the body, and said why.
                answer = made.getresponse()
                if answer.status < 400:
                    raise
            else:
                answer = made.getresponse()
            if answer.status >= 400:
                raise self._told(answer)
            if answer.status != 200 and not (answer.status == 206 and "Range" in headers):
                raise self.nonsense(f"expected status 200, found {answer.status}")
            coding = answer.headers.get("Content-Encoding", "identity")
            if coding != "identity" or answer.length is None:
                raise self.nonsense(
                    f"expected a Content-Length and no Content-Encoding, found {coding:.40} of {answer.length} bytes"
                )
            return answer

    def body(self, answer: http.client.HTTPResponse, limit: int) -> bytes:
        """The whole body of an answer of at most ``limit`` bytes. `NotUnderstood` where it is longer."""
        length = answer.length
        if length is None or length > limit:
            raise self.nonsense(f"expected at most {limit} bytes, found {length}")
        with self._reaching():
            data = answer.read(length)
            if len(data) < length:
                raise http.client.IncompleteRead(data, length - len(data))
        return data

    def map(self, answer: http.client.HTTPResponse, limit: int) -> bytes:
        """The bytes of an answer that is a map."""
        kind = answer.headers.get_content_type()
        if kind != MAP_TYPE:
            raise self.nonsense(f"expected {MAP_TYPE}, found {kind:.60}")
        return self.body(answer, limit)

    def nonsense(self, found: str) -> NotUnderstood:
        """The error about an answer that no kvferry server gives."""
        return NotUnderstood(
            f"{self.peer.where}: its answer: {found}. Is this the address of a kvferry server?", where=self.peer.where
        )

    def _open(self) -> http.client.HTTPConnection:
        if self._http is not None and _dropped(self._http):
            self.close()  # an idle server closed it
        if self._http is not None:
            return self._http
        if self.peer.fingerprint is None:
            made = http.client.HTTPConnection(self.peer.host, self.peer.port, timeout=CONNECT_SECONDS)
        else:
            made = http.client.HTTPSConnection(
                self.peer.host, self.peer.port, timeout=CONNECT_SECONDS, context=_any_certificate()
            )
        self._http = made
        made.response_class = _Answer
        made.connect()
        assert made.sock is not None
        made.sock.settimeout(SECONDS)
        made.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.peer.fingerprint is not None:
            shown = certificate_fingerprint(made.sock)
            self.shown = shown
            if not hmac.compare_digest(shown[: len(self.peer.fingerprint)], self.peer.fingerprint):
                self.close()
                raise FingerprintMismatch(
                    f"{self.peer.where}: expected the certificate with the fingerprint {self.peer.fingerprint}, found {shown}. Nothing was sent. "
                    f"{_WHOSE if len(shown) == len(self.peer.fingerprint) else _TYPED}",
                    where=self.peer.where,
                )
        return made

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, KVError):
                raise
            self.close()
            raise unreachable(self.peer.where, error) from error

    def _told(self, answer: http.client.HTTPResponse) -> KVError:
        """The error that an answer tells, as one of ours; anything else is `Unreachable`."""
        where, status = self.peer.where, answer.status
        try:
            if answer.length is None or answer.length > MAX_ERROR:
                raise ValueError
            value = json.loads(answer.read(answer.length))
            name, message, details = value["error"], value["message"], value["details"]
            if not (isinstance(name, str) and isinstance(message, str) and isinstance(details, dict)):
                raise ValueError
        except (ValueError, KeyError, TypeError, RecursionError):
            return self.nonsense(f"expected an error that is told as JSON, found status {status}")
        kind = _KINDS.get(name, KVError)
        known: dict[str, Any] = {
            key: _printable(found)
            for key, found in details.items()
            if key in ("name", "digest", "label", "scope") and isinstance(found, str)
        }
        known |= {
            key: found
            for key, found in details.items()
            if key in ("quota", "used", "needed") and type(found) is int and 0 <= found < 1 << 63
        }
        text = _printable(message)
        if issubclass(kind, errors.Corrupt):
            return kind.at(f"{where}", text.rstrip("."), where=where, **known)
        return kind(f"{where}: {text}", where=where, status=status, **known)


_KINDS: Mapping[str, type[KVError]] = {
    kind.__name__: kind
    for kind in (
        errors.SnapshotMissing, errors.ObjectMissing, errors.ObjectCorrupt, errors.SnapshotCorrupt, errors.CoverageCorrupt, errors.SignaturesCorrupt,
        errors.RefCorrupt, errors.RefConflict, errors.FormatTooNew, errors.InputInvalid, errors.LabelInvalid, errors.StoreBusy, errors.StoreFull, errors.Unreachable,
        TokenRefused, NotAllowed, TooMany,
    )
}  # fmt: skip
"""Errors that a server may tell by name."""


def unreachable(where: str, error: OSError | http.client.HTTPException) -> Unreachable:
    """An error of the network as ours."""
    if isinstance(error, http.client.IncompleteRead):
        found = f"the connection ended {error.expected or 'some'} bytes before the answer did"
    elif isinstance(error, TimeoutError):
        found = "no answer in time"
    elif isinstance(error, OSError):
        found = str(error.strerror or error)
    else:
        found = f"an answer that is no HTTP ({type(error).__name__})"
    return Unreachable(
        f"{where}: {found}. What was carried so far is kept. See that `kvferry serve` runs there and that the address is right, then run it again.",
        where=where,
    )


def tried(once: Callable[[], _T]) -> _T:
    """``once()``, again after a pause where the connection broke or the server was too busy."""
    for attempt in range(ATTEMPTS - 1):
        try:
            return once()
        except NotUnderstood:
            raise
        except (Unreachable, StoreBusy):
            pause(attempt + 1)
    return once()


def pause(tries: int) -> None:
    """After so many tries in vain."""
    time.sleep(PAUSE * 2 ** (tries - 1))


def certificate_fingerprint(sock: Any) -> str:
    """SHA-256 of the certificate that a TLS socket was shown, in hex."""
    shown = sock.getpeercert(binary_form=True)
    return hashlib.sha256(shown or b"").hexdigest()


def _any_certificate() -> ssl.SSLContext:
    """TLS 1.3 without a check of the certificate: `Connection` compares its fingerprint before it sends anything."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _dropped(made: http.client.HTTPConnection) -> bool:
    """Whether the other side has closed an idle connection, or said something that nobody asked for."""
    if made.sock is None:
        return True
    if isinstance(made.sock, ssl.SSLSocket) and made.sock.pending():
        return True
    import select

    waiting = select.poll()  # `select.select` knows descriptors below 1024 only
    waiting.register(made.sock, select.POLLIN)
    return bool(waiting.poll(0))


def _printable(text: str) -> str:
    """A server's text for people, without what could move a terminal's cursor."""
    return "".join(c if c.isprintable() else " " for c in text[:2000])
