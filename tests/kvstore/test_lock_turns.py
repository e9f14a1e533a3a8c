"""The store's lock: a collector gets its turn although savers never leave the lock free, and no saver waits long for one that can't get it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.errors import StoreBusy
from kvstore.shelf import Shelf


class Savers:
    """Three that hold the lock shared, each until another holds it too: left alone they never leave it free."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._over = threading.Event()
        self._changed = threading.Condition()
        self._turns = 0
        self._threads = [threading.Thread(target=self._work) for _ in range(3)]

    def _work(self) -> None:
        while not self._over.is_set():
            with self._shelf.shared(), self._changed:
                self._turns += 1
                mine = self._turns
                self._changed.notify_all()
                self._changed.wait_for(lambda mine=mine: self._turns > mine or self._over.is_set(), timeout=0.3)

    @contextmanager
    def working(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._turns > 10)
            yield
        finally:
            self._over.set()
            for thread in self._threads:
                thread.join()


def test_a_collector_gets_its_turn_between_savers_that_overlap(tmp_path: Path) -> None:
    with Shelf.open(tmp_path / "s") as shelf, Savers(shelf).working():
        for _ in range(3):
            with (
                shelf.exclusive(seconds=30),
                pytest.raises(StoreBusy),
                shelf.root.lock("lock", exclusive=False, seconds=0),
            ):
                pass


def test_savers_go_on_while_a_collector_waits_for_a_long_save(tmp_path: Path) -> None:
    with Shelf.open(tmp_path / "s") as shelf, shelf.shared():
        refused = threading.Event()

        def collect() -> None:
            try:
                with shelf.exclusive(seconds=2):
                    pass
            except StoreBusy:
                refused.set()

        collector = threading.Thread(target=collect)
        collector.start()
        saved = 0
        while collector.is_alive():
            with shelf.shared():
                saved += 1
        collector.join()
        assert refused.is_set() and saved > 1


def test_one_that_does_not_wait_is_told_at_once(tmp_path: Path) -> None:
    with Shelf.open(tmp_path / "s") as shelf:
        with shelf.shared(), pytest.raises(StoreBusy), shelf.exclusive(seconds=0):
            pass
        with shelf.exclusive(seconds=0):
            pass
