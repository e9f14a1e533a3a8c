"""Types in the text: ``fp16``, ``tensor<fp16, [1, 2]>``. A scalar and a tensor without dimensions are one type."""

from __future__ import annotations

from math import prod

from runtime.mlpackage.ir import BITS, TensorSpec
from runtime.mlpackage.limits import ELEMENT_LIMIT, RANK_LIMIT

from .text import Cursor

_OTHER = ("state", "list", "tuple", "dict")
_SIZE_DIGITS = 20


def at_type(cursor: Cursor) -> bool:
    """Whether a type stands ahead and not a name: only a type is followed by a bracket."""
    return cursor.after_next in ("<", "(")


def read_type(cursor: Cursor) -> TensorSpec:
    """Past a type, and the type. Raises ``PackageError`` for a state and whatever else is no tensor of a fixed shape."""
    if cursor.next in BITS:
        return TensorSpec((), cursor.take())
    if cursor.next in _OTHER and cursor.after_next == "<":
        raise cursor.wrong("a tensor", f"a {cursor.next}", "only functions over tensors, without state, can run")
    if cursor.next != "tensor":
        raise cursor.wrong(f"a type: tensor or one of {', '.join(BITS)}")
    cursor.take()
    cursor.skip("<")
    if cursor.next not in BITS:
        raise cursor.wrong(f"an element type: one of {', '.join(BITS)}")
    dtype = cursor.take()
    cursor.skip(",", "[")
    shape: list[int] = []
    while not cursor.taken("]"):
        if shape:
            cursor.skip(",")
        if cursor.next == "?":
            raise cursor.wrong("fixed sizes", "an unknown size", "only functions over tensors of fixed shapes can run")
        if not (cursor.next.isascii() and cursor.next.isdigit()) or len(cursor.next) > _SIZE_DIGITS:
            raise cursor.wrong("a size")
        shape.append(int(cursor.take()))
        if len(shape) > RANK_LIMIT:
            raise cursor.wrong(f"at most {RANK_LIMIT} dimensions", "more")
    cursor.skip(">")
    if prod(size or 1 for size in shape) > ELEMENT_LIMIT:
        raise cursor.wrong(f"at most {ELEMENT_LIMIT} elements", shape)
    return TensorSpec(tuple(shape), dtype)
