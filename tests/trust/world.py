"""Operations on small stores, and what must hold of the stores whatever happened meanwhile. Rows that disturb an operation share this.

A *world* is a folder with several stores in it, made once and copied for each attempt. An operation leads from the names before it to
the names after it. Interrupted, it may have got anywhere between; what it did not touch stands, nothing is half there, and the same
operation run again ends where it should.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy  # noqa: F401 - what planes need is loaded before anybody counts system calls
import zstandard  # noqa: F401
from battery import Lost, WrongBytes
from kvmemory import HEAD, Memory, find, load
from kvmemory import save as save_rows

from kvstore import Store, prune, recode, trash
from kvstore.check import check
from kvstore.codec import Codec
from kvstore.errors import Corrupt, Missing, NotCovered, ObjectMissing
from sync import Folder, pull, push

Items = tuple[int, ...]
Names = Mapping[str, Items]
"""What each name of one store stands for."""
State = Mapping[str, Names]
"""By store, the folder's name in the world."""

STEM = tuple((3 * i) % 90 for i in range(130))
GROWN = (*STEM, 1, 2, 3)
BOOK = (*STEM[:128], 7, 8, 9)
"""Shares two blocks with `STEM`, and so their objects."""

GONE = (6, *STEM[:70])

BEFORE: State = {
    "store": {"a": STEM, "other": (9, 9, 9), "small": (8, *STEM[:80])},
    "remote": {"book": BOOK, "a": STEM[:70]},
}


@dataclass(frozen=True, slots=True)
class Operation:
    """``run`` acts on a world and may be repeated; ``after``: the stores that it changes. ``found``: the items that `Store.find` must find
    afterwards, of an unnamed save."""

    name: str
    run: Callable[[Path], object]
    after: State
    found: Items | None = None
    partial: bool = False
    """When it raises, a new name may stand for a part of what it will stand for, which is told of whoever asks for more."""


def make(world: Path) -> None:
    """Makes the stores before any operation: one name in planes, a removed one in the trash, some unnamed cache."""
    world.mkdir()
    for folder, names in BEFORE.items():
        with Store.open(world / folder) as store:
            for name, items in names.items():
                save(store, name, items, codec="planes" if name == "small" else "raw")
            save(store, "gone", GONE)
            store.shelf.records.remove(["gone"])
            prune.apply(store, prune.plan(store))
            save(store, None, (5, *STEM[:70]))


def rows_of(items: Items) -> Memory:
    """What the engine computes for these tokens. As with real fp16, the high bytes of its numbers are alike."""
    memory = Memory.causal(items)
    for group in range(len(memory.layout.groups)):
        for span in memory.spans(group, 0, len(items)):
            span[1::2] = bytes(span[1::2]).translate(_HIGH)
    return memory


_HIGH = bytes(0x3C | byte & 3 for byte in range(256))


def save(store: Store, name: str | None, items: Items, codec: Codec = "raw") -> None:
    """With the token that follows, so that a restore gives all rows back."""
    save_rows(store, items, rows=rows_of(items), name=name, pending=7, head=HEAD, codec=codec)


