"""How far two computations of the same numbers are apart, and how far they may be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from bundle_weights import RESIDUAL_SCALE
from numpy.typing import NDArray
from recorded import Run


@dataclass(frozen=True)
class Distance:
    """Of arrays [rows, n] from a reference. ``rms``: root mean square of the differences over that of the reference. ``row``: the same of the
    worst single row. ``peak``: the largest difference over the reference's largest magnitude; ``absolute``: that difference itself."""

    rms: float
    row: float
    peak: float
    absolute: float

    def within(self, bound: Distance) -> bool:
        return self.rms <= bound.rms and self.row <= bound.row and self.peak <= bound.peak

    def __str__(self) -> str:
        return f"rms {self.rms:.1e} row {self.row:.1e} peak {self.peak:.1e} abs {self.absolute:.2g}"


def bound(*, rms: float, row: float, peak: float) -> Distance:
    """What a ``Distance`` may be at most; its ``absolute`` follows from the scale of what is compared."""
    return Distance(rms, row, peak, np.inf)


def distance(ours: NDArray[Any], reference: NDArray[Any]) -> Distance:
    assert ours.shape == reference.shape and ours.ndim == 2
    wide = reference.astype(np.float64)
    apart = ours.astype(np.float64) - wide
    rows = np.sqrt((apart**2).sum(1) / (wide**2).sum(1))
    largest = float(np.abs(apart).max())
    return Distance(
        float(np.sqrt((apart**2).sum() / (wide**2).sum())),
        float(rows.max()),
        largest / float(np.abs(wide).max()),
        largest,
    )


def worst(distances: Sequence[Distance]) -> Distance:
    """The largest of each figure."""
    return Distance(*(max(getattr(d, name) for d in distances) for name in ("rms", "row", "peak", "absolute")))


@dataclass(frozen=True)
class Heads:
    """Per position: ``error``, the largest difference of a logit; ``margin``, by how much the reference prefers its token to the next best;
    ``gap``, by how much it prefers its token to ours (0 where they are the same); negative log likelihoods of the token that follows."""

    error: NDArray[np.float64]
    margin: NDArray[np.float64]
    gap: NDArray[np.float64]
    nll_ours: NDArray[np.float64]
    nll_reference: NDArray[np.float64]

    @property
    def differing(self) -> list[int]:
        """Positions where the tokens differ."""
        return [int(p) for p in np.flatnonzero(self.gap)]

    def near_ties(self, margin: float) -> list[int]:
        """Positions where the reference prefers its token by ``margin`` at most."""
        return [int(p) for p in np.flatnonzero(self.margin <= margin)]

    def figures(self, margin: float) -> dict[str, Any]:
        """The same as values, for the record."""
        return {
            "positions": len(self.error),
            "largest_logit_difference": self.error.max(),
            "near_tie_margin": margin,
            "near_ties": len(self.near_ties(margin)),
            "differing": [{"position": p, "lead": self.gap[p]} for p in self.differing],
            "differing_count": len(self.differing),
            "largest_lead": max((self.gap[p] for p in self.differing), default=0.0),
            "nll_ours": self.nll_ours.mean(),
            "nll_theirs": self.nll_reference.mean(),
        }

    def described(self, margin: float) -> str:
        """The figures in one line."""
        differing = ", ".join(f"{p} (lead {self.gap[p]:.1g})" for p in self.differing) or "none"
        return (
            f"{len(self.error)} positions, largest logit difference {self.error.max():.2g}, "
            f"{len(self.near_ties(margin))} near-ties of {margin:g}, other tokens at: {differing}; "
            f"NLL {self.nll_ours.mean():.5f} ours, {self.nll_reference.mean():.5f} theirs, "
            f"largest difference of one token {np.abs(self.nll_ours - self.nll_reference).max():.2g}"
        )


def compare_heads(run: Run, reference: Callable[[int, int], NDArray[np.float32]], step: int = 64) -> Heads:
    """Our head of width 4 at every position of ``run`` against ``reference(start, stop)`` [stop − start, vocabulary]."""
    n = len(run.tokens)
    found: dict[str, list[float]] = {name: [] for name in ("error", "margin", "gap", "nll_ours", "nll_reference")}
    rows: Iterator[tuple[NDArray[np.float32], int]] = (
        (row, int(token)) for logits, tokens in run.logits() for row, token in zip(logits, tokens, strict=True)
    )
    for start in range(0, n, step):
        for position, expected in enumerate(reference(start, min(start + step, n)), start):
            ours, token = next(rows)
            second, first = np.partition(expected, -2)[-2:]
            found["error"].append(float(np.abs(ours - expected).max()))
            found["margin"].append(float(first - second))
            found["gap"].append(float(first - expected[token]))
            if position + 1 < n:
                follows = run.tokens[position + 1]
                found["nll_ours"].append(_nll(ours, follows))
                found["nll_reference"].append(_nll(expected, follows))
    return Heads(**{name: np.array(values) for name, values in found.items()})


def _nll(logits: NDArray[np.float32], token: int) -> float:
    largest = logits.max()
    return float(np.log(np.exp(logits - largest).sum(dtype=np.float64)) + largest - logits[token])


@dataclass(frozen=True)
class Bounds:
    """What each kind of array may be apart from its reference, in every layer."""

    keys: Distance
    values: Distance
    residual: Distance

    @classmethod
    def same(cls, limit: Distance) -> Bounds:
        """One bound for all three."""
        return cls(limit, limit, limit)


def violations(ours: Run, reference: Any, bounds: Bounds, rows: slice = slice(None)) -> list[str]:
    """Which arrays of ``rows`` lie outside ``bounds``, in the order in which a model computes them: ``keys[0]``, ``values[0]``, ``residual[0]``, …"""
    return [name for name, found, limit in distances(ours, reference, bounds, rows) if not found.within(limit)]


def distances(
    ours: Run, reference: Any, bounds: Bounds, rows: slice = slice(None)
) -> Iterator[tuple[str, Distance, Distance]]:
    """(name, distance, bound) of each array, over the layers that ``reference`` (an ``mlx_gemma3.Reference``) has."""
    for i, hidden in enumerate(reference.hidden):
        yield f"keys[{i}]", distance(ours.keys[i][rows], reference.keys[i][rows]), bounds.keys
        yield f"values[{i}]", distance(ours.values[i][rows], reference.values[i][rows]), bounds.values
        yield f"residual[{i}]", distance(ours.residual[i][rows] * RESIDUAL_SCALE, hidden[rows]), bounds.residual


def by_kind(ours: Run, reference: Any, bounds: Bounds) -> dict[str, Distance]:
    """The largest distance of each kind over all layers."""
    found: dict[str, list[Distance]] = {}
    for name, apart, _ in distances(ours, reference, bounds):
        found.setdefault(name.partition("[")[0], []).append(apart)
    return {name: worst(apart) for name, apart in found.items()}


def table(ours: Run, reference: Any, bounds: Bounds) -> str:
    """`by_kind`, one a line."""
    return "\n".join(f"{name}: worst layer {apart}" for name, apart in by_kind(ours, reference, bounds).items())


def largest_residual(reference: Any) -> float:
    """The largest magnitude in any layer's residual stream, to see an absolute difference beside."""
    return max(float(np.abs(hidden).max()) for hidden in reference.hidden)
