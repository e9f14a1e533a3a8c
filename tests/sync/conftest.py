"""Folders in memory where the system has that: transfers sync every file, and a shared disk makes minutes of it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ferries import save, verify
from live import ALL, serving
from raw_http import TOKENS, ask, files
from refusals import TOKENS as PULLED

from kvstore import Store
from sync.connection import Peer
from sync.pairing import Offers
from sync.server import Settings
from sync.tokens import TokenBook

_MEMORY = Path("/dev/shm")


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    memory = _MEMORY if _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="kvferry-test-", dir=memory) as path:
        yield Path(path)


@pytest.fixture
def mac(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "mac") as store:
        yield store


@pytest.fixture
def phone(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "phone") as store:
        yield store


@pytest.fixture
def stick(tmp_path: Path) -> Path:
    return tmp_path / "stick"


@pytest.fixture
def logged() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with Store.open(tmp_path / "served") as store:
        save(store, "book", TOKENS)
    return tmp_path / "served"


@pytest.fixture
def peer(folder: Path, logged: list[dict[str, Any]]) -> Iterator[Peer]:
    """A server of one good snapshot without tokens. At the end it is as it was, and has logged no fault of its own."""
    before = files(folder)
    with serving(folder, Settings(allow=ALL, log=logged.append, idle=5.0)) as peer:
        yield peer
        assert ask(peer, "GET", "/healthz").body == b"ok\n"
    assert files(folder) == before
    assert not [line for line in logged if "Traceback" in str(line.get("error"))]
    verify(folder)


@pytest.fixture
def book(tmp_path: Path) -> TokenBook:
    return TokenBook(tmp_path / "config")


@pytest.fixture
def guarded(folder: Path, tmp_path: Path, book: TokenBook, logged: list[dict[str, Any]]) -> Iterator[Peer]:
    how = Settings(allow=ALL, book=book, offers=Offers(tmp_path / "config"), log=logged.append)
    with serving(folder, how) as peer:
        yield peer


@pytest.fixture(scope="module")
def good() -> Iterator[tuple[Peer, Path]]:
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="kvferry-test-", dir=memory) as name:
        folder = Path(name) / "served"
        with Store.open(folder) as store:
            save(store, "book", PULLED)
            save(store, "other", 150, "other")
        with serving(folder, Settings()) as peer:
            yield peer, folder
