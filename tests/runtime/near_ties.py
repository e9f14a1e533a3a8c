"""Positions where two tokens are so close that an engine that rounds otherwise may choose the other."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from runtime.engine import Function

NOISE = 2e-2
"""As a share of the largest hidden number."""


def is_near_tie(head: Function, hidden: NDArray[np.float16]) -> bool:
    """Whether a little noise on ``hidden`` [H] changes the token that ``head`` says."""
    rng = np.random.default_rng(0)
    wide = hidden.astype(np.float32)
    noisy = (wide + NOISE * np.abs(wide).max() * rng.uniform(-1, 1, (16, len(wide)))).astype(np.float16)
    return len({int(head({"hidden": row})["token"][0]) for row in noisy}) > 1
