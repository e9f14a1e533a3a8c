"""Makes `golden/format-2`: one small store with all that format 2 can hold. Run once per format version and feature, never again.

    python tests/kvstore/make_golden.py tests/kvstore/golden/format-2
    python tests/kvstore/make_golden.py tests/kvstore/golden/format-2-planes

Its rows are those of `kvmemory.Memory.causal`, or with planes of `narrow.Narrow`; the ``.json`` beside the store says what a reader has to find.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import narrow
from kvmemory import carry, save

from kvstore import Lineage, SoftToken, Store
from kvstore.codec import encode_ref
from kvstore.digest import label_file, soft_row_digest
from kvstore.snapshot import Receipt, Ref

PICTURE = SoftToken(7, soft_row_digest(b"\0\x3c\0\xbc"))
ITEMS = [*range(100), *[PICTURE] * 3, *range(300, 347)]
"""150 tokens: two whole blocks and a short one; the picture crosses no block's edge."""
LONG = [(5 * i) % 97 for i in range(330)]
"""Long enough that trimming leaves out blocks of the windowed group."""


def fill(path: Path) -> None:
    cpu, gpu = (Lineage.of({"engine": engine, "os": "test"}) for engine in ("cpu", "gpu"))
    with (
        tempfile.TemporaryDirectory() as folder,
        Store.open(Path(folder) / "whole") as whole,
        Store.open(path) as store,
    ):
        receipt = Receipt((8, 9, 1), 3, "cap")
        save(store, ITEMS, "cpu", name="whole", lineage=[cpu, cpu, gpu], pending=8, head="h" * 64, receipt=receipt)
        save(store, ITEMS, "gpu", name="Gabelung ü", lineage=[gpu] * 3, namespace="default", model="tiny")
        save(store, ITEMS[:70], "cpu", namespace="other")
        made = save(whole, LONG, "cpu", pending=4, head="h" * 64)
        carry(whole, store, made.digest)
        store.shelf.records.move_ref("trimmed", None, made.digest)
        expected = {
            name: {"snapshot": store.match(name).digest.hex, "engine": engine, "runs": runs}
            for name, engine, runs in (
                ("whole", "cpu", [[[0, 3]], [[0, 3]]]),
                ("Gabelung ü", "gpu", [[[0, 3]], [[0, 3]]]),
                ("trimmed", "cpu", [[[0, 6]], [[3, 6]]]),
            )
        }
    _settle(path, expected)


def fill_planes(path: Path) -> None:
    """A store that lists the feature: a snapshot whose objects are planes, and one that has two blocks of it and two raw ones."""
    with Store.open(path) as store:
        narrow.save(store, LONG, name="planes", codec="planes", pending=4, head="h" * 64)
        narrow.save(store, [*LONG[:128], *range(67)], name="mixed")
        expected = {
            name: {"snapshot": store.match(name).digest.hex, "tokens": store.match(name).snapshot.tokens}
            for name in ("planes", "mixed")
        }
    _settle(path, expected)


def _settle(path: Path, expected: Mapping[str, Any]) -> None:
    """Leaves what a second run makes as well, and says what is to be found."""
    with Store.open(path) as store:
        for ref in store.shelf.records.refs():  # the time is the only thing that a second run would make differently
            file = path / "refs" / label_file(ref.label)
            file.write_bytes(encode_ref(Ref(ref.label, ref.snapshot, 1796000000)))
    for name in ("index.sqlite", "index.sqlite-wal", "index.sqlite-shm", "lock"):
        (path / name).unlink(missing_ok=True)
    for folder in sorted((p for p in path.rglob("*") if p.is_dir()), reverse=True):
        if not any(folder.iterdir()):
            folder.rmdir()  # git keeps no empty folders
    lines = (f"  {json.dumps(name, ensure_ascii=False)}: {json.dumps(entry)}" for name, entry in expected.items())
    (path.parent / f"{path.name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    target = Path(sys.argv[1])
    if target.exists():
        raise SystemExit(f"{target} is there: golden files are added, never rewritten")
    target.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        make = fill_planes if target.name.endswith("-planes") else fill
        make(Path(scratch) / target.name)
        shutil.move(Path(scratch) / target.name, target)
        shutil.move(Path(scratch) / f"{target.name}.json", target.parent)
