"""Runs the bundle's packages with Core ML, on a Mac. The framework itself is imported when an ``Edge`` is opened.

Files in order: units, edge, compiled, function, through_pyobjc, through_coremltools, routes, engine. Each imports only those before it.
"""

from runtime.coreml.compiled import CompiledPackages
from runtime.coreml.edge import CoreMLFailed, Edge, Model
from runtime.coreml.engine import CoreMLEngine, system
from runtime.coreml.routes import missing, open_edge
from runtime.coreml.units import HEAD_WORDS, UNITS, Units, UnitsPolicy

__all__ = [
    "HEAD_WORDS",
    "UNITS",
    "CompiledPackages",
    "CoreMLEngine",
    "CoreMLFailed",
    "Edge",
    "Model",
    "Units",
    "UnitsPolicy",
    "missing",
    "open_edge",
    "system",
]
