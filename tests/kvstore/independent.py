"""A second implementation of the format, written from `docs/format.md` alone; it imports nothing of kvstore.

It reads a store and makes frames, as another program would. The tests compare it with kvstore, both ways.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import msgpack
import zstandard
from blake3 import blake3

CONTEXT = "kvferry 2026-11-30 format 1 "
OBJECT, MANIFEST, COVERAGE, REF = 1, 2, 3, 4
NAME_CONTEXT = {OBJECT: "object", MANIFEST: "snapshot", COVERAGE: "coverage", REF: "ref"}
ELEMENT = {"float16": 2}


class Damaged(Exception):
    pass


def need(condition: bool, what: str) -> None:
    if not condition:
        raise Damaged(what)


def derive(context: str, *parts: bytes) -> bytes:
    return blake3(b"".join(parts), derive_key_context=CONTEXT + context).digest()


def plain(data: bytes) -> bytes:
    return blake3(data).digest()


# items: an int is a token, a pair (placeholder, 32 bytes) is a soft token


def pack_items(items: list[Any]) -> bytes:
    return b"".join(
        struct.pack(">I", i) if isinstance(i, int) else struct.pack(">I", i[0] + 2**31) + i[1] for i in items
    )


def unpack_items(data: bytes) -> list[Any]:
    items: list[Any] = []
    while data:
        (word,) = struct.unpack(">I", data[:4])
        if word < 2**31:
            items.append(word)
            data = data[4:]
        else:
            need(len(data) >= 36, "cut soft token")
            items.append((word - 2**31, data[4:36]))
            data = data[36:]
    return items


# frames


def frame(number: int, payload: bytes, **other: Any) -> bytes:
    """A frame; ``other`` overrides header fields, to make damaged and future ones with a right header hash."""
    field = {
        "magic": b"KVFERRY\0",
        "version": 1,
        "kind": number,
        "codec": 0,
        "cipher": 0,
        "reserved": b"\0\0\0",
        "content": len(payload),
        "stored": len(payload),
        "name": derive(NAME_CONTEXT[number], payload),
        **other,
    }
    field.setdefault("hash", field["name"])
    head = (
        field["magic"]
        + struct.pack("<HBBB", field["version"], field["kind"], field["codec"], field["cipher"])
        + field["reserved"]
        + struct.pack("<QQ", field["content"], field["stored"])
        + field["name"]
        + field["hash"]
    )
    return head + plain(head) + payload


def unframe(data: bytes, kind: int) -> tuple[bytes, bytes]:
    """(content name, payload)"""
    need(len(data) >= 128 and data[:8] == b"KVFERRY\0", "magic")
    need(data[96:128] == plain(data[:96]), "header hash")
    version, found, codec, cipher = struct.unpack("<HBBB", data[8:13])
    content, stored = struct.unpack("<QQ", data[16:32])
    payload = data[128:]
    need((version, found, cipher, data[13:16]) == (1, kind, 0, b"\0\0\0"), "header")
    need(stored == len(payload) > 0, "length")
    if codec == 1:
        need(kind == OBJECT, "codec")
        need(data[64:96] == plain(payload), "stored hash")
        payload = planes(payload, content)
    else:
        need(codec == 0 and data[64:96] == data[32:64], "stored hash")
    need(content == len(payload), "length")
    need(data[32:64] == derive(NAME_CONTEXT[kind], payload), "content name")
    return data[32:64], payload


def planes(payload: bytes, length: int) -> bytes:
    """The content of codec 1."""
    need(length % 2 == 0 and length <= 2**26 and length // 2 < len(payload) < length, "lengths of planes")
    low, frame = payload[: length // 2], payload[length // 2 :]
    need(frame[:4] == b"\x28\xb5\x2f\xfd", "frame")
    said = zstandard.get_frame_parameters(frame)
    need((said.content_size, said.dict_id, said.has_checksum) == (len(low), 0, False), "frame")
    need(said.window_size <= 2**25, "window")
    work = zstandard.ZstdDecompressor().decompressobj()
    high = work.decompress(frame)
    need(work.eof and not work.unused_data and len(high) == len(low), "frame")
    return bytes(byte for pair in zip(low, high, strict=True) for byte in pair)


def value(payload: bytes) -> Any:
    found = msgpack.unpackb(payload, object_pairs_hook=list, use_list=True)
    return _maps(found)


def _maps(found: Any) -> Any:
    """object_pairs_hook gives lists of pairs, which are tuples; arrays are lists of other things."""
    if isinstance(found, list) and found and all(isinstance(pair, tuple) for pair in found):
        need(len({k for k, _ in found}) == len(found), "double key")
        return {k: _maps(v) for k, v in found}
    return [_maps(v) for v in found] if isinstance(found, list) else found


# chains


def chain(manifest: dict[str, Any]) -> list[tuple[bytes, bytes, bytes]]:
    """Per block (items, prefix key, BlockId)."""
    root = derive(
        "prefix root",
        derive("identity", msgpack.packb(manifest["identity"])),
        derive("layout", msgpack.packb(manifest["layout"])),
        manifest["namespace"].encode(),
    )
    items, names = unpack_items(manifest["items"]), blocks(manifest)
    key = block = root
    links = []
    for b, contents in enumerate(names):
        encoded = pack_items(items[64 * b : 64 * b + 64])
        key = derive("prefix key", key, encoded)
        block = derive("block id", block, key, *contents)
        links.append((encoded, key, block))
    return links


def blocks(manifest: dict[str, Any]) -> list[list[bytes]]:
    names, groups = manifest["blocks"], len(manifest["layout"][1])
    flat = [names[at : at + 32] for at in range(0, len(names), 32)]
    return [flat[at : at + groups] for at in range(0, len(flat), groups)]


# a store


class Reader:
    """Reads a store's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        head = json.loads((path / "format.json").read_text())
        need(head["format"] == 2 and set(head["features"]) <= {"planes"}, "format.json")

    def ref(self, label: str) -> bytes:
        _, payload = unframe((self.path / "refs" / plain(label.encode()).hex()).read_bytes(), REF)
        found = value(payload)
        need(found["label"] == label, "label")
        snapshot: bytes = found["snapshot"]
        return snapshot

    def manifest(self, digest: bytes) -> dict[str, Any]:
        name, payload = unframe((self.path / "snapshots" / digest.hex()).read_bytes(), MANIFEST)
        need(name == digest, "snapshot digest")
        found: dict[str, Any] = value(payload)
        return found

    def coverage(self, digest: bytes) -> list[list[list[int]]]:
        _, payload = unframe((self.path / "snapshots" / f"{digest.hex()}.cov").read_bytes(), COVERAGE)
        found = value(payload)
        need(found["snapshot"] == digest, "snapshot of the coverage")
        runs: list[list[list[int]]] = found["runs"]
        return runs

    def object(self, name: bytes) -> bytes:
        found, payload = unframe((self.path / "objects" / name.hex()[:1] / name.hex()[1:]).read_bytes(), OBJECT)
        need(found == name, "content digest")
        return payload

    def rows(self, digest: bytes) -> dict[tuple[int, str], dict[int, bytes]]:
        """Per (layer, "K" or "V") the bytes of every present row, by token."""
        manifest = self.manifest(digest)
        kind, groups = manifest["layout"]
        tokens = len(unpack_items(manifest["items"]))
        rows: dict[tuple[int, str], dict[int, bytes]] = {}
        for g, (_, _, layers, kv_heads, head_dim) in enumerate(groups):
            size = kv_heads * head_dim * ELEMENT[kind]
            for first, last in self.coverage(digest)[g]:
                for b in range(first, last):
                    content = self.object(blocks(manifest)[b][g])
                    here = range(64 * b, min(64 * b + 64, tokens))
                    need(len(content) == len(here) * len(layers) * 2 * size, "object length")
                    at = 0
                    for layer in layers:
                        for part in "KV":
                            for token in here:
                                rows.setdefault((layer, part), {})[token] = content[at : at + size]
                                at += size
        return rows

    def usable(self, digest: bytes, match: int) -> int:
        """The longest P up to ``match`` that the snapshot can be continued at."""
        manifest, coverage = self.manifest(digest), self.coverage(digest)
        end = len(unpack_items(manifest["items"]))
        for p in range(min(match, end), 0, -1):
            if all(
                any(
                    p <= min(64 * last, end) and (first == 0 or (window is not None and p >= 64 * first + window - 1))
                    for first, last in coverage[g]
                )
                for g, (_, window, *_) in enumerate(manifest["layout"][1])
            ):
                return p
        return 0
