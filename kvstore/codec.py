"""Bytes of files ⇄ values, every version, with limits; no I/O. `docs/format.md` is the description.

Every file but ``format.json`` is one frame: a 128-byte header, then the payload, then nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal, TypeVar

import msgpack
import msgspec
from blake3 import blake3

from .digest import (
    ContentDigest,
    SnapshotDigest,
    content_digest,
    record_digest,
    snapshot_digest,
)
from .errors import (
    Corrupt,
    CoverageCorrupt,
    FormatTooNew,
    InputInvalid,
    ObjectCorrupt,
    RefCorrupt,
    SignaturesCorrupt,
    SnapshotCorrupt,
)
from .identity import MAX_FIELDS, Identity
from .items import decode_items, encode_items
from .layout import MAX_OBJECT, Group, Layout
from .planes import MAX_PLANES, decode_planes, encode_planes, fits_planes
from .signatures import MAX_SIGNATURES, Signature
from .snapshot import MAX_TOKENS, Coverage, Lineage, Receipt, Ref, Snapshot

MAGIC = b"KVFERRY\0"
VERSION = 1
HEADER = 128
RAW, PLANES, PLAIN = 0, 1, 0
"""Codec ids of content stored as it is and of objects stored as byte planes; cipher id of no encryption."""
Codec = Literal["raw", "planes"]
CODECS: dict[Codec, int] = {"raw": RAW, "planes": PLANES}
"""The codecs of objects by the names that people and `format.json` give them."""

_BIN_MARKS = (0xC4, 0xC5, 0xC6)
"""First bytes of a msgpack byte string."""

_FIELDS = struct.Struct("<8sHBBB3sQQ32s32s")
_T = TypeVar("_T")
MAX_RECORD = 64 << 20
"""Largest payload of a manifest, coverage or ref, in bytes."""
MAX_UPDATED = 253402300799
"""Latest time of a ref in Unix seconds: the end of the year 9999, after which it can't be shown as a date."""
_OTHER_FORM = "content: expected its canonical form, found another encoding of it"
MAX_STRUCTURE = 1 << 20
"""Largest part of such a payload outside of its byte strings, in bytes: it bounds the values that decoding makes."""


class Kind(IntEnum):
    """What a frame holds."""

    OBJECT = 1
    SNAPSHOT = 2
    COVERAGE = 3
    REF = 4
    SIGNATURES = 5


_CORRUPT: dict[Kind, type[Corrupt]] = {
    Kind.OBJECT: ObjectCorrupt,
    Kind.SNAPSHOT: SnapshotCorrupt,
    Kind.COVERAGE: CoverageCorrupt,
    Kind.REF: RefCorrupt,
    Kind.SIGNATURES: SignaturesCorrupt,
}


@dataclass(frozen=True, slots=True)
class Header:
    """The fixed header. ``name``: digest of the plain content. ``stored``: what a receiver checks while bytes arrive: the name
    itself where the payload is the content (codec 0), else plain BLAKE3 of the payload."""

    kind: Kind
    content_length: int
    stored_length: int
    name: bytes
    stored: bytes
    codec: int = RAW
    cipher: int = PLAIN


def encode_header(header: Header) -> bytes:
    """128 bytes; the last 32 are BLAKE3 of the first 96."""
    fields = _FIELDS.pack(
        MAGIC,
        VERSION,
        header.kind,
        header.codec,
        header.cipher,
        b"\0\0\0",
        header.content_length,
        header.stored_length,
        header.name,
        header.stored,
    )
    return fields + blake3(fields).digest()


