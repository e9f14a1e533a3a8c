"""Row 5: a file is cut, extended, zeroed, or stands in the place of another one that is as valid as itself.

Measured: 300 in 9 s of computing. Objects, manifests, coverages and refs are also exchanged with their own kind, where each file is whole and right, and
only its name is not. The index may be any file: one of an earlier state, of another store, none.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from battery import Size, Tally
from harmed import INDEX, Scene, judge

TITLE = "truncate, extend, zero, swap two valid files"
REQUIRED = 300
KINDS = ("object", "planes", "manifest", "coverage", "ref", "format", "index", "lock")
EDGES = (0, 1, 7, 8, 95, 96, 127, 128, 129)
Changed = dict[str, bytes]


def cut(scene: Scene, kind: str, chance: random.Random) -> Changed:
    name = chance.choice(scene.kinds[kind])
    data = scene.good(name)
    lengths = [n for n in (*EDGES, len(data) // 2, len(data) - 1, chance.randrange(len(data) or 1)) if n < len(data)]
    return {name: data[: chance.choice(lengths or [0])]}


def extend(scene: Scene, kind: str, chance: random.Random) -> Changed:
    name = chance.choice(scene.kinds[kind])
    data = scene.good(name)
    more = (b"\0", b"\n", bytes(4096), chance.randbytes(100), data)
    return {name: data + chance.choice([m for m in more if m])}


def zero(scene: Scene, kind: str, chance: random.Random) -> Changed:
    """All of it, a part, or a page as a file system leaves it that wrote the length and not the data."""
    name = chance.choice(scene.kinds[kind])
    data = bytearray(scene.good(name))
    if not data:
        return {name: bytes(4096)}
    start = chance.choice([0, 0, 128, len(data) // 2, len(data) // 4096 * 4096, chance.randrange(len(data))])
    stop = chance.choice([len(data), len(data), min(len(data), 128), min(len(data), start + 4096)])
    data[start:stop] = bytes(max(0, stop - start))
    return {name: bytes(data)}


def swap(scene: Scene, kind: str, chance: random.Random) -> Changed:
    first = chance.choice(scene.kinds[kind])
    others = [name for name in scene.kinds[kind] if scene.good(name) != scene.good(first)]
    if chance.random() < 0.2 or not others:
        others = [name for other in KINDS if other != kind for name in scene.kinds[other]]
    second = chance.choice(others)
    changed = {first: scene.good(second), second: scene.good(first)}
    return {name: data for name, data in changed.items() if name not in INDEX or kind == "index"}


WAYS: dict[str, Callable[[Scene, str, random.Random], Changed]] = {
    "cut": cut,
    "extended": extend,
    "zeroed": zero,
    "swapped": swap,
}


def run(size: Size, tally: Tally, scratch: Path) -> None:
    chance = random.Random(f"swaps {size.seed}")
    scenes = [Scene(scratch / "settled"), Scene(scratch / "live", live=True)]
    done = 0
    while done < size.pick(56, REQUIRED):
        for way, change in WAYS.items():
            for kind in KINDS:
                scene = chance.choice(scenes) if kind == "index" else scenes[0]
                changed = change(scene, kind, chance)
                if all(data == scene.good(name) for name, data in changed.items()):
                    continue
                done += 1
                with tally.attempt(f"{way}: {', '.join(changed)}"):
                    if judge(scene, changed) == "same":
                        assert kind in ("lock", "format", "index"), "nobody noticed"
                        tally.harmless()
