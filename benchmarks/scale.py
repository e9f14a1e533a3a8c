"""How time and memory grow with a store, from 1,000 to 100,000 blocks (--blocks 1000000: more): lookup, ls, gc's plan, check --quick, the index.

The store is written by this program, without syncing: real manifests, coverage and refs, of families of eight conversations that share
their first quarter, one of each family named. Digests of content are made up, and object files are sparse ones of the right length
(one layer of 16 bytes a token, so that a block is one file): nothing that is measured here reads their content. Every measurement is
a process of its own; its memory is the peak above what it had before the work. ``exponents``: the slope of log(CPU seconds), and of log(bytes), over
log(blocks), by least squares; 1 is proportional. CPU seconds, because a machine that does something else meanwhile spoils the others.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SIZES = (1_000, 10_000, 100_000)
FAMILY, SHARED, BLOCKS = 8, 16, 64
"""Conversations of a family, blocks that they share, blocks of each."""
PER_FAMILY = SHARED + FAMILY * (BLOCKS - SHARED)
LARGE = 500_000
"""Blocks from which everything is measured once."""
VOCABULARY = 50_000
QUERIES = 200
PROC = Path("/proc/self/status")


def main() -> None:
    parser = argparse.ArgumentParser(description="time and memory of a store's work by the number of its blocks")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--blocks", type=int, action="append", help=f"sizes, more than one (default: {SIZES})")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write (default: the system's temporary folder)")
    parser.add_argument("--side", nargs=3, metavar=("SIDE", "STORE", "FAMILIES"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        side, store, families = options.side
        print(json.dumps(SIDES[side](Path(store), int(families))))
        return
    from kv import machine, show

    sizes = tuple(options.blocks or SIZES)
    folder = Path(tempfile.mkdtemp(prefix="kvferry-scale-", dir=options.folder))
    try:
        measured = [measure(folder / str(blocks), blocks, options.rounds) for blocks in sizes]
        start = startup(folder)
    finally:
        shutil.rmtree(folder)
    value = {
        "benchmark": "scale",
        "sizes": measured,
        "exponents": exponents(measured) if len(sizes) > 1 else {},
        "ls_start": start,
        "machine": machine(),
    }
    show(value, options.json)


def measure(folder: Path, blocks: int, rounds: int) -> dict[str, Any]:
    families = max(1, round(blocks / PER_FAMILY))
    print(f"making {families * PER_FAMILY:,} blocks", file=sys.stderr)
    began = time.perf_counter()
    make(folder, families)
    made = time.perf_counter() - began
    work: dict[str, Any] = {}
    for name in SIDES:
        print(f"  {name}", file=sys.stderr)
        taken = [run(name, folder, families) for _ in range(rounds if blocks < LARGE else 1)]
        work[name] = {key: statistics.median_low([one[key] for one in taken]) for key in taken[0]}
    index = sum(path.stat().st_size for path in folder.glob("index.sqlite*"))
    shutil.rmtree(folder)
    return {
        "blocks": families * PER_FAMILY,
        "snapshots": families * FAMILY,
        "names": families,
        "making_seconds": round(made, 1),
        "index_bytes": index,
        **work,
    }


def run(side: str, folder: Path, families: int) -> dict[str, Any]:
    words = [sys.executable, __file__, "--side", side, str(folder), str(families)]
    done = subprocess.run(words, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, check=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def exponents(measured: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Per kind of work the growth of its time and of its memory, over all sizes and over the largest two."""
    found: dict[str, dict[str, float]] = {}
    for side in SIDES:
        sizes = [one["blocks"] for one in measured]
        for name, key, least in (("time", "cpu_seconds", 1e-6), ("memory", "peak_above_start_bytes", 4096)):
            values = [max(least, one[side][key]) for one in measured]
            found.setdefault(side, {})[name] = slope(sizes, values)
            found[side][f"{name}_of_largest"] = slope(sizes[-2:], values[-2:])
    return found


def slope(sizes: list[int], values: list[float]) -> float:
    x, y = [math.log(n) for n in sizes], [math.log(v) for v in values]
    return round(statistics.linear_regression(x, y).slope, 2)


# the store


def tokens_of(family: int, member: int) -> list[int]:
    shared = random.Random(f"family {family}").choices(range(VOCABULARY), k=SHARED * 64)
    return shared + random.Random(f"member {family} {member}").choices(range(VOCABULARY), k=(BLOCKS - SHARED) * 64)


def model() -> tuple[Any, Any]:
    from kvstore import Group, Identity, Layout

    layout = Layout((Group("full", None, (0,), 1, 4),))
    return layout, Identity.of({"architecture": "benchmark", "weights": "none", "tokenizer": "none"})


def make(folder: Path, families: int) -> None:
    from kvstore import Lineage, Snapshot, Store
    from kvstore.codec import HEADER, encode_coverage, encode_ref, encode_snapshot
    from kvstore.digest import label_file
    from kvstore.objects import Objects
    from kvstore.snapshot import Ref, whole

    layout, identity = model()
    lineages = (Lineage.of({"engine": "benchmark"}),)
    Store.open(folder).close()
    fans = {fan: os.open(folder / "objects" / fan, os.O_RDONLY) for fan in "0123456789abcdef"}
    length = HEADER + 64 * layout.row_bytes(0)
    for family in range(families):
        for member in range(FAMILY):
            contents = [content(family, 0 if block < SHARED else member + 1, block) for block in range(BLOCKS)]
            blocks = tuple((one,) for one in contents)
            items = tuple(tokens_of(family, member))
            snapshot = Snapshot(identity, layout, "default", items, blocks, lineages, (0,) * BLOCKS, model="benchmark")
            digest, data = encode_snapshot(snapshot)
            (folder / "snapshots" / digest.hex).write_bytes(data)
            (folder / "snapshots" / f"{digest}.cov").write_bytes(encode_coverage(whole(digest, snapshot)))
            if member == 0:
                label = f"chat {family}"
                (folder / "refs" / label_file(label)).write_bytes(encode_ref(Ref(label, digest, 0)))
            for one in contents if member == 0 else contents[SHARED:]:
                _, fan, name = Objects.path(one).split("/")
                fd = os.open(name, os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=fans[fan])
                os.ftruncate(fd, length)
                os.close(fd)
    for fd in fans.values():
        os.close(fd)