def decode_header(data: bytes | memoryview, kind: Kind, what: str) -> Header:
    """The header of a frame of ``kind``. ``what`` names the file in errors. Checks limits, touches no payload."""

    def bad(field: str, expected: object, found: object) -> Corrupt:
        return _CORRUPT[kind].at(what, f"{field}: expected {expected}, found {found}", field=field)

    if len(data) < HEADER:
        raise bad("length", f"at least {HEADER} bytes", len(data))
    magic, version, kind_id, codec, cipher, reserved, content, stored_length, name, stored = _FIELDS.unpack_from(data)
    if magic != MAGIC:
        raise bad("magic", MAGIC, bytes(magic))
    if bytes(data[_FIELDS.size : HEADER]) != blake3(data[: _FIELDS.size]).digest():
        raise bad("header hash", blake3(data[: _FIELDS.size]).hexdigest(), bytes(data[_FIELDS.size : HEADER]).hex())
    if version != VERSION:
        raise FormatTooNew(
            f"{what}: format version: this kvferry reads up to {VERSION}, found {version}. Upgrade kvferry to read it.",
            supported=VERSION,
            found=version,
        )
    if kind_id != kind:
        raise bad("kind", int(kind), kind_id)
    known = (RAW, PLANES) if kind is Kind.OBJECT else (RAW,)
    if codec not in known or cipher != PLAIN:
        raise FormatTooNew(
            f"{what}: codec and cipher: this kvferry reads codec {' or '.join(map(str, known))}, cipher {PLAIN}, found codec {codec}, cipher {cipher}. "
            f"Upgrade kvferry to read it.",
            codec=codec,
            cipher=cipher,
        )
    if reserved != b"\0\0\0":
        raise bad("reserved bytes", "zero", reserved)
    limit = MAX_OBJECT if kind is Kind.OBJECT else MAX_RECORD
    if not 0 < content <= limit:
        raise bad("content length", f"1 to {limit} bytes", content)
    if codec == PLANES and not fits_planes(content, stored_length):
        limits = f"an even number up to {MAX_PLANES}, and more than half of it but less than all"
        raise bad("content length and stored length of planes", limits, f"{content} and {stored_length}")
    if codec == RAW and stored_length != content:
        raise bad("stored length of raw content", content, stored_length)
    if codec == RAW and stored != name:
        raise bad("stored hash of raw content", name.hex(), stored.hex())
    return Header(kind, content, stored_length, name, stored, codec, cipher)


def object_header(name: ContentDigest, length: int) -> bytes:
    """The header of a raw object of ``length`` bytes of content, which ``name`` names."""
    return encode_header(Header(Kind.OBJECT, length, length, name.raw, name.raw))


def encode_object(
    name: ContentDigest, parts: Sequence[bytes | memoryview], codec: int = RAW
) -> list[bytes | memoryview]:
    """The file of an object in parts, from its content in parts; raw where planes would not make it smaller."""
    payload = encode_planes(parts) if codec == PLANES else None
    length = sum(len(part) for part in parts)
    if payload is None:
        return [object_header(name, length), *parts]
    stored = blake3(payload).digest()
    return [encode_header(Header(Kind.OBJECT, length, len(payload), name.raw, stored, PLANES)), payload]


def check_object(header: Header, payload: Sequence[bytes | memoryview], name: ContentDigest) -> None:
    """Raises `ObjectCorrupt` unless ``payload``, in consecutive parts, holds the content that ``name`` names."""
    if header.codec == PLANES:
        whole = memoryview(payload[0] if len(payload) == 1 else b"".join(payload))
        check_payload(header, [whole], name)
        decode_object(header, whole, name, [])
        return
    check_payload(header, payload, name)


def decode_object(header: Header, payload: memoryview, name: ContentDigest, parts: Sequence[memoryview]) -> None:
    """Verifies the content of planes, then fills ``parts``, as long as the content or none at all. `ObjectCorrupt`.

    The stored hash is left to `check_object`: it costs a tenth of a restore, and says nothing of the content that its digest doesn't.
    """
    content = decode_planes(name, payload, header.content_length)
    _check_content([content], name)
    at = 0
    for part in parts:
        part[:] = content[at : at + len(part)]
        at += len(part)


def check_payload(header: Header, payload: Sequence[bytes | memoryview], name: ContentDigest) -> None:
    """The payload is what the header says; of raw content so is the content."""
    what = f"object {name}"

    def bad(field: str, expected: object, found: object) -> ObjectCorrupt:
        return ObjectCorrupt.at(what, f"{field}: expected {expected}, found {found}", field=field, name=name.hex)

    if header.name != name.raw:
        raise bad("name in the header", name, header.name.hex())
    length = sum(map(len, payload))
    if length != header.stored_length:
        raise bad("length", f"{header.stored_length} bytes after the header", length)
    if header.codec == RAW:
        _check_content(payload, name)
        return
    hasher = blake3()
    for part in payload:
        hasher.update(part)
    if hasher.digest() != header.stored:
        raise bad("stored hash", header.stored.hex(), hasher.hexdigest())


