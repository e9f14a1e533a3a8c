"""What byte planes save, and what they cost: stored bytes a token, and restores, of real KV.

KV of Gemma 3 270M, 2,048 rows of a text, as the portable engine computes them. Two geometries, each saved raw and as planes, whole and
trimmed to the windows, with `Store.save`: the model's own, and that of Gemma 4 E2B, for which nobody has weights here: the same rows in
other places, its three full layers of 512 made of a full and a sliding layer of 256 each. Both take 18,432 bytes a token.

Bars: trimmed, as planes, all files of the store but its index: at most 6,200 bytes a token (Gemma 3 270M) and 8,300 (Gemma 4);
restoring planes at most 2.5 times restoring raw, cold.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from kv import LINEAGE, cool, machine, ratio, rounds, seconds, show, summary

from kvstore import Group, Identity, Layout, Rows, Store
from kvstore.cli import cache_folder
from kvstore.codec import Codec
from kvstore.layout import BLOCK, blocks_of, trim_start
from runtime import Bundle, PortableEngine
from runtime.chain import Chain, schedule
from runtime.hostkv import HostKV

ROOT = Path(__file__).parent.parent
TEXTS = (ROOT / "kvstore" / "data" / "ferry.txt", ROOT / "LICENSE")
TOKENS = 2048
BARS = {"gemma3-270m": 6200, "gemma4-e2b-geometry": 8300}
RESTORE_BAR = 2.5
IDENTITY = Identity.of({"weights": "of the bundle", "tokenizer": "of the bundle"})

GEMMA4 = Layout(
    (
        Group("full", None, (4, 9, 14), 1, 512),
        Group("sliding", 512, tuple(i for i in range(15) if i % 5 != 4), 1, 256),
    )
)


def main() -> None:
    parser = argparse.ArgumentParser(description="bytes and restores of KV as byte planes")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--bundle", type=Path, default=cache_folder() / "bundles" / "gemma3-270m")
    parser.add_argument(
        "--folder", type=Path, default=None, help="where to write (default: the system's temporary folder)"
    )
    options = parser.parse_args()
    if not options.bundle.is_dir():
        parser.error(f"{options.bundle}: no bundle there. `make demo` builds it, or give another with --bundle.")
    folder = Path(tempfile.mkdtemp(prefix="kvferry-bench-", dir=options.folder))
    try:
        show(measure(options.bundle, folder, options.rounds), options.json)
    finally:
        shutil.rmtree(folder)


def measure(bundle: Path, folder: Path, count: int) -> dict[str, Any]:
    items, kv = computed(bundle)
    value: dict[str, Any] = {
        "benchmark": "planes",
        "tokens": TOKENS,
        "bytes": TOKENS * kv.layout.bytes_per_token,
        "rounds": count,
    }
    for name, rows in (("gemma3-270m", kv), ("gemma4-e2b-geometry", as_gemma4(kv))):
        value[name] = {**one_geometry(folder / name, items, rows, count), "bar": BARS[name]}
    value["restore_bar"] = RESTORE_BAR
    return {
        **value,
        "machine": {
            **machine(),
            "zstandard": zstandard.__version__,
            "zstd": ".".join(map(str, zstandard.ZSTD_VERSION)),
        },
    }


def computed(folder: Path) -> tuple[list[int], HostKV]:
    """The text's first tokens, and their rows."""
    bundle = Bundle.open(folder, digest_cache=cache_folder() / "digests.json")
    items = bundle.tokenizer.encode("\n\n".join(path.read_text(encoding="utf-8") for path in TEXTS))[:TOKENS]
    kv, config = HostKV(bundle.layout(), TOKENS), bundle.config
    assert len(items) == TOKENS == config.ctx, (len(items), config.ctx)
    chain = Chain(bundle, PortableEngine(bundle.root), kv)
    for step in schedule(0, TOKENS, config.ctx, config.prefill_widths, config.plain_width):
        chain.run(step, items[step.start : step.start + step.width])
        kv.advance(step.start + step.width)
    return items, kv


