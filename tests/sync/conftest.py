"""Folders in memory where the system has that: transfers sync every file, and a shared disk makes minutes of it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import Store

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
