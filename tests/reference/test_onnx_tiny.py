"""Every function of the tiny bundle in onnxruntime, on the inputs that our runtime gave it in a real run: the same outputs but for the last bits.

Both sides compute in float32 and round K and V rows to fp16 where they enter the cache, so only the order of additions differs. It can push a
number over a rounding boundary, which later layers then see: hence shares of equal numbers instead of all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from closeness import bound, worst
from measured import Figures
from recorded import TINY_TOKENS as TOKENS
from recorded import Run

from runtime.mlpackage import Package
from runtime.portable import PortableEngine

LIMIT = bound(rms=3e-4, row=1.2e-3, peak=1.5e-3)
EQUAL = 0.9
LOGITS = 2e-5
FUNCTIONS = ["decode", "prefill_4", "prefill_8", "prefill_32", "prefill_256", "prefill_512"]


@pytest.fixture(scope="module")
def ours(tiny_run: Run) -> Run:
    return tiny_run


@pytest.fixture(scope="module")
def onnx_peer(require: Callable[[str], ModuleType]) -> ModuleType:
    require("onnx")
    require("onnxruntime")
    return require("onnx_peer")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function(name: str, ours: Run, tiny_bundle: Path, onnx_peer: ModuleType, figures: Figures) -> None:
    for package in ours.bundle.config.chunks:
        inputs, results = ours.calls[package, name]
        theirs = onnx_peer.Peer(tiny_bundle / package, name)(inputs)
        rows = {n: a for n, a in theirs.items() if n != "hidden"}
        if name == "decode":
            theirs = onnx_peer.without_cache(theirs, inputs)
            for output, array in rows.items():
                # Everything but the row that was written is the cache that was given.
                before = inputs[output.replace("_out", "_in")]
                kept = inputs["onehot"] == 0
                assert np.array_equal(array[0, kept], before[0, kept])
        assert all(np.array_equal(a, a.astype(np.float16)) for a in rows.values()), "K and V were not rounded on entry"
        found = onnx_peer.agreements(results, theirs)
        assert len(found) == 1 + len(rows)
        print(
            f"\ntiny {package}:{name}: least equal {min(a.equal for a in found):.3f}; {worst([a.apart for a in found])}"
        )
        figures.function(name, [a.equal for a in found], [a.apart for a in found])
        figures.note("bound", LIMIT, equal=EQUAL)
        assert [str(a) for a in found if a.equal < EQUAL or not a.apart.within(LIMIT)] == []


def test_sequential_head(ours: Run, tiny_bundle: Path, onnx_peer: ModuleType) -> None:
    peer = onnx_peer.Peer(tiny_bundle / ours.bundle.config.lmhead, None)
    for position in range(0, TOKENS, 5):
        theirs = peer({"hidden": ours.final[position]})
        assert _same_choice(ours.token(position), theirs["logits"][0], int(theirs["token"][0]))


def test_head_of_four(ours: Run, tiny_bundle: Path, onnx_peer: ModuleType, figures: Figures) -> None:
    peer = onnx_peer.Peer(tiny_bundle / ours.bundle.config.lmhead_batched[4], None)
    error, differing = 0.0, 0
    for start, (logits, tokens) in zip(range(0, TOKENS - 3, 4), ours.logits(), strict=False):
        theirs = peer({"hidden": ours.final[start : start + 4]})
        error = max(error, float(np.abs(logits - theirs["logits"]).max()))
        for mine, expected, other in zip(tokens, theirs["logits"], theirs["token"], strict=True):
            assert _same_choice(int(mine), expected, int(other))
            differing += int(mine != other)
    print(f"\ntiny head of four: largest logit difference {error:.1e}, other tokens at {differing} positions")
    figures.note("heads", largest_logit_difference=error, logit_bound=LOGITS, differing=differing)
    assert error <= LOGITS


def _same_choice(ours: int, logits: np.ndarray, theirs: int) -> bool:
    """The same token, or one that onnxruntime's logits prefer by no more than twice what they may be off by."""
    assert theirs == int(logits.argmax())
    return bool(ours == theirs or logits[theirs] - logits[ours] <= 2 * LOGITS)


