"""Row 4: one bit of one file is the other way round, anywhere in any kind of file.

Measured: 2,000 flips in 45 s of computing. Bytes that may change without being noticed, all of them proven so by what is read:

- ``format.json``: white space between its tokens (the JSON value is the same);
- ``index.sqlite``, ``-wal``, ``-shm``: pages and bytes that no answer depends on. It is a cache: every answer is verified against the files,
  and a check makes it anew where it differs.

``lock`` is empty. In objects (raw and planes), manifests, coverages and refs there is no byte that nobody checks.
"""

from __future__ import annotations

import random
from pathlib import Path

from battery import Size, Tally
from harmed import Scene, judge

TITLE = "bit flips over every file type"
REQUIRED = 2_000
WEIGHTS = {"object": 6, "planes": 6, "manifest": 8, "coverage": 4, "ref": 4, "format": 2, "index": 8}
UNUSED = ("format", "index")
"""Kinds in which a byte may be proven unused."""


def run(size: Size, tally: Tally, scratch: Path) -> None:
    chance = random.Random(f"flips {size.seed}")
    scenes = [Scene(scratch / "settled"), Scene(scratch / "live", live=True)]
    assert set(scenes[0].kinds) == {*WEIGHTS, "lock"}
    for _ in range(size.pick(60, REQUIRED)):
        (kind,) = chance.choices(list(WEIGHTS), list(WEIGHTS.values()))
        scene = chance.choice(scenes) if kind == "index" else scenes[0]
        name = chance.choice(scene.kinds[kind])
        data = bytearray(scene.good(name))
        at, bit = chance.randrange(len(data)), chance.randrange(8)
        data[at] ^= 1 << bit
        tally.facts[f"tried in {kind}"] = tally.facts.get(f"tried in {kind}", 0) + 1
        with tally.attempt(f"bit {bit} of byte {at} of {name}"):
            if judge(scene, {name: bytes(data)}) == "same":
                assert kind in UNUSED, "nobody noticed"
                tally.harmless()
