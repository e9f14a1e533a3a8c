"""Thirty random splits, ten a family; `splits` by itself tries as many as one likes."""

from __future__ import annotations

from pathlib import Path

import pytest
from families import every_family_slow
from splits import Splits, try_splits

from kvstore import Store
from runtime.bundle import Bundle


@every_family_slow
def test_random_splits_give_what_an_uninterrupted_run_gives(bundle: Bundle, tmp_path: Path) -> None:
    splits = try_splits(bundle, tmp_path / "store", 10, 600)
    assert splits.differences == [] and splits.tried == 10 and splits.rounds > 10


def test_a_difference_is_found(bundle: Bundle, tmp_path: Path, ids: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    with Store.open(tmp_path / "store") as store:
        splits = Splits(bundle, store, ids, 100)
        splits.one(3)
        assert splits.differences == []
        rows = splits.truth[0]
        splits.truth[0] = rows[:1] + bytes([rows[1] ^ 1]) + rows[2:]
        splits.one(3)
        assert [found.split(": ")[-1] for found in splits.differences][:2] == ["speculated rows", "restored rows"]
