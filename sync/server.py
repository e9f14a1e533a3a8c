"""The HTTP server: aiohttp on the outside, `Served` behind it. `docs/protocol.md` is the description.

The event loop never touches the store: every question runs in a thread. Bodies that come in are handed to their thread piece by
piece, so that one that comes faster than the disk takes it waits in the socket; bodies that go out are sent by the system from file to socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from aiohttp import web

from kvstore.codec import HEADER, Kind, decode_header
from kvstore.digest import ContentDigest
from kvstore.errors import (
    CoverageCorrupt,
    InputInvalid,
    KVError,
    ObjectCorrupt,
    ObjectMissing,
    SnapshotCorrupt,
)
from kvstore.shelf import FORMAT
from kvstore.signatures import MAX_SIGNATURES, Signature
from kvstore.waiting import read_ahead

from .asked import (
    GRANT,
    digest_of,
    expected,
    granted,
    hex_digits,
    label_of,
    number,
    range_of,
    raw_digest,
    require_loopback,
    require_plain,
)
from .bodies import (
    FRAME_TYPE,
    FRAMES_TYPE,
    MAP_TYPE,
    MAX_FRAMES,
    MAX_MAP,
    MAX_REFS,
    PROTOCOL,
    Fetch,
    Find,
    Found,
    Had,
    Have,
    Info,
    Landed,
    Limits,
    Pair,
    Paired,
    Publish,
    Published,
    Refs,
    RefShape,
    Shape,
    Signatures,
    bits,
    decode,
)
from .guard import Guard
from .listening import GUARD, KEEPALIVE, READ_BUFFER
from .metering import Metering
from .openapi import description
from .pairing import Offers
from .receiving import next_piece, pieces_of, require_pace
from .remote import MAX_ASKED
from .replies import (
    Broken,
    TooLarge,
    TooMany,
    disk_status,
    error_answer,
    frame_answer,
    map_answer,
    refusal,
    signatures_answer,
)
from .served import Served
from .throttle import Throttle
from .tokens import Grant, TokenBook, TokenRefused, check_device

_S = TypeVar("_S", bound=Shape)
_T = TypeVar("_T")
THREADS = 8
LANDINGS = 16
"""Bodies of object frames that are taken in at once."""
ANYBODY = 32
"""Clients' worth of requests at once, where there are no tokens to tell clients apart."""
STEP = 1 << 20
"""Bytes of an answer that a client has to take within `TAKING` seconds."""
TAKING = 60.0
HELD = 256 << 20
"""Bytes of maps that are taken in at once, by all requests together."""
HEAVY = 4
"""Threads for what takes long: reading objects through, finding, publishing."""
FAILURES, PARDON = 20, 3.0
"""Failed authentications of an address before it is told to wait, and the seconds in which it earns another one."""
MAX_FIND = 48 << 20
"""Bytes of a question by tokens, of which a soft one takes 36."""
MAX_MANIFEST = (64 << 20) + HEADER
A_DAY = 86400.0
_OPEN = ("/healthz", "/v1/pair")
"""Answered without a token."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How to serve. ``allow``: scopes that the server grants at all; ``book``: None where everybody may do what ``allow`` says.

    ``at_once``: requests of one token under way at once; more are answered with 429. Without tokens `ANYBODY` times as many in all. ``each`` and ``total``:
    connections of one address, and of all; ``idle``: seconds after which one without a request ends. ``unpublished``: bytes that a token may have sent
    and not published.
    """

    allow: frozenset[str] = frozenset({"read"})
    book: TokenBook | None = None
    offers: Offers | None = None
    at_once: int = 32
    each: int = 128
    total: int = 512
    idle: float = KEEPALIVE
    unpublished: int = 64 << 30
    name: str = "kvferry"
    log: Callable[[dict[str, Any]], None] = field(default=lambda line: None)


def application(served: Served, settings: Settings) -> web.Application:
    """The application for one store. Whoever runs it closes ``served`` afterwards."""
    return _Server(served, settings).application()


