"""Labels: what may be one, compare-and-swap, renaming, and two processes that want the same name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from kvmemory import LAYOUT, Memory, find, save

from kvstore import Store
from kvstore.digest import SnapshotDigest, label_file
from kvstore.errors import LabelInvalid, RefConflict, SnapshotMissing

A, B = [1, 2, 3], [4, 5, 6]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "s")


@pytest.mark.parametrize(
    "label", ["", " a", "a ", "a\nb", "a\x1b[31m", "\u202eabc", "x" * 201, "\ud800", "a\u00a0b", "a\x00"]
)
def test_what_is_no_label(store: Store, label: str) -> None:
    with pytest.raises(LabelInvalid, match="name "):
        save(store, A, name=label)
    assert not list(store.shelf.records.snapshots())


@pytest.mark.parametrize(
    "label", ["a", "x" * 200, "../../etc/passwd", "a/b", ".", "книга", "日本", "e\u0301", "😀", "a b"]
)
def test_what_is_a_label(store: Store, label: str) -> None:
    saved = save(store, A, name=label)
    assert store.match(label).digest == saved.digest
    (file,) = (store.shelf.path / "refs").iterdir()
    assert file.name == label_file(next(store.shelf.records.refs()).label)


def test_composed_and_decomposed_are_one(store: Store) -> None:
    one = save(store, A, name="caf\u00e9")
    assert store.match("cafe\u0301").digest == one.digest
    two = save(store, B, name="cafe\u0301")
    assert [(r.label, r.snapshot) for r in store.shelf.records.refs()] == [("caf\u00e9", two.digest)]


@pytest.mark.parametrize(("there", "new"), [("Book", "book"), ("straße", "STRASSE"), ("ﬁle", "file"), ("É", "e\u0301")])
def test_labels_that_differ_by_case_clash(store: Store, there: str, new: str) -> None:
    save(store, A, name=there)
    with pytest.raises(RefConflict, match="is there already"):
        save(store, B, name=new)
    save(store, B, name="other")
    with pytest.raises(RefConflict):
        store.shelf.records.rename_ref("other", new)
    assert store.shelf.records.ref(new) is None


def test_compare_and_swap(store: Store) -> None:
    records = store.shelf.records
    a, b = save(store, A).digest, save(store, B).digest
    with pytest.raises(RefConflict, match=r"expected .*, found none"):
        records.move_ref("n", a, b)
    records.move_ref("n", None, a)
    with pytest.raises(RefConflict, match="expected no snapshot"):
        records.move_ref("n", None, b)
    with pytest.raises(RefConflict):
        records.move_ref("n", b, None)
    records.move_ref("n", b, a)  # somebody else has set it to the same: nothing is lost
    assert records.ref("n").snapshot == a
    records.move_ref("n", a, b)
    assert records.ref("n").snapshot == b
    with pytest.raises(RefConflict):
        records.move_ref("n", a, None)
    records.move_ref("n", b, None)
    assert records.ref("n") is None
    records.move_ref("n", None, None)
    with pytest.raises(SnapshotMissing, match="found none"):
        records.move_ref("n", None, SnapshotDigest(b"\7" * 32))
    assert records.ref("n") is None


def test_rename(store: Store) -> None:
    records = store.shelf.records
    a = save(store, A, name="old").digest
    save(store, B, name="taken")
    assert records.rename_ref("old", "new").label == "new"
    assert records.ref("old") is None and records.ref("new").snapshot == a
    assert records.rename_ref("new", "New").label == "New"  # only its own case changes
    assert records.rename_ref("New", "New").label == "New"
    with pytest.raises(RefConflict):
        records.rename_ref("New", "taken")
    save(store, A, name="newer")
    assert records.rename_ref("New", "newer").label == "newer"  # as if a first attempt had been killed halfway
    assert records.rename_ref("newer", "New").label == "New"
    with pytest.raises(SnapshotMissing, match="no snapshot named 'old'"):
        records.rename_ref("old", "x")
    with pytest.raises(LabelInvalid):
        records.rename_ref("New", " ")
    assert [r.label for r in records.refs()] == ["New", "taken"]


def test_a_name_that_moved_meanwhile_is_a_conflict(store: Store) -> None:
    """The other writer comes between the save's first look at the name and its own swap."""
    save(store, A, name="n")
    path = store.shelf.path

    class Late(Memory):
        def spans(self, group: int, start: int, stop: int) -> list[memoryview]:
            if not hasattr(self, "done"):
                self.done = True
                with Store.open(path) as other:
                    save(other, [9, 9], name="n")
            return list(super().spans(group, start, stop))

    late = Late(LAYOUT, 3)
    with pytest.raises(RefConflict, match="moved by somebody else"):
        save(store, B, name="n", rows=late)
    assert store.match("n").snapshot.items == (9, 9)


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from kvmemory import save
from kvstore import Store
from kvstore.errors import RefConflict
number, won = int(sys.argv[3]), 0
with Store.open(Path(sys.argv[1])) as store:
    print("ready", flush=True)
    sys.stdin.readline()
    for i in range(12):
        try:
            saved = save(store, [number, i, *range(i)], name="shared")
            save(store, [number, i, *range(i)], name=f"own {number} {i}")
            print("won", saved.digest, flush=True)
        except RefConflict:
            pass
"""


def test_two_processes_save_at_once(tmp_path: Path) -> None:
    path = tmp_path / "s"
    Store.open(path).close()
    command = [sys.executable, "-c", WRITER, str(path), str(Path(__file__).parent)]
    writers = [
        subprocess.Popen([*command, str(n)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for n in (1, 2)
    ]
    assert all(w.stdout.readline() == "ready\n" for w in writers)
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.flush()
    outputs = [writer.communicate(timeout=120)[0] for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0]
    won = [line.split()[1] for output in outputs for line in output.splitlines() if line.startswith("won")]
    assert won
    with Store.open(path) as store:
        # Exactly one of the winning saves is what the shared name is at; every own name is at its own tokens.
        assert store.match("shared").digest.hex in won
        for ref in store.shelf.records.refs():
            if ref.label.startswith("own"):
                _, number, i = ref.label.split()
                assert store.match(ref.label).snapshot.items == (int(number), int(i), *range(int(i)))
                assert find(store, [int(number), int(i), *range(int(i)), 77]).n == 2 + int(i)
