"""An ML Program function as an ONNX model in float32, so that onnxruntime can run the very operations that the portable engine runs.

Only what our bundles use is here; another operation, or another form of one, is refused by name. Every fp16 value becomes float32, inputs
and outputs included. Two kinds of value are rounded to fp16 on the way, because they enter the cache: ``k_{i}_row`` and ``v_{i}_row``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from runtime.mlpackage import Arg, Function, Name, Op, Package, TensorSpec

OPSET = 20
IR_VERSION = 10
ENTERING = re.compile(r"[kv]_\d+_row")
_TYPES = {"fp16": TensorProto.FLOAT, "fp32": TensorProto.FLOAT, "int32": TensorProto.INT32}
_ELEMENTWISE = {
    "abs": "Abs", "add": "Add", "identity": "Identity", "maximum": "Max", "mul": "Mul", "real_div": "Div", "sub": "Sub",
}  # fmt: skip
_REDUCTIONS = {"reduce_max": "ReduceMax", "reduce_mean": "ReduceMean", "reduce_sum": "ReduceSum"}


class NotConverted(Exception):
    """An operation, or a form of one, that has no counterpart here."""


def convert(
    package: Package, function: Function, *, also: Sequence[str] = (), round_entering: bool = True
) -> onnx.ModelProto:
    """``function`` of ``package`` as a checked ONNX model with the same names. ``also``: further values to return.

    ``round_entering`` False leaves K and V unrounded: a control.
    """
    return _Converter(package, function, round_entering).model([*function.outputs, *also])


class _Converter:
    def __init__(self, package: Package, function: Function, round_entering: bool) -> None:
        self._package = package
        self._function = function
        self._round_entering = round_entering
        self._specs: dict[str, TensorSpec] = dict(function.inputs)
        self._constants: dict[str, NDArray[Any]] = {}
        self._initializers: dict[str, onnx.TensorProto] = {}
        self._nodes: list[onnx.NodeProto] = []

    def model(self, outputs: Sequence[str]) -> onnx.ModelProto:
        for op in self._function.ops:
            self._specs.update(op.outputs)
            self._op(op)
        graph = helper.make_graph(
            self._nodes,
            self._function.name,
            [self._described(name) for name in self._function.inputs],
            [self._described(name) for name in outputs],
            list(self._initializers.values()),
        )
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
        onnx.checker.check_model(made)
        return made

    def _described(self, name: str) -> onnx.ValueInfoProto:
        spec = self._specs[name]
        return helper.make_tensor_value_info(name, _TYPES[spec.dtype], spec.shape)

    # Operands

    def _constant(self, op: Op, key: str) -> NDArray[Any]:
        """The constant bound to ``key``."""
        (arg,) = op.inputs[key]
        if not isinstance(arg, Name):
            return self._package.array(arg)
        if arg.name not in self._constants:
            raise self._refusal(op, f"{key}: computed, expected a constant")
        return self._constants[arg.name]

    def _integer(self, op: Op, key: str) -> int:
        return int(self._constant(op, key).reshape(()))

    def _flag(self, op: Op, key: str) -> bool:
        return key in op.inputs and bool(self._constant(op, key).reshape(()))

    def _tensor(self, op: Op, key: str) -> str:
        """The ONNX name of the tensor bound to ``key``."""
        (arg,) = op.inputs[key]
        return self._named(arg, f"{op.name}_{key}")

    def _named(self, arg: Arg, fallback: str) -> str:
        if isinstance(arg, Name) and arg.name not in self._constants:
            return arg.name
        name, array = (
            (arg.name, self._constants[arg.name]) if isinstance(arg, Name) else (fallback, self._package.array(arg))
        )
        if name not in self._initializers:
            wide = array.astype(np.float32) if array.dtype == np.float16 else array
            self._initializers[name] = numpy_helper.from_array(np.ascontiguousarray(wide).reshape(array.shape), name)
        return name

    def _numbers(self, name: str, values: Sequence[int]) -> str:
        self._initializers[name] = numpy_helper.from_array(np.array(values, np.int64), name)
        return name

    def _refusal(self, op: Op, why: str) -> NotConverted:
        return NotConverted(f"{self._function.name}: {op.type} {op.name!r}: {why}")

    # Operations

    def _op(self, op: Op) -> None:
        if op.type == "const":
            self._constants[op.name] = self._package.array(op.attributes["val"])
            return
        convert: Callable[[Op, str], None] | None = getattr(self, f"_{op.type}", None)
        if op.type in _ELEMENTWISE:
            convert = self._elementwise
        elif op.type in _REDUCTIONS:
            convert = self._reduction
        if convert is None:
            raise self._refusal(op, "not known here")
        if ENTERING.fullmatch(op.name) and self._round_entering:
            convert(op, f"{op.name}_unrounded")
            self._node("Cast", [f"{op.name}_unrounded"], f"{op.name}_half", to=TensorProto.FLOAT16)
            self._node("Cast", [f"{op.name}_half"], op.name, to=TensorProto.FLOAT)
        else:
            convert(op, op.name)

    def _node(self, kind: str, inputs: Sequence[str], out: str, **attributes: Any) -> str:
        self._nodes.append(helper.make_node(kind, list(inputs), [out], name=out, **attributes))
        return out

    def _elementwise(self, op: Op, out: str) -> None:
        self._node(_ELEMENTWISE[op.type], [self._tensor(op, key) for key in ("x", "y") if key in op.inputs], out)

    def _reduction(self, op: Op, out: str) -> None:
        axes = self._numbers(f"{out}_axes", self._constant(op, "axes").tolist())
        self._node(_REDUCTIONS[op.type], [self._tensor(op, "x"), axes], out, keepdims=int(self._flag(op, "keep_dims")))

    def _reduce_argmax(self, op: Op, out: str) -> None:
        best = self._node(
            "ArgMax",
            [self._tensor(op, "x")],
            f"{out}_wide",
            axis=self._integer(op, "axis"),
            keepdims=int(self._flag(op, "keep_dims")),
        )
        self._node("Cast", [best], out, to=TensorProto.INT32)

    def _rsqrt(self, op: Op, out: str) -> None:
        x = self._node("Add", [self._tensor(op, "x"), self._tensor(op, "epsilon")], f"{out}_shifted")
        self._node("Reciprocal", [self._node("Sqrt", [x], f"{out}_root")], out)

    def _gelu(self, op: Op, out: str) -> None:
        mode = str(self._constant(op, "mode").reshape(())[()])
        if mode != "TANH_APPROXIMATION":
            raise self._refusal(op, f"mode {mode}")
        self._node("Gelu", [self._tensor(op, "x")], out, approximate="tanh")

    def _softmax(self, op: Op, out: str) -> None:
        self._node("Softmax", [self._tensor(op, "x")], out, axis=self._integer(op, "axis"))

    def _linear(self, op: Op, out: str) -> None:
        """x [n, in] · weightᵀ [in, out] + bias [out]."""
        x = self._tensor(op, "x")
        if len(self._specs[x].shape) != 2:
            raise self._refusal(op, f"x {self._specs[x]}: expected rank 2")
        self._node("Gemm", [x, self._tensor(op, "weight"), self._tensor(op, "bias")], out, transB=1)

    def _matmul(self, op: Op, out: str) -> None:
        sides = []
        for key in ("x", "y"):
            side = self._tensor(op, key)
            if self._flag(op, f"transpose_{key}"):
                order = list(range(len(self._specs[side].shape)))
                order[-2:] = order[:-3:-1]
                side = self._node("Transpose", [side], f"{out}_{key}_turned", perm=order)
            sides.append(side)
        self._node("MatMul", sides, out)

    def _reshape(self, op: Op, out: str) -> None:
        self._node("Reshape", [self._tensor(op, "x"), self._numbers(f"{out}_shape", op.outputs[0][1].shape)], out)

    def _transpose(self, op: Op, out: str) -> None:
        self._node("Transpose", [self._tensor(op, "x")], out, perm=self._constant(op, "perm").tolist())

    def _slice_by_size(self, op: Op, out: str) -> None:
        begin = self._constant(op, "begin").tolist()
        end = [b + n for b, n in zip(begin, op.outputs[0][1].shape, strict=True)]
        self._node(
            "Slice",
            [self._tensor(op, "x"), self._numbers(f"{out}_begin", begin), self._numbers(f"{out}_end", end)],
            out,
        )

    def _concat(self, op: Op, out: str) -> None:
        if self._flag(op, "interleave"):
            raise self._refusal(op, "interleaved")
        values = [self._named(arg, f"{op.name}_{index}") for index, arg in enumerate(op.inputs["values"])]
        self._node("Concat", values, out, axis=self._integer(op, "axis"))

    def _constexpr_blockwise_shift_scale(self, op: Op, out: str) -> None:
        """int8 rows with one factor each."""
        data, scale = self._constant(op, "data"), self._constant(op, "scale")
        if data.dtype != np.int8 or data.ndim != 2 or scale.shape != (len(data), 1) or "offset" in op.inputs:
            raise self._refusal(op, f"data {data.dtype}{list(data.shape)}, scale {list(scale.shape)}")
        rows, factors = f"{out}_rows", f"{out}_factors"
        self._initializers[rows] = numpy_helper.from_array(data, rows)
        self._initializers[factors] = numpy_helper.from_array(scale.reshape(-1).astype(np.float32), factors)
        self._node("DequantizeLinear", [rows, factors], out, axis=0)