def as_gemma4(kv: HostKV) -> HostKV:
    """The same rows in Gemma 4 E2B's geometry."""
    full, sliding = (list(group.layers) for group in kv.layout.groups)
    other = HostKV(GEMMA4, TOKENS)
    for layer in range(15):
        parts = [full.pop(0), sliding.pop(0)] if layer % 5 == 4 else [sliding.pop(0)]
        k, v = (np.concatenate([kv.inputs(part)[j][0] for part in parts], axis=1) for j in (0, 1))
        other.write_rows(layer, 0, k, v)
    assert not full and not sliding
    other.advance(TOKENS)
    return other


def save(
    path: Path, items: list[int], rows: Rows, layout: Layout, codec: Codec, trimmed_of: Path | None = None
) -> float:
    """Seconds of `Store.save`. ``trimmed_of``: a store with the whole snapshot, of which only what the windows need is kept."""
    more: dict[str, Any] = {}
    if trimmed_of is not None:
        with Store.open(trimmed_of, create=False) as whole:
            more["known"] = whole.match("a", head="none").snapshot.blocks[: TOKENS // BLOCK]
        more["covered"] = [BLOCK * trim_start(group.window, TOKENS) for group in layout.groups]
    with Store.open(path) as store:
        return seconds(
            lambda: store.save(
                layout, IDENTITY, items, rows, namespace="default", name="a", lineage=[LINEAGE] * blocks_of(TOKENS),
                pending=1, head="none", codec=codec, **more,
            )
        )  # fmt: skip


def one_geometry(folder: Path, items: list[int], rows: HostKV, count: int) -> dict[str, Any]:
    layout, into = rows.layout, HostKV(rows.layout, TOKENS)
    codecs: tuple[Codec, ...] = ("raw", "planes")
    for codec in codecs:
        save(folder / f"{codec}_whole", items, rows, layout, codec)
        save(folder / f"{codec}_trimmed", items, rows, layout, codec, folder / "raw_whole")

    def restore(name: str) -> float:
        with Store.open(folder / name, create=False) as store:
            cool(folder / name / "objects")
            cool(folder / name / "snapshots")
            return seconds(lambda: store.load(store.match("a", head="none"), into))

    def saved(codec: Codec) -> float:
        path = folder / f"again {codec}"
        try:
            return save(path, items, rows, layout, codec)
        finally:
            shutil.rmtree(path)

    names = [f"{codec}_{how}" for how in ("whole", "trimmed") for codec in codecs]
    sides = {f"restore_{name}": (lambda name=name: restore(name)) for name in names}
    sides |= {f"save_{codec}": (lambda codec=codec: saved(codec)) for codec in codecs}
    rounds(1, sides)
    times = rounds(count, sides)
    for name in names:
        restore(name)
        for group, shape in enumerate(layout.groups):
            first = 0 if "whole" in name else BLOCK * trim_start(shape.window, TOKENS)
            for mine, theirs in zip(into.spans(group, first, TOKENS), rows.spans(group, first, TOKENS), strict=True):
                assert bytes(mine) == bytes(theirs), f"{name}: the restored rows are not the saved ones"
    return {
        "bytes_per_token": {name: stored(folder / name) for name in names},
        "times": summary(times),
        "restore_ratio": {
            how: ratio(times, f"restore_planes_{how}", f"restore_raw_{how}") for how in ("whole", "trimmed")
        },
        "save_ratio": ratio(times, "save_planes", "save_raw"),
    }


def stored(path: Path) -> float:
    """Bytes of all files of a store but its index, a token."""
    files = itertools.chain.from_iterable(
        path.rglob(pattern) for pattern in ("objects/*/*", "snapshots/*", "refs/*", "format.json")
    )
    return round(sum(file.stat().st_size for file in files if file.is_file()) / TOKENS, 1)


if __name__ == "__main__":
    main()
