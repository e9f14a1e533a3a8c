"""Row 7: eight processes write to one store, one collects and one checks, all at once.

Six of the eight save, two pull from a remote. No name may ever stand for an object that is missing, nobody may get other bytes, and nobody
may get an error: an attempt is one thing that one of them did. Afterwards every name that was given and not removed is restored.

Measured: 73 s on a busy machine, 60 of them at work.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from battery import Lost, Size, Tally
from crowd import CARRIED, restore
from kvmemory import HEAD, save

from kvstore import Store
from kvstore.check import check
from sync import Folder, push

TITLE = "8 writers, a collector and a checker at once"
REQUIRED = "60 s"
ROLES = ("writer",) * 6 + ("ferry",) * 2 + ("collector", "checker")
HERE = Path(__file__).parent


def run(size: Size, tally: Tally, scratch: Path) -> None:
    seconds = size.pick(4, 60)
    path, remote = scratch / "store", scratch / "remote"
    with Store.open(scratch / "source") as source, Folder.open(remote, create=True) as folder:
        for name, items in CARRIED.items():
            save(source, items, name=name, pending=3, head=HEAD)
        push(source, folder, list(CARRIED))
    Store.open(path).close()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", START, role, *map(str, (number, size.seed, seconds, path, remote))],
            stdout=subprocess.PIPE,
            text=True,
            cwd=scratch,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE)])},
        )
        for number, role in enumerate(ROLES)
    ]
    names: dict[str, list[int]] = {}
    for role, process in zip(ROLES, processes, strict=True):
        said, _ = process.communicate()
        with tally.attempt(f"the {role} ends"):
            result = json.loads(said)
            tally.add(result["tally"])
            names |= result["names"]
    with tally.attempt("everybody had a turn"):
        idle = {"saves", "loads", "pulls", "collections", "checks"} - tally.facts.keys()
        assert not idle, f"not once: {sorted(idle)}"
    with Store.open(path) as store:
        with tally.attempt("the last check"):
            report = check(store)
            if not report.ok:
                raise Lost(str(report))
            tally.facts["objects at the end"] = report.objects
        with tally.attempt("the names at the end"):
            if {ref.label for ref in store.shelf.records.refs()} != set(names):
                raise Lost("names that were given, or removed ones that are there")
        for name, items in names.items():
            with tally.attempt(f"restoring {name!r} at the end"):
                restore(store, name, items)
    tally.facts["names at the end"] = len(names)


START = "import sys, battery, crowd; crowd.main(*sys.argv[1:2], *map(int, sys.argv[2:4]), float(sys.argv[4]), *map(crowd.Path, sys.argv[5:]))"
"""Through `battery`, which says where the store's own test tools are."""
