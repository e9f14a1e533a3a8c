"""The batched head is used only where it says what the sequential one says; every way of lying that we know of is refused by row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_ml_stand_in import Machine, engine_over, install_framework
from engines import Change, Lying
from numpy.typing import NDArray

from runtime import verify_head
from runtime.bundle import Bundle
from runtime.portable import PortableEngine
from runtime.verify_head import HeadRefused, WidthUnknown, check_head, require_agreement, verified_head

BATCHED = "lmhead_v4.mlpackage"


def test_a_head_that_agrees_is_given_out(bundle: Bundle) -> None:
    engine = PortableEngine(bundle.root)
    check = check_head(bundle, engine, 4)
    assert check.rows == () and check.sequential == check.batched and len(set(check.sequential)) == 4
    assert all(0 < position < verify_head.STEPS for position in check.positions)
    assert engine.ledger.names() == [f"{c}:decode" for c in bundle.config.chunks] + [bundle.config.lmhead, BATCHED]
    assert verified_head(bundle, engine, 4) is engine.function(BATCHED, None)


@pytest.mark.parametrize(
    ("change", "rows"),
    [
        (np.zeros_like, (0, 1, 2, 3)),  # the published head on the Neural Engine
        (lambda tokens: np.full_like(tokens, tokens[2]), (0, 1, 3)),
        (lambda tokens: tokens[[0, 2, 1, 3]], (1, 2)),
        (lambda tokens: np.where(np.arange(4) == 3, tokens + 1, tokens), (3,)),
    ],
    ids=["zeros", "one row for all", "rows swapped", "the last row"],
)
def test_a_head_that_lies_is_refused_by_row(bundle: Bundle, change: Change, rows: tuple[int, ...]) -> None:
    engine = Lying(PortableEngine(bundle.root), BATCHED, change)
    named = f"{BATCHED}: rows {', '.join(map(str, rows))} of 4: expected the sequential"
    with pytest.raises(HeadRefused, match=named) as caught:
        verified_head(bundle, engine, 4)
    assert caught.value.rows == rows
    assert caught.value.exit_code == 7


def test_rows_that_prove_nothing_are_refused_too(bundle: Bundle) -> None:
    """A sequential head that always says 0 would agree with a batched one that always says 0."""
    zeros = Lying(Lying(PortableEngine(bundle.root), BATCHED, np.zeros_like), bundle.config.lmhead, np.zeros_like)
    with pytest.raises(
        HeadRefused, match=r"expected 4 decode steps whose tokens are not all equal, found \[0, 0, 0, 0\]"
    ):
        check_head(bundle, zeros, 4)


def test_few_different_tokens_are_enough_when_there_are_no_more(bundle: Bundle) -> None:
    """Two different tokens, the second once in 48 steps: both must be among the rows."""
    seen: list[int] = []

    def mostly_nine(token: NDArray[Any]) -> NDArray[Any]:
        seen.append(1)
        return np.full_like(token, 5 if len(seen) == 20 else 9)

    engine = Lying(PortableEngine(bundle.root), bundle.config.lmhead, mostly_nine)
    check = check_head(bundle, engine, 4)
    assert check.sequential == (9, 9, 9, 5) and check.positions == (1, 2, 3, 20) and check.rows
    require_agreement(replace(check, batched=check.sequential))


def test_a_width_that_the_bundle_lacks_is_named(bundle: Bundle) -> None:
    with pytest.raises(WidthUnknown, match=r"expected one of the bundle's widths \(4\), found 8"):
        check_head(bundle, PortableEngine(bundle.root), 8)


def test_through_core_ml_the_zeros_of_one_unit_are_caught(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine whose Neural Engine answers 0: refused with `ane`, accepted where the policy keeps the head off it."""
    machine = Machine()

    def zeros(package: str, outputs: dict[str, NDArray[Any]]) -> None:
        if package == BATCHED and machine.loaded[-1] == (BATCHED, None, "cpuAndNeuralEngine"):
            outputs["token"][:] = 0

    machine.change = zeros
    edge = install_framework(machine, monkeypatch)
    with pytest.raises(HeadRefused, match="rows 0, 1, 2, 3 of 4"):
        verified_head(bundle, engine_over(bundle.root, edge, tmp_path, "cpuAndNeuralEngine", "ane"), 4)
    verified_head(bundle, engine_over(bundle.root, edge, tmp_path, "cpuAndNeuralEngine"), 4)
    assert machine.loaded[-1] == (BATCHED, None, "cpuOnly")
