"""Several threads of one server publish into one store and search it: they take turns at the index."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvmemory import IDENTITY, LAYOUT, save

from kvstore import Store
from kvstore.check import check
from kvstore.digest import root_key
from kvstore.search import Query


def test_publish_and_answer_from_many_threads(tmp_path: Path) -> None:
    """Without the turns SQLite is entered twice at once, and the process ends."""
    root = root_key(IDENTITY.digest, LAYOUT.digest, "default")
    with Store.open(tmp_path / "s") as store:
        saved = [save(store, [(n + i) % 90 for i in range(130)], name=f"n{n}") for n in range(6)]

        def work(number: int) -> None:
            one = saved[number % 6]
            assert one.snapshot is not None and one.digest is not None
            coverage = store.shelf.records.coverage(one.digest, one.snapshot)
            with store.shelf.shared():
                assert store.publish(one.snapshot, coverage) == coverage
            match = store.answer(Query(LAYOUT, root, tuple(one.snapshot.items), None, None))
            assert match is not None and match.digest == one.digest

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(work, range(60)))
        assert not check(store).problems
