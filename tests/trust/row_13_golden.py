"""Row 13: every golden file of every format version, both ways.

What an older version wrote is read here: by kvstore, by the independent reader of the tests, and by the example that was written from the document
alone; and the present version still writes the same bytes. What a newer version wrote is refused, untouched, with both versions named. The golden files of the
app's checkpoint folder go the same ways.

Measured: 130 attempts in 2 s of computing.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import battery
import test_golden as golden
from battery import Size, Tally, WrongBytes
from harmed import CODEC, PLANES
from independent import COVERAGE, MANIFEST, OBJECT, REF, Reader, frame
from kvmemory import Memory, files, load
from make_golden import fill, fill_planes
from narrow import Narrow

from kvstore import KVError, Store
from kvstore.check import check
from kvstore.digest import SnapshotDigest
from kvstore.errors import FormatTooNew, FormatTooOld

TITLE = "golden files of every version, both ways"
REQUIRED = "every file"
EXAMPLE = battery.HERE.parents[1] / "examples" / "read_kvferry.py"
HEAD = "h" * 64


def run(size: Size, tally: Tally, scratch: Path) -> None:
    stores = [path for path in sorted(golden.GOLDEN.iterdir()) if path.is_dir()]
    with tally.attempt("the golden stores"):
        assert set(stores) == {*golden.STORES, *golden.PLANES, *golden.UNREAD}
    for path in stores:
        place = scratch / path.name
        shutil.copytree(path, place)
        before = files(place)
        if path in golden.UNREAD:
            _refused(tally, place, before)
        else:
            _read(tally, path, place, before)
            _written(tally, path, place, scratch / f"{path.name}-again")
            _newer(tally, place)
    with tally.attempt("the app's checkpoint folder"):
        sys.path.append(str(battery.HERE.parent / "formats"))
        sys.path.append(str(battery.HERE.parent / "runtime"))
        import test_corellm_golden

        (scratch / "checkpoint").mkdir()
        test_corellm_golden.test_the_golden_checkpoint(scratch / "checkpoint")


def _refused(tally: Tally, place: Path, before: dict[str, bytes]) -> None:
    with tally.attempt(f"{place.name}: refused by name and untouched"):
        try:
            Store.open(place).close()
        except FormatTooOld as error:
            assert "found format 1" in str(error)
        else:
            raise AssertionError("opened")
        assert files(place) == before


def _saved(path: Path, items: Sequence[Any], entry: dict[str, Any]) -> Memory:
    """The rows that were saved."""
    return Narrow.causal(items) if path in golden.PLANES else Memory.causal(items, entry["engine"])


def _restore(store: Store, path: Path, name: str, entry: dict[str, Any]) -> None:
    match = store.match(name, head=HEAD)
    assert match.digest.hex == entry["snapshot"] and match.n in (match.snapshot.tokens, match.snapshot.tokens - 1)
    found, want = load(store, match), _saved(path, match.snapshot.items, entry)
    for group, (first, last) in enumerate(match.runs):
        if last != match.n or found.rows(group, first, last) != want.rows(group, first, last):
            raise WrongBytes(f"group {group}")


def _read(tally: Tally, path: Path, place: Path, before: dict[str, bytes]) -> None:
    reader = Reader(place)
    with Store.open(place) as store:
        for name, entry in golden.expected(path).items():
            with tally.attempt(f"{path.name}: {name} read by kvstore"):
                _restore(store, path, name, entry)
            with tally.attempt(f"{path.name}: {name} read by the independent reader"):
                digest = reader.ref(name)
                assert digest.hex() == entry["snapshot"]
                snapshot = store.match(name).snapshot
                memory, rows = _saved(path, snapshot.items, entry), reader.rows(digest)
                for g, group in enumerate(snapshot.layout.groups):
                    for at, (layer, part) in enumerate((layer, part) for layer in group.layers for part in "KV"):
                        assert rows[layer, part]
                        for token, row in rows[layer, part].items():
                            if row != memory.rows(g, token, token + 1)[at]:
                                raise WrongBytes(f"layer {layer}, {part}, row {token}")
            with tally.attempt(f"{path.name}: {name} read by the example"):
                done = subprocess.run(
                    [sys.executable, str(EXAMPLE), str(place), name], capture_output=True, check=False
                )
                assert done.returncode == 0, done.stderr
        with tally.attempt(f"{path.name}: checked"):
            assert check(store).ok
    with tally.attempt(f"{path.name}: untouched by all that"):
        assert files(place) == before


def _written(tally: Tally, path: Path, place: Path, again: Path) -> None:
    copies = files(place)
    for name, data in copies.items():
        with tally.attempt(f"{path.name}: {name} written again"):
            assert _encoded(name, data, copies) == data
    if path in (max(golden.STORES), max(golden.PLANES)):
        with tally.attempt(f"{path.name}: made again"):
            (fill_planes if path in golden.PLANES else fill)(again)
            made = files(again)
            assert made.keys() == copies.keys()
            for name, data in copies.items():
                planes = (
                    name.startswith("objects/") and data[CODEC] == PLANES
                )  # a compressor may make other bytes of the same
                assert made[name] == data or (planes and made[name][:24] == data[:24]), name


def _encoded(name: str, data: bytes, copies: dict[str, bytes]) -> bytes:
    """The file that the present version makes of what it reads in ``data``."""
    from kvstore.codec import decode_coverage, decode_ref, decode_snapshot, encode_coverage, encode_ref, encode_snapshot

    folder, _, rest = name.partition("/")
    if folder == "refs":
        return encode_ref(decode_ref(data, name))
    if folder == "snapshots":
        digest = SnapshotDigest.parse(rest.removesuffix(".cov"))
        snapshot = decode_snapshot(copies[f"snapshots/{digest}"], digest)
        if rest.endswith(".cov"):
            return encode_coverage(decode_coverage(data, digest, len(snapshot.layout.groups), len(snapshot.blocks)))
        made, written = encode_snapshot(snapshot)
        assert made == digest
        return written
    if folder == "objects":
        from store_parsers import object_again

        return object_again(data)
    assert name == "format.json"
    return data


def _newer(tally: Tally, place: Path) -> None:
    """What the next version may write: another store format, another version of one file, a feature that nobody knows yet."""
    head = json.loads((place / "format.json").read_bytes())
    ahead = {**head, "format": head["format"] + 1}
    _refuses(tally, place, "format.json", json.dumps(ahead).encode(), (head["format"], ahead["format"]), _open)
    unknown = {**head, "features": [*head["features"], "time travel"]}
    _refuses(tally, place, "format.json", json.dumps(unknown).encode(), ("time travel",), _open)
    for kind, find in (
        (OBJECT, "objects/*/*"),
        (MANIFEST, "snapshots/*"),
        (COVERAGE, "snapshots/*.cov"),
        (REF, "refs/*"),
    ):
        for file in sorted(place.glob(find)):
            data = file.read_bytes()
            if data[10] == kind and data[11] == 0:
                name = file.relative_to(place).as_posix()
                _refuses(tally, place, name, frame(kind, data[128:], version=2), (1, 2), _restore_all)


def _open(place: Path) -> None:
    Store.open(place).close()


def _restore_all(place: Path) -> None:
    """Every name; one at least needs the file that is changed, or a check names it."""
    path = golden.GOLDEN / place.name
    with Store.open(place) as store:
        for name, entry in golden.expected(path).items():
            _restore(store, path, name, entry)
        report = check(store)
        for problem in report.problems:
            raise FormatTooNew(f"{problem.path}: {problem.found}")


def _refuses(
    tally: Tally, place: Path, name: str, data: bytes, named: tuple[object, ...], read: Callable[[Path], None]
) -> None:
    with tally.attempt(f"{place.name}: a newer {name}"):
        good = (place / name).read_bytes()
        (place / name).write_bytes(data)
        before = files(place)
        try:
            read(place)
        except KVError as error:
            assert isinstance(error, FormatTooNew), repr(error)
            assert all(str(one) in str(error) for one in named), error
        else:
            raise AssertionError("read as if it were not newer")
        finally:
            after = files(place)
            (place / name).write_bytes(good)
        assert after == before, "touched"
