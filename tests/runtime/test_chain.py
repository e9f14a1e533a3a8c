"""The schedule as a table, the inputs the host makes, and what one step may change."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from engines import Watched
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstore.layout import Group, Layout
from runtime.bundle import Bundle, StoreLayers
from runtime.chain import Chain, InputUnknown, Step, decode_only, rope_rows, schedule, write_mask, write_onehot
from runtime.engine import LoadLedger
from runtime.hostkv import HostKV
from runtime.mlpackage import TensorSpec
from runtime.portable import PortableEngine
from runtime.soft import SoftSpan, positions

WIDTHS = (512, 256, 32, 8, 4)
CTX = 2048


def text(steps: tuple[Step, ...]) -> str:
    """Steps as ``P`` (plain), ``D`` (decode) or the width, with a count: "P512 256*3 D*2"."""
    names = [f"P{s.width}" if s.kind == "plain" else "D" if s.kind == "decode" else str(s.width) for s in steps]
    runs: list[list[Any]] = []
    for name in names:
        if runs and runs[-1][0] == name:
            runs[-1][1] += 1
        else:
            runs.append([name, 1])
    return " ".join(name if count == 1 else f"{name}*{count}" for name, count in runs)


@pytest.mark.parametrize(
    ("position", "count", "expected"),
    [
        (0, 0, ""),
        (0, 1, "D"),
        (0, 3, "D*3"),
        (0, 4, "4"),
        (0, 5, "4 D"),
        (0, 63, "32 8*3 4 D*3"),
        (0, 64, "32*2"),
        (0, 511, "256 32*7 8*3 4 D*3"),
        (0, 512, "P512"),
        (0, 513, "P512 D"),
        (0, 1024, "P512 256*2"),
        (0, 2047, "P512 256*5 32*7 8*3 4 D*3"),
        (1, 512, "256*2"),  # plain runs at position 0 only, and 512 is no offset width
        (1, 511, "256 32*7 8*3 4 D*3"),
        (512, 512, "256*2"),
        (700, 3, "D*3"),
        (1500, 35, "32 D*3"),
        (2040, 8, "8"),
        (2041, 7, "4 D*3"),
    ],
)
def test_schedule(position: int, count: int, expected: str) -> None:
    assert text(schedule(position, count, CTX, WIDTHS, 512)) == expected


def test_schedule_without_a_plain_width_or_without_prefill() -> None:
    assert text(schedule(0, 517, CTX, WIDTHS, None)) == "512 4 D"
    assert text(schedule(0, 600, CTX, (256, 4), 512)) == "256*2 4*22"
    assert text(schedule(0, 2, CTX, (), None)) == "D*2"
    assert text(schedule(0, 700, CTX, (512,), 512)) == "P512 D*188"


def test_schedule_never_runs_a_width_past_the_context() -> None:
    assert text(schedule(2040, 100, CTX, (32, 8), None)).startswith("8 D")
    assert text(schedule(2046, 4, CTX, WIDTHS, 512)) == "D*4"


@given(st.integers(0, CTX - 1), st.data())
def test_schedule_covers_every_token_once_in_order_and_is_greedy(position: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, CTX - position))
    steps = schedule(position, count, CTX, WIDTHS, 512)
    ends = [position] + [s.start + s.width for s in steps]
    assert [s.start for s in steps] == ends[:-1] and ends[-1] == position + count
    assert all(s.kind != "plain" or s.start == 0 for s in steps)
    for s in steps:
        left = position + count - s.start
        wider = [w for w in WIDTHS if w > s.width and w <= left and (w != 512 or s.start == 0)]
        assert not wider, "a wider function fits"
    assert all(a.width >= b.width for a, b in pairwise(steps))


def test_decode_only_is_one_step_a_token() -> None:
    assert text(decode_only(700, 600)) == "D*600" and decode_only(3, 1) == (Step("decode", 3, 1),)


@pytest.mark.parametrize(("start", "rows"), [(0, 4), (509, 8), (1500, 1), (2044, 4)])
def test_masks(start: int, rows: int) -> None:
    neg = -40000.0
    full, sliding = np.empty((rows, CTX), np.float16), np.empty((rows, CTX), np.float16)
    write_mask(full, start, None, neg)
    write_mask(sliding, start, 512, neg)
    for r in range(rows):
        p = start + r
        for s in (0, max(0, p - 513), max(0, p - 512), max(0, p - 511), p, min(p + 1, CTX - 1), CTX - 1):
            assert full[r, s] == (0 if s <= p else np.float16(neg))
            # A distance of 511 is visible, one of 512 is not.
            assert sliding[r, s] == (0 if s <= p and p - s < 512 else np.float16(neg))
        assert (sliding[r] == 0).sum() == min(p + 1, 512) and (full[r] == 0).sum() == p + 1


def test_onehot() -> None:
    out = np.full((3, 10), 7, np.float16)
    write_onehot(out, 6)
    assert out.sum() == 3 and [int(r.argmax()) for r in out] == [6, 7, 8]


def test_rope_rows_are_rounded_once_from_double_and_repeated() -> None:
    inverse = [1.0, 0.31622776601683794, 5.623413251903491e-05]
    cos, sin = rope_rows(2046, 2, inverse)
    assert cos.shape == sin.shape == (2, 6) and cos.dtype == sin.dtype == np.float16
    for r in range(2):
        for i in range(6):
            angle = (2046 + r) * inverse[i % 3]
            assert cos[r, i] == np.float16(math.cos(angle)) and sin[r, i] == np.float16(math.sin(angle))


def chain(bundle: Bundle, engine: Any) -> tuple[Chain, HostKV]:
    kv = HostKV(bundle.layout(), bundle.config.ctx)
    return Chain(bundle, engine, kv), kv


def held(kv: HostKV, stop: int) -> bytes:
    return b"".join(bytes(s) for group in (0, 1) for s in kv.spans(group, 0, stop))


def run(made: Chain, kv: HostKV, steps: tuple[Step, ...], tokens: list[int]) -> NDArray[np.float16]:
    hidden: NDArray[np.float16] | None = None
    for step in steps:
        hidden = made.run(step, tokens[step.start : step.start + step.width])
        kv.advance(step.start + step.width)
    assert hidden is not None
    return hidden


def test_a_step_of_four_is_bit_for_bit_four_decodes(bundle: Bundle, engine: PortableEngine, ids: list[int]) -> None:
    one, kv_one = chain(bundle, engine)
    four, kv_four = chain(bundle, engine)
    a = run(one, kv_one, decode_only(0, 24), ids)
    b = run(four, kv_four, schedule(0, 24, CTX, (8, 4), None), ids)
    assert a.tobytes() == b.tobytes() and a.shape == (bundle.config.hidden,)
    assert held(kv_one, CTX) == held(kv_four, CTX)
    assert one.token(a) == four.token(b)


def test_wide_steps_agree_with_decode_to_rounding(bundle: Bundle, engine: PortableEngine, ids: list[int]) -> None:
    one, kv_one = chain(bundle, engine)
    wide, kv_wide = chain(bundle, engine)
    run(one, kv_one, decode_only(0, 800), ids)
    run(wide, kv_wide, schedule(0, 800, CTX, WIDTHS, 512), ids)
    for layer in kv_one.layers:
        for a, b in zip(kv_one.inputs(layer), kv_wide.inputs(layer), strict=True):
            scale = np.abs(a.astype(np.float32)).max()
            assert np.abs(a.astype(np.float32) - b.astype(np.float32)).max() < 0.02 * scale


def test_decode_asks_for_its_own_row_and_reads_the_host_arrays_in_place(
    bundle: Bundle, engine: PortableEngine, ids: list[int]
) -> None:
    asked: list[tuple[int, int] | None] = []
    addresses: list[set[int]] = []
    readonly: list[bool] = []

    def look(
        package: str, function: str | None, inputs: Mapping[str, NDArray[Any]], rows: tuple[int, int] | None
    ) -> None:
        asked.append(rows)
        caches = {n: a for n, a in inputs.items() if n.endswith("_in") and n != "hidden_in"}
        addresses.append({a.__array_interface__["data"][0] for a in caches.values()})
        readonly.extend(not a.flags.writeable for n, a in inputs.items() if n in caches or n[:4] in ("mask", "oneh"))

    made, kv = chain(bundle, Watched(engine, look))
    run(made, kv, schedule(0, 7, CTX, WIDTHS, 512), ids)
    chunks = len(bundle.config.chunks)
    assert asked == [None] * chunks + [(p, p + 1) for p in (4, 5, 6) for _ in range(chunks)]
    live = {a.__array_interface__["data"][0] for layer in kv.layers for a in kv.inputs(layer)}
    assert set().union(*addresses) == live and readonly and all(readonly)


def test_rows_of_negative_zero_stay_negative_zero(bundle: Bundle, engine: PortableEngine, ids: list[int]) -> None:
    made, kv = chain(bundle, engine)
    run(made, kv, decode_only(0, 6), ids)
    odd = np.full(bundle.config.head_dim, 0x8000, np.uint16).tobytes()
    for group in (0, 1):
        for span in kv.spans(group, 2, 3):
            span[:] = odd
    before = held(kv, 6)
    run(made, kv, decode_only(6, 5), ids)
    assert held(kv, 6) == before and before.count(odd) >= 2 * len(kv.layers)
    # The reason why only row p is taken: the whole-array output has lost the sign.
    function = engine.function(bundle.config.chunks[0], "decode")
    given = {}
    for name, spec in function.inputs.items():
        given[name] = np.zeros(spec.shape, np.float16)
    given["k_0_in"][0, 2] = -0.0
    assert not np.signbit(function(given)["k_0_out"][0, 2]).any()


def test_what_a_step_returns_stays_as_it_is(bundle: Bundle, engine: PortableEngine, ids: list[int]) -> None:
    made, kv = chain(bundle, engine)
    first = run(made, kv, decode_only(0, 1), ids)
    copy = first.copy()
    run(made, kv, schedule(1, 9, CTX, WIDTHS, None), ids)
    assert first.tobytes() == copy.tobytes()


def test_functions_load_when_first_needed_and_decode_alone_on_request(
    tiny_bundle: Path, bundle: Bundle, ids: list[int]
) -> None:
    engine = PortableEngine(tiny_bundle)
    made, kv = chain(bundle, engine)
    made.load_decode()
    decode = [f"{package}:decode" for package in bundle.config.chunks]
    assert engine.ledger.names() == decode
    run(made, kv, decode_only(0, 2), ids)
    assert engine.ledger.names() == decode
    run(made, kv, (Step("offset", 2, 4),), ids)
    assert engine.ledger.names() == decode + [f"{package}:prefill_4" for package in bundle.config.chunks]


class Recorder:
    """An engine whose functions declare what they are told, keep copies of their inputs, and return ones."""

    def __init__(
        self, functions: dict[tuple[str, str | None], tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]]
    ) -> None:
        self._functions = functions
        self.ledger = LoadLedger()
        self.seen: list[dict[str, NDArray[Any]]] = []

    def describe(self) -> dict[str, str]:
        return {"engine": "recorder"}

    def function(self, package: str, function: str | None) -> Any:
        inputs, outputs = self._functions[package, function]

        def call(
            given: Mapping[str, NDArray[Any]], *, kv_rows: tuple[int, int] | None = None
        ) -> dict[str, NDArray[Any]]:
            assert {n: a.shape for n, a in given.items()} == inputs
            self.seen.append({n: a.copy() for n, a in given.items()})
            return {n: np.full(shape, len(self.seen), np.float16) for n, shape in outputs.items()}

        specs = {n: TensorSpec(shape, "fp16") for n, shape in inputs.items()}
        return type("F", (), {"name": function, "inputs": specs, "__call__": staticmethod(call)})()


def shared_bundle() -> Bundle:
    """Gemma 4's shape in small: one chunk that owns KV (layers 0 sliding, 1 full), one of shared layers; per-layer embeddings."""
    config = SimpleNamespace(
        chunks=("own", "shared"), decode_function="decode", prefill_functions={4: "p4", 2: "p2"}, lmhead="head",
        store_layers=StoreLayers(0, 1), sliding_window=64, neg=-100.0, inv_slide=(1.0,), inv_full=(0.5, 0.25),
    )  # fmt: skip
    table = SimpleNamespace(take=lambda tokens: np.array([[t, t + 0.5] for t in tokens], np.float16))
    ple = SimpleNamespace(take=lambda tokens: np.array([[t * 10 + i for i in range(6)] for t in tokens], np.float16))
    return cast(Bundle, SimpleNamespace(config=config, embed=table, ple=ple))


