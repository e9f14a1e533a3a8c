"""Reads Core ML's ``.mlpackage`` folders with protobuf and a memory map; coremltools is not needed.

Files in order: errors, ir, limits, schema, blob, weights, program, package. Each imports only those before it.
"""

from runtime.mlpackage.errors import PackageError, PackageMissing
from runtime.mlpackage.ir import Arg, Blob, Const, Function, Name, Op, Program, TensorSpec, Value
from runtime.mlpackage.package import Package

__all__ = [
    "Arg",
    "Blob",
    "Const",
    "Function",
    "Name",
    "Op",
    "Package",
    "PackageError",
    "PackageMissing",
    "Program",
    "TensorSpec",
    "Value",
]
