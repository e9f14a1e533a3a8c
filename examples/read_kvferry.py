"""Reads a kvferry store without kvferry. It is written from docs/format.md alone, to show that the document is enough.
`python examples/read_kvferry.py STORE` lists names and snapshots; with a NAME it verifies every byte of that one."""

import collections.abc
import json
import re
import sys
import unicodedata
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import zstandard
from blake3 import blake3

PARTS = "identity layout namespace items blocks lineages lineage pending head receipt model"
KEYS = {"object": "", "snapshot": PARTS, "coverage": "snapshot runs", "ref": "label snapshot updated"}
Group = collections.namedtuple("Group", "name window layers kv_heads head_dim")


def need(true: object, where: str, what: str) -> None:
    if not true:
        raise ValueError(f"{where}: {what}")


def digest(what: str, data: bytes) -> bytes:
    return blake3(data, derive_key_context=f"kvferry 2026-11-30 format 1 {what}").digest()


def frame(store: Path, place: str, kind: str, name: str | None = None, trash: str = "") -> Any:
    """The verified content of one file, bytes or a map. What a collector has just taken away is found in the trash."""
    place = trash if trash and not (store / place).exists() and (store / trash).exists() else place
    linked = any((store / p).is_symlink() for p in (Path(place), *Path(place).parents[:-1]))
    need((store / place).is_file() and not linked, place, f"no {kind} there (links are not followed)")
    with (store / place).open("rb") as file:
        head, size, number = file.read(128), (store / place).stat().st_size, [*KEYS].index(kind) + 1
        need(head[:8] == b"KVFERRY\0", place, "not one of kvferry's files: it begins otherwise")
        need(len(head) == 128 and head[96:] == blake3(head[:96]).digest(), place, "the header is damaged or cut off")
        version, content, stored = (int.from_bytes(head[a:b], "little") for a, b in ((8, 10), (16, 24), (24, 32)))
        need(version == 1, place, f"version {version} of the frame; this reads 1")
        planes, own, other = number == head[11] == 1, head[32:64], head[64:96]
        need(head[10:16] == bytes([number, planes, 0, 0, 0, 0]), place, f"the header is not that of a plain {kind}")
        need(name in (None, own.hex()) and (planes or own == other), place, "the header names other content")
        good = content // 2 < stored < content <= 2**26 and content % 2 == 0 if planes else content == stored
        good = good and 0 < content <= (2**26 if number > 1 else 2**30)
        need(good, place, f"impossible lengths, {content} and {stored} bytes")
        need(size == 128 + stored, place, f"expected {128 + stored} bytes, found {size}: cut off or appended to")
        data = file.read(stored)
    if planes:
        need(blake3(data).digest() == other, place, "the payload is damaged: its hash is not the stored one")
        low, high = data[: content // 2], data[content // 2 :]
        said = zstandard.get_frame_parameters(high)
        odd = high[:4] != b"\x28\xb5\x2f\xfd" or said.window_size > 2**25 or said.dict_id or said.has_checksum
        need(not odd and said.content_size == len(low), place, "not one plain Zstandard frame of the high plane")
        high = zstandard.ZstdDecompressor().decompress(high, allow_extra_data=False)
        data = np.frombuffer(low + high, "u1").reshape(2, -1).T.tobytes()
    need(digest(kind, data) == own, place, "the payload is damaged: its digest is not its name")
    try:
        out: Any = msgpack.unpackb(data) if (keys := KEYS[kind]) else data
        need(not keys or (" ".join({**out}) == keys and msgpack.packb(out) == data), "content", "not canonical")
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"{place}: {error}") from None
    return out


class Snapshot(collections.namedtuple("Snapshot", "store name manifest groups blocks contents runs")):
    """blocks: the encoded items of each; contents: of each its groups' content digests; runs: of each group [first, last)."""

    def objects(self) -> collections.abc.Iterator[tuple[int, int, Any]]:
        """Of every covered object its group, its block, and the rows [layers, K and V, tokens, width]."""
        for g, b in ((g, b) for g, runs in enumerate(self.runs) for a, z in runs for b in range(a, z)):
            group, name = self.groups[g], self.contents[b][g].hex()
            shape = len(group.layers), 2, len(self.blocks[b]), group.kv_heads * group.head_dim
            data = frame(self.store, place := f"objects/{name[0]}/{name[1:]}", "object", name, f"trash/{name}")
            need(len(data) == 2 * np.prod(shape), place, f"expected {2 * np.prod(shape)} bytes, found {len(data)}")
            yield g, b, np.frombuffer(data, "<f2").reshape(shape)

    def rows(self) -> dict[tuple[int, str], Any]:
        """For each layer and "k" or "v" the rows [tokens, kv_heads * head_dim], NaN where this store has none."""
        widths = {(layer, kv): g.kv_heads * g.head_dim for g in self.groups for layer in g.layers for kv in "kv"}
        out = {x: np.full((sum(map(len, self.blocks)), width), np.nan, "<f2") for x, width in widths.items()}
        for g, b, pairs in self.objects():
            for layer, (k, v) in zip(self.groups[g].layers, pairs, strict=True):
                out[layer, "k"][64 * b :][: len(k)], out[layer, "v"][64 * b :][: len(v)] = k, v
        return out

    def chain(self) -> tuple[list[bytes], list[bytes]]:
        """Of every block the prefix key, and the BlockId."""
        roots = [digest(x, msgpack.packb(self.manifest[x])) for x in ("identity", "layout")]
        key = block = digest("prefix root", b"".join(roots) + self.manifest["namespace"].encode())
        keys = [key := digest("prefix key", key + b"".join(items)) for items in self.blocks]
        ids = [block := digest("block id", block + k + b"".join(c)) for k, c in zip(keys, self.contents, strict=True)]
        return keys, ids