def _check_content(parts: Sequence[bytes | memoryview], name: ContentDigest) -> None:
    found = content_digest(parts)
    if found != name:
        what, field = f"object {name}", "content digest"
        raise ObjectCorrupt.at(what, f"{field}: expected {name}, found {found}", field=field, name=name.hex)


def _record(kind: Kind, name: bytes, payload: bytes) -> bytes:
    if len(payload) > MAX_RECORD:
        raise InputInvalid(f"{kind.name.lower()}: expected at most {MAX_RECORD} bytes, found {len(payload)}")
    return encode_header(Header(kind, len(payload), len(payload), name, name)) + payload


def _payload(data: bytes, kind: Kind, what: str) -> tuple[bytes, bytes]:
    """The checked payload of a whole small frame, and the content name that its header states."""
    header = decode_header(data, kind, what)
    payload = data[HEADER:]

    def bad(field: str, expected: object, found: object) -> Corrupt:
        return _CORRUPT[kind].at(what, f"{field}: expected {expected}, found {found}", field=field)

    if len(payload) != header.stored_length:
        raise bad("length", f"{header.stored_length} bytes after the header", len(payload))
    named = snapshot_digest(payload).raw if kind is Kind.SNAPSHOT else record_digest(kind.name.lower(), payload)
    if header.name != named:
        raise bad("content name", f"{header.name.hex()} as in the header", f"content that {named.hex()} names")
    return payload, header.name


