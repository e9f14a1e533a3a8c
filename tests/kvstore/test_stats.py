"""What is counted of a store: bounded, never trusted, and never in the way of an answer."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from kvmemory import IDENTITY, find, save
from test_index import read_only

import kvstore.counts
from kvstore import Store
from kvstore.index import Index
from kvstore.stats import stats_text, store_stats
from kvstore.testing import other_identity, tokens


def test_questions_and_answers_add_up(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s") as store:
        save(store, tokens(100), name="a")
        assert find(store, [*tokens(80), 2000]).n == 80
        assert find(store, [5000]) is None
        assert find(store, tokens(50), namespace="other") is None
        assert find(store, tokens(50), identity=other_identity(weights="w1")) is None
        (other, _), *_ = [(one, 0) for one in store.indexed(Index.counts) if one.namespace == "other"]
        assert (other.finds, other.hits, other.tokens, other.reused, other.identity) == (1, 0, 50, 0, IDENTITY.digest)
        value = store_stats(store).value()
    assert (value["asked"]["finds"], value["asked"]["hits"], value["asked"]["hit_rate"]) == (4, 1, 0.25)
    assert (value["asked"]["tokens"], value["asked"]["reused_tokens"]) == (81 + 1 + 50 + 50, 80)
    assert [(m["model"][:5], m["namespace"], m["asked"]["finds"], m["snapshots"]) for m in value["models"]] == sorted(
        [("model", "default", 2, 1), ("", "default", 1, 0), ("", "other", 1, 0)],
        key=lambda row: (row[1], [m["snapshots"] for m in value["models"]].index(row[3])),
    )


def test_looking_counts_nothing(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s") as store:
        save(store, tokens(100))
        from kvmemory import LAYOUT

        assert store.look(LAYOUT, IDENTITY, [*tokens(80), 2000], namespace="default").n == 80  # type: ignore[union-attr]
        assert store.indexed(Index.counts) == []


def test_sharing_counts_each_object_once(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s") as store:
        save(store, tokens(128), name="a")
        save(store, [*tokens(128), *tokens(64, 1)], name="b")
        value = store_stats(store).value()
    assert value["logical_bytes"] == (128 + 192) * 80 and value["once_bytes"] == 192 * 80
    assert value["saved_by_sharing_bytes"] == 128 * 80 and value["stored_bytes"] == 192 * 80 + 6 * 128
    (model,) = value["models"]
    assert {key: model[key] for key in ("snapshots", "tokens", "logical_bytes")} == {
        "snapshots": 2, "tokens": 320, "logical_bytes": 320 * 80
    }  # fmt: skip
    assert "2 snapshots of 25.6 kB in 16.1 kB of files; sharing saves 10.2 kB." in stats_text(value, None)


def test_the_table_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvstore.counts, "MOST_COUNTED", 3)
    with Store.open(tmp_path / "s") as store:
        for number in range(9):
            assert find(store, [1, 2], namespace=f"n{number}") is None
        assert find(store, [1, 2], namespace="n1") is None
        counts = store.indexed(Index.counts)
        value = store_stats(store).value()
    assert [(one.namespace, one.finds) for one in counts] == [("", 6), ("n0", 1), ("n1", 2), ("n2", 1)]
    assert value["asked"]["finds"] == 10 and value["models"][-1]["identity"] is None


def test_a_store_that_can_only_be_read_answers_without_counting(tmp_path_factory: pytest.TempPathFactory) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o711)
        path = Path(made) / "s"
        with Store.open(path) as store:
            save(store, tokens(100), name="a")
        with read_only(path), Store.open(path, create=False) as store:
            assert find(store, [*tokens(90), 2000]).n == 90
            value = store_stats(store).value()
        assert value["asked"] is None and value["snapshots"] == 1
        assert "not counted" in stats_text(value, None)


def test_a_busy_index_is_not_waited_for(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s") as store:
        save(store, tokens(100))
        find(store, [*tokens(90), 2000])
        other = sqlite3.connect(tmp_path / "s" / "index.sqlite", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        assert find(store, [*tokens(90), 2000]).n == 90
        other.execute("ROLLBACK")
        other.close()
        assert [one.finds for one in store.indexed(Index.counts)] == [1]


def test_nonsense_in_the_counts_is_a_damaged_index(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s") as store:
        save(store, tokens(100), name="a")
        find(store, [1])
        store.indexed(lambda index: index._db.execute("UPDATE asked SET finds = 'many'"))
        assert store_stats(store).value()["asked"]["finds"] == 0
        assert find(store, [*tokens(100), 2000]).n == 100


def _ask(path: Path) -> None:
    with Store.open(path) as store:
        for _ in range(20):
            find(store, [*tokens(90), 2000])


def test_processes_that_count_at_once_lose_few_and_break_nothing(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s") as store:
        save(store, tokens(100))
    with ProcessPoolExecutor(3) as pool:
        list(pool.map(_ask, [tmp_path / "s"] * 3))
    with Store.open(tmp_path / "s") as store:
        (one,) = store.indexed(Index.counts)
        assert 1 <= one.finds <= 60 and one.hits == one.finds and one.reused == 90 * one.finds
        assert store.indexed(Index.sound)
