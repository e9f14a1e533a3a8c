"""One-file snapshots: written, read, cut anywhere, damaged anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from ferries import assert_restores, object_files, save

from kvstore import KVError, Store
from kvstore.errors import Corrupt, RefConflict, Refused
from sync.carry import unmetered
from sync.onefile import FileCorrupt, Imported, export, import_, plan_export, write


def exported(store: Store, name: str, path: Path, *, trimmed: bool = False) -> bytes:
    plan = plan_export(store, name, trimmed=trimmed)
    with unmetered(0) as advance:
        write(path, export(store, plan, advance), force=False)
    data = path.read_bytes()
    assert len(data) == plan.bytes
    return data


def imported(store: Store, data: bytes, size: int = 1 << 16, **options: object) -> Imported:
    pieces: Iterator[bytes] = (data[at : at + size] for at in range(0, len(data), size))
    with unmetered(0) as advance:
        return import_(store, pieces, "x.kvferry", **{"name": None, "force": False, **options}, advance=advance)  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 511, 512, 513, 700])
@pytest.mark.parametrize("trimmed", [False, True])
def test_there_and_back(tmp_path: Path, tokens: int, trimmed: bool) -> None:
    with Store.open(tmp_path / "a") as a, Store.open(tmp_path / "b") as b:
        save(a, "book", tokens)
        data = exported(a, "book", tmp_path / "book.kvferry", trimmed=trimmed)
        made = imported(b, data)
        assert made.bytes == len(data)
        assert made.carried.label == "book"
        assert_restores(b, "book", tokens)
        again = imported(b, data)
        assert (again.objects, again.landed) == (made.objects, 0)


def test_cut_into_single_bytes(tmp_path: Path) -> None:
    with Store.open(tmp_path / "a") as a, Store.open(tmp_path / "b") as b:
        save(a, "book", 70)
        imported(b, exported(a, "book", tmp_path / "f"), size=1, name="another")
        assert_restores(b, "another", 70)


def test_every_cut_and_every_flip_is_refused(tmp_path: Path) -> None:
    """At edges of frames and within them; nothing becomes visible."""
    with Store.open(tmp_path / "a") as a, Store.open(tmp_path / "b") as b:
        save(a, "book", 70)
        data = exported(a, "book", tmp_path / "f")
        for at in sorted({*range(0, len(data), 401), *range(0, 128 * 8, 31), len(data) - 1}):
            with pytest.raises((Corrupt, KVError)) as cut:
                imported(b, data[:at])
            assert isinstance(cut.value, Corrupt), cut.value
            flipped = bytearray(data)
            flipped[at] ^= 0x10
            with pytest.raises(KVError):
                imported(b, bytes(flipped))
        with pytest.raises(FileCorrupt, match="more bytes"):
            imported(b, data + b"\0")
        assert list(b.shelf.records.refs()) == []
        assert list(b.shelf.records.snapshots()) == []
        assert not object_files(tmp_path / "b")
        imported(b, data)
        assert_restores(b, "book", 70)


def test_a_damaged_object_here_is_not_exported(tmp_path: Path) -> None:
    with Store.open(tmp_path / "a") as a:
        save(a, "book", 300)
        victim = object_files(tmp_path / "a")[0]
        data = bytearray(victim.read_bytes())
        data[-1] ^= 1
        victim.write_bytes(data)
        with pytest.raises(Corrupt):
            exported(a, "book", tmp_path / "f.kvferry")
        assert not list(tmp_path.glob("*f.kvferry*"))
        assert not list(tmp_path.glob(".f*"))


def test_a_name_moves_only_forward(tmp_path: Path) -> None:
    with Store.open(tmp_path / "a") as a, Store.open(tmp_path / "b") as b:
        save(a, "book", 128)
        short = exported(a, "book", tmp_path / "short")
        save(a, "book", 300)
        longer = exported(a, "book", tmp_path / "longer")
        imported(b, short)
        imported(b, longer)
        assert_restores(b, "book", 300)
        with pytest.raises(RefConflict):
            imported(b, short)
        imported(b, short, force=True)
        assert_restores(b, "book", 128)


def test_a_file_that_is_there_is_kept(tmp_path: Path) -> None:
    with Store.open(tmp_path / "a") as a:
        save(a, "book", 10)
        (tmp_path / "f").write_text("mine")
        with pytest.raises(Refused, match="--force"):
            exported(a, "book", tmp_path / "f")
        assert (tmp_path / "f").read_text() == "mine"
