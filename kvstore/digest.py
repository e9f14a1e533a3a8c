"""Digests, one type per meaning, and the two chains that are built from them.

All are BLAKE3 in derive-key mode, 32 bytes, with one context string per meaning, so that a digest of one kind can
never equal a digest of another kind. `docs/format.md` gives the contexts and test vectors.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from blake3 import blake3

from .errors import InputInvalid

SIZE = 32
MAX_NAMESPACE = 200
_CONTEXT = "kvferry 2026-11-30 format 1 {}"


@dataclass(frozen=True, slots=True, order=True)
class Digest:
    """32 bytes. Subclasses never compare equal to each other."""

    raw: bytes

    def __post_init__(self) -> None:
        if type(self.raw) is not bytes or len(self.raw) != SIZE:
            raise InputInvalid(f"{type(self).__name__}: expected {SIZE} bytes, found {self.raw!r:.60}")

    @property
    def hex(self) -> str:
        return self.raw.hex()

    @classmethod
    def parse(cls, text: str) -> Self:
        """From 64 lowercase hex digits, exactly."""
        if len(text) == 2 * SIZE and all(c in "0123456789abcdef" for c in text):
            return cls(bytes.fromhex(text))
        raise InputInvalid(f"{cls.__name__}: expected {2 * SIZE} lowercase hex digits, found {text!r:.80}")

    def __str__(self) -> str:
        return self.hex


class IdentityDigest(Digest):
    """Names a model identity: whose KV."""

    __slots__ = ()


class LayoutDigest(Digest):
    """Names a KV layout: which layers, head sizes, windows, dtype."""

    __slots__ = ()


class PrefixKey(Digest):
    """Names a token prefix under one identity, layout and namespace: *which tokens*."""

    __slots__ = ()


class ContentDigest(Digest):
    """Names one object by its plain content: *which KV bytes*."""

    __slots__ = ()


class BlockId(Digest):
    """Names a block in its chain: which tokens *and* which KV bytes, all the way up to the root."""

    __slots__ = ()


class SnapshotDigest(Digest):
    """Names a snapshot by the bytes of its manifest."""

    __slots__ = ()


def _derive(context: str, parts: Iterable[bytes | memoryview]) -> bytes:
    hasher = blake3(derive_key_context=_CONTEXT.format(context))
    for part in parts:
        hasher.update(part)
    return hasher.digest()


def identity_digest(canonical: bytes) -> IdentityDigest:
    return IdentityDigest(_derive("identity", [canonical]))


def layout_digest(canonical: bytes) -> LayoutDigest:
    return LayoutDigest(_derive("layout", [canonical]))


def check_namespace(namespace: str) -> None:
    """`InputInvalid` unless it is one that everybody types the same way: 1 to 200 printable characters in NFC, trimmed."""
    normal = unicodedata.normalize("NFC", namespace[:MAX_NAMESPACE])
    if not namespace or normal != namespace or normal != normal.strip() or not normal.isprintable():
        raise InputInvalid(
            f"namespace: expected 1 to {MAX_NAMESPACE} printable characters in NFC without spaces at the ends, "
            f"found {namespace!r:.80}"
        )


def root_key(identity: IdentityDigest, layout: LayoutDigest, namespace: str) -> PrefixKey:
    """The key of the empty prefix: one namespace, one root."""
    check_namespace(namespace)
    return PrefixKey(_derive("prefix root", [identity.raw, layout.raw, namespace.encode()]))


def child_key(parent: PrefixKey, items: bytes) -> PrefixKey:
    """The key of a prefix one block longer. ``items``: the block's encoded items (1 to 64)."""
    return PrefixKey(_derive("prefix key", [parent.raw, items]))


def root_block(root: PrefixKey) -> BlockId:
    """The parent of every first block under ``root``."""
    return BlockId(root.raw)


def child_block(parent: BlockId, key: PrefixKey, groups: Sequence[ContentDigest]) -> BlockId:
    """The id of a block: its parent's id, its prefix key, and its groups' contents in layout order."""
    return BlockId(_derive("block id", [parent.raw, key.raw, *(g.raw for g in groups)]))


def content_digest(parts: Iterable[bytes | memoryview]) -> ContentDigest:
    """The digest of one object's plain content, given as consecutive parts. Reads them, keeps nothing."""
    return ContentDigest(_derive("object", parts))


def content_hasher() -> blake3:
    """For content that arrives in pieces: its ``digest()`` after all of them is the `ContentDigest`'s 32 bytes."""
    return blake3(derive_key_context=_CONTEXT.format("object"))


def snapshot_digest(manifest: bytes) -> SnapshotDigest:
    return SnapshotDigest(_derive("snapshot", [manifest]))


def record_digest(kind: str, payload: bytes) -> bytes:
    """The content name of a small mutable record (``ref`` or ``coverage``)."""
    return _derive(kind, [payload])


def soft_row_digest(row: bytes | memoryview) -> bytes:
    """The 32 bytes that stand for a soft token's embedding row (fp16, little-endian) in its item."""
    return _derive("soft row", [row])


def label_file(label: str) -> str:
    """The file name of a ref: lowercase hex of BLAKE3 (plain mode) of the NFC label's UTF-8."""
    return blake3(label.encode()).hexdigest()
