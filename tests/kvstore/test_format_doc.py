"""The test vectors of `docs/format.md`, recomputed by the independent implementation, and kvstore against both."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import independent
import msgpack
import pytest
from independent import COVERAGE, MANIFEST, OBJECT, REF, derive, frame, pack_items, plain

from kvstore import codec, digest
from kvstore.identity import Identity
from kvstore.items import SoftToken
from kvstore.layout import Group, Layout
from kvstore.snapshot import Coverage, Lineage, Receipt, Ref, Snapshot

DOC = (Path(__file__).parents[2] / "docs" / "format.md").read_text()


def _document() -> tuple[dict[str, Any], dict[str, bytes]]:
    inputs = json.loads(DOC.split("```json\n")[1].split("```")[0])
    table = re.findall(r"^\| ([^|`]+) \| `([0-9a-f]+)` \|$", DOC, re.M)
    return inputs, {name: bytes.fromhex(value) for name, value in table}


INPUTS, VECTORS = _document()


def _content(block: int, group: int, tokens: int) -> bytes:
    _, _, layers, kv_heads, head_dim = INPUTS["layout"][1][group]
    return bytes((7 * i + 3 * block + group) % 251 for i in range(tokens * len(layers) * 2 * kv_heads * head_dim * 2))


def _independent() -> dict[str, bytes]:
    soft = derive("soft row", bytes.fromhex(INPUTS["soft row"]))
    items = [*range(64), 64, (7, soft)]
    contents = [[_content(b, g, n) for g in (0, 1)] for b, n in ((0, 64), (1, 2))]
    names = [[derive("object", c) for c in block] for block in contents]
    manifest = {
        "identity": dict(sorted(INPUTS["identity"].items())),
        "layout": INPUTS["layout"],
        "namespace": INPUTS["namespace"],
        "items": pack_items(items),
        "blocks": b"".join(name for block in names for name in block),
        "lineages": INPUTS["lineages"],
        "lineage": [0, 0],
        "pending": INPUTS["pending"],
        "head": INPUTS["head"],
        "receipt": INPUTS["receipt"],
        "model": INPUTS["model"],
    }
    payload = msgpack.packb(manifest)
    snapshot = derive("snapshot", payload)
    links = independent.chain(manifest)
    return {
        "identity bytes": msgpack.packb(manifest["identity"]),
        "identity digest": derive("identity", msgpack.packb(manifest["identity"])),
        "layout bytes": msgpack.packb(manifest["layout"]),
        "layout digest": derive("layout", msgpack.packb(manifest["layout"])),
        "soft row digest": soft,
        "items of block 1": links[1][0],
        "root key": derive(
            "prefix root",
            derive("identity", msgpack.packb(manifest["identity"])),
            derive("layout", msgpack.packb(manifest["layout"])),
            INPUTS["namespace"].encode(),
        ),
        "prefix key of block 0": links[0][1],
        "prefix key of block 1": links[1][1],
        **{f"content digest of block {b}, group {g}": names[b][g] for b in (0, 1) for g in (0, 1)},
        "BlockId of block 0": links[0][2],
        "BlockId of block 1": links[1][2],
        "header of the object of block 1, group 1": frame(OBJECT, contents[1][1])[:128],
        "snapshot digest": snapshot,
        "header of the manifest": frame(MANIFEST, payload)[:128],
        "coverage file: group 0 whole, group 1 from block 1 on": frame(
            COVERAGE, msgpack.packb({"snapshot": snapshot, "runs": [[[0, 2]], [[1, 2]]]})
        ),
        "ref file: updated 1700000000": frame(
            REF, msgpack.packb({"label": INPUTS["label"], "snapshot": snapshot, "updated": 1700000000})
        ),
        "file name of the ref": plain(INPUTS["label"].encode()),
    }


def _kvstore() -> dict[str, bytes]:
    soft = digest.soft_row_digest(bytes.fromhex(INPUTS["soft row"]))
    kind, groups = INPUTS["layout"]
    layout = Layout(tuple(Group(name, window, tuple(layers), h, d) for name, window, layers, h, d in groups), kind)
    identity = Identity.of(INPUTS["identity"])
    contents = [[_content(b, g, n) for g in (0, 1)] for b, n in ((0, 64), (1, 2))]
    snapshot = Snapshot(
        identity=identity,
        layout=layout,
        namespace=INPUTS["namespace"],
        items=(*range(64), 64, SoftToken(7, soft)),
        blocks=tuple(tuple(digest.content_digest([c]) for c in block) for block in contents),
        lineages=tuple(Lineage.of(fields) for fields in INPUTS["lineages"]),
        lineage=(0, 0),
        pending=INPUTS["pending"],
        head=INPUTS["head"],
        receipt=Receipt(tuple(INPUTS["receipt"][0]), *INPUTS["receipt"][1:]),
        model=INPUTS["model"],
    )
    name, manifest = codec.encode_snapshot(snapshot)
    links = list(snapshot.chain())
    return {
        "identity bytes": msgpack.packb(identity.wire()),
        "identity digest": identity.digest.raw,
        "layout bytes": msgpack.packb(layout.wire()),
        "layout digest": layout.digest.raw,
        "soft row digest": soft,
        "items of block 1": links[1].items,
        "root key": snapshot.root.raw,
        **{f"prefix key of block {b}": links[b].key.raw for b in (0, 1)},
        **{f"content digest of block {b}, group {g}": snapshot.blocks[b][g].raw for b in (0, 1) for g in (0, 1)},
        **{f"BlockId of block {b}": links[b].id.raw for b in (0, 1)},
        "header of the object of block 1, group 1": codec.object_header(
            digest.content_digest([contents[1][1]]), len(contents[1][1])
        ),
        "snapshot digest": name.raw,
        "header of the manifest": manifest[:128],
        "coverage file: group 0 whole, group 1 from block 1 on": codec.encode_coverage(
            Coverage(name, (((0, 2),), ((1, 2),)))
        ),
        "ref file: updated 1700000000": codec.encode_ref(Ref(INPUTS["label"], name, 1700000000)),
        "file name of the ref": bytes.fromhex(digest.label_file(INPUTS["label"])),
    }


@pytest.mark.parametrize("vector", sorted(_independent()))
def test_vector(vector: str) -> None:
    assert VECTORS[vector].hex() == _independent()[vector].hex()
    assert VECTORS[vector].hex() == _kvstore()[vector].hex()


def test_every_vector_of_the_document_is_tested() -> None:
    assert set(VECTORS) == set(_independent()) == set(_kvstore())


def test_the_contexts_of_the_document_are_all_that_there_are() -> None:
    contexts = set(re.findall(r"`(kvferry 2026-11-30 format 1 [a-z ]+)`", DOC))
    source = (Path(digest.__file__)).read_text()
    used = set(re.findall(r"_derive\(\"([a-z ]+)\"", source)) | {"ref", "coverage", "signatures"}
    assert contexts == {digest._CONTEXT.format(one) for one in used}


def test_the_limits_of_the_document() -> None:
    assert (codec.MAX_RECORD, codec.MAX_STRUCTURE, codec.MAX_OBJECT) == (2**26, 2**20, 2**30)
    for text in ("at most 2³⁰ bytes of content", "at most 2²⁶ bytes", "at most 2²⁰ outside"):
        assert text in DOC.replace("\n", " ")
