"""Peak memory of continuing 1,500 tokens: restored and decoded, against prefilled and decoded, the same bundle, a fresh process each.

The portable engine maps weight files and decodes matrices to float32 for the functions that it loads; all functions of a package share
both. So the weights of the two sides are the same here, and what differs is what wide functions hold while they run
(``peak_beside_weights_bytes``, which takes every mapped weight page for touched). Core ML loads every function by itself; nothing here
measures that.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kv import machine, show

CONTEXT, CONTINUATION = 1500, 16
NAME = "memory"
TEXT = Path(__file__).parents[1] / "kvstore" / "data" / "ferry.txt"
PROC = Path("/proc/self/status")


def main() -> None:
    parser = argparse.ArgumentParser(description="peak memory of a decode-only consumer and of one that prefills")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--bundle", type=Path, help="default: gemma3-270m in the cache, built if it is not there")
    parser.add_argument("--folder", type=Path, help="where to write (default: the system's temporary folder)")
    parser.add_argument("--rounds", type=int, help="taken and not used, so that one ARGS serves every benchmark")
    parser.add_argument("--side", nargs=2, metavar=("SIDE", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    bundle = options.bundle or cached_bundle()
    if options.side:
        print(json.dumps(run_side(bundle, options.side[0], Path(options.side[1]))))
        return
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-", dir=options.folder) as folder:
        show(measure(bundle, Path(folder)), options.json)


def cached_bundle() -> Path:
    from kvstore.cli import cache_folder
    from kvstore.demo import ensure_bundle

    ensure_bundle("gemma3-270m")
    return cache_folder() / "bundles" / "gemma3-270m"


def measure(bundle: Path, folder: Path) -> dict[str, Any]:
    produced = side(bundle, "produce", folder)
    sides = {name: side(bundle, name, folder) for name in ("restore", "prefill")}
    tokens = [sides[name].pop("tokens") for name in sides]
    if not tokens[0] == tokens[1] == produced["tokens"]:
        raise SystemExit(f"the continuations differ: {tokens}")
    return {
        "benchmark": "memory",
        "bundle": produced["bundle"],
        "context_tokens": CONTEXT,
        "continued_tokens": CONTINUATION,
        "kv_bytes": produced["kv_bytes"],
        "sides": sides,
        "restore_to_prefill": {
            key: round(sides["restore"][key] / sides["prefill"][key], 3)
            for key in sides["restore"]
            if key != "functions"
        },
        "machine": machine(),
    }


def side(bundle: Path, name: str, folder: Path) -> dict[str, Any]:
    """One side in a process of its own, started by another: nothing of this one is counted."""
    words = [sys.executable, __file__, "--bundle", str(bundle), "--side", name, str(folder)]
    done = subprocess.run(words, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, check=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def run_side(path: Path, name: str, folder: Path) -> dict[str, Any]:
    from kvstore import Store
    from runtime import Bundle, PortableEngine, Session

    # The producer leaves the bundle's digests and the token ids, so that no other side hashes files or loads a tokenizer.
    bundle = Bundle.open(path, digest_cache=folder / "digests.json")
    if name == "produce":
        encoded = bundle.tokenizer.encode(TEXT.read_text(encoding="utf-8"))
        (folder / "ids.json").write_text(json.dumps(encoded[:CONTEXT]), encoding="utf-8")
    ids = json.loads((folder / "ids.json").read_text(encoding="utf-8"))
    with Store.open(folder / "store") as store:
        engine = PortableEngine(bundle.root)
        session = Session.open(bundle, engine, store=store, decode_only=name == "restore")
        start = peak()
        began = time.perf_counter()
        if name == "restore":
            session.restore(NAME)
        else:
            session.feed(ids)
        if name == "produce":
            session.save(NAME)
        made = session.generate(CONTINUATION)
        seconds = time.perf_counter() - began
    weights = engine.weight_bytes()
    answer: dict[str, Any] = {"tokens": list(made.tokens)}
    if name == "produce":
        layout = bundle.layout()
        return answer | {"bundle": bundle.config.name, "kv_bytes": CONTEXT * layout.bytes_per_token}
    most = peak()
    return answer | {
        "peak_bytes": most,
        "peak_above_start_bytes": most - start,
        "peak_beside_weights_bytes": most - start - weights.stored - weights.decoded,
        "weights_stored_bytes": weights.stored,
        "weights_decoded_bytes": weights.decoded,
        "seconds": round(seconds, 2),
        "functions": engine.ledger.names(),
    }


def peak() -> int:
    """Most memory of this process so far, mapped pages included. Linux: VmHWM, which starts anew with the program; the
    other figure would include the process that this one was forked from."""
    if PROC.exists():
        line = next(line for line in PROC.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


if __name__ == "__main__":
    main()