class _Group(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    name: str
    window: int | None
    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int


class _Layout(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    dtype: str
    groups: tuple[_Group, ...]


class _Receipt(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    tokens: tuple[int, ...]
    asked: int
    finish: str


class _Snapshot(msgspec.Struct, forbid_unknown_fields=True):
    identity: dict[str, Any]
    layout: _Layout
    namespace: str
    items: bytes
    blocks: bytes
    lineages: tuple[dict[str, str], ...]
    lineage: tuple[int, ...]
    pending: int | None
    head: str | None
    receipt: _Receipt | None
    model: str


class _Coverage(msgspec.Struct, forbid_unknown_fields=True):
    snapshot: bytes
    runs: tuple[tuple[tuple[int, int], ...], ...]


class _Ref(msgspec.Struct, forbid_unknown_fields=True):
    label: str
    snapshot: bytes
    updated: int


class _Signatures(msgspec.Struct, forbid_unknown_fields=True):
    snapshot: bytes
    signatures: tuple[tuple[bytes, bytes], ...]


def _unique(pairs: Sequence[tuple[Any, Any]]) -> dict[Any, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("duplicate map keys")
    return value


def _check_structure(payload: bytes) -> None:
    """Raises ValueError unless ``payload`` is a small map of which all but its byte strings is small too. Builds no value."""
    scan = msgpack.Unpacker(max_buffer_size=len(payload), strict_map_key=True, max_bin_len=len(payload))
    scan.feed(payload)
    entries = scan.read_map_header()
    if entries > MAX_FIELDS:
        raise ValueError(f"{entries} map entries")
    structure = 0
    for _ in range(entries):
        start = scan.tell()
        scan.skip()
        middle = scan.tell()
        scan.skip()
        end = scan.tell()
        is_bytes = payload[middle] in _BIN_MARKS
        structure += middle - start + (0 if is_bytes else end - middle)
        if structure > MAX_STRUCTURE:
            raise ValueError(f"more than {MAX_STRUCTURE} bytes outside of byte strings")


def _unpack(payload: bytes, shape: type[_T], corrupt: type[Corrupt], what: str) -> _T:
    """A value of ``shape``, within the limits. Each decoder then compares what its value encodes to: other forms are refused."""
    try:
        _check_structure(payload)
        plain = msgpack.unpackb(
            payload,
            use_list=False,
            strict_map_key=True,
            object_pairs_hook=_unique,
            max_bin_len=36 * MAX_TOKENS,
            max_str_len=1 << 20,
            max_array_len=MAX_TOKENS,
            max_map_len=4096,
            max_ext_len=0,
        )
        return msgspec.convert(plain, shape)
    except (ValueError, TypeError, msgpack.UnpackException, msgspec.ValidationError, RecursionError) as error:
        found = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise corrupt.at(what, f"content: expected what kvferry writes, found something else ({found:.200})") from error


def encode_snapshot(snapshot: Snapshot) -> tuple[SnapshotDigest, bytes]:
    """The digest that names a snapshot, and its file. Deterministic. `InputInvalid` for what could not be read again."""
    receipt = snapshot.receipt
    value: dict[str, Any] = {
        "identity": snapshot.identity.wire(),
        "layout": snapshot.layout.wire(),
        "namespace": snapshot.namespace,
        "items": encode_items(snapshot.items),
        "blocks": b"".join(d.raw for block in snapshot.blocks for d in block),
        "lineages": [dict(lineage.fields) for lineage in snapshot.lineages],
        "lineage": snapshot.lineage,
        "pending": snapshot.pending,
        "head": snapshot.head,
        "receipt": None if receipt is None else [receipt.tokens, receipt.asked, receipt.finish],
        "model": snapshot.model,
    }
    try:
        payload: bytes = msgpack.packb(value)
        _check_structure(payload)
    except (ValueError, OverflowError) as error:
        raise InputInvalid(f"snapshot: expected values that a manifest can hold, found {error}") from error
    digest = snapshot_digest(payload)
    return digest, _record(Kind.SNAPSHOT, digest.raw, payload)


def decode_snapshot(data: bytes, digest: SnapshotDigest) -> Snapshot:
    """The snapshot that ``digest`` names, from its file; `SnapshotCorrupt` on anything else."""
    what = f"snapshot {digest}"
    payload, name = _payload(data, Kind.SNAPSHOT, what)
    if name != digest.raw:
        raise SnapshotCorrupt.at(what, f"name in the header: expected {digest}, found {name.hex()}")
    wire = _unpack(payload, _Snapshot, SnapshotCorrupt, what)
    try:
        layout = _layout_of(wire.layout)
        step = 32 * len(layout.groups)
        if len(wire.blocks) % step:
            raise InputInvalid(f"blocks: expected a multiple of {step} bytes, found {len(wire.blocks)}")
        blocks = tuple(
            tuple(ContentDigest(wire.blocks[at + 32 * g : at + 32 * g + 32]) for g in range(len(layout.groups)))
            for at in range(0, len(wire.blocks), step)
        )
        receipt = (
            None if wire.receipt is None else Receipt(wire.receipt.tokens, wire.receipt.asked, wire.receipt.finish)
        )
        snapshot = Snapshot(
            identity=Identity.of(wire.identity),
            layout=layout,
            namespace=wire.namespace,
            items=decode_items(wire.items),
            blocks=blocks,
            lineages=tuple(Lineage.of(fields) for fields in wire.lineages),
            lineage=wire.lineage,
            pending=wire.pending,
            head=wire.head,
            receipt=receipt,
            model=wire.model,
        )
        if encode_snapshot(snapshot)[0] != digest:
            raise InputInvalid(_OTHER_FORM)
    except InputInvalid as error:
        raise SnapshotCorrupt.at(what, str(error)) from error
    return snapshot


def decode_layout(data: bytes) -> Layout:
    """A layout from its bytes (``msgpack`` of `Layout.wire`). `InputInvalid`."""
    try:
        wire = msgspec.convert(msgpack.unpackb(data, use_list=False, max_ext_len=0), _Layout)
        layout = _layout_of(wire)
    except (ValueError, TypeError, msgpack.UnpackException, msgspec.ValidationError, RecursionError) as error:
        raise InputInvalid(
            f"layout: expected its canonical bytes, found something else ({str(error)[:200]})"
        ) from error
    if msgpack.packb(layout.wire()) != data:
        raise InputInvalid("layout: expected its canonical bytes, found another encoding of it")
    return layout


def _layout_of(wire: _Layout) -> Layout:
    return Layout(tuple(Group(g.name, g.window, g.layers, g.kv_heads, g.head_dim) for g in wire.groups), wire.dtype)


def encode_coverage(coverage: Coverage) -> bytes:
    payload: bytes = msgpack.packb({"snapshot": coverage.snapshot.raw, "runs": coverage.runs})
    return _record(Kind.COVERAGE, record_digest("coverage", payload), payload)


def decode_coverage(data: bytes, snapshot: SnapshotDigest, groups: int, blocks: int) -> Coverage:
    """The coverage of ``snapshot``, which has ``groups`` groups and ``blocks`` blocks."""
    what = f"coverage of {snapshot}"
    payload, _ = _payload(data, Kind.COVERAGE, what)
    wire = _unpack(payload, _Coverage, CoverageCorrupt, what)
    try:
        coverage = Coverage(SnapshotDigest(wire.snapshot), wire.runs)
    except InputInvalid as error:
        raise CoverageCorrupt.at(what, str(error)) from error
    if coverage.snapshot != snapshot:
        raise CoverageCorrupt.at(what, f"snapshot: expected {snapshot}, found {coverage.snapshot}")
    if len(coverage.runs) != groups or any(b > blocks for runs in coverage.runs for _, b in runs):
        runs = f"{coverage.runs!r:.100}"
        raise CoverageCorrupt.at(what, f"runs: expected {groups} groups within {blocks} blocks, found {runs}")
    if encode_coverage(coverage) != data:
        raise CoverageCorrupt.at(what, _OTHER_FORM)
    return coverage


def encode_ref(ref: Ref) -> bytes:
    updated = min(max(0, ref.updated), MAX_UPDATED)  # a clock may show anything, and a ref must be read again
    payload: bytes = msgpack.packb({"label": ref.label, "snapshot": ref.snapshot.raw, "updated": updated})
    return _record(Kind.REF, record_digest("ref", payload), payload)


def decode_ref(data: bytes, what: str) -> Ref:
    """A ref from its file; the caller compares its label with the file's name."""
    payload, _ = _payload(data, Kind.REF, what)
    wire = _unpack(payload, _Ref, RefCorrupt, what)
    if not 0 <= wire.updated <= MAX_UPDATED:
        raise RefCorrupt.at(what, f"updated: expected 0 to {MAX_UPDATED} seconds, found {wire.updated}")
    try:
        ref = Ref(wire.label, SnapshotDigest(wire.snapshot), wire.updated)
    except InputInvalid as error:
        raise RefCorrupt.at(what, str(error)) from error
    if encode_ref(ref) != data:
        raise RefCorrupt.at(what, _OTHER_FORM)
    return ref


def encode_signatures(snapshot: SnapshotDigest, signatures: Sequence[Signature]) -> bytes:
    """The signatures of a snapshot, in the order of their keys."""
    pairs = [(signature.key, signature.raw) for signature in signatures]
    payload: bytes = msgpack.packb({"snapshot": snapshot.raw, "signatures": pairs})
    return _record(Kind.SIGNATURES, record_digest("signatures", payload), payload)


def decode_signatures(data: bytes, snapshot: SnapshotDigest) -> tuple[Signature, ...]:
    """The signatures of ``snapshot`` by form: whether they are true is not looked at."""
    what = f"signatures of {snapshot}"
    payload, _ = _payload(data, Kind.SIGNATURES, what)
    wire = _unpack(payload, _Signatures, SignaturesCorrupt, what)
    try:
        found = tuple(Signature(key, raw) for key, raw in wire.signatures)
    except InputInvalid as error:
        raise SignaturesCorrupt.at(what, str(error)) from error
    if wire.snapshot != snapshot.raw:
        raise SignaturesCorrupt.at(what, f"snapshot: expected {snapshot}, found {wire.snapshot.hex():.64}")
    keys = [signature.key for signature in found]
    if not 1 <= len(keys) <= MAX_SIGNATURES or keys != sorted(set(keys)):
        raise SignaturesCorrupt.at(
            what, f"signatures: expected 1 to {MAX_SIGNATURES} in order of their keys, each once, found {len(keys)}"
        )
    if encode_signatures(snapshot, found) != data:
        raise SignaturesCorrupt.at(what, _OTHER_FORM)
    return found
