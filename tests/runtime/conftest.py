"""The tiny bundle opened, an engine over it, and tokens to feed."""

from __future__ import annotations

from pathlib import Path

import pytest
from text import FERRY, KITCHEN

from runtime.bundle import Bundle
from runtime.portable import PortableEngine


@pytest.fixture(scope="session")
def bundle(tiny_bundle: Path) -> Bundle:
    return Bundle.open(tiny_bundle)


@pytest.fixture(scope="session")
def engine(tiny_bundle: Path) -> PortableEngine:
    """Shared by tests that restrict nothing: functions stay loaded."""
    return PortableEngine(tiny_bundle)


@pytest.fixture(scope="session")
def ids(bundle: Bundle) -> list[int]:
    """2,100 tokens and more of English."""
    tokens = bundle.tokenizer.encode(KITCHEN.strip() + "\n" + FERRY.strip())
    assert len(tokens) > 2100
    return tokens
