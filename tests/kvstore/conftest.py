"""Stores of these tests live in memory where there is such a file system: syncing them to a disk would be most of the time."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite("kvstore.testing.contract")

MEMORY = Path("/dev/shm")


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    if not (MEMORY.is_dir() and os.access(MEMORY, os.W_OK)):
        yield tmp_path_factory.mktemp("store")
        return
    path = Path(tempfile.mkdtemp(prefix="kvferry-test-", dir=MEMORY))
    yield path
    shutil.rmtree(path)
