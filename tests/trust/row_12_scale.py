"""Row 12: a store of 100,000 blocks beside one of 10,000: what takes memory for every block, and what must not.

Each deed in a process of its own, in both stores; what the larger one takes more, by 90,000 blocks, is what a block costs. Listing, showing, finding
and restoring cost nothing for it; marking, checking and counting a few bytes, which `LIMITS` bounds. Times are recorded and not judged.

Measured: 170 s on a busy machine; 0.5 GB in memory, or on the disk where /dev/shm is smaller.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from battery import HERE, Size, Tally
from scaled import BLOCKS, DEEDS, fill

TITLE = "100,000 blocks: memory stays flat, listings stream"
REQUIRED = 2 * len(DEEDS)
NOISE = 8 << 20
"""Bytes that two runs of the same may differ by: allocators, SQLite's pages."""
LIMITS = {
    "names": 0,
    "ls": 0,
    "objects": 0,
    "restore": 0,
    "find": 0,
    "gc plan": 200,
    "check quick": 200,
    "check full": 200,
    "index rebuild": 0,
    "du": 400,
}
"""Bytes of memory that a block may cost."""
ROOM = 1 << 30
"""Bytes that the stores take at most, a page for every object."""


def run(size: Size, tally: Tally, scratch: Path) -> None:
    counts = (size.pick(BLOCKS, 10_000), size.pick(2 * BLOCKS, 100_000, 300_000))
    room = ROOM * max(1, counts[1] // 100_000)
    with tempfile.TemporaryDirectory(prefix="kvferry-trust-") as disk:
        folder = scratch if shutil.disk_usage(scratch).free > room else Path(disk)
        stores = {count: folder / str(count) for count in counts}
        fsync = os.fsync
        os.fsync = lambda fd: None  # durability is another row's; 100,000 syncs of a disk would be most of this one
        try:
            for count, path in stores.items():
                fill(path, count)
        finally:
            os.fsync = fsync
        for deed in DEEDS:
            taken = {}
            for count, path in stores.items():
                with tally.attempt(f"{deed}, {count:,} blocks"):
                    taken[count] = _done(deed, path)
                    if deed in ("objects", "check quick", "check full"):
                        assert taken[count]["found"] == count
                    elif deed in ("names", "ls"):
                        assert taken[count]["found"] == count // BLOCKS
                    tally.facts[f"{deed}, {count} blocks, seconds"] = round(taken[count]["seconds"], 3)
                    tally.facts[f"{deed}, {count} blocks, MiB"] = round(taken[count]["bytes"] / 2**20, 1)
            with tally.attempt(f"{deed}: memory for each block"):
                few, many = (taken[count]["bytes"] for count in counts)
                limit = NOISE + LIMITS[deed] * (counts[1] - counts[0])
                assert many - few <= limit, (
                    f"{(many - few) / 2**20:.1f} MiB more for {counts[1] - counts[0]:,} blocks more"
                )


def _done(deed: str, path: Path) -> dict[str, float]:
    command = [sys.executable, str(HERE / "scaled.py"), deed, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, float] = json.loads(done.stdout)
    return result
