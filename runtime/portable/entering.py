"""Which values are K and V rows as they enter the cache.

The host stores rows as fp16, and a later call reads them so. A function that lets attention read its own new rows
in float32 would therefore not agree with the next call. So the rows are rounded where they are made, before anyone
reads them. Where that is follows from the graph alone: from each K or V output back through what only places rows.
"""

from __future__ import annotations

from runtime.engine import is_cache_input, is_cache_output
from runtime.mlpackage import Name, Op
from runtime.portable.graph import MOVES, ONEHOT, Graph, single


def entering_values(graph: Graph) -> frozenset[str]:
    """Names of the values to round. Empty for a function without K or V outputs."""
    found: set[str] = set()
    for output in graph.function.outputs:
        if is_cache_output(output):
            rows = _rows(graph, output)
            # k_in + onehot · (row − k_in): the row itself never stands alone, so what is written gets rounded
            mixed = any(_reads_cache(graph, row) for row in rows)
            found |= {output} if mixed else rows
    return frozenset(found)


def _rows(graph: Graph, value: str) -> set[str]:
    """The values that make the rows in ``value``: where placing ends and computing begins."""
    op = graph.producer.get(value)
    if op is None:
        return set()
    if not graph.depends(value):
        return set()
    inner = _placed(graph, op)
    if inner is None:
        return {value}
    return set().union(*(_rows(graph, name) for name in inner))


def _placed(graph: Graph, op: Op) -> list[str] | None:
    """The values whose rows ``op`` only places; ``None`` when it computes."""
    if op.type in MOVES:
        source = single(op.inputs, "x")
        return None if source is None else [source]
    if op.type == "concat":
        return [arg.name for arg in op.inputs["values"] if isinstance(arg, Name)]
    if op.type in ("mul", "matmul"):
        for one, other in (("x", "y"), ("y", "x")):
            value = single(op.inputs, other)
            if graph.only(op.inputs[one][0], ONEHOT) and value is not None and not graph.depends(value) <= ONEHOT:
                return [value]
        return None
    if op.type == "select" and graph.only(op.inputs["cond"][0], ONEHOT):
        return [name for side in ("a", "b") if (name := single(op.inputs, side)) is not None]
    if op.type == "add":
        sides = [single(op.inputs, side) for side in ("x", "y")]
        if all(side is not None and _selected(graph, side) for side in sides):
            return [side for side in sides if side is not None]
    return None


def _selected(graph: Graph, value: str) -> bool:
    """Whether ``value`` is the cache, or something that the one-hot rows have chosen slots of."""
    origin = graph.origin(value)
    op = graph.producer.get(origin)
    if op is None:
        return is_cache_input(origin)
    return op.type in ("mul", "matmul", "select", "add", "concat") and _placed(graph, op) is not None


def _reads_cache(graph: Graph, value: str) -> bool:
    op = graph.producer[value]
    sides = (single(op.inputs, side) for side in ("x", "y"))
    return any(side is not None and is_cache_input(graph.origin(side)) for side in sides)
