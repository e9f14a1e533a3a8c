"""Engines that round otherwise than the portable one: how far they may be from it, and where a token may differ.

On macOS these are Core ML's, by both routes and on different compute units. Elsewhere it is the portable engine rounding every operation to
fp16, which shows that the bounds are neither empty nor out of reach.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from core_ml_stand_in import engine_over
from near_ties import is_near_tie
from numpy.typing import NDArray

from runtime.bundle import Bundle
from runtime.chain import Chain, Step, decode_only, schedule
from runtime.coreml import Units
from runtime.engine import Engine
from runtime.hostkv import HostKV
from runtime.portable import PortableEngine
from runtime.session import Session
from runtime.verify_head import TEXT, check_head

Half = NDArray[np.float16]

HIDDEN = 5e-2
"""Of the largest hidden number, after some 90 decode steps. The portable engine's own fp16 rounding is 0.8e-2 away."""


def pyobjc(root: Path, cache: Path, units: Units) -> Engine:
    from runtime.coreml.through_pyobjc import PyObjCEdge

    return engine_over(root, PyObjCEdge(), cache, units)


def coremltools(root: Path, cache: Path, units: Units) -> Engine:
    from runtime.coreml.through_coremltools import CoremltoolsEdge

    return engine_over(root, CoremltoolsEdge(), cache, units)


def rounding(root: Path, cache: Path, units: Units) -> Engine:
    return PortableEngine(root, compute="fp16-rounding")


Make = Callable[[Path, Path, Units], Engine]
both_routes = [
    pytest.param(make, units, marks=pytest.mark.macos, id=f"{make.__name__}, {units}")
    for make in (pyobjc, coremltools)
    for units in ("cpuOnly", "all")
]
engines = pytest.mark.parametrize(("make", "units"), [pytest.param(rounding, "all", id="fp16-rounding"), *both_routes])


def run(bundle: Bundle, engine: Engine, steps: tuple[Step, ...], ids: list[int]) -> tuple[Half, list[int]]:
    """The last hidden state and the token after each step."""
    kv = HostKV(bundle.layout(), bundle.config.ctx)
    chain = Chain(bundle, engine, kv)
    hidden, tokens = [], []
    for step in steps:
        hidden.append(chain.run(step, ids[step.start : step.start + step.width]))
        kv.advance(step.start + step.width)
        tokens.append(chain.token(hidden[-1]))
    return np.stack(hidden), tokens


def compare(bundle: Bundle, engine: Engine, steps: tuple[Step, ...], ids: list[int]) -> tuple[float, list[int]]:
    """How far hidden states are from the portable engine's, of the largest number; and the steps whose tokens differ although they are no near-ties."""
    portable = PortableEngine(bundle.root)
    (mine, said), (theirs, want) = run(bundle, engine, steps, ids), run(bundle, portable, steps, ids)
    far = np.abs(mine.astype(np.float32) - theirs.astype(np.float32)).max() / np.abs(theirs.astype(np.float32)).max()
    head = portable.function(bundle.config.lmhead, None)
    near = [is_near_tie(head, row) for row in theirs]
    wrong = [i for i, (a, b) in enumerate(zip(said, want, strict=True)) if a != b and not near[i]]
    print(
        f"{len(steps)} steps: hidden {far:.2g} away, {sum(near)} near-ties, {sum(a != b for a, b in zip(said, want, strict=True))} differ"
    )
    assert sum(near) * 2 < len(near) or len(near) < 8, "most positions must count"
    return float(far), wrong


@engines
def test_decode_steps_of_a_text(make: Make, units: Units, bundle: Bundle, tmp_path: Path) -> None:
    ids = bundle.tokenizer.encode(TEXT * 2)
    far, wrong = compare(bundle, make(bundle.root, tmp_path, units), decode_only(0, len(ids)), ids)
    assert 0 < far <= HIDDEN and wrong == []


@engines
def test_prefill_of_every_width(make: Make, units: Units, bundle: Bundle, tmp_path: Path, ids: list[int]) -> None:
    config = bundle.config
    steps = schedule(0, 829, config.ctx, config.prefill_widths, config.plain_width)
    assert {step.width for step in steps} == {512, 256, 32, 8, 4, 1}
    far, wrong = compare(bundle, make(bundle.root, tmp_path, units), steps, ids)
    assert 0 < far <= HIDDEN and wrong == []


@engines
def test_the_batched_head_agrees_with_the_sequential_one(
    make: Make, units: Units, bundle: Bundle, tmp_path: Path
) -> None:
    check = check_head(bundle, make(bundle.root, tmp_path, units), 4)
    assert check.rows == () and check.batched == check.sequential and len(set(check.batched)) == 4


def test_the_bound_is_not_out_of_reach_of_a_mistake(bundle: Bundle) -> None:
    """Tokens that come one step late are further away than the bound, and are told apart by the head."""
    ids = bundle.tokenizer.encode(TEXT)
    late = [ids[0], *ids[:-1]]
    steps = decode_only(0, len(ids))
    (mine, said), (theirs, want) = (run(bundle, PortableEngine(bundle.root), steps, some) for some in (late, ids))
    assert np.abs(mine.astype(np.float32) - theirs.astype(np.float32)).max() > HIDDEN * np.abs(theirs).max()
    assert said != want


@pytest.mark.macos
@pytest.mark.parametrize("make", [pyobjc, coremltools])
def test_first_use_costs_are_told_and_a_second_engine_compiles_nothing(
    make: Make, bundle: Bundle, tmp_path: Path
) -> None:
    for _ in range(2):
        engine = make(bundle.root, tmp_path, "all")
        session = Session.open(bundle, engine, decode_only=True)
        session.feed([2, 300, 301])
        session.generate(4)
        print(engine.ledger.seconds(), engine.describe())
        assert all(seconds > 0 for seconds in engine.ledger.seconds().values())
        folders = sorted((tmp_path / "compiled").iterdir())
        made = {folder: folder.stat().st_mtime_ns for folder in folders}
    assert len(made) == len(bundle.config.chunks) + 1
    assert {folder: folder.stat().st_mtime_ns for folder in folders} == made


@pytest.mark.macos
def test_core_ml_uses_the_output_backings(bundle: Bundle, tmp_path: Path) -> None:
    """Otherwise every step would copy the whole cache: correct, and slow."""
    from runtime.coreml.through_pyobjc import PyObjCEdge, PyObjCModel

    engine = engine_over(bundle.root, PyObjCEdge(), tmp_path)
    Session.open(bundle, engine).feed([2, 300])
    model = engine.function(bundle.config.chunks[0], bundle.config.decode_function)._model
    assert isinstance(model, PyObjCModel)
    given = {name: array for name, (array, _) in model._values.items()}
    backings = {name: array for name, (array, _) in model._outputs.items()}
    found = model.predict(given, backings)
    elsewhere = [name for name, array in found.items() if array is not backings[name]]
    print("not in their backings:", elsewhere)
    assert "k_0_out" not in elsewhere