def test_per_layer_embeddings_and_the_store_layers_reach_the_chunks_that_declare_them() -> None:
    rows = {"k_0_out": (2, 3), "v_0_out": (2, 3), "k_1_out": (2, 5), "v_1_out": (2, 5), "hidden": (2, 2)}
    common = {"hidden_in": (2, 2), "inputs_embeds": (2, 2), "tokid": (2, 3, 2)}
    plain = {"mask_s": (2, 2), "mask_f": (2, 2), "sks": (2, 3), "svs": (2, 3), "skf": (2, 5), "svf": (2, 5)}
    shared = {"sks": (1, 128, 3), "svs": (1, 128, 3), "skf": (1, 128, 5), "svf": (1, 128, 5), "onehot": (128,)}
    one = {"hidden_in": (2,), "inputs_embeds": (2,), "tokid": (3, 2), "cos_s": (2,), "sin_f": (4,)}
    row = {n: (1, 1, shape[1]) for n, shape in rows.items() if n != "hidden"} | {"hidden": (2,)}
    engine = Recorder(
        {
            ("own", "p2"): (common, rows),
            ("shared", "p2"): (common | plain, {"hidden": (2, 2)}),
            ("own", "decode"): (one, row),
            ("shared", "decode"): (one | shared, {"hidden": (2,)}),
        }
    )
    kv = HostKV(Layout((Group("full", None, (1,), 1, 5), Group("sliding", 64, (0,), 1, 3))), 128)
    made = Chain(shared_bundle(), engine, kv)
    run(made, kv, (Step("plain", 0, 2), Step("decode", 2, 1)), [7, 8, 9])
    own, later, own_decode, later_decode = engine.seen
    assert own["hidden_in"].tolist() == own["inputs_embeds"].tolist() == [[7, 7.5], [8, 8.5]]
    assert own["tokid"].tolist() == [[[70, 71], [72, 73], [74, 75]], [[80, 81], [82, 83], [84, 85]]]
    assert later["hidden_in"].tolist() == [[1, 1], [1, 1]] and later["inputs_embeds"].tolist() == [[7, 7.5], [8, 8.5]]
    # A plain step hands on the rows that the chunk before has just returned; decode the whole context, row p included.
    assert (later["sks"] == 1).all() and (later["svf"] == 1).all()
    assert later["mask_s"].tolist() == later["mask_f"].tolist() == [[0, -100], [0, 0]]
    assert own_decode["hidden_in"].tolist() == [9, 9.5] and own_decode["tokid"].tolist() == [
        [90, 91],
        [92, 93],
        [94, 95],
    ]
    assert later_decode["sks"][0, :4].tolist() == [[1] * 3, [1] * 3, [3] * 3, [0] * 3]
    assert later_decode["skf"][0, :4].tolist() == [[1] * 5, [1] * 5, [3] * 5, [0] * 5]
    assert later_decode["onehot"].nonzero()[0].tolist() == [2]


