"""Chains never mix, and KV never crosses an identity, an adapter or a namespace."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kvmemory import HEAD, IDENTITY, LAYOUT, Memory, expect_rows, files, find, lineage, save

from kvstore import Group, Identity, Layout, Store
from kvstore.errors import (
    IdentityMismatch,
    InputInvalid,
    LayoutMismatch,
    SidecarMismatch,
    TokenizerMismatch,
    WeightsMismatch,
)
from kvstore.identity import ABSENT, require_same

ITEMS = [(3 * i) % 90 for i in range(200)]


def mixed(items: list[int], *engines: str) -> Memory:
    """Rows whose block b comes from ``engines[b]``, as after continuing a snapshot on another engine."""
    sources = [Memory.causal(items, engine) for engine in engines]
    memory = Memory(LAYOUT, len(items))
    for b, source in enumerate(sources):
        start, stop = 64 * b, min(64 * b + 64, len(items))
        for g in (0, 1):
            for target, span in zip(memory.spans(g, start, stop), source.spans(g, start, stop), strict=True):
                target[:] = span
    return memory


def test_an_unnamed_save_is_dropped_from_the_block_that_differs(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s") as store:
        save(store, ITEMS, "cpu", name="first", pending=5, head=HEAD)
        before = set(files(tmp_path / "s"))
        rows = mixed(ITEMS, "cpu", "cpu", "gpu", "gpu")
        saved = save(store, ITEMS, "gpu", rows=rows, pending=5, head=HEAD)
        assert (saved.dropped_from, saved.written_objects) == (2, 0)
        assert saved.snapshot.tokens == 128 and saved.snapshot.pending is None
        assert not any(path.startswith("objects/") for path in set(files(tmp_path / "s")) - before)
        whole = save(store, ITEMS, "gpu")
        assert (whole.digest, whole.snapshot, whole.coverage, whole.dropped_from) == (None, None, None, 0)
        expect_rows(store, find(store, [*ITEMS, 1]), "cpu")
        # The same tokens with the same bytes are no difference, and new blocks behind them are kept.
        assert save(store, [*ITEMS[:128], *[7] * 10], "cpu").dropped_from is None


def test_a_named_save_forks(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s") as store:
        cpu = save(store, ITEMS, "cpu", name="cpu")
        gpu = save(store, ITEMS, "gpu", name="gpu")
        assert gpu.dropped_from is None and gpu.written_objects == 8
        for engine, saved in (("cpu", cpu), ("gpu", gpu)):
            match = find(store, [*ITEMS, 1], lineage=lineage(engine))
            assert match.digest == saved.digest and match.n == 200
            expect_rows(store, match, engine)
            expect_rows(store, store.match(engine), engine)
        # A third chain that starts as one and goes on as the other shares the bytes and stays apart.
        third = save(store, ITEMS, "gpu", rows=mixed(ITEMS, "cpu", "gpu", "gpu", "gpu"), name="third")
        assert third.written_objects == 0
        chains = [list(s.snapshot.chain()) for s in (cpu, gpu, third)]
        assert chains[0][0].id == chains[2][0].id
        assert len({chain[3].id for chain in chains}) == 3
        assert len({chain[3].key for chain in chains}) == 1


def test_one_chain_is_never_continued_with_another(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s") as store:
        save(store, ITEMS[:128], "cpu", name="short")
        save(store, ITEMS, "gpu", name="long")
        match = find(store, [*ITEMS, 1], lineage=lineage("cpu"))
        assert match.n == 200
        expect_rows(store, match, "gpu")


@pytest.mark.parametrize("change", [{"adapter": "lora"}, {"weights": "w1"}, {"scale": 0.25}, {"scale": 1}, {"new": 1}])
def test_another_identity_never_matches(tmp_path: Path, change: dict[str, Any]) -> None:
    other = Identity.of({**IDENTITY.wire(), **change})
    assert other.digest != IDENTITY.digest
    with Store.open(tmp_path / "s") as store:
        save(store, ITEMS)
        assert find(store, [*ITEMS, 1], identity=other) is None
        save(store, ITEMS, "other", identity=other)
        expect_rows(store, find(store, [*ITEMS, 1], identity=other), "other")
        expect_rows(store, find(store, [*ITEMS, 1]), "cpu")


def test_another_layout_never_matches(tmp_path: Path) -> None:
    other = Layout((LAYOUT.groups[0], Group("sliding", 192, (0, 2, 3), 2, 2)))
    with Store.open(tmp_path / "s") as store:
        save(store, ITEMS)
        assert find(store, [*ITEMS, 1], layout=other) is None


def test_namespaces_never_cross(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s") as store:
        mine = save(store, ITEMS, namespace="mine", name="a")
        assert find(store, [*ITEMS, 1]) is None
        assert find(store, [*ITEMS, 1], namespace="theirs") is None
        assert find(store, [*ITEMS, 1], namespace="mine").digest == mine.digest
        theirs = save(store, ITEMS, namespace="theirs")
        # Equal bytes are stored once, whoever they belong to; the snapshots are two.
        assert theirs.written_objects == 0 and theirs.digest != mine.digest
        assert find(store, [*ITEMS, 1], namespace="theirs").digest == theirs.digest
        with pytest.raises(InputInvalid, match="namespace"):
            find(store, ITEMS, namespace="")


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"weights": "w1"}, WeightsMismatch),
        ({"sidecars": [["embed", "e1"]]}, SidecarMismatch),
        ({"tokenizer": "t1"}, TokenizerMismatch),
        ({"scale": 0.25}, IdentityMismatch),
        ({"weights": "w1", "tokenizer": "t1"}, IdentityMismatch),
        ({"adapter": None}, IdentityMismatch),
        ({"scale": 1}, IdentityMismatch),
    ],
)
def test_a_mismatch_names_every_field(fields: dict[str, Any], kind: type[IdentityMismatch]) -> None:
    found = Identity.of({**IDENTITY.wire(), **fields})
    with pytest.raises(IdentityMismatch) as caught:
        require_same((IDENTITY, LAYOUT), (found, LAYOUT), "snapshot 'a'")
    assert type(caught.value) is kind
    assert [name for name, _, _ in caught.value.fields] == sorted(fields)
    for name, expected, got in caught.value.fields:
        assert (expected, got) == (dict(IDENTITY.fields).get(name, ABSENT), dict(found.fields)[name])
        assert f"{name}: expected {expected!r}, found {got!r}" in str(caught.value)
    require_same((IDENTITY, LAYOUT), (Identity.of(dict(IDENTITY.fields)), LAYOUT), "itself")


def test_a_layout_mismatch() -> None:
    other = Layout((LAYOUT.groups[0], Group("sliding", 192, (0, 2, 3), 2, 2)))
    with pytest.raises(LayoutMismatch, match=r"window 128.*window 192"):
        require_same((IDENTITY, LAYOUT), (IDENTITY, other), "it")
    with pytest.raises(IdentityMismatch) as caught:
        require_same((IDENTITY, LAYOUT), (Identity.of({**IDENTITY.wire(), "weights": "x"}), other), "it")
    assert type(caught.value) is IdentityMismatch
    assert [name for name, _, _ in caught.value.fields] == ["weights", "layout"]


def test_what_an_identity_and_a_layout_must_be() -> None:
    for missing in ({"weights": "w"}, {"tokenizer": "t"}, {"weights": "", "tokenizer": "t"}):
        with pytest.raises(InputInvalid, match="it is what keeps models apart"):
            Identity.of(missing)
    with pytest.raises(InputInvalid, match="plain values"):
        Identity.of({"weights": "w", "tokenizer": "t", "x": {}})
    with pytest.raises(InputInvalid, match="64-bit"):
        _ = Identity.of({"weights": "w", "tokenizer": "t", "x": 2**70}).digest
    good = ("full", None, (0,), 1, 4)
    for bad in (
        (),
        (("full", 100, (0,), 1, 4),),
        (("full", 0, (0,), 1, 4),),
        (("full", None, (), 1, 4),),
        (("full", None, (1, 0), 1, 4),),
        (("full", None, (0, 0), 1, 4),),
        (("full", None, (2000,), 1, 4),),
        (("full", None, (0,), 0, 4),),
        (("full", None, (0,), 1024, 65536),),
        (good, good),
        (good, ("other", None, (0,), 1, 4)),
        (good, ("full", None, (1,), 1, 4)),
    ):
        with pytest.raises(InputInvalid):
            Layout(tuple(Group(*g) for g in bad))
    with pytest.raises(InputInvalid, match="dtype"):
        Layout((Group(*good),), "int3")


@pytest.mark.parametrize(
    ("expected", "found"),
    [
        (["a" * 150 + "x"], ["a" * 150 + "y"]),
        (list(range(400)), [*range(399), 7]),
        ([0.1] * 99, [0.1] * 98),
        ("w" * 64, "w" * 63 + "x"),
        (b"s" * 300 + b"1", b"s" * 300 + b"2"),
        (1, 1.0),
        ("x" * 5000, "x" * 4999),
    ],
)
def test_what_differs_never_looks_alike(expected: Any, found: Any) -> None:
    mine, other = (Identity.of({**IDENTITY.wire(), "field": value}) for value in (expected, found))
    with pytest.raises(IdentityMismatch) as caught:
        require_same((mine, LAYOUT), (other, LAYOUT), "it")
    line = re.search(r"field: expected (.*), found (.*)\)\. Use", str(caught.value))
    assert line is not None
    assert line[1] != line[2]
    assert len(str(caught.value)) < 400


def test_layouts_that_differ_by_their_layers_only() -> None:
    other = Layout((replace(LAYOUT.groups[0], layers=(1, 5)), LAYOUT.groups[1]))
    with pytest.raises(LayoutMismatch, match=r"full 1x4 window None layers 1,4.*found.*layers 1,5"):
        require_same((IDENTITY, LAYOUT), (IDENTITY, other), "it")
