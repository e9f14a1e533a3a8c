"""Golden stores of every released format: what is in them, read by kvstore and by the independent reader, and written again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from independent import Reader
from kvmemory import Memory, expect_rows, files, lineage, save
from make_golden import ITEMS, LONG, fill, fill_planes
from narrow import Narrow, codecs, expect

from kvstore import SoftToken, Store
from kvstore.codec import (
    Kind,
    check_object,
    decode_coverage,
    decode_header,
    decode_ref,
    decode_snapshot,
    encode_coverage,
    encode_ref,
    encode_snapshot,
    object_header,
)
from kvstore.digest import ContentDigest, SnapshotDigest
from kvstore.errors import FormatTooOld, NotCovered
from kvstore.snapshot import Receipt

GOLDEN = Path(__file__).parent / "golden"
STORES = [GOLDEN / "format-2"]
PLANES = [GOLDEN / "format-2-planes"]
UNREAD = [GOLDEN / "format-1"]
"""Of formats that no release wrote."""


def expected(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path.parent / f"{path.name}.json").read_text())
    return found


@pytest.fixture(params=STORES, ids=lambda path: path.name)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A copy of a golden store that may be opened, and what has to be found in it."""
    target = tmp_path / "golden"
    shutil.copytree(request.param, target)
    return target, expected(request.param)


def test_there_is_one() -> None:
    assert sorted(STORES + PLANES + UNREAD) == sorted(path for path in GOLDEN.iterdir() if path.is_dir())


@pytest.mark.parametrize("path", UNREAD, ids=lambda path: path.name)
def test_a_format_from_before_the_first_release_is_refused_by_name(path: Path, tmp_path: Path) -> None:
    shutil.copytree(path, tmp_path / "old")
    before = files(tmp_path / "old")
    with pytest.raises(FormatTooOld, match="found format 1, which no release wrote"):
        Store.open(tmp_path / "old")
    assert files(tmp_path / "old") == before


def test_kvstore_reads_it(golden: tuple[Path, dict[str, Any]]) -> None:
    path, want = golden
    before = files(path)
    with Store.open(path) as store:
        assert {ref.label: ref.snapshot.hex for ref in store.shelf.records.refs()} == {
            name: entry["snapshot"] for name, entry in want.items()
        }
        for name, entry in want.items():
            match = store.match(name, head="h" * 64)
            assert match.snapshot.items == tuple(LONG if name == "trimmed" else ITEMS)
            coverage = store.shelf.records.coverage(match.digest, match.snapshot)
            assert [[list(run) for run in runs] for runs in coverage.runs] == entry["runs"]
            expect_rows(store, match, entry["engine"])
        whole, fork, trimmed = (store.match(n, head="h" * 64) for n in ("whole", "Gabelung ü", "trimmed"))
        assert (whole.n, whole.pending, whole.snapshot.receipt) == (150, 8, Receipt((8, 9, 1), 3, "cap"))
        assert whole.snapshot.lineages == (lineage("cpu"), lineage("gpu")) and whole.snapshot.lineage == (0, 0, 1)
        assert (fork.n, fork.pending, fork.snapshot.receipt, fork.snapshot.model) == (149, None, None, "tiny")
        assert (trimmed.n, trimmed.runs) == (330, ((0, 330), (192, 330)))
        found = store.find(whole.snapshot.layout, whole.snapshot.identity, [*ITEMS[:69], 1], namespace="other")
        assert (found.n, found.snapshot.namespace) == (69, "other")
    assert files(path) == before


def test_the_independent_reader_agrees(golden: tuple[Path, dict[str, Any]]) -> None:
    path, want = golden
    reader = Reader(path)
    with Store.open(path) as store:
        for name, entry in want.items():
            digest = reader.ref(name)
            assert digest.hex() == entry["snapshot"]
            items = LONG if name == "trimmed" else ITEMS
            memory = Memory.causal(items, entry["engine"])
            snapshot = store.shelf.records.snapshot(SnapshotDigest(digest))
            coverage = store.shelf.records.coverage(SnapshotDigest(digest), snapshot)
            rows = reader.rows(digest)
            assert set(rows) == {(layer, part) for g in snapshot.layout.groups for layer in g.layers for part in "KV"}
            for g, group in enumerate(snapshot.layout.groups):
                tokens = [t for b in coverage.blocks(g) for t in range(64 * b, min(64 * b + 64, len(items)))]
                for place, (layer, part) in enumerate((layer, part) for layer in group.layers for part in "KV"):
                    assert sorted(rows[layer, part]) == tokens
                    for token in tokens:
                        assert rows[layer, part][token] == memory.rows(g, token, token + 1)[place]
            for position in range(1, len(items) + 1):
                usable = reader.usable(digest, position - 1)
                if usable == position - 1:
                    assert store.match(name, at=position).n == usable
                else:
                    with pytest.raises(NotCovered):
                        store.match(name, at=position)


