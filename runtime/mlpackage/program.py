"""From protobuf messages to the IR: every field is checked here, once, on the way in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from runtime.mlpackage.blob import unpack
from runtime.mlpackage.errors import PackageError
from runtime.mlpackage.ir import BITS, Arg, Blob, Const, Function, Name, Op, TensorSpec, Value
from runtime.mlpackage.limits import ELEMENT_LIMIT, IMMEDIATE_LIMIT, RANK_LIMIT

_DTYPES = {
    1: "bool", 2: "string", 10: "fp16", 11: "fp32", 12: "fp64", 21: "int8", 22: "int16", 23: "int32",
    24: "int64", 25: "int4", 31: "uint8", 32: "uint16", 33: "uint32", 34: "uint64", 35: "uint4", 36: "uint2",
    37: "uint1", 38: "uint6", 39: "uint3",
}  # fmt: skip
_TYPES = ("tensorType", "listType", "tupleType", "dictionaryType", "stateType")
_TENSORS = ("floats", "ints", "bools", "strings", "longInts", "doubles", "bytes")
_SIZES = ("constant", "unknown")


class ProgramReader:
    """Reads functions of one model message. ``file`` is how refusals call the model file."""

    def __init__(self, model: Any, file: str) -> None:
        self._file = file
        if not model.HasField("mlProgram"):
            raise self.wrong("mlProgram", "an ML Program", "another kind of model")
        self._functions = self._unique("mlProgram.functions", model.mlProgram.functions)
        described = [function.name for function in model.description.functions]
        # A single-function package describes its inputs and outputs at the root and names no function.
        order = described or list(self._functions)
        if not described and len(order) != 1:
            raise self.wrong("description.functions", f"{len(order)} names", "none")
        if sorted(order) != sorted(self._functions):
            raise self.wrong("description.functions", sorted(self._functions), sorted(order))
        self.names: tuple[str, ...] = tuple(order)
        default = model.description.defaultFunctionName or order[0]
        if default not in self._functions:
            raise self.wrong("description.defaultFunctionName", f"one of {order}", default)
        self.default: str = default

    def wrong(self, field: str, expected: object, found: object, hint: str = "") -> PackageError:
        """The refusal of ``field`` of this model file."""
        return PackageError.of(self._file, field, expected, found, hint)

    def function(self, name: str) -> Function:
        """Function ``name`` (one of ``names``). Raises ``PackageError``; reads no weight."""
        message = self._functions[name]
        where = f"function {name}"
        blocks = self._unique(f"{where}: block_specializations", message.blocks)
        block = blocks.get(message.opset)
        if block is None:
            raise self.wrong(f"{where}: block for opset", message.opset, sorted(blocks))
        inputs = self._named(f"{where}: inputs", message.inputs)
        known = dict(inputs)
        ops = []
        for index, operation in enumerate(block.operations):
            ops.append(self._op(f"{where}: op {index} ({operation.type})", operation, known))
        missing = [output for output in block.outputs if output not in known]
        if missing or not block.outputs:
            raise self.wrong(f"{where}: outputs", "values of the function", missing or "none")
        return Function(name, inputs, {output: known[output] for output in block.outputs}, tuple(ops))

    def _op(self, where: str, message: Any, known: dict[str, TensorSpec]) -> Op:
        if message.blocks:
            raise self.wrong(f"{where}: nested blocks", "none", len(message.blocks), "control flow can't run here")
        inputs = {
            key: tuple(self._arg(f"{where}: {key}", binding, known) for binding in argument.arguments)
            for key, argument in self._unique(f"{where}: inputs", message.inputs).items()
        }
        outputs = self._named(f"{where}: outputs", message.outputs)
        attributes = {
            key: self._value(f"{where}: {key}", value)
            for key, value in self._unique(f"{where}: attributes", message.attributes).items()
        }
        if not outputs or (message.type == "const" and "val" not in attributes):
            raise self.wrong(where, "an output, and val for a constant", sorted(outputs) + sorted(attributes))
        twice = [name for name in outputs if name in known]
        if twice:
            raise self.wrong(f"{where}: outputs", "new names", twice)
        known.update(outputs)
        return Op(message.type, inputs, tuple(outputs.items()), attributes)

    def _arg(self, where: str, binding: Any, known: Mapping[str, TensorSpec]) -> Arg:
        if binding.HasField("value") and not binding.name:
            return self._value(where, binding.value)
        if binding.HasField("value") or binding.name not in known:
            raise self.wrong(where, "a function input or an earlier output", repr(binding.name))
        return Name(binding.name)

    def _value(self, where: str, message: Any) -> Value:
        spec = self._spec(where, message.type)
        kind = self._one(where, message, ("immediateValue", "blobFileValue"))
        if kind == "blobFileValue":
            blob = message.blobFileValue
            return Blob(spec, blob.fileName, blob.offset)
        tensor = message.immediateValue.tensor
        if spec.size > IMMEDIATE_LIMIT:
            raise self.wrong(where, f"at most {IMMEDIATE_LIMIT} inline elements", spec.size)
        kind = self._one(where, tensor, _TENSORS)
        if kind == "bytes":
            raw, bits = tensor.bytes.values, BITS[spec.dtype]
            need = -(-spec.size * bits // 8)
            if spec.dtype == "string" or len(raw) != need:
                raise self.wrong(where, f"{need} bytes for {spec}", len(raw))
            if bits < 8:
                return Const(spec, unpack(np.frombuffer(raw, np.uint8), spec.dtype, spec.shape))
            return Const(spec, np.frombuffer(raw, spec.numpy).reshape(spec.shape))
        values = list(getattr(tensor, kind).values) if kind else []
        if len(values) != spec.size or (kind == "strings") != (spec.dtype == "string" and bool(values)):
            raise self.wrong(where, f"{spec.size} values for {spec}", f"{len(values)} {kind or 'values'}")
        try:
            array = np.array(values, spec.numpy).reshape(spec.shape)
        except (OverflowError, ValueError) as error:
            raise self.wrong(where, f"values of {spec}", error) from error
        array.flags.writeable = False
        return Const(spec, array)

    def _spec(self, where: str, message: Any) -> TensorSpec:
        kind = self._one(where, message, _TYPES)
        if kind != "tensorType":
            raise self.wrong(
                where, "tensorType", kind or "nothing", "only functions over tensors, without state, can run"
            )
        tensor = message.tensorType
        if tensor.dataType not in _DTYPES:
            raise self.wrong(f"{where}: dataType", f"one of {sorted(_DTYPES)}", tensor.dataType)
        if tensor.rank != len(tensor.dimensions) or tensor.rank > RANK_LIMIT:
            raise self.wrong(f"{where}: rank", f"{len(tensor.dimensions)} (at most {RANK_LIMIT})", tensor.rank)
        kinds = {self._one(f"{where}: dimensions", dimension, _SIZES) for dimension in tensor.dimensions}
        if kinds - {"constant"}:
            raise self.wrong(f"{where}: dimensions", "fixed sizes", "an unknown size")
        shape = tuple(dimension.constant.size for dimension in tensor.dimensions)
        if prod(size or 1 for size in shape) > ELEMENT_LIMIT:
            raise self.wrong(f"{where}: elements", f"at most {ELEMENT_LIMIT}", shape)
        return TensorSpec(shape, _DTYPES[tensor.dataType])

    def _one(self, where: str, message: Any, fields: Sequence[str]) -> str | None:
        """Which of ``fields`` is set; they exclude each other."""
        found = [field for field in fields if message.HasField(field)]
        if len(found) > 1:
            raise self.wrong(where, f"one of {', '.join(fields)}", " and ".join(found))
        return found[0] if found else None

    def _named(self, where: str, messages: Iterable[Any]) -> dict[str, TensorSpec]:
        specs: dict[str, TensorSpec] = {}
        for message in messages:
            if not message.name or message.name in specs:
                raise self.wrong(where, "distinct names", repr(message.name))
            specs[message.name] = self._spec(f"{where}: {message.name}", message.type)
        return specs

    def _unique(self, where: str, entries: Iterable[Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for entry in entries:
            if entry.key in found:
                raise self.wrong(where, "distinct keys", f"{entry.key!r} twice")
            found[entry.key] = entry.value
        return found
