"""What rounding every result to fp16 changes: the portable engine's `fp16-rounding` mode against its fp32, the tiny bundle, one text by decode.

Not a speed: it gives the bounds that Core ML is held to (`tests/runtime/test_engines_agree.py`) something to be seen beside.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from kv import machine, show

from runtime.build import build_bundle
from runtime.bundle import Bundle
from runtime.chain import Chain, decode_only
from runtime.hostkv import HostKV
from runtime.portable import PortableEngine
from runtime.verify_head import TEXT


def main() -> None:
    parser = argparse.ArgumentParser(description="what rounding every result to fp16 changes")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--folder", type=Path, help="where to write (default: the system's temporary folder)")
    parser.add_argument("--rounds", type=int, help="taken and not used, so that one ARGS serves every benchmark")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-", dir=options.folder) as folder:
        show(measure(Bundle.open(build_bundle("tiny", Path(folder) / "tiny").path)), options.json)


def measure(bundle: Bundle) -> dict[str, Any]:
    ids = bundle.tokenizer.encode(TEXT * 2)
    (plain, said), (rounded, other) = (
        run(bundle, PortableEngine(bundle.root), ids),
        run(bundle, PortableEngine(bundle.root, compute="fp16-rounding"), ids),
    )
    return {
        "benchmark": "rounding",
        "bundle": bundle.config.name,
        "steps": len(ids),
        "hidden_difference_to_largest": float(f"{np.abs(plain - rounded).max() / np.abs(plain).max():.4g}"),
        "tokens_that_differ": sum(a != b for a, b in zip(said, other, strict=True)),
        "machine": machine(),
    }


def run(bundle: Bundle, engine: PortableEngine, ids: list[int]) -> tuple[np.ndarray, list[int]]:
    """The last hidden state, float32, and the token after each of ``ids``."""
    kv = HostKV(bundle.layout(), bundle.config.ctx)
    chain = Chain(bundle, engine, kv)
    hidden, tokens = [], []
    for step in decode_only(0, len(ids)):
        hidden.append(chain.run(step, ids[step.start : step.start + step.width]))
        kv.advance(step.start + step.width)
        tokens.append(chain.token(hidden[-1]))
    return np.stack(hidden).astype(np.float32), tokens


if __name__ == "__main__":
    main()