def test_a_soft_position_gets_its_row_and_row_0_of_the_per_layer_embeddings() -> None:
    common = {"hidden_in": (4, 2), "inputs_embeds": (4, 2), "tokid": (4, 3, 2)}
    one = {"hidden_in": (2,), "inputs_embeds": (2,), "tokid": (3, 2)}
    rows = {f"{p}_{i}_out": (4, w) for p in "kv" for i, w in ((0, 3), (1, 5))} | {"hidden": (4, 2)}
    row = {n: (1, 1, shape[1]) for n, shape in rows.items() if n != "hidden"} | {"hidden": (2,)}
    functions = {("own", "p4"): (common, rows), ("own", "decode"): (one, row)}
    functions |= {("shared", "p4"): (common, {"hidden": (4, 2)}), ("shared", "decode"): (one, {"hidden": (2,)})}
    engine = Recorder(functions)
    kv = HostKV(Layout((Group("full", None, (1,), 1, 5), Group("sliding", 64, (0,), 1, 3))), 128)
    made = Chain(shared_bundle(), engine, kv)
    fed = positions([7, SoftSpan(999, np.array([[-1, -2], [3, -0.0], [5, 6]], np.float16)), 9], 2)
    made.run(Step("offset", 0, 4), fed[:4])
    kv.advance(4)
    made.run(Step("decode", 4, 1), fed[4:])
    zero = [[0, 1], [2, 3], [4, 5]]
    for own in engine.seen[:2]:  # both chunks
        assert own["inputs_embeds"].tolist() == [[7, 7.5], [-1, -2], [3, 0], [5, 6]] and np.signbit(
            own["inputs_embeds"][2, 1]
        )
        assert own["tokid"].tolist() == [[[70, 71], [72, 73], [74, 75]], zero, zero, zero]
    assert engine.seen[2]["hidden_in"].tolist() == [9, 9.5] and engine.seen[2]["tokid"].tolist()[0] == [90, 91]
    assert engine.seen[0]["hidden_in"].tolist() == engine.seen[0]["inputs_embeds"].tolist()


