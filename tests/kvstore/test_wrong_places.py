"""Something else in the place of each file and folder of a store: every act does its work, or is refused by class, path and advice."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from kvmemory import expect_rows, find, object_file, save
from sentences import assert_told

from kvstore import Store, prune
from kvstore.check import check
from kvstore.digest import label_file
from kvstore.errors import KVError, Missing, SnapshotMissing
from kvstore.report import describe, listing
from kvstore.usage import usage

ITEMS = list(range(150))

READING = {"ls", "show", "du", "restore", "find", "check"}
"""They leave the files as they are."""

ACTS: dict[str, Callable[[Store], object]] = {
    "ls": lambda s: [damage for damage in listing(s.shelf)[1] if _raise(damage)],
    "show": lambda s: describe(s, "a"),
    "du": usage,
    "restore": lambda s: expect_rows(s, s.match("a")),
    "find": lambda s: find(s, [*ITEMS, 1]),
    "check": check,
    "save": lambda s: save(s, [*ITEMS, 1, 2], name="b"),
    "save the same": lambda s: save(s, ITEMS, name="a"),
    "gc": lambda s: prune.apply(s, prune.plan(s)),
    "purge": prune.purge,
    "rename": lambda s: s.shelf.records.rename_ref("a", "c"),
    "rm": lambda s: s.shelf.records.remove(["a"]),
}


def _raise(error: KVError) -> bool:
    raise error


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "s"
    with Store.open(path) as store:
        save(store, ITEMS, name="a")
        save(store, [7] * 70)
    return path


@pytest.mark.parametrize("harm", ["a file", "a folder", "nothing"])
@pytest.mark.parametrize(
    "entry",
    ["format.json", "lock", "index.sqlite", "objects", "snapshots", "refs", "tmp", "quarantine", "trash",
     "OBJECT", "FAN", "MANIFEST", "COVERAGE", "REF"],
)  # fmt: skip
def test_something_else_in_its_place(whole: Path, tmp_path: Path, entry: str, harm: str) -> None:
    with Store.open(whole, create=False) as store:
        snapshot, digest = store.match("a").snapshot, store.resolve("a")
    thing = object_file(tmp_path / "s", snapshot.blocks[0][0])
    path = {
        "OBJECT": thing,
        "FAN": thing.parent,
        "MANIFEST": tmp_path / "s" / "snapshots" / digest.hex,
        "COVERAGE": tmp_path / "s" / "snapshots" / f"{digest}.cov",
        "REF": tmp_path / "s" / "refs" / label_file("a"),
    }.get(entry, tmp_path / "s" / entry)
    refusals = 0
    for verb, act in ACTS.items():
        if verb not in READING or verb == "ls":
            shutil.rmtree(tmp_path / "s", ignore_errors=True)
            shutil.copytree(whole, tmp_path / "s")
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            if harm == "a folder":
                path.mkdir()
                (path / "letter").write_bytes(b"dear")
            elif harm == "a file":
                path.write_bytes(b"dear")
        try:
            with Store.open(tmp_path / "s", create=False) as store:
                act(store)
        except SnapshotMissing:
            assert (entry, harm) in {("REF", "nothing"), ("MANIFEST", "nothing"), ("refs", "nothing"), ("refs", "a folder"),
                                     ("snapshots", "nothing"), ("snapshots", "a folder")}, verb  # fmt: skip
        except Missing as error:
            refusals += 1
            assert harm != "a file" and path.name not in ("lock", "format.json"), (verb, error)
        except KVError as error:
            refusals += 1
            assert type(error) is not KVError, verb
            assert_told(error)
        except OSError as error:
            refusals += 1
            assert (harm == "nothing" or entry == "objects") and error.filename is not None, (verb, error)
            assert str(error.filename).startswith(str(tmp_path / "s")), (verb, error)
        if harm == "a folder" and entry not in ("tmp", "quarantine", "trash", "refs", "REF", "index.sqlite"):
            assert (path / "letter").read_bytes() == b"dear", "what is not ours is left alone"
    if entry in ("format.json", "OBJECT", "MANIFEST", "REF") and harm != "nothing":
        assert refusals
