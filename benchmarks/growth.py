"""A conversation saved at 500, 1,000, 1,500 and 2,000 tokens: bytes on disk at the end, against the final KV.

Bar: <= 1.15. Counts every file below the store's root, manifests, coverage, refs and index included. The peers write the whole
cache each time (mlx-lm) or the trimmed one (llama.cpp).
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from kv import IDENTITY, LAYOUT, arguments, host, machine, save_arguments, show
from peers import installed

from kvstore import Store

TURNS = (500, 1000, 1500, 2000)


def main() -> None:
    options = arguments("a growing conversation", 1)
    folder = Path(tempfile.mkdtemp(prefix="kvferry-bench-", dir=options.folder))
    try:
        show(measure(folder), options.json)
    finally:
        shutil.rmtree(folder)


def measure(folder: Path) -> dict[str, object]:
    kv = host(TURNS[-1])
    items = list(range(1000, 1000 + TURNS[-1]))
    final = TURNS[-1] * LAYOUT.bytes_per_token
    written = []
    with Store.open(folder / "store") as store:
        for tokens in TURNS:
            arguments_of = save_arguments(tokens)
            saved = store.save(LAYOUT, IDENTITY, items[:tokens], kv, name="chat", **arguments_of)
            written.append(saved.written_bytes)
    total = sum(path.stat().st_size for path in (folder / "store").rglob("*") if path.is_file())
    peers = {}
    for tokens in TURNS:
        for peer in installed(folder, host(tokens), tokens):
            peer.save()
            entry = peers.setdefault(peer.name, {"version": peer.version, "written_bytes": 0})
            entry["written_bytes"] += peer.bytes()
    for entry in peers.values():
        entry["ratio_to_final"] = round(entry["written_bytes"] / final, 3)
    return {
        "benchmark": "growth",
        "turns": list(TURNS),
        "final_bytes": final,
        "object_bytes_per_turn": written,
        "bytes_on_disk": total,
        "ratio_to_final": round(total / final, 3),
        "peers": peers,
        "machine": machine(),
    }


if __name__ == "__main__":
    main()
