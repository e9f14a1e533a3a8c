"""Speculation with a real model: text that is copied is drafted well, and nothing but the speed changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from text import FERRY

from runtime.bundle import Bundle
from runtime.portable import PortableEngine
from runtime.session import Session
from runtime.speculation import Speculation

pytestmark = pytest.mark.real_model

N = 40


@pytest.fixture(scope="module")
def gemma(gemma_bundle: Path) -> Bundle:
    return Bundle.open(gemma_bundle)


@pytest.fixture(scope="module")
def copying(gemma: Bundle) -> list[int]:
    """A passage, and its beginning again."""
    passage = FERRY.strip()[:700]
    return gemma.tokenizer.encode(f"{passage}\n\nThe same text again:\n\n{passage[:120]}")


@pytest.fixture(scope="module")
def plain(gemma: Bundle, copying: list[int]) -> Iterator[tuple[Session, tuple[int, ...]]]:
    session = Session.open(gemma, PortableEngine(gemma.root))
    session.feed(copying)
    yield session, session.generate(N).tokens


@pytest.mark.parametrize(
    "how",
    [Speculation(), Speculation("recheck"), Speculation("margin", 0.1)],
    ids=["trust", "recheck", "margin"],
)
def test_copied_text_is_accepted_and_the_bytes_are_those_of_plain_decoding(
    gemma: Bundle, copying: list[int], plain: Any, how: Speculation
) -> None:
    expected, tokens = plain
    session = Session.open(gemma, expected.engine)
    session.feed(copying)
    made = session.generate(N, speculate=how)
    assert made.tokens == tokens and session.pending == expected.pending
    for group in range(len(session.kv.covered)):
        for one, other in zip(session.kv.spans(group, 0, 800), expected.kv.spans(group, 0, 800), strict=True):
            assert one == other
    stats = made.speculation
    assert stats is not None and stats.acceptance_with_pending is not None
    assert stats.acceptance_with_pending >= 0.86 and stats.rounds >= 8 and stats.corrected == 0
