"""The contract of every backend, of the store in a folder and of the one in memory; and that the contract can tell a bad one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore import Match, Rows, Saved, Store
from kvstore.backend import Backend
from kvstore.digest import ContentDigest
from kvstore.errors import RefConflict
from kvstore.memory import MemoryStore
from kvstore.testing import PlainRows, damage_object, lose_object, save, tokens
from kvstore.testing.contract import BackendContract


class TestStore(BackendContract):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> Iterator[Store]:
        with Store.open(tmp_path / "store") as store:
            yield store

    def damaged(self, backend: Backend, name: ContentDigest) -> None:
        assert isinstance(backend, Store)
        damage_object(backend.shelf.path, name)

    def lost(self, backend: Backend, name: ContentDigest) -> None:
        assert isinstance(backend, Store)
        lose_object(backend.shelf.path, name)

    def reopened(self, backend: Backend) -> Store:
        assert isinstance(backend, Store)
        backend.close()
        return Store.open(backend.shelf.path, create=False)


class TestMemoryStore(BackendContract):
    @pytest.fixture
    def backend(self) -> Iterator[MemoryStore]:
        with MemoryStore() as store:
            yield store

    def damaged(self, backend: Backend, name: ContentDigest) -> None:
        assert isinstance(backend, MemoryStore)
        backend.objects[name] = b"\0" * len(backend.objects[name])

    def lost(self, backend: Backend, name: ContentDigest) -> None:
        assert isinstance(backend, MemoryStore)
        del backend.objects[name]


class Rounding(MemoryStore):
    """Finds whole blocks only."""

    def find(self, *args: Any, **other: Any) -> Match | None:
        match = super().find(*args, **other)
        return None if match is None else replace(match, n=match.n // 64 * 64)


class Trusting(MemoryStore):
    """Hands over whatever lies there."""

    def load(self, match: Match, into: Rows) -> int:
        for block, group in match.objects():
            start, stop = block * 64, min(block * 64 + 64, match.runs[group][1])
            content = self.objects[match.snapshot.blocks[block][group]]
            targets = into.spans(group, start, stop)
            stride = len(content) // len(targets)
            for i, target in enumerate(targets):
                target[:] = content[i * stride : i * stride + len(target)]
        return 0


class Overwriting(MemoryStore):
    """Moves a name wherever it stands."""

    def save(self, *args: Any, **other: Any) -> Saved:
        return super().save(*args, **{**other, "expect": "anything"})


class Mixing(MemoryStore):
    """Keeps everybody's KV together."""

    def save(self, *args: Any, **other: Any) -> Saved:
        return super().save(*args, **{**other, "namespace": "one"})

    def find(self, *args: Any, **other: Any) -> Match | None:
        return super().find(*args, **{**other, "namespace": "one"})


@pytest.mark.parametrize(
    ("bad", "test"),
    [
        (Rounding, TestMemoryStore.test_a_prefix_is_found_to_the_token),
        (Trusting, TestMemoryStore.test_damage_is_an_error_that_names_the_object),
        (Overwriting, TestMemoryStore.test_a_name_is_moved_only_from_where_it_is_expected),
        (Mixing, TestMemoryStore.test_nothing_crosses_models_and_namespaces),
    ],
)
def test_the_contract_tells_a_bad_backend(bad: type[MemoryStore], test: Callable[..., None]) -> None:
    test(TestMemoryStore(), MemoryStore())
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test(TestMemoryStore(), bad())


def test_two_savers_that_expect_a_name_free_do_not_both_get_it(tmp_path: Path) -> None:
    """The second one looks before the first has moved the name, and moves it after: the compare-and-swap at the end decides."""

    class Racing(PlainRows):
        """While its rows are read, somebody else saves under the name."""

        def spans(self, group: int, start: int, stop: int) -> Sequence[memoryview]:
            with Store.open(tmp_path / "store") as other:
                if other.standing("a") is None:
                    save(other, tokens(70, 2), name="a", expect=None)
            return super().spans(group, start, stop)

    with Store.open(tmp_path / "store") as store:
        with pytest.raises(RefConflict, match="moved by somebody else") as caught:
            save(store, tokens(70, 1), name="a", rows=Racing.causal(tokens(70, 1)), expect=None)
        first = store.match("a")
        assert first.snapshot.items == tuple(tokens(70, 2))
        assert (caught.value.details["expected"], caught.value.details["found"]) == (None, first.digest.hex)
