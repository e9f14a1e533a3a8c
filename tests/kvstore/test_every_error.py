"""Every error of all three packages has the one root and travels whole; and what really raises one says what to do about it."""

from __future__ import annotations

import importlib
import json
import pickle
import pkgutil
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from kvmemory import IDENTITY, LAYOUT, Memory, find, lineage, object_file, save

import kvstore
import runtime
import sync
from kvstore import Group, Identity, Layout, Store, errors
from kvstore.errors import KVError
from kvstore.identity import require_same
from kvstore.layout import BLOCK
from kvstore.testing import other_identity, tokens

OPTIONAL = {"CoreML", "Foundation", "objc", "coremltools", "gguf", "sentencepiece", "safetensors", "aiohttp", "obstore"}
"""Packages without which a module of ours is not imported here: its errors are tested where it is."""

ELSEWHERE = {
    "StoreFull": "test_quota",
    "WouldDeleteMost": "test_prune",
    "Unreachable": "sync",
    "SignaturesCorrupt": "test_signatures",
    "Unsigned": "sync",
}
"""Errors of the store that it takes more to raise than these few lines; their own tests do."""

FAMILIES = {"KVError", "Missing", "Corrupt", "Refused"}


def modules(package: ModuleType) -> Iterator[ModuleType]:
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if found.name.endswith("__main__"):
            continue
        try:
            yield importlib.import_module(found.name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in OPTIONAL:
                raise


def kinds() -> list[type[KVError]]:
    found = {
        value
        for package in (kvstore, runtime, sync)
        for module in modules(package)
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, Exception)
        and value.__module__.partition(".")[0] == package.__name__
    }
    return sorted(found, key=lambda kind: (kind.__module__, kind.__qualname__))


KINDS = kinds()
INTERNAL = {"Behind", "NoRoom"}
"""Signals inside a package that no caller sees."""


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__qualname__)
def test_it_has_the_one_root_and_is_picklable(kind: type[KVError]) -> None:
    if kind.__name__ in INTERNAL or kind.__name__.startswith("_"):
        return
    assert issubclass(kind, KVError), f"{kind.__module__}.{kind.__name__}: expected a KVError"
    details = {"field": "x", "found": 3, "file": "f", "expected": "2", "fields": [("a", 1, b"2")]}
    error = kind("x: expected 2, found 3. Give 2.", **details)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind and str(again) == error.message == again.message and dict(again.details) == details
    assert again.__dict__ == error.__dict__ and 1 <= again.exit_code <= 10


def test_they_are_really_looked_at() -> None:
    names = {kind.__name__ for kind in KINDS}
    assert {
        "ObjectCorrupt",
        "JsonInvalid",
        "CheckpointCorrupt",
        "ContextOverflow",
        "BundleDamaged",
        "GateFailed",
    } <= names


# raised in earnest


def missing_snapshot(store: Store, path: Path) -> None:
    store.match("nothing")


def missing_object(store: Store, path: Path) -> None:
    match = store.match("a")
    object_file(path, match.snapshot.blocks[0][0]).unlink()
    store.load(match, Memory(LAYOUT, match.n))


def corrupt_object(store: Store, path: Path) -> None:
    match = store.match("a")
    file = object_file(path, match.snapshot.blocks[0][0])
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    store.load(match, Memory(LAYOUT, match.n))


def missing_store(store: Store, path: Path) -> None:
    Store.open(path / "refs" / "nowhere", create=False)


def damaged(file: Callable[[Store], str]) -> Callable[[Store, Path], None]:
    def act(store: Store, path: Path) -> None:
        (path / file(store)).write_bytes(b"damaged")
        store.match("a")

    return act


def stored_format(line: str) -> Callable[[Store, Path], None]:
    def act(store: Store, path: Path) -> None:
        (path / "format.json").write_text(line)
        Store.open(path)

    return act


def another(identity: Identity, layout: Layout = LAYOUT) -> Callable[[Store, Path], None]:
    return lambda store, path: require_same((IDENTITY, LAYOUT), (identity, layout), "snapshot x")


def refused_rows(store: Store, path: Path) -> None:
    known = store.match("a").snapshot.blocks[:-1]
    store.shelf.root.remove(f"snapshots/{store.resolve('a')}.cov")
    for name in {content for block in known for content in block[1:]}:
        object_file(path, name).unlink(missing_ok=True)
    items = tokens(5 * BLOCK + 10)
    save(store, items, covered=(0, 3 * BLOCK), known=known, name="b")
    store.match("b", at=BLOCK)


def conflict(store: Store, path: Path) -> None:
    save(store, [1, 2], name="a", expect=None)


def busy(store: Store, path: Path) -> None:
    with store.shelf.root.lock("lock", exclusive=True), store.shelf.exclusive(seconds=0.01):
        pass


RAISED: dict[str, Callable[[Store, Path], None]] = {
    "SnapshotMissing": missing_snapshot,
    "ObjectMissing": missing_object,
    "StoreMissing": missing_store,
    "ObjectCorrupt": corrupt_object,
    "SnapshotCorrupt": damaged(lambda store: f"snapshots/{store.resolve('a')}"),
    "CoverageCorrupt": damaged(lambda store: f"snapshots/{store.resolve('a')}.cov"),
    "RefCorrupt": damaged(lambda store: f"refs/{store.shelf.records.ref_files()[0]}"),
    "StoreCorrupt": stored_format("nonsense"),
    "FormatTooNew": stored_format('{"format": 99, "features": []}'),
    "FormatTooOld": stored_format('{"format": 1, "features": []}'),
    "IdentityMismatch": another(other_identity(weights="w1", tokenizer="t1")),
    "WeightsMismatch": another(other_identity(weights="w1")),
    "SidecarMismatch": another(other_identity(sidecars=(("embed", "e1"),))),
    "TokenizerMismatch": another(other_identity(tokenizer="t1")),
    "LayoutMismatch": another(IDENTITY, Layout((Group("full", None, (0,), 1, 4),))),
    "NotCovered": refused_rows,
    "RefConflict": conflict,
    "LabelInvalid": lambda store, path: store.match(" "),
    "InputInvalid": lambda store, path: find(store, [-1]),
    "StoreBusy": busy,
}

WHAT_TO_DO = re.compile(r"`kvferry |\b(Choose|Give|Look|Pull|Save|Use|upgrade|Try) |expected .+, found ")
"""A command, an imperative, or for an argument what it should have been."""


def test_every_error_of_the_store_is_raised_here_or_elsewhere() -> None:
    own = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, KVError)}
    assert own == RAISED.keys() | ELSEWHERE.keys() | FAMILIES


@pytest.mark.parametrize("name", RAISED)
def test_what_is_raised_says_what_to_do_and_travels(name: str, tmp_path: Path) -> None:
    path = tmp_path / "s"
    with Store.open(path) as store:
        save(store, tokens(5 * BLOCK + 10), name="a", lineage=[lineage()] * 6)
        with pytest.raises(getattr(errors, name)) as caught:
            RAISED[name](store, path)
    error = caught.value
    assert type(error) is getattr(errors, name)
    assert WHAT_TO_DO.search(error.message), error.message
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and again.message == error.message
    assert dict(again.details) == dict(error.details)
    assert json.loads(json.dumps(dict(error.details), default=str)) is not None
