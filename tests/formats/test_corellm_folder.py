"""Checkpoint folders between a store and an independent reader and writer, to the byte; no model runs."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import corellm_independent as independent
import pytest
from corellm_models import (
    WHEN,
    app,
    export,
    loaded,
    manifest,
    same_rows,
    save,
    some_rows,
    some_tokens,
    take,
    tree,
    with_zeros,
    write_bundle,
)

from kvstore import Layout, SoftToken, Store
from kvstore.digest import soft_row_digest
from kvstore.errors import IdentityMismatch, NotCovered, Refused
from kvstore.formats.corellm_geometry import geometry_of
from kvstore.report import describe
from kvstore.snapshot import trimmed

LENGTHS = (1, 511, 512, 513, 2047)


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("published") / "gemma-small")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store")


@pytest.mark.parametrize("count", LENGTHS)
def test_the_independent_reader_takes_what_we_write(store: Store, root: Path, tmp_path: Path, count: int) -> None:
    tokens, rows = some_tokens(count), some_rows(root, count)
    save(store, root, "a", tokens, rows)
    told = export(store, "a", tmp_path / "out", app(root))
    assert (told.made, told.tokens, told.pending, told.zeroed_rows, told.notes) == (True, count, 7, 0, ())
    found, read = independent.read(tmp_path / "out", root, expected=tokens)
    assert same_rows(read, rows)

    other = independent.write(tmp_path / "theirs", root, tokens, rows, pending=7)
    own = {"createdOnOS": "Linux 6.1 (kvferry)", "createdWithComputeUnits": "cpuOnly", "createdAtISO8601": WHEN}
    assert found == other | own, "the manifest is that of the independent writer"
    ours, theirs = tree(tmp_path / "out"), tree(tmp_path / "theirs")
    assert {n: d for n, d in ours.items() if n != "manifest.json"} == {
        n: d for n, d in theirs.items() if n != "manifest.json"
    }
    assert told.bytes == sum(len(d) for n, d in ours.items() if n != "manifest.json")
    text = ours["manifest.json"].decode()
    assert text.splitlines()[1].startswith('  "bundleName"'), "pretty, keys sorted"


@pytest.mark.parametrize("count", LENGTHS)
def test_what_the_independent_writer_wrote_is_the_same_kv_here(
    store: Store, root: Path, tmp_path: Path, count: int
) -> None:
    tokens, rows = some_tokens(count), some_rows(root, count)
    independent.write(tmp_path / "theirs", root, tokens, rows, pending=9)
    told = take(store, tmp_path / "theirs", root)
    match, found = loaded(store, "taken")
    assert same_rows(found, rows)
    assert (match.n, match.pending, match.snapshot.items) == (count, 9, tuple(tokens))
    assert (told.uncovered_rows, told.soft_tokens, told.notes) == (0, 0, ())
    assert match.snapshot.head == app(root).head
    shown = describe(store, "taken")
    assert shown["kept"] == "whole"
    assert shown["lineages"] == [
        {
            "context": "2048",
            "convert_config": independent.identity_of(root)["convertConfigSHA256"],
            "createdOnOS": "Version 26.1 (Build 23B85)",
            "createdWithComputeUnits": "cpuAndNeuralEngine",
            "engine": "corellm checkpoint",
        }
    ]
    again = take(store, tmp_path / "theirs", root)
    assert (again.saved.digest, again.saved.written_objects) == (told.saved.digest, 0)

    # Blocks of a session's snapshot of the same KV are the same blocks: one chain.
    ours = save(store, root, "ours", tokens, rows)
    assert ours.snapshot is not None and told.saved.snapshot is not None
    assert [link.id for link in ours.snapshot.chain()] == [link.id for link in told.saved.snapshot.chain()]

    # And out again, without a bundle: the lineage says what is needed.
    export(store, "taken", tmp_path / "out", None)
    first, second = manifest(tmp_path / "theirs"), manifest(tmp_path / "out")
    del first["bundleName"]
    assert first | {"createdAtISO8601": WHEN} == second
    assert tree(tmp_path / "theirs").keys() == tree(tmp_path / "out").keys()
    assert all(d == tree(tmp_path / "theirs")[n] for n, d in tree(tmp_path / "out").items() if n != "manifest.json")


def test_without_a_pending_token_the_last_one_is_decoded_again(store: Store, root: Path, tmp_path: Path) -> None:
    tokens, rows = some_tokens(70), some_rows(root, 70)
    written = independent.write(tmp_path / "theirs", root, tokens, rows, pending=None)
    independent.put(tmp_path / "theirs", written | {"pendingNextToken": None})  # null is absent, as in the app
    told = take(store, tmp_path / "theirs", root)
    assert any("decoded again" in note for note in told.notes)
    match, _ = loaded(store, "taken")
    assert (match.n, match.common, match.pending) == (69, 70, None)
    back = export(store, "taken", tmp_path / "out", app(root))
    assert "pendingNextToken" not in manifest(tmp_path / "out")
    assert any("takes 0" in note for note in back.notes)


def test_another_head_leaves_the_pending_token_out(store: Store, root: Path, tmp_path: Path) -> None:
    save(store, root, "a", some_tokens(5), some_rows(root, 5), head="e" * 64)
    told = export(store, "a", tmp_path / "out", app(root))
    assert told.pending is None
    assert "another head" in told.notes[0]
    assert "pendingNextToken" not in manifest(tmp_path / "out")


def test_another_bundle_name_only_warns_and_extra_keys_are_let_be(store: Store, root: Path, tmp_path: Path) -> None:
    tokens, rows = some_tokens(3), some_rows(root, 3)
    written = independent.write(tmp_path / "a", root, tokens, rows, pending=1, name="another")
    told = take(store, tmp_path / "a", root)
    assert ["'another'" in note for note in told.notes] == [True]
    written["later"] = {"schema": [1]}
    written["layers"][0]["later"] = 1
    written["identity"]["later"] = 1
    del written["bundleName"]
    independent.put(tmp_path / "a", written)
    (tmp_path / "a" / ".DS_Store").write_bytes(b"Finder")
    assert take(store, tmp_path / "a", root).notes == ()


# trimmed


def trim(store: Store, name: str) -> int:
    """Narrows what the store promises of a snapshot to what its end needs. Returns the first sliding row that is left."""
    digest = store.resolve(name)
    snapshot = store.shelf.records.snapshot(digest)
    coverage = trimmed(digest, snapshot)
    from kvstore.codec import encode_coverage

    (store.shelf.path / "snapshots" / f"{digest}.cov").write_bytes(encode_coverage(coverage))
    return coverage.runs[1][0][0] * 64


@pytest.mark.parametrize("pending", [7, None])
@pytest.mark.parametrize("count", [576, 577, 1300, 2047])
def test_trimmed_out_and_in(store: Store, root: Path, tmp_path: Path, count: int, pending: int | None) -> None:
    tokens, rows = some_tokens(count), some_rows(root, count)
    save(store, root, "a", tokens, rows, pending=pending, head=app(root).head if pending else None)
    first = trim(store, "a")
    assert first == (count - 512) // 64 * 64 > 0
    told = export(store, "a", tmp_path / "out", app(root))
    assert told.zeroed_rows == first
    assert any(f"below token {first + 511} would" in note for note in told.notes)
    _, read = independent.read(tmp_path / "out", root, expected=tokens)
    assert same_rows(read, with_zeros(root, rows, first))

    with Store.open(tmp_path / "other") as other:
        # Zero rows that somebody else saved as rows: the store must not take them for those that were left out.
        save(other, root, "zeros", tokens, with_zeros(root, rows, first))
        back = take(other, tmp_path / "out", root)
        assert back.uncovered_rows == first
        assert describe(other, "taken")["kept"] == "trimmed"
        match, found = loaded(other, "taken")
        assert match.n == count - (pending is None)
        assert [run[0] for run in match.runs] == [0, first]
        assert same_rows(
            found, {i: (k[: match.n], v[: match.n]) for i, (k, v) in with_zeros(root, rows, first).items()}
        )
        assert other.match("taken", at=first + 512).n == first + 511
        with pytest.raises(NotCovered):
            other.match("taken", at=first + 510)
        assert other.shelf.records.coverage(match.digest, match.snapshot).runs[1][0][0] * 64 == first
        export(other, "taken", tmp_path / "again", app(root))
    again, once = manifest(tmp_path / "again"), manifest(tmp_path / "out")
    assert again | {"createdAtISO8601": ""} == once | {"createdAtISO8601": ""}


@pytest.mark.parametrize(
    ("count", "zero", "covered"),
    [(700, 1, 64), (700, 64, 64), (700, 100, 128), (700, 188, None), (5, 1, None), (5, 5, None)],
)
def test_zero_rows_count_by_blocks(
    store: Store, root: Path, tmp_path: Path, count: int, zero: int, covered: int | None
) -> None:
    rows = with_zeros(root, some_rows(root, count), zero)
    independent.write(tmp_path / "a", root, some_tokens(count), rows, pending=1)
    if covered is not None:
        assert take(store, tmp_path / "a", root).uncovered_rows == covered
        return
    with pytest.raises(NotCovered, match="sliding"):
        take(store, tmp_path / "a", root)
    assert list(store.shelf.records.ref_files()) == []


def test_decoding_the_last_token_again_needs_one_row_more(store: Store, root: Path, tmp_path: Path) -> None:
    rows = with_zeros(root, some_rows(root, 575), 64)
    independent.write(tmp_path / "a", root, some_tokens(575), rows, pending=1)
    independent.write(tmp_path / "b", root, some_tokens(575), rows, pending=None)
    take(store, tmp_path / "a", root)
    with pytest.raises(NotCovered, match="rows from token 63 on, which going on from token 574 reads"):
        take(store, tmp_path / "b", root)


def test_a_zero_row_in_one_sliding_layer_alone_is_a_row(store: Store, root: Path, tmp_path: Path) -> None:
    rows = some_rows(root, 600)
    rows[0] = tuple(a.copy() for a in rows[0])  # type: ignore[assignment]
    for array in rows[0]:
        array[:10] = 0
    independent.write(tmp_path / "a", root, some_tokens(600), rows, pending=1)
    assert take(store, tmp_path / "a", root).uncovered_rows == 0


def test_what_cannot_be_continued_is_not_exported(store: Store, root: Path, tmp_path: Path) -> None:
    save(store, root, "a", some_tokens(700), some_rows(root, 700))
    digest = store.resolve("a")
    (store.shelf.path / "snapshots" / f"{digest}.cov").unlink()
    with pytest.raises(NotCovered):
        export(store, "a", tmp_path / "out", app(root))
    assert not (tmp_path / "out").exists()


# soft tokens


def test_media_is_restored_by_name_and_never_found(store: Store, root: Path, tmp_path: Path) -> None:
    tokens, rows = some_tokens(200), some_rows(root, 200)
    tokens[70:74] = [258880] * 4
    tokens[150] = 258881
    independent.write(tmp_path / "a", root, tokens, rows, pending=1)
    told = take(store, tmp_path / "a", root)
    assert told.soft_tokens == 5
    assert any("never found" in note for note in told.notes)
    bundle = app(root)
    match, found = loaded(store, "taken")
    assert same_rows(found, rows)
    items = match.snapshot.items
    soft = [item for item in items if isinstance(item, SoftToken)]
    assert [item.placeholder for item in soft] == [258880] * 4 + [258881]
    assert len({item.row for item in soft}) == 5

    def find(asked: list[int | SoftToken]) -> int:
        found = store.find(bundle.layout, bundle.identity, asked, namespace="default", head=bundle.head)
        return 0 if found is None else found.n

    row = SoftToken(258880, soft_row_digest(rows[1][0][70].tobytes()))
    for asked in (tokens, [*tokens[:70], row, *tokens[71:]]):
        assert find(list(asked)) == 70, "up to the image and no further"

    # The same checkpoint anywhere gives the same key; a longer one of the same conversation shares its blocks.
    with Store.open(tmp_path / "other") as other:
        assert take(other, tmp_path / "a", root).saved.digest == told.saved.digest
    longer, more = tokens + some_tokens(60, 1), some_rows(root, 260)
    independent.write(tmp_path / "b", root, longer, more, pending=1)
    grown = take(store, tmp_path / "b", root, "grown")
    assert grown.saved.snapshot is not None
    assert grown.saved.snapshot.items[:200] == items
    # Another image's KV is another key, with the same tokens.
    independent.write(tmp_path / "c", root, tokens, some_rows(root, 200, seed=5), pending=1)
    different = take(store, tmp_path / "c", root, "different").saved.snapshot
    assert different is not None and different.items[70] != items[70]
    # Out again: the placeholders.
    export(store, "taken", tmp_path / "out", bundle)
    assert manifest(tmp_path / "out")["processedTokens"] == tokens


def test_the_key_of_media_does_not_depend_on_trimming(store: Store, root: Path, tmp_path: Path) -> None:
    tokens, rows = some_tokens(700), some_rows(root, 700)
    tokens[3] = 258880
    independent.write(tmp_path / "a", root, tokens, rows, pending=1)
    independent.write(tmp_path / "b", root, tokens, with_zeros(root, rows, 128), pending=1)
    whole, part = (take(store, tmp_path / name, root, name).saved.snapshot for name in "ab")
    assert whole is not None and part is not None
    assert whole.items == part.items


def test_soft_tokens_that_the_app_does_not_know_stay_here(store: Store, root: Path, tmp_path: Path) -> None:
    tokens: list[int | SoftToken] = [1, SoftToken(7, b"r" * 32), 3]
    save(store, root, "a", tokens, some_rows(root, 3))
    with pytest.raises(Refused, match=r"item 1.*placeholder 7"):
        export(store, "a", tmp_path / "out", app(root))
    tokens[1] = SoftToken(258881, b"r" * 32)
    save(store, root, "a", tokens, some_rows(root, 3))
    assert export(store, "a", tmp_path / "out", app(root)).soft_tokens == 1
    assert manifest(tmp_path / "out")["processedTokens"] == [1, 258881, 3]


# whose KV


def test_an_export_for_another_model_is_refused(store: Store, root: Path, tmp_path: Path) -> None:
    save(store, root, "a", some_tokens(3), some_rows(root, 3))
    other = write_bundle(tmp_path / "other", inv_slide=[1.0, 0.5, 0.25, 0.125])
    with pytest.raises(IdentityMismatch, match="rope_sliding"):
        export(store, "a", tmp_path / "out", app(other))
    with pytest.raises(Refused, match="--bundle"):
        export(store, "a", tmp_path / "out", None)
    assert not (tmp_path / "out").exists()


def test_more_rows_than_the_target_s_context(store: Store, root: Path, tmp_path: Path) -> None:
    save(store, root, "a", some_tokens(300), some_rows(root, 300))
    short = write_bundle(tmp_path / "short", ctx=256)
    with pytest.raises(Refused, match="at most 256"):
        export(store, "a", tmp_path / "out", app(short))


def test_models_that_the_app_cannot_load_are_refused_by_name(store: Store, root: Path, tmp_path: Path) -> None:
    ours = write_bundle(tmp_path / "ours", form="ours")
    bundle = app(ours)
    rows = {i: (k.repeat(2, 1), v.repeat(2, 1)) for i, (k, v) in some_rows(root, 3).items()}
    rows |= {4: rows[0], 5: rows[1]}
    save(store, ours, "a", [1, 2, 3], rows)
    with pytest.raises(Refused, match="kvferry-bundle-1"):
        export(store, "a", tmp_path / "out", bundle)
    with pytest.raises(
        Refused, match=r"kv_heads: expected 1, found 2; ple_dim.*first_shared.*store_layers.*kvferry-bundle-1"
    ):
        export(store, "a", tmp_path / "out", None)
    independent.write(tmp_path / "theirs", root, [1, 2, 3], some_rows(root, 3), pending=1)
    with pytest.raises(Refused, match="kvferry-bundle-1"):
        take(store, tmp_path / "theirs", ours)
    assert not (tmp_path / "out").exists()


def test_our_format_id_is_enough_to_refuse_a_bundle(store: Store, root: Path, tmp_path: Path) -> None:
    """The app goes by the id, whatever the bundle holds."""
    other = shutil.copytree(root, tmp_path / "same-shape")
    head = json.loads((other / "manifest.json").read_text())
    (other / "manifest.json").write_text(json.dumps(head | {"format": "kvferry-bundle-1"}))
    save(store, root, "a", [1, 2, 3], some_rows(root, 3))
    independent.write(tmp_path / "theirs", root, [1, 2, 3], some_rows(root, 3), pending=1)
    with pytest.raises(Refused, match="bundle format: expected coreml-corellm-r1"):
        export(store, "a", tmp_path / "out", app(other))
    with pytest.raises(Refused, match="bundle format: expected coreml-corellm-r1"):
        take(store, tmp_path / "theirs", other)


def test_a_layout_that_is_not_the_identity_s(root: Path) -> None:
    bundle = app(root)
    full, sliding = bundle.layout.groups
    for groups in ((sliding, full), (full, replace(sliding, window=64)), (full,)):
        with pytest.raises(Refused, match="layout: expected that of its layer_types"):
            geometry_of(bundle.identity, Layout(groups), ctx=1, convert_config_sha256="")
