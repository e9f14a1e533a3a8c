"""An export appears whole or not at all, replaces nothing, and clears away what a killed one left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from corellm_models import WHEN, app, export, manifest, save, some_rows, some_tokens, tree, write_bundle

from kvstore import Store
from kvstore.errors import InputInvalid, KVError, Refused
from kvstore.files import Root


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("published") / "gemma-small", ctx=128, sliding=64)


@pytest.fixture
def store(tmp_path: Path, root: Path) -> Store:
    store = Store.open(tmp_path / "store")
    for name, count in (("a", 70), ("b", 71)):
        save(store, root, name, some_tokens(count), some_rows(root, count))
    return store


@pytest.fixture
def place(tmp_path: Path) -> Path:
    made = tmp_path / "place"
    made.mkdir()
    return made


def test_the_same_again_changes_nothing(store: Store, root: Path, place: Path) -> None:
    assert export(store, "a", place / "kv", app(root)).made
    before = {p.name: p.stat().st_mtime_ns for p in (place / "kv").iterdir()}
    (place / "kv" / ".DS_Store").write_bytes(b"Finder")
    assert not export(store, "a", place / "kv", app(root), created_at="2027-01-01T00:00:00Z").made
    assert manifest(place / "kv")["createdAtISO8601"] == WHEN
    del before["manifest.json"]
    assert before == {p.name: p.stat().st_mtime_ns for p in (place / "kv").iterdir() if p.name in before}
    assert [p.name for p in place.iterdir()] == ["kv"]
    assert (place / "kv").stat().st_mode & 0o777 == 0o700


def test_nothing_is_replaced(store: Store, root: Path, place: Path) -> None:
    export(store, "a", place / "kv", app(root))
    before = tree(place / "kv")
    with pytest.raises(Refused, match=r"found another k_0\.bin"):
        export(store, "b", place / "kv", app(root))
    assert tree(place / "kv") == before
    (place / "kv" / "mine.txt").write_bytes(b"mine")
    with pytest.raises(Refused, match=r"mine\.txt"):
        export(store, "a", place / "kv", app(root))
    (place / "kv" / "mine.txt").unlink()
    # The same KV with another pending token is another checkpoint.
    save(store, root, "c", some_tokens(70), some_rows(root, 70), pending=8)
    with pytest.raises(Refused, match=r"found another manifest\.json"):
        export(store, "c", place / "kv", app(root))
    (place / "kv" / "manifest.json").write_bytes(b"{")
    with pytest.raises(Refused, match=r"found another manifest\.json"):
        export(store, "a", place / "kv", app(root))
    (place / "file").write_bytes(b"")
    (place / "link").symlink_to(place / "kv", target_is_directory=True)
    for name in ("file", "link"):
        with pytest.raises(Refused, match="a link or a file"):
            export(store, "a", place / name, app(root))
    with pytest.raises(InputInvalid, match="nowhere"):
        export(store, "a", place / "nowhere" / "kv", app(root))
    assert {p.name for p in place.iterdir()} == {"kv", "file", "link"}


def test_an_empty_folder_is_as_good_as_none(store: Store, root: Path, place: Path) -> None:
    (place / "kv").mkdir()
    assert export(store, "a", place / "kv", app(root)).made
    assert len(tree(place / "kv")) == 9


def test_a_folder_that_appears_meanwhile_is_not_replaced(
    store: Store, root: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    move = Root.move

    def late(self: Root, moves: list[tuple[str, str]]) -> None:
        (place / "kv").mkdir()
        (place / "kv" / "theirs").write_bytes(b"theirs")
        move(self, moves)

    monkeypatch.setattr(Root, "move", late)
    with pytest.raises(Refused, match="appeared meanwhile"):
        export(store, "a", place / "kv", app(root))
    assert tree(place / "kv") == {"theirs": b"theirs"}
    assert [p.name for p in place.iterdir()] == ["kv"]


@pytest.mark.parametrize("at", range(9))
def test_a_full_disk_leaves_nothing(
    store: Store, root: Path, place: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    write, count = Root.write, 0

    def full(self: Root, path: str, parts: list[memoryview]) -> None:
        nonlocal count
        count += 1
        write(self, path, parts)
        if count == at + 1:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(Root, "write", full)
    with pytest.raises(KVError, match=r"expected room for \d+ bytes, found a full disk \(No space") as caught:
        export(store, "a", place / "kv", app(root))
    told = caught.value.message
    assert told.startswith(f"{place / 'kv'}: ") and f"holds {place}, " in told and "gc" not in told
    assert caught.value.details["expected"] > 1000
    assert list(place.iterdir()) == []


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = {paths!r}
from corellm_models import app, WHEN
from kvstore import Store
from kvstore.formats.corellm_store import export_snapshot
left = int(sys.argv[4])
def progress(_):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
store, root, target = map(Path, sys.argv[1:4])
with Store.open(store) as opened:
    export_snapshot(opened, "a", target, bundle=app(root), created_at=WHEN, progress=progress)
"""


@pytest.mark.parametrize("files", [1, 9])
def test_a_killed_export_leaves_a_hidden_folder_that_the_next_one_deletes(
    store: Store, root: Path, place: Path, files: int
) -> None:
    tests = Path(__file__).parents[1]
    program = KILLED.format(paths=[str(tests / "formats"), str(tests / "runtime")])
    words = [str(store.shelf.path), str(root), str(place / "kv"), str(files)]
    done = subprocess.run([sys.executable, "-c", program, *words], cwd=tests.parent, check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = place.iterdir()
    assert left.name.startswith(".kv.") and left.name.endswith(".partial")
    others = [
        place / name for name in (".kv.mine.partial", ".kv.other.1f-00000000.partial", ".kv.1f-00000000.partial.mine")
    ]
    for other in others:
        other.mkdir()
    running = place / ".kv.1f-00000000.partial"
    shutil.copytree(left, running)
    with Root(place).lock(running.name, exclusive=True):
        assert export(store, "a", place / "kv", app(root)).made
    assert {p.name for p in place.iterdir()} == {"kv", running.name, *(p.name for p in others)}


def test_everything_is_synced_before_it_is_seen(
    store: Store, root: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    rename, sync = os.rename, os.fsync

    def name(fd: int) -> str:
        return Path(f"/proc/self/fd/{fd}").readlink().name

    def fsync(fd: int) -> None:
        calls.append(f"sync {name(fd)}")
        sync(fd)

    def renamed(src: str, dst: str, **other: int) -> None:
        calls.append(f"rename to {dst}")
        rename(src, dst, **other)

    if not Path("/proc/self/fd").is_dir():
        pytest.skip("needs /proc")
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", renamed)
    export(store, "a", place / "kv", app(root))
    at = calls.index("rename to kv")
    synced = calls[:at]
    assert {f"sync {file}" for file in tree(place / "kv")} <= set(synced)
    assert synced[-1].endswith(".partial")
    assert calls[at + 1 :] == ["sync place"]
