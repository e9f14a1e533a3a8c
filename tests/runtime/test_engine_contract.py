"""What every engine promises (`runtime.engine`): one suite, each engine plugs in.

The Core ML engine runs here over stand-ins for the framework (`core_ml_stand_in`), on macOS over the framework itself as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from core_ml_stand_in import Machine, engine_over, install_framework, install_proxy
from families import FAMILIES
from feeding import Feeder, decode_each
from near_ties import is_near_tie

from kvstore.errors import KVError
from runtime.bundle import Bundle
from runtime.engine import Engine, FunctionNotAllowed, InputMismatch
from runtime.portable import PortableEngine

pytestmark = pytest.mark.parametrize(
    "bundle",
    [
        name if name == "tiny" else pytest.param(name, marks=pytest.mark.slow)
        for name in FAMILIES
        if name != "tiny-gemma4"
    ],
    indirect=True,
    scope="session",
)
"""Sliding layers and one KV head; and the SmolLM2 family's full attention and several KV heads. tiny-gemma4's chunks of shared layers take other
inputs than these tests feed: `test_engines_agree` and the gate run it."""

CHUNK, HEAD = "chunk_0.mlpackage", "lmhead.mlpackage"


@dataclass(frozen=True)
class Plugged:
    """``make()``: a fresh engine over the bundle. ``exact``: its numbers are the portable engine's, bit for bit."""

    make: Callable[[], Engine]
    exact: bool


@pytest.fixture
def folder(bundle: Bundle) -> Path:
    return bundle.root


