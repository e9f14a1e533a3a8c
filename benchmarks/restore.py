"""Restore 2,000 tokens from a cold store, every byte verified, against mapping and copying the same bytes.

Floor: one file of the same bytes, mapped cold and copied to host rows (no verification). Bars: whole <= 1.3 x floor; trimmed
<= 0.55 x the floor of the whole; faster than mlx-lm. Both sides fill memory that was used before, as a second restore does; ``fresh``: memory
that never was, which the system has to find and clear meanwhile. The peers take what memory they take.
"""

from __future__ import annotations

import mmap
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from kv import (
    CONTEXT,
    IDENTITY,
    LAYOUT,
    arguments,
    cool,
    everything,
    host,
    machine,
    ratio,
    rounds,
    save_arguments,
    seconds,
    show,
    summary,
)
from peers import installed

from kvstore import Store
from kvstore.layout import trim_start
from kvstore.staging import Rows, Staging
from runtime.hostkv import HostKV

TOKENS = 2000


def main() -> None:
    options = arguments("restore 2,000 tokens", 11)
    folder = Path(tempfile.mkdtemp(prefix="kvferry-bench-", dir=options.folder))
    try:
        show(measure(folder, options.rounds), options.json)
    finally:
        shutil.rmtree(folder)


def measure(folder: Path, count: int) -> dict[str, object]:
    kv, into = host(TOKENS), host(0)
    data = everything(kv, TOKENS)
    (folder / "floor").write_bytes(data)
    used = np.ones(len(data), np.uint8)
    items = list(range(1000, 1000 + TOKENS))
    with Store.open(folder / "store") as store:
        store.save(LAYOUT, IDENTITY, items, kv, name="a", **save_arguments(TOKENS))
        _trimmed_copy(store, folder)

    def floor(target: np.ndarray[Any, Any]) -> float:
        cool(folder / "floor")

        def run() -> None:
            with (folder / "floor").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
                source = np.frombuffer(view, np.uint8)
                np.copyto(target, source)
                del source

        return seconds(run)

    def ours(name: str, into: HostKV = into) -> float:
        with Store.open(folder / name, create=False) as store:
            cool(folder / name / "objects")
            cool(folder / name / "snapshots")
            return seconds(lambda: store.load(store.match("a", head="none"), into))

    peers = installed(folder, kv, TOKENS)
    for peer in peers:
        peer.save()
    sides = {"floor": lambda: floor(used), "whole": lambda: ours("store"), "trimmed": lambda: ours("trimmed")}
    fresh = {
        "fresh_floor": lambda: floor(np.frombuffer(mmap.mmap(-1, len(data)), np.uint8)),
        "fresh_whole": lambda: ours("store", HostKV(LAYOUT, CONTEXT)),
    }
    sides |= {peer.name: peer.load for peer in peers}
    rounds(1, sides)
    times = rounds(count, sides)
    times |= rounds(count, fresh)  # by themselves: memory that comes and goes slows whoever is next
    ours("store")
    assert everything(into, TOKENS) == data, "the restored rows are not the saved ones"
    return {
        "benchmark": "restore",
        "tokens": TOKENS,
        "bytes": len(data),
        "rounds": count,
        "times": summary(times),
        "ratio_to_floor": ratio(times, "whole", "floor"),
        "trimmed_ratio_to_floor_of_whole": ratio(times, "trimmed", "floor"),
        "fresh_ratio_to_floor": ratio(times, "fresh_whole", "fresh_floor"),
        "peers": {
            peer.name: {
                "version": peer.version,
                "bytes": peer.bytes(),
                "ours_to_it": ratio(times, "whole", peer.name),
                "ours_trimmed_to_it": ratio(times, "trimmed", peer.name),
            }
            for peer in peers
        },
        "machine": machine(),
    }


def _trimmed_copy(store: Store, folder: Path) -> None:
    """A second store that holds what `pull --trimmed` brings: full groups whole, windowed ones from the trim start."""
    from kvstore.snapshot import trimmed

    digest = store.resolve("a")
    snapshot = store.shelf.records.snapshot(digest)
    coverage = trimmed(digest, snapshot)
    with Store.open(folder / "trimmed") as other, Staging(other.shelf.root) as staging:
        for g, group in enumerate(LAYOUT.groups):
            for b in range(trim_start(group.window, TOKENS), len(snapshot.blocks)):
                name = snapshot.blocks[b][g]
                content = store.shelf.objects.read(name, snapshot.object_bytes(b, g))
                staging.add([Rows([content], name)])
        staging.publish({name for block in snapshot.blocks for name in block})
        other.publish(snapshot, coverage)
        other.shelf.records.move_ref("a", None, digest)


if __name__ == "__main__":
    main()
