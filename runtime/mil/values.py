"""Values in the text: ``int32(5)``, ``tensor<fp16, [2]>([0x1p+0, 0x1.8p-3])``, and where in a weight file they are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.mlpackage.ir import BITS, Blob, Const, TensorSpec, Value
from runtime.mlpackage.limits import IMMEDIATE_LIMIT

from .text import Cursor
from .types import read_type

_ESCAPE = re.compile(r"\\(.)")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", '"': '"', "\\": "\\"}
_BOOLS = {"true": True, "false": False}
_INTEGER = re.compile(r"[-+]?[0-9]{1,20}")
_MARKS = frozenset(("", ",", *"()[]{}<>=;"))
_HEX = re.compile(r"[-+]?0[xX]")


def read_value(cursor: Cursor) -> Value:
    """Past a value with its type, and the value. Raises ``PackageError``; reads no weight."""
    spec = read_type(cursor)
    cursor.skip("(")
    value = _blob(cursor, spec) if cursor.next == "BLOBFILE" else _immediate(cursor, spec)
    cursor.skip(")")
    return value


def _blob(cursor: Cursor, spec: TensorSpec) -> Blob:
    cursor.skip("BLOBFILE", "(", "path", "=")
    file = _scalar(cursor, "string")
    cursor.skip(",", "offset", "=")
    offset = _scalar(cursor, "uint64")
    cursor.skip(")")
    return Blob(spec, str(file), int(offset))


def _scalar(cursor: Cursor, dtype: str) -> Any:
    """The Python value of a scalar of ``dtype``."""
    spec = read_type(cursor)
    if spec != TensorSpec((), dtype):
        raise cursor.wrong(dtype, spec)
    cursor.skip("(")
    array = _immediate(cursor, spec).array
    cursor.skip(")")
    return array[()]


def _immediate(cursor: Cursor, spec: TensorSpec) -> Const:
    if spec.size > IMMEDIATE_LIMIT:
        raise cursor.wrong(f"at most {IMMEDIATE_LIMIT} inline elements", spec.size)
    tokens: list[str] = []
    if cursor.next == "[":
        flat = _list(cursor, spec.shape, 0, tokens)
        fits = len(tokens) == spec.size and (flat or len(spec.shape) > 1)
    else:
        tokens.append(_element(cursor))
        fits = spec.size == 1
    if not fits:
        raise cursor.wrong(f"{spec.size} values for {spec}", f"{len(tokens)} of another shape")
    try:
        array: NDArray[np.generic] = _READ[_kind(spec.dtype)](tokens, spec).reshape(spec.shape)
    except (ValueError, OverflowError) as error:
        raise cursor.wrong(f"values of {spec}", error) from error
    array.flags.writeable = False
    return Const(spec, array)


def _list(cursor: Cursor, shape: Sequence[int], depth: int, tokens: list[str]) -> bool:
    """Past a list, nested as ``shape`` says or flat, its elements added to ``tokens``; whether it is flat.

    The depth of brackets is bounded (``sections``), and so is this function's.
    """
    cursor.skip("[")
    count, flat = 0, True
    while not cursor.taken("]"):
        if count:
            cursor.skip(",")
        if cursor.next == "[":
            flat = False
            _list(cursor, shape, depth + 1, tokens)
        else:
            tokens.append(_element(cursor))
        count += 1
    whole_row = depth < len(shape) and count == shape[depth] and (flat == (depth == len(shape) - 1))
    if not whole_row and not (flat and depth == 0):
        raise cursor.wrong(f"lists nested as {list(shape)}", f"{count} entries {depth + 1} deep")
    return flat


def _element(cursor: Cursor) -> str:
    if cursor.next in _MARKS:
        cursor.refuse("a value")
    return cursor.take()


def _kind(dtype: str) -> str:
    return dtype if dtype in ("bool", "string") else "float" if dtype.startswith("fp") else "integer"


def _strings(tokens: Sequence[str], spec: TensorSpec) -> NDArray[Any]:
    for token in tokens:
        if not token.startswith('"'):
            raise ValueError(f"{token[:60]!r}, not a string")
    made = np.empty(len(tokens), spec.numpy)
    made[:] = [_ESCAPE.sub(_unescaped, token[1:-1]) for token in tokens]
    return made


def _unescaped(found: re.Match[str]) -> str:
    if found[1] not in _ESCAPED:
        raise ValueError(f"the escape {found[0]!r}")
    return _ESCAPED[found[1]]


def _bools(tokens: Sequence[str], spec: TensorSpec) -> NDArray[Any]:
    for token in tokens:
        if token not in _BOOLS:
            raise ValueError(f"{token[:60]!r}, not true or false")
    return np.array([_BOOLS[token] for token in tokens], spec.numpy)


def _integers(tokens: Sequence[str], spec: TensorSpec) -> NDArray[Any]:
    bits = BITS[spec.dtype]
    low, high = (0, (1 << bits) - 1) if spec.dtype.startswith("u") else (-(1 << bits - 1), (1 << bits - 1) - 1)
    for token in tokens:
        if not _INTEGER.fullmatch(token) or not low <= int(token) <= high:
            raise ValueError(f"{token[:60]!r}, not an integer from {low} to {high}")
    return np.array([int(token) for token in tokens], spec.numpy)


def _float(token: str) -> float:
    try:
        return float.fromhex(token) if _HEX.match(token) else float(token)
    except (ValueError, OverflowError):
        raise ValueError(f"{token[:60]!r}, not a number") from None


def _floats(tokens: Sequence[str], spec: TensorSpec) -> NDArray[Any]:
    wide = np.array([_float(token) for token in tokens], np.float64)
    with np.errstate(over="ignore"):
        made = wide.astype(spec.numpy)
    beyond = np.isfinite(wide) & ~np.isfinite(made)
    if beyond.any():
        raise OverflowError(f"{tokens[int(beyond.argmax())][:60]!r}, beyond it")
    return made


_READ = {"string": _strings, "bool": _bools, "integer": _integers, "float": _floats}
