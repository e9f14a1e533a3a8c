"""The bench: what speculation gains on a bundle, measured here, in processes of their own.

Order: workloads · one · comparing · telling
"""

from .comparing import Comparison, SpeculationDiffers, compare_speculation
from .workloads import WORKLOADS

__all__ = ["WORKLOADS", "Comparison", "SpeculationDiffers", "compare_speculation"]
