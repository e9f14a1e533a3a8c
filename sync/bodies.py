"""The maps of the wire protocol ⇄ values, with limits; no I/O. `docs/protocol.md` is the description."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgpack
import msgspec

from kvstore.errors import InputInvalid

PROTOCOL = 1
MAP_TYPE = "application/msgpack"
FRAMES_TYPE = "application/vnd.kvferry.frames"
FRAME_TYPE = "application/vnd.kvferry.frame"

MAX_MAP = 1 << 20
"""Bytes of a map, manifests left out."""
MAX_FRAMES = 64
"""Object frames in one body."""
MAX_REFS = 1000
"""Names in one page."""

_T = TypeVar("_T", bound=msgspec.Struct)


class Shape(msgspec.Struct, forbid_unknown_fields=True):
    """A map of which exactly these keys are allowed."""


class Limits(Shape):
    """What one request may hold: objects asked about, object frames, bytes of a map."""

    asked: int
    frames: int
    map: int


class Info(Shape):
    """Who answers. ``namespaces``: None is all."""

    protocol: int
    format: int
    features: tuple[str, ...]
    allows: tuple[str, ...]
    namespaces: tuple[str, ...] | None
    limits: Limits


class RefShape(Shape):
    """A name, the snapshot's digest, and when it was given in Unix seconds."""

    label: str
    snapshot: bytes
    updated: int


class Refs(Shape):
    """A page of names."""

    refs: tuple[RefShape, ...]
    more: bool


class Have(Shape):
    """Asks which objects, by name and content bytes, are there; ``sound``: reading each."""

    objects: tuple[tuple[bytes, int], ...]
    sound: bool


class Had(Shape):
    """One bit an object, see `bits`."""

    have: bytes


class Fetch(Shape):
    """Asks for the frames of these objects."""

    objects: tuple[bytes, ...]


class Landed(Shape):
    """How many objects of a body of frames were taken in."""

    landed: int


class Publish(Shape):
    """The frames of a manifest and of the coverage that its objects have."""

    snapshot: bytes
    coverage: bytes


class Published(Shape):
    """The frame of the coverage that now holds."""

    coverage: bytes


class Find(Shape):
    """Asks which snapshot serves these items best. ``layout`` and ``items`` are encoded as in format.md."""

    namespace: str
    root: bytes
    layout: bytes
    items: bytes
    head: str | None


class Found(Shape):
    """The snapshot's digest, and how many tokens of it can be used; a hint."""

    snapshot: bytes | None
    tokens: int


class Pair(Shape):
    """Trades a one-time secret for a token. ``device``: a name for people."""

    secret: str
    device: str


class Paired(Shape):
    """A token, what it allows, and the server's own name for people."""

    token: str
    scopes: tuple[str, ...]
    namespaces: tuple[str, ...] | None
    name: str


class Signature(Shape):
    """An Ed25519 public key of 32 bytes, and its signature of 64."""

    key: bytes
    signature: bytes


class Signatures(Shape):
    """The detached signatures of one manifest."""

    signatures: tuple[Signature, ...]


def encode(value: Shape) -> bytes:
    """The map of a value."""
    packed: bytes = msgpack.packb(msgspec.to_builtins(value, builtin_types=(bytes,)))
    return packed


def decode(data: bytes, shape: type[_T], what: str) -> _T:
    """The value of a map. `InputInvalid` on any other bytes; ``what`` names them. The caller bounds their number."""
    try:
        # By type first: what doesn't belong is refused where it begins, before it is built. A megabyte of empty maps takes seventy.
        value = msgspec.msgpack.decode(data, type=shape)
        msgpack.unpackb(data, use_list=False, strict_map_key=True, object_pairs_hook=_unique, max_ext_len=0)
        return value
    except (ValueError, TypeError, msgpack.UnpackException, msgspec.ValidationError, RecursionError) as error:
        found = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputInvalid(
            f"{what}: expected a map as docs/protocol.md has it, found something else ({found:.200})"
        ) from error


def _unique(pairs: Sequence[tuple[Any, Any]]) -> dict[Any, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("duplicate map keys")
    return value


def bits(flags: Sequence[bool]) -> bytes:
    """One bit each, the first in the top bit of the first byte; the last byte is filled up with zeros."""
    padded = [*flags, *[False] * (-len(flags) % 8)]
    return bytes(sum(flag << (7 - i) for i, flag in enumerate(padded[at : at + 8])) for at in range(0, len(padded), 8))


def flags(data: bytes, count: int, what: str) -> list[bool]:
    """What `bits` made of ``count`` flags; `InputInvalid` on anything else."""
    found = [bool(byte >> (7 - i) & 1) for byte in data for i in range(8)]
    if len(data) != -(-count // 8) or any(found[count:]):
        raise InputInvalid(f"{what}: expected one bit for each of {count} objects, found {len(data)} bytes")
    return found[:count]
