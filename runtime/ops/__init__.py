"""The ML Program operations in numpy, as tables: one factory an operation, looked up by its name.

Files in order: widen, weights, call, constexpr, elementwise, shapes, reduce, linear. Each imports only those before it.
"""

from __future__ import annotations

from collections.abc import Mapping

from runtime.ops import elementwise, linear, reduce, shapes
from runtime.ops.call import Array, Call, Factory, OperationUnsupported, Run, Step, held
from runtime.ops.constexpr import CONSTANTS
from runtime.ops.weights import Source, Stored, WeightCache

OPERATIONS: Mapping[str, Factory] = {**elementwise.OPS, **shapes.OPS, **reduce.OPS, **linear.OPS}

__all__ = [
    "CONSTANTS",
    "OPERATIONS",
    "Array",
    "Call",
    "Factory",
    "OperationUnsupported",
    "Run",
    "Source",
    "Step",
    "Stored",
    "WeightCache",
    "held",
]