def content(family: int, member: int, block: int) -> Any:
    from kvstore.digest import content_digest

    return content_digest([f"{family} {member} {block}".encode()])


# the work, each in a process of its own


def measured(work: Callable[[], object]) -> dict[str, float]:
    before, began, busy = peak(), time.perf_counter(), time.process_time()
    work()
    taken = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - busy}
    return {key: round(value, 6) for key, value in taken.items()} | {"peak_above_start_bytes": peak() - before}


def peak() -> int:
    """Most memory of this process so far."""
    if PROC.exists():
        line = next(line for line in PROC.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


def rebuild(folder: Path, _: int) -> dict[str, float]:
    from kvstore import Store
    from kvstore.index import Index

    with Store.open(folder) as store:
        store.indexed(Index.roots)  # open, and entered once already
        return measured(lambda: store.indexed(Index.rebuild))


def lookup(folder: Path, families: int) -> dict[str, float]:
    """One `Store.find`, median: the index, the manifest that it proposes, and whether the objects that loading would read are there."""
    from kvstore import Store
    from kvstore.digest import root_key
    from kvstore.index import Index

    layout, identity = model()
    with Store.open(folder) as store:
        root = root_key(identity.digest, layout.digest, "default")
        queries = list(asked(families))
        for query, cut in queries[: QUERIES // 4]:
            match = store.find(layout, identity, query, namespace="default")
            assert match is not None and match.n == cut, (match, cut)
        before = peak()
        finds, proposals, busy = [], [], []
        for query, _ in queries:
            began, cpu = time.perf_counter(), time.process_time()
            store.find(layout, identity, query, namespace="default")
            between = time.perf_counter()
            busy.append(time.process_time() - cpu)

            def propose(index: Index, items: list[int] = query) -> object:
                return next(index.candidates(root, items))

            store.indexed(propose)
            finds.append(between - began)
            proposals.append(time.perf_counter() - between)
        return {
            "seconds": round(statistics.median(finds), 6),
            "cpu_seconds": round(statistics.median(busy), 6),
            "p95_seconds": round(sorted(finds)[int(0.95 * len(finds))], 6),
            "index_ms": round(1e3 * statistics.median(proposals), 3),
            "index_p95_ms": round(1e3 * sorted(proposals)[int(0.95 * len(proposals))], 3),
            "peak_above_start_bytes": peak() - before,
        }


def asked(families: int) -> Iterator[tuple[list[int], int]]:
    """(tokens, how many of them are here): a beginning of a conversation, cut anywhere, and then something new."""
    chance = random.Random(1)
    for _ in range(QUERIES):
        tokens = tokens_of(chance.randrange(families), chance.randrange(FAMILY))
        cut = chance.randrange(64, len(tokens))
        yield [*tokens[:cut], *[VOCABULARY + 1] * 100], cut


def ls(folder: Path, _: int) -> dict[str, float]:
    from kvstore.report import listing, listing_text
    from kvstore.shelf import Shelf

    with Shelf.open(folder) as shelf:
        return measured(lambda: listing_text(listing(shelf)[0], None))


def gc_plan(folder: Path, _: int) -> dict[str, float]:
    from kvstore import Store, prune

    with Store.open(folder) as store:
        return measured(lambda: prune.plan(store))


def check_quick(folder: Path, _: int) -> dict[str, float]:
    from kvstore import Store
    from kvstore.check import check
    from kvstore.inventory import QUICK

    with Store.open(folder) as store:
        return measured(lambda: check(store, QUICK))


SIDES: dict[str, Callable[[Path, int], dict[str, float]]] = {
    "rebuild": rebuild,
    "lookup": lookup,
    "ls": ls,
    "gc_plan": gc_plan,
    "check_quick": check_quick,
}


def startup(folder: Path) -> dict[str, float]:
    """`kvferry ls` of an empty store, and a bare interpreter, both with their bytecode at hand: CPU time, medians of 15, taken in turn."""
    from kvstore import Store

    surroundings = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    surroundings["PYTHONPYCACHEPREFIX"] = str(folder / "bytecode")

    Store.open(folder / "empty").close()
    sides = {
        "bare": [sys.executable, "-c", "pass"],
        "ls": [sys.executable, "-m", "kvstore", "--store", str(folder / "empty"), "ls"],
    }
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(16):
        for name, words in sides.items():
            began = children()
            subprocess.run(words, stdout=subprocess.DEVNULL, env=surroundings, check=True)
            times[name].append(children() - began)
    medians = {f"{name}_ms": round(1e3 * statistics.median(taken[1:]), 1) for name, taken in times.items()}
    return medians | {"beyond_bare_ms": round(medians["ls_ms"] - medians["bare_ms"], 1)}


def children() -> float:
    """CPU seconds of the processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
