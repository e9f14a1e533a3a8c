"""What the server answers: maps, frames, and errors as `docs/protocol.md` has them."""

from __future__ import annotations

import errno
import json
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from kvstore.errors import (
    Corrupt,
    FormatTooNew,
    InputInvalid,
    KVError,
    Missing,
    RefConflict,
    StoreBusy,
    StoreFull,
    Unreachable,
)
from kvstore.signatures import Signature

from .asked import Unsatisfiable
from .bodies import FRAME_TYPE, MAP_TYPE, Shape, Signatures, encode
from .bodies import Signature as SignatureShape
from .tokens import NotAllowed, TokenRefused


class TooMany(KVError):
    """More at once than the server takes from one client."""


class TooLarge(InputInvalid):
    """A body of more bytes than allowed."""


class Broken(KVError):
    """Something of the server's own is damaged."""


def map_answer(value: Shape) -> web.Response:
    return web.Response(body=encode(value), headers={"Content-Type": MAP_TYPE, "Cache-Control": "no-store"})


def signatures_answer(found: Sequence[Signature]) -> web.Response:
    return map_answer(Signatures(tuple(SignatureShape(one.key, one.raw) for one in found)))


def frame_answer(data: bytes, headers: dict[str, str]) -> web.Response:
    return web.Response(body=data, headers={"Content-Type": FRAME_TYPE, **headers})


_UNTOLD = (TooLarge, Unsatisfiable, Broken)
"""Told by the name of their kind."""
_STATUS: tuple[tuple[type[KVError], int], ...] = (
    (TokenRefused, 401),
    (NotAllowed, 403),
    (TooMany, 429),
    (TooLarge, 413),
    (Unsatisfiable, 416),
    (RefConflict, 412),
    (StoreFull, 507),
    (Broken, 500),
    (Missing, 404),
    (StoreBusy, 503),
    (Unreachable, 503),
    (Corrupt, 500),
    (FormatTooNew, 400),
    (InputInvalid, 400),
)


def refusal(error: KVError, status: int | None = None) -> web.Response:
    found = status or next((code for kind, code in _STATUS if isinstance(error, kind)), 400)
    name = next(kind.__name__ for kind in type(error).__mro__ if kind not in _UNTOLD)
    details = {
        key: value
        for key, value in error.details.items()
        if key in ("name", "digest", "label", "scope", "size", "wait", "quota", "used", "needed")
    }
    return error_answer(found, name, error.message, details)


def error_answer(status: int, name: str, message: str, details: dict[str, Any]) -> web.Response:
    headers = {"Cache-Control": "no-store"}
    if status in (429, 503):
        headers["Retry-After"] = str(details.get("wait", 1))
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if status == 416:
        headers["Content-Range"] = f"bytes */{details.get('size', '*')}"
    text = json.dumps({"error": name, "message": message, "details": details})
    return web.Response(status=status, text=text, content_type="application/json", headers=headers)


def disk_status(error: OSError) -> int:
    return 507 if error.errno in (errno.ENOSPC, errno.EDQUOT) else 500
