"""The nearest snapshot: the longest common beginning of anybody's, the asker's own where equally near."""

from __future__ import annotations

from pathlib import Path

from kvmemory import IDENTITY, LAYOUT, carry, save

from kvstore import Group, Layout, Store
from kvstore.explain import Nearest, nearest
from kvstore.index import Index
from kvstore.items import Item
from kvstore.testing import other_identity, tokens


def near(store: Store, items: list[Item] | list[int], namespace: str = "default") -> Nearest | None:
    return nearest(store, LAYOUT, IDENTITY, items, namespace=namespace)


def test_the_longest_of_anybodys_wins_and_ones_own_where_equal(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s") as store:
        assert near(store, tokens(10)) is None
        save(store, tokens(100), name="mine")
        save(store, tokens(200), name="theirs", identity=other_identity(weights="w1"))
        save(store, tokens(300), name="elsewhere", namespace="other")
        assert near(store, [9999]) is None
        for asked, name, fields in (
            (tokens(90), ("mine",), []),
            ([*tokens(150), 2000], ("elsewhere",), ["namespace"]),
            (tokens(250), ("elsewhere",), ["namespace"]),
        ):
            found = near(store, asked)
            assert found is not None and found.names == name
            assert [field for field, _, _ in found.differences] == fields
            assert found.usable == (len(asked) - 1 if not fields else 0)
        found = near(store, tokens(250), "other")
        assert found is not None and found.names == ("elsewhere",) and found.usable == 249


def test_every_differing_field_is_named(tmp_path: Path) -> None:
    wide = Layout((Group("full", None, (0,), 1, 8),))
    with Store.open(tmp_path / "s") as store:
        save(store, tokens(70), identity=other_identity(weights="w1", tokenizer="t1"), layout=wide, namespace="n")
        found = near(store, tokens(70))
        assert found is not None and not found.same_tokenizer and found.names == ()
        assert [field for field, _, _ in found.differences] == ["tokenizer", "weights", "layout", "namespace"]
        assert found.differences[0] == ("tokenizer", "t0", "t1") and found.differences[3] == (
            "namespace",
            "default",
            "n",
        )


def test_of_equally_near_ones_the_most_usable(tmp_path: Path) -> None:
    with Store.open(tmp_path / "source") as source, Store.open(tmp_path / "s") as store:
        whole = save(source, [*tokens(260), 5], name="whole")
        assert whole.digest is not None
        carry(source, store, whole.digest, (((0, 5),), ((0, 5),)))
        for number in range(3):  # trimmed, and used later: nothing of their middle can be used
            saved = save(source, [*tokens(400), number])
            assert saved.digest is not None
            carry(source, store, saved.digest)
        found = near(store, [*tokens(260), 2000])
        assert found is not None and (found.match.digest, found.usable) == (whole.digest, 260)


def test_a_damaged_snapshot_is_passed_over(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s") as store:
        save(store, tokens(100), name="mine")
        bad = save(store, tokens(100), name="bad", pending=1, head="h")
        (tmp_path / "s" / "snapshots" / str(bad.digest)).write_bytes(b"damaged")
        found = near(store, tokens(100))
        assert found is not None and found.names == ("mine",)


def test_nothing_changes(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s") as store:
        save(store, tokens(100), name="mine")
        near(store, tokens(100))
        assert store.indexed(Index.counts) == []
