"""Operations that move values, against numpy's indexing and against coremltools' own evaluation of constants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from graphs import Writer, evaluate, planned
from numpy.typing import NDArray

from kvstore.errors import KVError
from runtime.mlpackage import Name, Op, TensorSpec
from runtime.ops import OperationUnsupported
from runtime.ops.shapes import IndexOutOfRange

X = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)

CASES: dict[str, tuple[str, dict[str, Any], Callable[[NDArray[Any]], NDArray[Any]]]] = {
    "identity": ("identity", {}, lambda x: x),
    "reshape": ("reshape", {"shape": [4, 6]}, lambda x: x.reshape(4, 6)),
    "reshape with -1": ("reshape", {"shape": [4, -1]}, lambda x: x.reshape(4, 6)),
    "expand_dims": ("expand_dims", {"axes": [0, 2]}, lambda x: x[None, :, None]),
    "transpose": ("transpose", {"perm": [2, 0, 1]}, lambda x: x.transpose(2, 0, 1)),
    "transpose from the end": ("transpose", {"perm": [0, -1, -2]}, lambda x: x.swapaxes(1, 2)),
    "slice_by_size": ("slice_by_size", {"begin": [0, 1, 1], "size": [2, 2, 3]}, lambda x: x[:, 1:3, 1:4]),
    "slice_by_size to the end": ("slice_by_size", {"begin": [1, 0, 2], "size": [-1, 3, -1]}, lambda x: x[1:, :, 2:]),
    "slice_by_index": ("slice_by_index", {"begin": [0, 1, 0], "end": [2, 3, 2]}, lambda x: x[:, 1:3, :2]),
    "begin_mask and end_mask": (
        "slice_by_index",
        {"begin": [1, 1, 1], "end": [1, 2, 1], "begin_mask": [True, False, True], "end_mask": [True, False, True]},
        lambda x: x[:, 1:2, :],
    ),
    "negative ends": ("slice_by_index", {"begin": [0, -2, 0], "end": [2, -1, -1]}, lambda x: x[:, -2:-1, :-1]),
    "stride": (
        "slice_by_index",
        {"begin": [0, 0, 0], "end": [2, 3, 4], "stride": [1, 2, 3]},
        lambda x: x[:, ::2, ::3],
    ),
    "stride backwards": (
        "slice_by_index",
        {
            "begin": [0, 2, 3], "end": [0, 0, 0], "stride": [1, -1, -2],
            "begin_mask": [True, False, False], "end_mask": [True, True, True],
        },
        lambda x: x[:, 2::-1, 3::-2],
    ),
    "squeeze_mask": (
        "slice_by_index",
        {"begin": [1, 0, -1], "end": [2, 3, 4], "squeeze_mask": [True, False, True]},
        lambda x: x[1, :, -1],
    ),
    "tile": ("tile", {"reps": [1, 2, 3]}, lambda x: np.tile(x, (1, 2, 3))),
    "gather": ("gather", {"indices": [2, 0, -1], "axis": 1}, lambda x: x[:, [2, 0, -1]]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_values_end_up_where_numpy_puts_them(name: str) -> None:
    kind, static, move = CASES[name]
    want = move(X)
    assert np.array_equal(evaluate(kind, {"x": X}, want.shape, **static), want)


@pytest.mark.parametrize("name", [n for n in CASES if n not in ("identity",)])
def test_coremltools_means_the_same(name: str) -> None:
    """The definitions above are ours; coremltools evaluates operations on constants by its own."""
    pytest.importorskip("coremltools")
    from coremltools.converters.mil import Builder as mb

    kind, static, move = CASES[name]
    found: list[NDArray[Any]] = []

    def body(unused: Any) -> Any:
        given = {
            k: np.array(v, np.int32) if isinstance(v, list) and not isinstance(v[0], bool) else v
            for k, v in static.items()
        }
        found.append(getattr(mb, kind)(x=mb.const(val=X), **given).val)
        return unused

    mb.program(input_specs=[mb.TensorSpec(shape=(1,))])(body)
    assert np.array_equal(found[0], move(X))


def test_concat_and_stack_join_in_order() -> None:
    writer = Writer(a=TensorSpec((2, 1), "fp32"), b=TensorSpec((2, 2), "fp32"))
    joined = writer("concat", (2, 3), "fp32", values=["a", "b"], axis=-1, interleave=False)
    stacked = writer("stack", (2, 2, 2), "fp32", values=["b", "b"], axis=1)
    a, b = np.array([[1], [2]], np.float32), np.array([[3, 4], [5, 6]], np.float32)
    found = planned(writer.function(joined, stacked))({"a": a, "b": b})
    assert found[joined].tolist() == [[1, 3, 4], [2, 5, 6]]
    assert np.array_equal(found[stacked], np.stack([b, b], 1))


def test_split_has_several_outputs_and_each_may_go_unread() -> None:
    writer = Writer(x=TensorSpec((2, 6), "fp32"))
    parts = tuple((f"part{i}", TensorSpec((2, n), "fp32")) for i, n in enumerate((1, 2, 3)))
    sizes = writer("identity", (2, 6), "fp32", x="x")
    from graphs import const

    inputs = {"x": (Name(sizes),), "split_sizes": (const([1, 2, 3]),), "axis": (const(1),)}
    writer.ops.append(Op("split", inputs, parts, {}))
    function = writer.function(sizes)
    outputs = {"part2": parts[2][1], "part0": parts[0][1]}
    x = np.arange(12, dtype=np.float32).reshape(2, 6)
    found = planned(type(function)("main", function.inputs, outputs, function.ops))({"x": x})
    assert list(found) == ["part2", "part0"]
    assert np.array_equal(found["part2"], x[:, 3:]) and np.array_equal(found["part0"], x[:, :1])


def test_slice_by_size_at_a_computed_place_is_checked_when_it_runs() -> None:
    begin = np.array([0, 1, 0], np.int32)
    found = evaluate("slice_by_size", {"x": X, "begin": begin}, (2, 2, 4), size=[2, 2, 4])
    assert np.array_equal(found, X[:, 1:3])
    with pytest.raises(IndexOutOfRange, match="slice_by_size"):
        evaluate("slice_by_size", {"x": X, "begin": np.array([0, 2, 0], np.int32)}, (2, 2, 4), size=[2, 2, 4])


def test_gather_outside_is_refused_by_name() -> None:
    with pytest.raises(IndexOutOfRange, match=r"expected \[-3, 3\), found 0..3"):
        evaluate("gather", {"x": X, "indices": np.array([0, 3], np.int32)}, (2, 2, 4), axis=1)


def test_interleaved_concat_is_refused() -> None:
    with pytest.raises(OperationUnsupported, match="interleave"):
        writer = Writer(a=(2, 2))
        writer("concat", (2, 4), values=["a", "a"], axis=-1, interleave=True)
        planned(writer.function("concat_0"))


def test_unknown_operations_are_listed_before_anything_runs() -> None:
    writer = Writer(a=(2,))
    writer("erf", (2,), x="a")
    writer("cumsum", (2,), x="a")
    with pytest.raises(OperationUnsupported, match=r"main: operations: .*cumsum, erf") as caught:
        planned(writer.function("erf_0"))
    assert caught.value.details["ops"] == ["cumsum", "erf"]
    assert isinstance(caught.value, KVError)