def snapshot(store: Path, name: str) -> Snapshot:
    place = f"snapshots/{name}"
    m = frame(store, place, "snapshot", name, f"trash/{name}.snapshot")
    cover: Any = {"snapshot": bytes.fromhex(name), "runs": None}  # where no file is, nothing is promised
    if (store / f"{place}.cov").exists() or (store / f"trash/{name}.cov").exists():
        cover = frame(store, f"{place}.cov", "coverage", None, f"trash/{name}.cov")
    try:
        groups = [Group(*group) for group in m["layout"][1]]
        items = re.findall(rb"(?s)[\0-\x7f].{3}|[\x80-\xff].{35}", m["items"])
        blocks = [items[i : i + 64] for i in range(0, len(items), 64)]
        contents = np.frombuffer(m["blocks"], "V32").reshape(-1, len(groups)).tolist()
        sizes = [x for g in groups for x in (len(g.layers), g.kv_heads, g.head_dim, (g.window or 64) // 64)]
        good = m["layout"][0] == "float16" and all(type(x) is int and x > 0 for x in sizes)
        need(good and b"".join(items) == m["items"] and len(contents) == len(blocks) > 0, "its parts", "misfit")
        promised = [[] for _ in groups] if cover["runs"] is None else cover["runs"]
        edges = [[-1, *np.ravel(runs), len(blocks) + 1] for _, runs in zip(groups, promised, strict=True)]
        good = cover["snapshot"].hex() == name and all(edge == sorted(set(edge)) for edge in edges)
        need(good, "coverage", "of another snapshot, or impossible")
    except (ValueError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"{place}: {error}") from None
    return Snapshot(store, name, m, groups, blocks, contents, promised)


def ref(store: Path, file: str) -> tuple[str, str]:  # the label and its snapshot
    r = frame(store, place := f"refs/{file}", "ref")
    need(blake3(r["label"].encode()).hexdigest() == file, place, f"the ref of another label, {r['label']!r}")
    return r["label"], r["snapshot"].hex()


def main(store: Path, label: str | None = None) -> None:
    about = {"format": "a link"} if (path := store / "format.json").is_symlink() else json.loads(path.read_bytes())
    need(about["format"] == 2 and {*about["features"]} <= {"planes"}, "format.json", f"not format 2, but {about}")
    if label is None:
        refs = [ref(store, path.name) for path in sorted((store / "refs").glob("?" * 64))]
        for s in (snapshot(store, path.name) for path in sorted((store / "snapshots").glob("?" * 64))):
            print(s.name, sum(map(len, s.blocks)), "tokens", *(repr(label) for label, name in refs if name == s.name))
        return
    s = snapshot(store, ref(store, blake3(unicodedata.normalize("NFC", label).encode()).hexdigest())[1])
    print(f"{label!r}: snapshot {s.name}, model {s.manifest['model']!r}, pending {s.manifest['pending']}")
    items = [int.from_bytes(item[:4]) for block in s.blocks for item in block]
    print(f"{len(items)} tokens:", *(x if x < 2**31 else f"soft({x - 2**31})" for x in items[:12]))
    here = [(g, rows.shape[2], rows.nbytes) for g, _, rows in s.objects()]
    for g, group in enumerate(s.groups):
        tokens, size = (sum(x[i] for x in here if x[0] == g) for i in (1, 2))
        print(f"{group.name!r}: layers {group.layers}, window {group.window}, {tokens} rows of each, {size} bytes")
    print("last block: prefix key {}, BlockId {}".format(*(digests[-1].hex() for digests in s.chain())))


if __name__ == "__main__":
    try:
        main(Path(*sys.argv[1:2]), *sys.argv[2:3])
    except (ValueError, OSError, zstandard.ZstdError, TypeError, LookupError, AttributeError) as error:
        sys.exit(f"read_kvferry: {error}")
