"""A tiny bundle opened, an engine over it, and tokens to feed: `tiny` unless a test names another (`families`)."""

from __future__ import annotations

import sys

import pytest
from text import FERRY, KITCHEN

from runtime.bundle import Bundle
from runtime.portable import PortableEngine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Core ML is there on macOS only, so elsewhere nothing could be installed that would run these."""
    for item in items:
        if item.get_closest_marker("macos") and sys.platform != "darwin":
            item.add_marker(pytest.mark.skip(reason="needs macOS"))


@pytest.fixture(scope="session")
def bundle(request: pytest.FixtureRequest) -> Bundle:
    family = getattr(request, "param", "tiny")
    return Bundle.open(request.getfixturevalue(f"{family.replace('-', '_')}_bundle"))


@pytest.fixture(scope="session")
def engine(bundle: Bundle) -> PortableEngine:
    """Shared by tests that restrict nothing: functions stay loaded."""
    return PortableEngine(bundle.root)


@pytest.fixture(scope="session")
def ids(bundle: Bundle) -> list[int]:
    """2,100 tokens and more of English."""
    tokens = bundle.tokenizer.encode(KITCHEN.strip() + "\n" + FERRY.strip())
    assert len(tokens) > 2100
    return tokens
