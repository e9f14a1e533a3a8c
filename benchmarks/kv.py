"""What the benchmarks share: KV of the Gemma 3 270M geometry, cold files, medians, and one way to print a result.

The KV is random (seeded) fp16, which is as incompressible as real KV's low byte; no model is needed. 18 layers, one KV
head of 256, 3 full layers and 15 with a window of 512: 18,432 bytes a token.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvstore import Group, Identity, Layout, Lineage
from kvstore.layout import blocks_of
from runtime.hostkv import HostKV

CONTEXT = 2048
LAYOUT = Layout(
    (
        Group("full", None, tuple(i for i in range(18) if i % 6 == 5), 1, 256),
        Group("sliding", 512, tuple(i for i in range(18) if i % 6 != 5), 1, 256),
    )
)
IDENTITY = Identity.of({"architecture": "benchmark", "weights": "none", "tokenizer": "none"})
LINEAGE = Lineage.of({"engine": "benchmark"})


def host(tokens: int, seed: int = 1) -> HostKV:
    """Host KV whose first ``tokens`` rows are random; every page has been touched."""
    kv = HostKV(LAYOUT, CONTEXT)
    random = np.random.default_rng(seed)
    for group in range(len(LAYOUT.groups)):
        for span in kv.spans(group, 0, CONTEXT):
            span[:] = bytes(len(span))
        for span in kv.spans(group, 0, tokens):
            values = random.standard_normal(len(span) // 2, dtype=np.float32).astype(np.float16)
            span[:] = values.view(np.uint8).data
    return kv


def save_arguments(tokens: int) -> dict[str, Any]:
    """The keyword arguments of `Store.save` for that many tokens."""
    return {"namespace": "default", "lineage": [LINEAGE] * blocks_of(tokens), "pending": 1, "head": "none"}


def everything(kv: HostKV, tokens: int) -> bytes:
    """All KV bytes of the first ``tokens`` rows, one after another."""
    return b"".join(bytes(s) for g in range(len(LAYOUT.groups)) for s in kv.spans(g, 0, tokens))


def cool(folder: Path) -> None:
    """Syncs every file below ``folder`` and drops it from the page cache (Linux; elsewhere it stays warm)."""
    for path in [folder] if folder.is_file() else [p for p in folder.rglob("*") if p.is_file()]:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def seconds(work: Callable[[], object]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def rounds(count: int, sides: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Every side once per round, in turn, so that a busy moment hits all; each callable returns its seconds."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(count):
        order = list(sides) if i % 2 == 0 else list(reversed(sides))
        for name in order:
            times[name].append(sides[name]())
    return times


def summary(times: Mapping[str, list[float]]) -> dict[str, dict[str, float]]:
    """Median, least and most, in milliseconds."""
    return {
        name: {
            "median_ms": round(1e3 * statistics.median(t), 2),
            "min_ms": round(1e3 * min(t), 2),
            "max_ms": round(1e3 * max(t), 2),
        }
        for name, t in times.items()
    }


def ratio(times: Mapping[str, list[float]], side: str, base: str) -> float:
    """Median of ``side`` over median of ``base``."""
    return round(statistics.median(times[side]) / statistics.median(times[base]), 3)


def arguments(description: str, default_rounds: int) -> argparse.Namespace:
    """--json, --rounds, --folder."""
    return parser(description, default_rounds).parse_args()


def parser(description: str, default_rounds: int) -> argparse.ArgumentParser:
    """With --json, --rounds and --folder, for a script that takes more."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--json", action="store_true", help="print one JSON object")
    made.add_argument("--rounds", type=int, default=default_rounds)
    made.add_argument(
        "--folder", type=Path, default=None, help="where to write (default: the system's temporary folder)"
    )
    return made


def machine() -> dict[str, str | int | None]:
    return {
        "system": platform.system(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def show(value: Mapping[str, Any], as_json: bool) -> None:
    """One JSON object, or the same as lines."""
    if as_json:
        print(json.dumps(value, indent=2))
        return
    for key, entry in value.items():
        if isinstance(entry, Mapping):
            print(f"{key}:")
            for name, inner in entry.items():
                print(f"  {name:<28} {inner}")
        else:
            print(f"{key:<30} {entry}")