def test_whole_cache_of_decode(ours: Run, tiny_bundle: Path, onnx_peer: ModuleType) -> None:
    package = ours.bundle.config.chunks[0]
    inputs, _ = ours.calls[package, "decode"]
    results = PortableEngine(tiny_bundle).function(package, "decode")(inputs)
    theirs = onnx_peer.Peer(tiny_bundle / package, "decode")(inputs)
    for name in (n for n in results if n != "hidden"):
        assert results[name].shape == theirs[name].shape == (1, ours.bundle.config.ctx, results[name].shape[-1])
        different = np.flatnonzero((results[name] != theirs[name].astype(np.float16)).any(-1)[0])
        assert set(different) <= {int(inputs["onehot"].argmax())}


def test_padding_rows_change_nothing(ours: Run, tiny_bundle: Path, onnx_peer: ModuleType) -> None:
    """Two tokens through ``prefill_4``: the other two rows are zeros that see nothing and are written nowhere."""
    for package in ours.bundle.config.chunks:
        inputs, results = ours.calls[package, "prefill_4"]
        padded = {name: array.copy() for name, array in inputs.items()}
        for name in ("hidden_in", "onehot"):
            padded[name][2:] = 0
        for name in (n for n in padded if n.startswith("mask")):
            padded[name][2:] = ours.bundle.config.neg
        mine = PortableEngine(tiny_bundle).function(package, "prefill_4")(padded)
        theirs = onnx_peer.Peer(tiny_bundle / package, "prefill_4")(padded)
        first = {name: array[:2] for name, array in mine.items()}
        assert all(array.tobytes() == results[name][:2].tobytes() for name, array in first.items())
        found = onnx_peer.agreements(first, {name: array[:2] for name, array in theirs.items()})
        assert [str(a) for a in found if a.equal < EQUAL or not a.apart.within(LIMIT)] == []


# Controls


def test_rows_that_were_not_rounded_are_noticed(ours: Run, tiny_bundle: Path, onnx_peer: ModuleType) -> None:
    package = ours.bundle.config.chunks[0]
    inputs, _ = ours.calls[package, "prefill_32"]
    theirs = onnx_peer.Peer(tiny_bundle / package, "prefill_32", round_entering=False)(inputs)
    assert not any(np.array_equal(a, a.astype(np.float16)) for n, a in theirs.items() if n != "hidden")


@pytest.mark.parametrize("changed", ["mask_s", "cos_s", "k_1_in", "onehot"])
def test_another_input_is_noticed(changed: str, ours: Run, tiny_bundle: Path, onnx_peer: ModuleType) -> None:
    package = ours.bundle.config.chunks[0]
    inputs, results = ours.calls[package, "prefill_32"]
    wrong = dict(inputs)
    if changed == "mask_s":  # one slot more at the far end of the window
        wrong[changed] = inputs[changed].copy()
        for row in wrong[changed]:
            row[int((row == 0).argmax()) - 1] = 0
    elif changed == "onehot":
        wrong[changed] = np.roll(inputs[changed], 1, axis=-1)
    else:
        wrong[changed] = np.roll(inputs[changed], 1, axis=-2)
    found = onnx_peer.agreements(results, onnx_peer.Peer(tiny_bundle / package, "prefill_32")(wrong))
    assert not next(a for a in found if a.name == "hidden").apart.within(LIMIT)


def test_an_unknown_operation_is_refused(tiny_bundle: Path, onnx_peer: ModuleType) -> None:
    package = Package.open(tiny_bundle / "chunk_0.mlpackage")
    function = package.function("decode")
    ops = tuple(replace(op, type="erf") if op.type == "gelu" else op for op in function.ops)
    with pytest.raises(onnx_peer.NotConverted, match="decode: erf 'l0_gelu': not known here"):
        onnx_peer.convert(package, replace(function, ops=ops))