def test_a_verify_step_of_three_tokens_pads_the_fourth_row() -> None:
    """Its token's, per-layer and one-hot rows are zero, its masks see nothing; and of what comes back three rows are written."""
    common = {"hidden_in": (4, 2), "inputs_embeds": (4, 2), "tokid": (4, 3, 2), "onehot": (4, 128)}
    common |= {"mask_s": (4, 128), "mask_f": (4, 128)}
    rows = {f"{p}_{i}_out": (4, w) for p in "kv" for i, w in ((0, 3), (1, 5))} | {"hidden": (4, 2)}
    stores = {"sks": (1, 128, 3), "skf": (1, 128, 5)}
    engine = Recorder({("own", "v4"): (common, rows), ("shared", "v4"): (common | stores, {"hidden": (4, 2)})})
    kv = HostKV(Layout((Group("full", None, (1,), 1, 5), Group("sliding", 64, (0,), 1, 3))), 128)
    bundle = shared_bundle()
    bundle.config.verify_functions = {4: "v4"}  # type: ignore[misc]
    kv.advance(70)
    made = Chain(bundle, engine, kv)
    assert made.run_rows(Step("verify", 70, 4), [7, 8, 9]).shape == (4, 2)
    own, later = engine.seen
    assert own["inputs_embeds"].tolist() == own["hidden_in"].tolist() == [[7, 7.5], [8, 8.5], [9, 9.5], [0, 0]]
    assert not own["tokid"][3].any() and own["tokid"][2].tolist() == [[90, 91], [92, 93], [94, 95]]
    assert list(zip(*(axis.tolist() for axis in own["onehot"].nonzero()), strict=True)) == [(0, 70), (1, 71), (2, 72)]
    assert (own["mask_s"][3] == -100).all() and (own["mask_f"][3] == -100).all()
    assert (own["mask_f"][2] == 0).nonzero()[0].tolist() == list(range(73))
    assert (own["mask_s"][2] == 0).nonzero()[0].tolist() == list(range(9, 73))
    # A chunk of shared layers already sees the three rows, and nothing behind them.
    assert later["skf"][0, :, 0].nonzero()[0].tolist() == later["sks"][0, :, 0].nonzero()[0].tolist() == [70, 71, 72]
    assert kv.position == 70
    # At the context's very end there is no slot for the padding row, and none is needed.
    kv.advance(125)
    made.run_rows(Step("verify", 125, 4), [7, 8, 9])
    assert engine.seen[2]["onehot"][3].tolist() == [0] * 128


def test_an_input_that_the_host_cannot_make_is_refused_by_name() -> None:
    engine = Recorder({("own", "decode"): ({"hidden_in": (2,), "audio": (3,)}, {}), ("shared", "decode"): ({}, {})})
    kv = HostKV(Layout((Group("full", None, (1,), 1, 5),)), 128)
    made = Chain(shared_bundle(), engine, kv)
    with pytest.raises(InputUnknown, match="'audio'"):
        made.run(Step("decode", 0, 1), [1])
    assert not engine.seen and kv.position == 0


def test_per_layer_embeddings_without_their_table_are_refused_by_name() -> None:
    bundle = shared_bundle()
    bundle.ple = None
    engine = Recorder({("own", "decode"): ({"tokid": (3, 2)}, {}), ("shared", "decode"): ({}, {})})
    made = Chain(bundle, engine, HostKV(Layout((Group("full", None, (1,), 1, 5),)), 128))
    with pytest.raises(InputUnknown, match="'tokid'"):
        made.run(Step("decode", 0, 1), [1])


def test_step_is_a_value() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Step("decode", 0, 1).start = 2  # type: ignore[misc]