@pytest.fixture(
    params=[
        "portable",
        "pyobjc stand-in",
        "coremltools stand-in",
        pytest.param("pyobjc", marks=pytest.mark.macos),
        pytest.param("coremltools", marks=pytest.mark.macos),
    ]
)
def plugged(request: pytest.FixtureRequest, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plugged:
    match request.param:
        case "portable":
            return Plugged(lambda: PortableEngine(folder), True)
        case "pyobjc":
            from runtime.coreml.through_pyobjc import PyObjCEdge

            return Plugged(lambda: engine_over(folder, PyObjCEdge(), tmp_path), False)
        case "coremltools":
            from runtime.coreml.through_coremltools import CoremltoolsEdge

            return Plugged(lambda: engine_over(folder, CoremltoolsEdge(), tmp_path), False)
    install = install_framework if request.param == "pyobjc stand-in" else install_proxy
    edge = install(Machine(), monkeypatch)
    return Plugged(lambda: engine_over(folder, edge, tmp_path), True)


@pytest.fixture
def rows() -> np.ndarray[tuple[int, ...], np.dtype[np.float16]]:
    return np.random.default_rng(0).standard_normal((16, 64)).astype(np.float16)


def test_a_refused_load_loads_nothing(plugged: Plugged) -> None:
    engine = plugged.make()
    engine.ledger.restrict([(CHUNK, "decode")])
    with pytest.raises(FunctionNotAllowed, match="prefill_4: opened decode-only"):
        engine.function(CHUNK, "prefill_4")
    assert engine.ledger.names() == []


def test_functions_load_once_and_stay_when_the_ledger_is_restricted_later(plugged: Plugged) -> None:
    engine = plugged.make()
    wide = engine.function(CHUNK, "prefill_4")
    engine.ledger.restrict([(CHUNK, "decode")])
    assert engine.function(CHUNK, "prefill_4") is wide
    engine.function(CHUNK, "decode")
    assert engine.ledger.names() == [f"{CHUNK}:prefill_4", f"{CHUNK}:decode"] == list(engine.ledger.seconds())
    assert all(seconds > 0 for seconds in engine.ledger.seconds().values())


def test_a_function_that_the_package_lacks_is_an_error_with_its_name(plugged: Plugged) -> None:
    engine = plugged.make()
    with pytest.raises(KVError, match="verify_4"):
        engine.function(CHUNK, "verify_4")
    assert engine.ledger.names() == []


def test_inputs_must_be_the_declared_ones(plugged: Plugged) -> None:
    head = plugged.make().function(HEAD, None)
    hidden = np.zeros(64, np.float16)
    head({"hidden": hidden})
    bad = [
        {}, {"hidden": hidden, "other": hidden}, {"hidden": hidden.astype(np.float32)}, {"hidden": hidden[None]},
        {"hidden": hidden[:-1]}, {"hidden": hidden.astype(">f2")},
    ]  # fmt: skip
    for given in bad:
        with pytest.raises(InputMismatch, match=": input"):
            head(given)


def test_inputs_may_be_read_only_and_strided_and_are_left_alone(plugged: Plugged, folder: Path) -> None:
    feeder = Feeder(folder, plugged.make())
    rng = np.random.default_rng(0)
    function = feeder.engine.function(feeder.chunks[0], "decode")
    hidden = rng.standard_normal(64).astype(np.float16)
    given = feeder.inputs(function, hidden, feeder.common(1, 700, feeder.ctx, 1))
    for name, array in given.items():
        if name.startswith(("k_", "v_")):
            given[name] = rng.standard_normal(array.shape).astype(np.float16)
    want = function(given)
    before = {name: array.tobytes() for name, array in given.items()}
    spread = {}
    for name, array in given.items():
        wide = np.zeros((*array.shape[:-1], array.shape[-1] * 2), np.float16)
        spread[name] = wide[..., ::2]
        spread[name][...] = array
        spread[name].flags.writeable = False
    found = function(spread)
    assert {n: a.tobytes() for n, a in found.items()} == {n: a.tobytes() for n, a in want.items()}
    assert {name: array.tobytes() for name, array in given.items()} == before


def test_outputs_are_new_arrays_that_the_caller_owns(plugged: Plugged, folder: Path, rows: np.ndarray) -> None:
    feeder = Feeder(folder, plugged.make())
    function = feeder.engine.function(feeder.chunks[0], "decode")
    common = feeder.common(1, 0, feeder.ctx, 1)
    first = function(feeder.inputs(function, rows[0], common), kv_rows=(0, 1))
    before = {name: array.tobytes() for name, array in first.items()}
    second = function(feeder.inputs(function, rows[1], common), kv_rows=(0, 1))
    assert {name: array.tobytes() for name, array in first.items()} == before
    assert second["hidden"].tobytes() != before["hidden"]
    for output in second.values():
        output[...] = 0
    again = function(feeder.inputs(function, rows[0], common), kv_rows=(0, 1))
    assert {name: array.tobytes() for name, array in again.items()} == before


def test_kv_rows_takes_rows_of_the_whole_cache_only(plugged: Plugged, folder: Path, rows: np.ndarray) -> None:
    feeder = Feeder(folder, plugged.make())
    decode_each(feeder, rows[:5], 0)
    function = feeder.engine.function(feeder.chunks[0], "decode")
    given = feeder.inputs(function, rows[5], feeder.common(1, 5, feeder.ctx, 1))
    whole, some = function(given), function(given, kv_rows=(3, 6))
    assert whole["k_0_out"].shape == (1, feeder.ctx, feeder.width) and some["k_0_out"].shape == (1, 3, feeder.width)
    for name, array in whole.items():
        want = array if name == "hidden" else array[:, 3:6]
        assert some[name].tobytes() == want.tobytes(), name
        assert some[name].dtype == np.float16 and some[name].any()
    wide = feeder.engine.function(feeder.chunks[0], "prefill_4")
    given = feeder.inputs(wide, rows[5:9], feeder.common(4, 5, feeder.ctx, 4))
    assert wide(given, kv_rows=(5, 6))["k_0_out"].size == 4 * feeder.width


def test_rows_that_the_host_writes_are_seen_by_the_next_call(plugged: Plugged, folder: Path, rows: np.ndarray) -> None:
    """The cache lies at the same place from call to call, and another cache may be given at any time."""
    one, other = Feeder(folder, engine := plugged.make()), Feeder(folder, engine)
    apart = Feeder(folder, plugged.make())
    together = [(one.feed("decode", r[None], p), other.feed("decode", -r[None], p)) for p, r in enumerate(rows[:4])]
    alone = [apart.feed("decode", r[None], p) for p, r in enumerate(rows[:4])]
    assert [a.tobytes() for a, _ in together] == [a.tobytes() for a in alone]
    apart.kv = apart.empty()
    alone = [apart.feed("decode", -r[None], p) for p, r in enumerate(rows[:4])]
    assert [b.tobytes() for _, b in together] == [a.tobytes() for a in alone]
    assert one.rows_of(0, 4) != other.rows_of(0, 4) == apart.rows_of(0, 4)


def apart(mine: np.ndarray, theirs: np.ndarray) -> float:
    """The largest difference, of the largest number; 0 only where every byte is the same."""
    if mine.tobytes() == theirs.tobytes():
        return 0.0
    most = np.abs(theirs.astype(np.float32)).max()
    return max(1e-9, float(np.abs(mine.astype(np.float32) - theirs.astype(np.float32)).max() / most))


@pytest.mark.parametrize("function", ["decode", "prefill_4", "prefill_8", "prefill_32", "prefill_512"])
def test_the_numbers_are_the_portable_engines(plugged: Plugged, folder: Path, function: str) -> None:
    mine, theirs = Feeder(folder, plugged.make()), Feeder(folder, PortableEngine(folder))
    width = 1 if function == "decode" else int(function.removeprefix("prefill_"))
    some = np.random.default_rng(1).standard_normal((width + 2, 64)).astype(np.float16)
    at = 0
    if function != "prefill_512":
        for feeder in (mine, theirs):
            decode_each(feeder, some[:2], 0)
        mine.kv = {name: array.copy() for name, array in theirs.kv.items()}
        at = 2
    bound = 0.0 if plugged.exact else 2e-2  # fp16 through a few layers
    assert apart(mine.feed(function, some[2:], at), theirs.feed(function, some[2:], at)) <= bound
    for name, array in mine.kv.items():
        assert array[0, : at + width].any()
        assert apart(array[0, : at + width], theirs.kv[name][0, : at + width]) <= bound, name


def test_both_heads_say_the_portable_engines_tokens(plugged: Plugged, folder: Path) -> None:
    """On rows that are no near-ties."""
    mine, theirs = plugged.make(), PortableEngine(folder)
    head = theirs.function(HEAD, None)
    rows = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float16)
    hidden = np.stack([row for row in rows if not is_near_tie(head, row)][:4])
    want = [int(head({"hidden": row})["token"][0]) for row in hidden]
    assert len(set(want)) == 4
    assert [int(mine.function(HEAD, None)({"hidden": row})["token"][0]) for row in hidden] == want
    batched = mine.function("lmhead_v4.mlpackage", None)({"hidden": hidden})["token"]
    assert batched.tolist() == want and batched.dtype == np.int32


def test_describe_is_stable_and_says_what_matters(plugged: Plugged) -> None:
    engine = plugged.make()
    told = engine.describe()
    engine.function(HEAD, None)({"hidden": np.zeros(64, np.float16)})
    assert told == engine.describe() == plugged.make().describe()
    assert all(isinstance(value, str) and value for value in told.values())
    assert told["numpy"] == np.__version__ and {"engine", "os", "machine", "python"} <= told.keys()
    assert told.keys() & {"compute", "compute_units"} and told.keys() & {"blas_core", "core"}