class _Server:
    def __init__(self, served: Served, settings: Settings) -> None:
        self._served = served
        self._settings = settings
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="kvferry-serve")
        self._metering = Metering()
        # Of their own: each waits for its client, and must not keep others from being answered.
        self._landing_pool = ThreadPoolExecutor(LANDINGS, thread_name_prefix="kvferry-land")
        self._landing: dict[str, int] = {}
        self._heavy_pool = ThreadPoolExecutor(HEAVY, thread_name_prefix="kvferry-heavy")
        self._guard = Guard(settings.each, settings.total, settings.idle)
        self._throttle = Throttle(FAILURES, PARDON)
        self._held = 0
        self._files = 0
        self._may_open = _open_files() // 2
        self._pairing = asyncio.Lock()
        self._busy: dict[str, int] = {}

    def application(self) -> web.Application:
        app = web.Application(client_max_size=0, middlewares=[self._answer])
        app[GUARD] = self._guard
        router = app.router
        router.add_get("/v1/info", self.info)
        router.add_get("/v1/refs", self.refs)
        router.add_get("/v1/refs/{label:.+}", self.ref, allow_head=False)
        router.add_put("/v1/refs/{label:.+}", self.publish)
        router.add_delete("/v1/refs/{label:.+}", self.remove)
        router.add_get("/v1/snapshots/{digest}", self.manifest)
        router.add_get("/v1/snapshots/{digest}/coverage", self.coverage)
        router.add_get("/v1/snapshots/{digest}/signatures", self.signatures)
        router.add_put("/v1/snapshots/{digest}/signatures", self.sign)
        router.add_post("/v1/have", self.have)
        router.add_post("/v1/find", self.find)
        router.add_get("/v1/objects/{name}", self.object)
        router.add_put("/v1/objects", self.land)
        router.add_post("/v1/fetch", self.fetch)
        if self._settings.book is not None and self._settings.offers is not None:
            router.add_post("/v1/pair", self.pair)
        router.add_get("/v1/openapi.json", self.openapi)
        router.add_get("/healthz", self.healthz)
        router.add_get("/metrics", self.metrics)
        app.cleanup_ctx.append(self._running)
        return app

    async def _running(self, _: web.Application) -> AsyncIterator[None]:
        async def tidy() -> None:
            while True:
                await asyncio.sleep(3600)
                await self._run(self._served.tidy, A_DAY)

        tasks = [asyncio.create_task(tidy()), asyncio.create_task(self._guard.watch())]
        yield
        for task in tasks:
            task.cancel()
        # Not on the loop itself: a thread that takes in a body waits for it, to be told that the connection has ended.
        for pool in (self._pool, self._landing_pool, self._heavy_pool):
            await asyncio.to_thread(pool.shutdown, wait=True, cancel_futures=True)

    async def _run(self, work: Callable[..., _T], *args: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *args)

    async def _run_long(self, work: Callable[..., _T], *args: Any) -> _T:
        """In threads of their own, so that what is quick needn't wait."""
        return await asyncio.get_running_loop().run_in_executor(self._heavy_pool, work, *args)

    # around every request

    @web.middleware
    async def _answer(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        started = time.monotonic()
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else "other"
        who, answer, error = "-", None, None
        try:
            require_plain(request)
            if route not in _OPEN and resource is not None:
                grant = request[GRANT] = self._grant(request)
                who = grant.id
            limit = self._settings.at_once * (ANYBODY if self._settings.book is None else 1)
            with (
                self._guard.busy(request.transport),
                _counted(self._busy, f"address {request.remote}" if who == "-" else who, limit, "requests"),
            ):
                answer = await handler(request)
        except KVError as refused:
            error = type(refused).__name__
            answer = refusal(refused)
        except OSError as failed:
            error = type(failed).__name__
            if isinstance(failed, ConnectionError):  # nobody is there to read this
                answer = error_answer(499, error, "the connection ended.", {})
            else:
                answer = refusal(KVError(f"the server's store: {failed.strerror or failed}."), disk_status(failed))
        except web.HTTPException as other:
            error = "InputInvalid" if other.status < 500 else "KVError"
            answer = error_answer(other.status, error, f"{request.method} {request.path}: {other.reason}.", {})
        except Exception as bug:
            # Ours: told whole to whoever reads the log, and to the client only that it is.
            error = "".join(traceback.format_exception(bug))
            answer = error_answer(
                500, "KVError", f"a fault in the server ({type(bug).__name__}); its log says more.", {}
            )
        finally:
            seconds = time.monotonic() - started
            status = answer.status if answer is not None else 499
            sent = int(answer.content_length or 0) if answer is not None else 0
            self._metering.request(request.method, route, status, seconds, sent)
            line = {"method": request.method, "route": route, "status": status, "token": who, "seconds": round(seconds, 4),
                    "bytes": sent, "peer": request.remote}  # fmt: skip
            self._settings.log(line if error is None else {**line, "error": error})
        if answer.status >= 400 and request.can_read_body and not request.content.at_eof():
            answer.force_close()  # the rest of a body that nobody reads
        return answer

    def _grant(self, request: web.Request) -> Grant:
        book, allow = self._settings.book, self._settings.allow
        if book is None:
            require_loopback(request)
            return Grant("loopback", allow, None)
        kind, _, text = request.headers.get("Authorization", "").partition(" ")
        try:
            # A right token always counts: nobody is locked out by a neighbour behind the same address.
            grant = book.check(text if kind.lower() == "bearer" else None)
        except TokenRefused:
            self._require_pardon(request)
            self._throttle.failed(request.remote)
            raise
        except InputInvalid as error:
            raise Broken(f"the server's list of tokens can't be read ({type(error).__name__}).") from error
        return Grant(grant.id, grant.scopes & (allow | {"admin"}), grant.namespaces)

    def _require_pardon(self, request: web.Request) -> None:
        """`TooMany` for an address that failed too often."""
        seconds = self._throttle.wait(request.remote)
        if seconds:
            raise TooMany(
                f"expected no more failures from this address, found too many. Try again in {seconds} s.", wait=seconds
            )

    # reading

    async def info(self, request: web.Request) -> web.Response:
        grant = granted(request, "read")
        spaces = None if grant.namespaces is None else tuple(sorted(grant.namespaces))
        limits = Limits(MAX_ASKED, MAX_FRAMES, MAX_MAP)
        return map_answer(Info(PROTOCOL, FORMAT, self._served.features, tuple(sorted(grant.scopes)), spaces, limits))

    async def refs(self, request: web.Request) -> web.Response:
        grant = granted(request, "read")
        limit = number(request.query.get("limit", str(MAX_REFS)), "limit")
        page, more = await self._run(self._served.refs, grant, request.query.get("after", ""), limit)
        return map_answer(Refs(tuple(RefShape(r.label, r.snapshot.raw, r.updated) for r in page), more))

    async def ref(self, request: web.Request) -> web.Response:
        snapshot, frame = await self._run(self._served.ref, granted(request, "read"), label_of(request))
        return frame_answer(frame, {"ETag": f'"{snapshot}"', "Cache-Control": "no-cache"})

    async def manifest(self, request: web.Request) -> web.Response:
        grant, digest = granted(request, "read"), digest_of(request)
        frame = await self._run(self._served.manifest, grant, digest)
        return frame_answer(frame, {"ETag": f'"{digest}"', "Cache-Control": "private, max-age=31536000, immutable"})

    async def coverage(self, request: web.Request) -> web.Response:
        frame = await self._run(self._served.coverage, granted(request, "read"), digest_of(request))
        return frame_answer(frame, {"Cache-Control": "no-cache"})

    async def signatures(self, request: web.Request) -> web.Response:
        found = await self._run(self._served.signatures, granted(request, "read"), digest_of(request))
        return signatures_answer(found)

    async def have(self, request: web.Request) -> web.Response:
        grant = granted(request, "read" if "read" in request[GRANT].scopes else "push")
        asked = await self._map(request, Have)
        lengths = {ContentDigest(raw_digest(name)): length for name, length in asked.objects}
        if len(lengths) != len(asked.objects):
            raise InputInvalid("objects: expected each once, found one twice")
        run = self._run_long if asked.sound else self._run
        there = await run(lambda: self._served.have(grant, lengths, sound=asked.sound))
        self._metering.lookup(len(there), len(lengths) - len(there))
        return map_answer(Had(bits([name in there for name in lengths])))

    async def find(self, request: web.Request) -> web.Response:
        grant = granted(request, "read")
        found = await self._run_long(self._served.find, grant, await self._map(request, Find, MAX_FIND))
        return map_answer(Found(None, 0) if found is None else Found(found[0].raw, found[1]))

    async def object(self, request: web.Request) -> web.StreamResponse:
        grant = granted(request, "read")
        name = ContentDigest.parse(hex_digits(request.match_info["name"]))
        with await self._open(grant, [name]) as ((fd, size),):
            head = await self._run(os.pread, fd, HEADER, 0)
            etag = f'"{decode_header(head, Kind.OBJECT, f"object {name}").stored.hex()}"'
            headers = {"ETag": etag, "Accept-Ranges": "bytes", "Content-Type": FRAME_TYPE}
            start, stop, status = 0, size, 200
            asked = request.headers.get("Range")
            if asked is not None and request.headers.get("If-Range", etag) == etag:
                found = range_of(asked, size)
                if found is not None:
                    (start, stop), status = found, 206
                    headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
            answer = web.StreamResponse(status=status, headers=headers)
            answer.content_length = stop - start
            return await self._send(request, answer, [(fd, start, stop - start)])

    async def fetch(self, request: web.Request) -> web.StreamResponse:
        grant = granted(request, "read")
        names = [ContentDigest(raw_digest(name)) for name in (await self._map(request, Fetch)).objects]
        with await self._open(grant, names) as files:
            answer = web.StreamResponse(headers={"Content-Type": FRAMES_TYPE})
            answer.content_length = sum(size for _, size in files)
            return await self._send(request, answer, [(fd, 0, size) for fd, size in files])

    async def _open(self, grant: Grant, names: list[ContentDigest]) -> _Opened:
        if self._files + len(names) > self._may_open:
            raise TooMany("expected fewer objects on their way at once, found too many. Try again in a second.")
        self._files += len(names)
        try:
            opened = self._served.opened(grant, names)
            files = await self._run(opened.__enter__)
        except BaseException:
            self._files -= len(names)
            raise
        for fd, size in files:
            read_ahead(fd, size)
        return _Opened(opened, files, self._closed)

    def _closed(self, count: int) -> None:
        self._files -= count

    async def _send(
        self, request: web.Request, answer: web.StreamResponse, pieces: list[tuple[int, int, int]]
    ) -> web.StreamResponse:
        """Sends pieces of files, each (descriptor, first byte, bytes)."""
        writer = await answer.prepare(request)
        if request.method == "HEAD" or writer is None:
            return answer
        transport = request.transport
        if transport is None:
            raise ConnectionResetError
        writer.send_headers()
        loop = asyncio.get_running_loop()
        for fd, start, count in pieces:
            if transport.is_closing():
                raise ConnectionResetError
            if transport.get_extra_info("sslcontext") is None:
                sent = 0
                with open(fd, "rb", buffering=0, closefd=False) as file:
                    while sent < count:
                        step = loop.sendfile(transport, file, start + sent, min(STEP, count - sent))
                        taken = await _taken(step, transport)
                        if not taken:
                            break
                        sent += taken
            else:
                sent = await self._encrypted(answer, transport, fd, start, count)
            if sent != count:  # somebody cut the file: the length that was promised can't be kept
                transport.abort()
                raise ConnectionResetError
            self._metering.sent(count)
        await answer.write_eof()
        return answer

    async def _encrypted(
        self, answer: web.StreamResponse, transport: asyncio.Transport, fd: int, start: int, count: int
    ) -> int:
        """Over TLS the bytes pass through this process. Returns how many there were."""
        sent = 0
        while sent < count:
            piece = await self._run(os.pread, fd, min(READ_BUFFER, count - sent), start + sent)
            if not piece:
                break
            await _taken(answer.write(piece), transport)
            sent += len(piece)
        return sent

    # pushing

    async def land(self, request: web.Request) -> web.Response:
        grant = granted(request, "push")
        loop = asyncio.get_running_loop()
        if request.content_type != FRAMES_TYPE:
            raise InputInvalid(f"Content-Type: expected {FRAMES_TYPE}, found {request.content_type:.60}")
        if request.content_length is None:
            raise InputInvalid("Content-Length: expected the bytes of the body, found none")
        # One token's slow bodies leave room for others'.
        with (
            _counted(self._landing, "all", LANDINGS, "bodies of objects"),
            _counted(self._landing, f"token {grant.id}", LANDINGS // 2, "bodies of objects"),
        ):
            try:
                pieces = pieces_of(request, loop, self._metering)
                most = self._settings.unpublished
                count = await loop.run_in_executor(self._landing_pool, self._served.land, grant, pieces, most)
            except ObjectCorrupt as error:
                return refusal(error, 400)  # theirs, not the store's
        return map_answer(Landed(count))

    async def publish(self, request: web.Request) -> web.Response:
        grant, label = granted(request, "push"), label_of(request)
        expect = expected(request)
        asked = await self._map(request, Publish, MAX_MANIFEST + MAX_MAP)
        try:
            held = await self._run_long(self._served.publish, grant, label, expect, asked.snapshot, asked.coverage)
        except ObjectMissing as error:
            return refusal(error, 409)
        except (SnapshotCorrupt, CoverageCorrupt) as error:
            return refusal(error, 400)
        return map_answer(Published(held))

    async def sign(self, request: web.Request) -> web.Response:
        grant, digest = granted(request, "push"), digest_of(request)
        asked = await self._map(request, Signatures)
        brought = [Signature(one.key, one.signature) for one in asked.signatures[: MAX_SIGNATURES + 1]]
        return signatures_answer(await self._run(self._served.sign, grant, digest, brought))

    async def remove(self, request: web.Request) -> web.Response:
        grant, label = granted(request, "admin"), label_of(request)
        expect = expected(request)
        if expect is None:
            raise InputInvalid("If-Match: expected the snapshot that the name stands for, found none")
        await self._run(self._served.remove, grant, label, expect)
        return web.Response(status=204)

    async def _map(self, request: web.Request, shape: type[_S], limit: int = MAX_MAP) -> _S:
        if request.content_type != MAP_TYPE:
            raise InputInvalid(f"Content-Type: expected {MAP_TYPE}, found {request.content_type:.60}")
        length = request.content_length
        if length is None or length > limit:
            raise TooLarge(f"Content-Length: expected at most {limit} bytes, found {length}")
        data = bytearray()
        started = time.monotonic()
        try:
            while piece := await next_piece(request):
                self._held += len(piece)
                data += piece
                if self._held > HELD:
                    raise TooMany("expected fewer large bodies at once, found too many. Try again in a second.")
                require_pace(len(data), started)
            return await self._run(decode, bytes(data), shape, "the body")
        finally:
            self._held -= len(data)

    # pairing

    async def pair(self, request: web.Request) -> web.Response:
        offers, book = self._settings.offers, self._settings.book
        assert offers is not None and book is not None
        asked = await self._map(request, Pair, 4096)
        check_device(asked.device)  # before the offer is taken for it
        async with self._pairing:  # one attempt at a time, however many ask
            self._require_pardon(request)
            try:
                scopes, namespaces = await self._run(offers.take, asked.secret)
            except TokenRefused:
                self._throttle.failed(request.remote)
                raise
            text, token = await self._run(book.issue, asked.device, scopes, namespaces)
        return map_answer(Paired(text, token.scopes, token.namespaces, self._settings.name))

    # for machines that watch

    async def healthz(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def openapi(self, _: web.Request) -> web.Response:
        return web.json_response(description())

    async def metrics(self, request: web.Request) -> web.Response:
        if self._settings.book is not None:
            granted(request, "admin")
        text, kind = self._metering.text()
        return web.Response(body=text, headers={"Content-Type": kind})


class _Opened:
    """Files that were opened in a thread, for a ``with``."""

    def __init__(self, opened: Any, files: list[tuple[int, int]], closed: Callable[[int], None]) -> None:
        self._opened, self._files, self._closed = opened, files, closed

    def __enter__(self) -> list[tuple[int, int]]:
        return self._files

    def __exit__(self, *raised: Any) -> None:
        self._opened.__exit__(None, None, None)
        self._closed(len(self._files))


@contextlib.contextmanager
def _counted(counts: dict[str, int], key: str, limit: int, what: str) -> Iterator[None]:
    """Around one of at most ``limit`` at once. `TooMany`."""
    if counts.get(key, 0) >= limit:
        raise TooMany(f"expected at most {limit} {what} at once, found more. Try again in a second.")
    counts[key] = counts.get(key, 0) + 1
    try:
        yield
    finally:
        counts[key] -= 1
        if not counts[key]:
            del counts[key]


async def _taken(step: Awaitable[_T], transport: asyncio.Transport) -> _T:
    """Waits until a client took a step of its answer; one that takes none loses the connection."""
    try:
        return await asyncio.wait_for(step, TAKING)
    except TimeoutError as error:
        transport.abort()
        raise ConnectionResetError from error


def _open_files() -> int:
    """Files that this process may have open."""
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 16 if soft == resource.RLIM_INFINITY else min(soft, 1 << 16)
