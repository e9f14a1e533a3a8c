"""A server and its client are a remote like any other: the same contract as a folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from live import serving
from remote_contract import Opened, RemoteContract

from sync.client import Client


class TestHttp(RemoteContract):
    @pytest.fixture
    def opened(self, tmp_path: Path) -> Iterator[Opened]:
        with serving(tmp_path / "served") as peer:

            @contextlib.contextmanager
            def opened() -> Iterator[Client]:
                with Client.open(peer) as client:
                    yield client

            yield opened