def copied(made: Path, to: Path) -> Path:
    """A world like ``made``, in the place of what is there. Times of files and folders are kept: the index compares them."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(made, to)
    return to


def collect(store: Store) -> None:
    """All that `kvferry gc --purge` does, without its pauses for others."""
    prune.PAUSE = 0.0
    prune.apply(store, prune.plan(store))
    prune.purge(store)


def saving(folder: str, name: str | None, items: Items, codec: Codec = "raw") -> Callable[[Path], object]:
    def run(world: Path) -> None:
        with Store.open(world / folder) as store:
            save(store, name, items, codec)

    return run


def _rename(world: Path) -> None:
    with Store.open(world / "store") as store:
        if store.shelf.records.ref("a") is not None:
            store.shelf.records.rename_ref("a", "b")


def removing(world: Path, name: str) -> None:
    with Store.open(world / "store") as store:
        if store.shelf.records.ref(name) is not None:
            store.shelf.records.remove([name])


def _collect(world: Path) -> None:
    with Store.open(world / "store") as store:
        collect(store)


def _restore(world: Path) -> None:
    with Store.open(world / "store") as store:
        if any("gone" in one.names for one in trash.collected(store.shelf)):
            back = trash.restore(store, "gone")
            if back.lacking:
                raise ObjectMissing(f"{back.lacking} objects of 'gone' could not be brought back")


def _recode(to: Codec) -> Callable[[Path], object]:
    def run(world: Path) -> None:
        with Store.open(world / "store") as store:
            recoded = recode.apply(store, recode.plan(store, to))
            assert not recoded.damaged

    return run


def _pull(folder: str) -> Callable[[Path], object]:
    def run(world: Path) -> None:
        with Store.open(world / folder) as store, Folder.open(world / "remote") as remote:
            pull(store, remote, ["book"])

    return run


def _push(world: Path) -> None:
    with Store.open(world / "store") as store, Folder.open(world / "remote", create=True) as remote:
        push(store, remote, ["a"])


STORE, REMOTE = BEFORE["store"], BEFORE["remote"]
WITHOUT_A = {name: items for name, items in STORE.items() if name != "a"}
OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation("save", saving("store", "new", BOOK), {"store": {**STORE, "new": BOOK}}),
        Operation("save over", saving("store", "a", GROWN), {"store": {**STORE, "a": GROWN}}),
        Operation("save unnamed", saving("store", None, GROWN), {}, GROWN),
        Operation("save in a new store", saving("fresh", "new", STEM[:70]), {"fresh": {"new": STEM[:70]}}),
        Operation("rename", _rename, {"store": {**WITHOUT_A, "b": STEM}}),
        Operation("remove", lambda world: removing(world, "a"), {"store": WITHOUT_A}),
        Operation("collect", _collect, {}),
        Operation("restore from the trash", _restore, {"store": {**STORE, "gone": GONE}}, partial=True),
        Operation("save as planes", saving("store", "new", BOOK, "planes"), {"store": {**STORE, "new": BOOK}}),
        Operation("recode to planes", _recode("planes"), {}),
        Operation("recode to raw", _recode("raw"), {}),
        Operation("pull", _pull("store"), {"store": {**STORE, "book": BOOK}}),
        Operation("pull into a new store", _pull("fresh"), {"fresh": {"book": BOOK}}),
        Operation("push", _push, {"remote": {**REMOTE, "a": STEM}}),
    )
}
"""By name."""


def names_in(path: Path, incomplete: str | None = None) -> dict[str, Items]:
    """What every name of a store restores, all bytes compared. `Lost` where one can't be restored, `WrongBytes`. The name ``incomplete`` is left
    out where only a part of it is there."""
    found = {}
    with Store.open(path, create=False) as store:
        for ref in store.shelf.records.refs():
            try:
                found[ref.label] = restored(store, ref.label)
            except NotCovered:
                if ref.label != incomplete:
                    raise
    return found


def restored(store: Store, label: str) -> Items:
    """The items of a name, whose rows are what the engine had computed for them."""
    try:
        match = store.match(label, head=HEAD)
        rows = load(store, match)
    except (Missing, Corrupt) as error:
        raise Lost(f"{label!r} is named and can't be restored: {error}") from error
    if match.n != match.snapshot.tokens:
        raise Lost(f"{label!r}: {match.n} of {match.snapshot.tokens} tokens can be restored")
    _compare(rows, match)
    return tuple(match.snapshot.items)  # type: ignore[arg-type]


def _compare(rows: Memory, match: object) -> None:
    want = rows_of(match.snapshot.items)  # type: ignore[attr-defined]
    for group, (first, last) in enumerate(match.runs):  # type: ignore[attr-defined]
        if rows.rows(group, first, last) != want.rows(group, first, last):
            raise WrongBytes(f"group {group}, rows {first} to {last} of {match.digest}")  # type: ignore[attr-defined]


def require_sound(path: Path) -> None:
    """A full check finds nothing."""
    with Store.open(path, create=False) as store:
        report = check(store)
    if report.problems:
        kind = Lost if any(named.usable != named.tokens for named in report.names) else AssertionError
        raise kind(f"{path.name}: {report}")


def require_found(path: Path, items: Items) -> None:
    """An unnamed snapshot that was acknowledged is found whole, and is what it was."""
    with Store.open(path, create=False) as store:
        match = find(store, (*items, 89))
        if match is None or match.n != len(items):
            raise Lost(f"unnamed: {0 if match is None else match.n} of {len(items)} tokens found")
        _compare(load(store, match), match)


def judge(world: Path, operation: Operation, *, returned: bool, before: State = BEFORE) -> None:
    """What holds right after the operation, or after it was disturbed. Changes nothing but indexes."""
    end = {**before, **operation.after}
    for folder in end:
        if not (world / folder / "format.json").exists():
            if folder in before or returned:
                raise Lost(f"the store {folder} has no format.json")
            continue  # its making was interrupted; the next run goes on
        require_sound(world / folder)
        was, should = before.get(folder, {}), end[folder]
        new = next(iter(should.keys() - was.keys()), None)
        now = names_in(world / folder, new if operation.partial and not returned else None)
        if returned and now != should:
            raise Lost(f"{operation.name} returned; {folder}: expected {told(should)}, found {told(now)}")
        for label in was.keys() | should.keys() | now.keys():
            if now.get(label) not in (was.get(label), should.get(label)):
                raise Lost(f"{folder}: {label!r}: expected {told(was)} or {told(should)}, found {told(now)}")
        if gone := (set(was.values()) & set(should.values())) - set(now.values()):
            raise Lost(f"{folder}: no name stands for the {len(next(iter(gone)))} tokens any more, found {told(now)}")
    if returned and operation.found is not None:
        require_found(world / "store", operation.found)


def finish(world: Path, operation: Operation, before: State = BEFORE) -> None:
    """The same operation once more, undisturbed: it ends where it should. Then a collection leaves no trace of what was interrupted."""
    operation.run(world)
    judge(world, operation, returned=True, before=before)
    for folder, names in {**before, **operation.after}.items():
        with Store.open(world / folder, create=False) as store:
            collect(store)
        left = [path.name for part in ("tmp", "quarantine", "trash") for path in (world / folder / part).iterdir()]
        assert not left, f"{folder}: after a collection there is still {left[:5]}"
        require_sound(world / folder)
        if (now := names_in(world / folder)) != names:
            raise Lost(f"{folder}, after a collection: expected {told(names)}, found {told(now)}")


def told(names: Names) -> str:
    return "{" + ", ".join(f"{label}: {len(items)} tokens" for label, items in sorted(names.items())) + "}"
