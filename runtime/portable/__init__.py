"""Runs the bundle's own packages, compiled or not, with numpy: the same functions as Core ML, on any machine.

Files in order: half, graph, entering, probe, placement, recognise, caches, attention, function, plan, engine. Each imports only those before it.
"""

from runtime.portable.engine import PortableEngine

__all__ = ["PortableEngine"]
