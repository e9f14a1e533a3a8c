"""HostKV: rows outside what is held are zero, whatever happened before; held rows keep every bit."""

from __future__ import annotations

import mmap
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import InputInvalid, NotCovered
from kvstore.layout import Group, Layout
from runtime.hostkv import HostKV

CTX = 300
LAYOUT = Layout((Group("full", None, (1,), 1, 8), Group("sliding", 64, (0, 2), 2, 4)))
OTHER = Layout((Group("full", None, (3,), 1, 5),))


def rows(seed: int, n: int, width: int = 8) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, width)).astype(np.float16)


def fill(kv: HostKV, stop: int, seed: int = 0) -> None:
    start = kv.position
    for layer in kv.layers:
        kv.write_rows(layer, start, rows(seed + 2 * layer, stop - start), rows(seed + 2 * layer + 1, stop - start))
    kv.advance(stop)


def content(kv: HostKV, start: int, stop: int) -> bytes:
    return b"".join(bytes(span) for group in range(len(kv.layout.groups)) for span in kv.spans(group, start, stop))


def memory(kv: HostKV) -> bytes:
    return b"".join(array.tobytes() for layer in kv.layers for array in kv.inputs(layer))


def test_arrays_are_zero_page_aligned_and_of_their_shape() -> None:
    for layout, width in ((LAYOUT, 8), (OTHER, 5)):
        kv = HostKV(layout, CTX)
        for layer in kv.layers:
            for array in kv.inputs(layer):
                assert array.shape == (1, CTX, width) and array.dtype == np.float16
                assert array.flags.c_contiguous and not array.any()
                assert array.__array_interface__["data"][0] % mmap.PAGESIZE == 0


def test_inputs_are_the_live_memory_and_cannot_be_written() -> None:
    kv = HostKV(LAYOUT, CTX)
    k, v = kv.inputs(2)
    with pytest.raises(ValueError, match="read-only"):
        k[0, 0, 0] = 1
    address = k.__array_interface__["data"][0]
    fill(kv, 3)
    assert np.array_equal(k[0, :3], rows(4, 3)) and np.array_equal(v[0, :3], rows(5, 3))
    assert kv.inputs(2)[0].__array_interface__["data"][0] == address


def test_spans_are_k_then_v_per_layer_in_group_order_and_live() -> None:
    kv = HostKV(LAYOUT, CTX)
    fill(kv, 10)
    spans = kv.spans(1, 2, 5)
    expected = [rows(0, 10), rows(1, 10), rows(4, 10), rows(5, 10)]
    assert [bytes(s) for s in spans] == [a[2:5].tobytes() for a in expected]
    assert all(s.format == "B" and s.ndim == 1 and s.contiguous for s in spans)
    spans[3][:] = bytes(len(spans[3]))
    assert not kv.inputs(2)[1][0, 2:5].any() and kv.inputs(2)[1][0, 5:10].all()
    for start, stop in ((-1, 2), (5, 4), (0, CTX + 1)):
        with pytest.raises(InputInvalid):
            kv.spans(0, start, stop)


def test_negative_zero_infinity_and_nan_keep_their_bits() -> None:
    kv = HostKV(LAYOUT, CTX)
    odd = np.array([[0x8000, 0x7C00, 0x7E01, 0xFC00, 0x0001, 0xFE55, 0x0000, 0x8001]], np.uint16).view(np.float16)
    for layer in kv.layers:
        kv.write_rows(layer, 0, odd, odd)
    kv.advance(1)
    assert content(kv, 0, 1) == odd.tobytes() * 6


def test_rollback_drops_rows_and_what_replaces_them_looks_as_if_never_otherwise() -> None:
    kv, fresh = HostKV(LAYOUT, CTX), HostKV(LAYOUT, CTX)
    fill(kv, 200, seed=50)
    nan = np.full((5, 8), np.nan, np.float16)
    kv.write_rows(0, 200, nan, nan)  # a step that did not finish
    kv.rollback(100)
    assert kv.position == 100 and content(kv, 100, CTX).count(0) == len(content(kv, 100, CTX))
    fill(kv, 120, seed=7)
    kv.rollback(0)
    fill(kv, 90)
    fill(fresh, 90)
    assert memory(kv) == memory(fresh)
    kv.reset()
    assert memory(kv) == memory(HostKV(LAYOUT, CTX))


@pytest.mark.parametrize("position", [-1, 201])
def test_rollback_refuses_what_is_not_held(position: int) -> None:
    kv = HostKV(LAYOUT, CTX)
    fill(kv, 200)
    with pytest.raises(InputInvalid, match="expected 0 to 200"):
        kv.rollback(position)
    assert kv.position == 200


def test_trimmed_rows_allow_a_rollback_exactly_as_far_as_they_reach() -> None:
    kv = HostKV(LAYOUT, CTX)
    for group, start in ((0, 0), (1, 128)):
        for span in kv.spans(group, start, 250):
            span[:] = b"\x01" * len(span)
    kv.hold(250, (0, 128))
    assert kv.covered == (0, 128)
    before = memory(kv)
    # At 190 the first row that the window of 64 still shows is 127, which is not here; at 191 it is 128.
    with pytest.raises(NotCovered, match=r"sliding.*rows from 127") as caught:
        kv.rollback(190)
    assert caught.value.details == {"group": "sliding", "expected": 127, "found": 128}
    assert memory(kv) == before and kv.position == 250
    kv.rollback(191)
    assert kv.position == 191 and kv.covered == (0, 128)
    kv.rollback(0)  # nothing is read at 0
    assert kv.covered == (0, 0) and memory(kv) == memory(HostKV(LAYOUT, CTX))


def test_spans_written_from_several_threads_are_all_cleared_by_reset() -> None:
    kv = HostKV(LAYOUT, CTX)

    def write(start: int) -> None:
        for group in (0, 1):
            for span in kv.spans(group, start, min(start + 7, CTX)):
                span[:] = b"\x02" * len(span)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(0, CTX, 7)))
    assert 0 not in memory(kv)
    kv.reset()
    assert not any(memory(kv))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["fill", "back", "reset", "fail"]), st.integers(0, CTX), st.integers(0, 9)),
        max_size=12,
    )
)
def test_memory_is_a_function_of_the_held_rows(script: list[tuple[str, int, int]]) -> None:
    kv = HostKV(LAYOUT, CTX)
    model = np.zeros((6, CTX, 8), np.float16)
    held = 0
    for what, at, seed in script:
        if what == "fill" and at > held:
            fill(kv, at, seed)
            for i, layer in enumerate(kv.layers):
                model[2 * i, held:at] = rows(seed + 2 * layer, at - held)
                model[2 * i + 1, held:at] = rows(seed + 2 * layer + 1, at - held)
            held = at
        elif what == "back" and at <= held:
            kv.rollback(at)
            held = at
        elif what == "reset":
            kv.reset()
            held = 0
        elif what == "fail" and held < CTX:
            kv.write_rows(1, held, rows(seed, 1), rows(seed, 1))
            kv.rollback(held)
        model[:, held:] = 0
        assert kv.position == held and memory(kv) == model.tobytes()
