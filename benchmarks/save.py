"""Save 2,000 tokens durably, against one file of the same bytes written, synced, renamed, and its folder synced.

Bar: <= 1.3 x floor. A new store each time: every object is written. The peers do not sync.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from kv import (
    IDENTITY,
    LAYOUT,
    arguments,
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

TOKENS = 2000


def main() -> None:
    options = arguments("save 2,000 tokens", 11)
    folder = Path(tempfile.mkdtemp(prefix="kvferry-bench-", dir=options.folder))
    try:
        show(measure(folder, options.rounds), options.json)
    finally:
        shutil.rmtree(folder)


def measure(folder: Path, count: int) -> dict[str, object]:
    kv = host(TOKENS)
    data = everything(kv, TOKENS)
    items = list(range(1000, 1000 + TOKENS))

    def floor() -> float:
        def run() -> None:
            fd = os.open(folder / "floor.part", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
            os.close(fd)
            (folder / "floor.part").rename(folder / "floor")
            parent = os.open(folder, os.O_RDONLY)
            os.fsync(parent)
            os.close(parent)

        os.sync()
        taken = seconds(run)
        (folder / "floor").unlink()
        return taken

    def ours() -> float:
        path = folder / "store"
        with Store.open(path) as store:
            store.indexed(lambda index: None)
            os.sync()  # making the store is not saving to it
            taken = seconds(lambda: store.save(LAYOUT, IDENTITY, items, kv, name="a", **save_arguments(TOKENS)))
        shutil.rmtree(path)
        return taken

    peers = installed(folder, kv, TOKENS)
    sides = {"floor": floor, "save": ours} | {peer.name: peer.save for peer in peers}
    rounds(1, sides)
    times = rounds(count, sides)
    return {
        "benchmark": "save",
        "tokens": TOKENS,
        "bytes": len(data),
        "rounds": count,
        "times": summary(times),
        "ratio_to_floor": ratio(times, "save", "floor"),
        "peers": {
            peer.name: {"version": peer.version, "bytes": peer.bytes(), "ours_to_it": ratio(times, "save", peer.name)}
            for peer in peers
        },
        "machine": machine(),
    }


if __name__ == "__main__":
    main()
