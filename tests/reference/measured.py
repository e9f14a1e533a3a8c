"""The figures that these comparisons measure, as the record that docs/checks.md quotes.

``pytest tests/reference -m reference --record`` writes them to benchmarks/results/checks/, one file a test module; without ``--record`` they are
noted and thrown away, so that the two runs are the same.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from closeness import Distance, worst

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "checks"
DIGITS = 4
"""Significant digits that a record keeps; likelihoods, compared in their fifth decimal, keep more."""
FINE = 7


class Figures:
    """What one test module measured, by name."""

    def __init__(self) -> None:
        self.noted: dict[str, Any] = {}
        self._functions: dict[str, tuple[list[float], list[Distance]]] = {}

    def note(self, name: str, *values: Any, **more: Any) -> None:
        """Under ``name``: the keys of ``values`` (mappings, dataclasses) and ``more``, together."""
        found: dict[str, Any] = {}
        for value in values:
            found |= plain(value)
        self.noted[name] = {**self.noted.get(name, {}), **found, **plain(more)}

    def function(self, name: str, equal: Sequence[float], apart: Sequence[Distance]) -> None:
        """A function of one more package: the least equal share and the largest distances so far."""
        said = self._functions.setdefault(name, ([], []))
        said[0].extend(equal)
        said[1].extend(apart)
        self.note(name, worst(said[1]), equal=min(said[0]))

    def write(self, path: Path) -> None:
        """Joined with what other runs noted there: a run may leave tests out."""
        before = json.loads(path.read_text("utf-8"))["figures"] if path.exists() else {}
        value = {"check": path.stem, "figures": {**before, **self.noted}, "machine": machine()}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", "utf-8")


def plain(value: Any, digits: int = DIGITS) -> Any:
    """JSON's own types; numbers with so many significant digits."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value), digits)
    if isinstance(value, Mapping):
        finite = {str(k): v for k, v in value.items() if v != float("inf")}  # a bound that isn't one
        return {k: plain(v, FINE if k.startswith("nll") else digits) for k, v in finite.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(v) for v in value]
    if isinstance(value, bool | int | str):
        return value
    return float(f"{float(value):.{digits}g}")


def machine() -> dict[str, str]:
    """What measured."""
    import platform

    found = {"system": platform.system(), "machine": platform.machine(), "python": platform.python_version()}
    for name in ("numpy", "mlx", "mlx-lm", "onnx", "onnxruntime", "torch", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return {**found, "date": time.strftime("%Y-%m-%d")}
