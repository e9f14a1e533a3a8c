"""What a request to the server says beside its body: token, label, digests, conditions, ranges. Each checked before anything is done with it."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import unquote

from aiohttp import web

from kvstore.digest import SnapshotDigest
from kvstore.errors import InputInvalid

from .tokens import Grant, NotAllowed

GRANT = web.RequestKey("grant", Grant)
"""What whoever asks may do."""


def require_plain(request: web.Request) -> None:
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise InputInvalid(f"Content-Encoding: expected none, found {encoding:.40}")


def require_loopback(request: web.Request) -> None:
    """Without tokens only what was addressed to this machine by its own name is answered: else any page that a browser here shows could point its
    own name at this server, and read it."""
    host = request.headers.get("Host")
    if host is None:
        return
    name = host.rpartition(":")[0] if re.search(r":\d*$", host) else host
    try:
        loopback = ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        loopback = name.lower() == "localhost"
    if not loopback:
        raise NotAllowed(f"Host: expected localhost or a loopback address, found {host:.60}")


def granted(request: web.Request, scope: str) -> Grant:
    grant: Grant = request[GRANT]
    grant.require(scope)
    return grant


def label_of(request: web.Request) -> str:
    _, found, raw = request.rel_url.raw_path.partition("/v1/refs/")
    if not found:
        raise InputInvalid("the name: expected /v1/refs/ before it, written so")
    try:
        return unquote(raw, errors="strict")
    except UnicodeDecodeError as error:
        raise InputInvalid("the name: expected UTF-8, percent-encoded, found something else") from error


def hex_digits(text: str) -> str:
    if len(text) != 64 or set(text) - set("0123456789abcdef"):
        raise InputInvalid(f"digest: expected 64 lowercase hex digits, found {text!r:.80}")
    return text


def raw_digest(raw: bytes) -> bytes:
    if len(raw) != 32:
        raise InputInvalid(f"digest: expected 32 bytes, found {len(raw)}")
    return raw


def digest_of(request: web.Request) -> SnapshotDigest:
    return SnapshotDigest.parse(hex_digits(request.match_info["digest"]))


def number(text: str, what: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise InputInvalid(f"{what}: expected a number, found {text!r:.40}")
    return int(text)


def expected(request: web.Request) -> SnapshotDigest | None:
    """Where a name is expected to stand: from If-Match, or None with ``If-None-Match: *``."""
    match, none = request.headers.get("If-Match"), request.headers.get("If-None-Match")
    if match is None and none == "*":
        return None
    if none is not None or match is None or len(match) != 66 or match[0] + match[-1] != '""':
        raise InputInvalid('expected If-Match: "<snapshot>" or If-None-Match: *, found neither')
    return SnapshotDigest.parse(hex_digits(match[1:-1]))


class Unsatisfiable(InputInvalid):
    """A range that lies outside the object."""


def range_of(text: str, size: int) -> tuple[int, int] | None:
    """First byte and the one after the last; None for what is answered with the whole (other units, several ranges)."""
    unit, _, spec = text.partition("=")
    first, dash, last = spec.strip().partition("-")
    if unit.strip().lower() != "bytes" or "," in spec or not dash or not first:
        return None
    start = number(first, "Range")
    stop = min(size, number(last, "Range") + 1) if last else size
    if start >= size or stop <= start:
        raise Unsatisfiable(f"Range: expected bytes below {size}, found {text!r:.60}", size=size)
    return start, stop