def test_it_encodes_to_the_same_bytes(golden: tuple[Path, dict[str, Any]]) -> None:
    path, _ = golden
    count = 0
    for name, data in files(path).items():
        folder, _, rest = name.partition("/")
        if folder == "objects":
            header = decode_header(data, Kind.OBJECT, name)
            content = ContentDigest.parse(rest.replace("/", ""))
            check_object(header, [data[128:]], content)
            assert object_header(content, len(data) - 128) == data[:128]
        elif folder == "snapshots" and not name.endswith(".cov"):
            digest = SnapshotDigest.parse(rest)
            snapshot = decode_snapshot(data, digest)
            assert encode_snapshot(snapshot) == (digest, data)
            coverage = (path / "snapshots" / f"{digest}.cov").read_bytes()
            decoded = decode_coverage(coverage, digest, len(snapshot.layout.groups), len(snapshot.blocks))
            assert encode_coverage(decoded) == coverage
        elif folder == "refs":
            assert encode_ref(decode_ref(data, name)) == data
        else:
            assert name == "format.json" or name.endswith(".cov")
        count += 1
    assert count > 20


def test_format_2_is_still_written_like_this(tmp_path: Path) -> None:
    """The present version makes the same files. When format 3 is there this test goes, the golden files stay."""
    fill(tmp_path / "again")
    assert files(tmp_path / "again") == files(GOLDEN / "format-2")


def test_a_golden_store_can_be_saved_to(golden: tuple[Path, dict[str, Any]]) -> None:
    path, _ = golden
    with Store.open(path) as store:
        saved = save(store, [*ITEMS[:128], *range(50)], "cpu")
        assert saved.written_objects == 2 and isinstance(ITEMS[100], SoftToken)
        assert store.match("whole").n == 149


# with the feature planes


@pytest.fixture(params=PLANES, ids=lambda path: path.name)
def planes(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    target = tmp_path / "golden"
    shutil.copytree(request.param, target)
    return target, expected(request.param)


def test_planes_are_read(planes: tuple[Path, dict[str, Any]]) -> None:
    path, want = planes
    before = files(path)
    assert json.loads(before["format.json"]) == {"format": 2, "features": ["planes"]}
    assert sorted(codecs(path).values()) == [0] * 4 + [1] * 12
    with Store.open(path) as store:
        for name, entry in want.items():
            match = store.match(name, head="h" * 64)
            assert (match.digest.hex, match.snapshot.tokens) == (entry["snapshot"], entry["tokens"])
            expect(store, name)
    assert files(path) == before


def test_the_independent_reader_agrees_about_planes(planes: tuple[Path, dict[str, Any]]) -> None:
    path, want = planes
    reader = Reader(path)
    with Store.open(path) as store:
        for name, entry in want.items():
            snapshot = store.match(name).snapshot
            rows, memory = reader.rows(bytes.fromhex(entry["snapshot"])), Narrow.causal(snapshot.items)
            for g, group in enumerate(snapshot.layout.groups):
                for place, (layer, part) in enumerate((layer, part) for layer in group.layers for part in "KV"):
                    found = [rows[layer, part][token] for token in range(snapshot.tokens)]
                    assert b"".join(found) == memory.rows(g, 0, snapshot.tokens)[place]


def test_planes_are_still_written_like_this(tmp_path: Path) -> None:
    """The same files but for the planes' Zstandard frames, which may be others; their content may not."""
    fill_planes(tmp_path / "again")
    here, golden = files(tmp_path / "again"), files(PLANES[0])
    assert here.keys() == golden.keys() and codecs(tmp_path / "again") == codecs(PLANES[0])
    for name, data in golden.items():
        if name.startswith("objects/") and data[11]:
            theirs, ours = (decode_header(one[name], Kind.OBJECT, name) for one in (golden, here))
            assert (ours.name, ours.content_length) == (theirs.name, theirs.content_length)
        else:
            assert here[name] == data


def test_a_golden_store_with_planes_can_be_saved_to(planes: tuple[Path, dict[str, Any]]) -> None:
    path, _ = planes
    with Store.open(path) as store:
        saved = save(store, LONG, rows=Narrow.causal(LONG), name="again")
        assert saved.written_objects == 0
        expect(store, "again")
