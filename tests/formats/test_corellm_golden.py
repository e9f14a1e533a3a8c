"""The committed checkpoint is read as it always was, and written to the byte as it was."""

from __future__ import annotations

import json
from pathlib import Path

import corellm_independent as independent
from blake3 import blake3
from corellm_models import WHEN, app, export, loaded, same_rows, some_rows, take, tree, with_zeros, write_bundle
from make_golden_corellm import golden_bundle

from kvstore import SoftToken, Store

GOLDEN = Path(__file__).parent / "data" / "corellm-1"


def test_the_golden_checkpoint(tmp_path: Path) -> None:
    expected = json.loads((GOLDEN / "expected.json").read_text())
    root = golden_bundle(GOLDEN, tmp_path / "golden-bundle")
    said, rows = independent.read(GOLDEN / "checkpoint", root, expected=expected["tokens"])
    assert (said["pendingNextToken"], said["createdAtISO8601"]) == (expected["pending"], WHEN)
    with Store.open(tmp_path / "store") as store:
        told = take(store, GOLDEN / "checkpoint", root)
        snapshot = told.saved.snapshot
        assert snapshot is not None and told.notes[1:] == ()
        assert [[d.hex for d in block] for block in snapshot.blocks] == expected["blocks"]
        soft = {i: item for i, item in enumerate(snapshot.items) if isinstance(item, SoftToken)}
        assert {str(i): item.row.hex() for i, item in soft.items()} == expected["soft"]
        assert [t.placeholder if isinstance(t, SoftToken) else t for t in snapshot.items] == expected["tokens"]
        assert same_rows(loaded(store, "taken")[1], rows)
        export(store, "taken", tmp_path / "out", app(root))
    assert tree(tmp_path / "out") == tree(GOLDEN / "checkpoint")


def test_the_names_that_stand_for_what_a_checkpoint_leaves_out(tmp_path: Path) -> None:
    """Recomputed from docs/format.md."""
    root = write_bundle(tmp_path / "published", ctx=256, sliding=64)
    tokens, rows = [1] * 200, with_zeros(root, some_rows(root, 200), 70)
    tokens[130] = 258881
    independent.write(tmp_path / "kv", root, tokens, rows, pending=1)
    with Store.open(tmp_path / "store") as store:
        snapshot = take(store, tmp_path / "kv", root).saved.snapshot
    assert snapshot is not None

    def digest(meaning: str, *parts: bytes) -> bytes:
        context = f"kvferry 2026-11-30 {meaning}"
        return blake3(b"".join(parts), derive_key_context=context).digest()

    full = [rows[layer][which] for layer in (1, 3) for which in (0, 1)]
    item = snapshot.items[130]
    assert isinstance(item, SoftToken)
    assert item.row == digest("corellm checkpoint soft row 1", *(a[130].tobytes() for a in full))
    for block in (0, 1):
        start, stop = 64 * block, 64 * block + 64
        content = digest("format 1 object", *(a[start:stop].tobytes() for a in full))
        absent = digest("corellm checkpoint absent object 1", content, b"sliding")
        assert [d.raw for d in snapshot.blocks[block]] == [content, absent]
