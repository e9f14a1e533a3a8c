"""The system may write and read fewer bytes than asked for, anywhere: all of them arrive, once and in order."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstore import files
from kvstore.files import Root, read_parts


def shortened(parts: Sequence[memoryview | bytes], most: int) -> list[memoryview]:
    """The first ``most`` bytes of ``parts``."""
    left = []
    for part in parts:
        left.append(memoryview(part)[:most])
        most -= len(left[-1])
    return left


@pytest.mark.parametrize("most", [1, 2, 3, 7, 64, 65, 1000])
def test_short_writes_and_reads(most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(most)
    parts = [chance.randbytes(chance.choice([0, 1, 2, 3, 30])) for _ in range(3 * 16)]
    parts[5:5] = [b""] * 40  # more than one call takes
    writev, preadv = os.writev, os.preadv
    monkeypatch.setattr(files, "_IOV", 16)
    monkeypatch.setattr(os, "writev", lambda fd, some: writev(fd, shortened(some, most)))
    monkeypatch.setattr(os, "preadv", lambda fd, some, at: preadv(fd, shortened(some, most), at))
    root = Root(tmp_path)
    root.write("one by one", parts)
    root.make_folder("tmp")
    root.publish([files.Pending("at once", parts)])
    whole = b"".join(parts)
    assert (tmp_path / "one by one").read_bytes() == (tmp_path / "at once").read_bytes() == whole
    into = [memoryview(bytearray(len(part))) for part in parts]
    with root.open("at once") as fd:
        assert read_parts(fd, into) == len(whole)
        assert read_parts(fd, [*into, memoryview(bytearray(9))]) == len(whole)
    root.close()
    assert [bytes(part) for part in into] == parts


def test_views_of_other_elements_are_written_whole(tmp_path: Path) -> None:
    whole = bytes(range(240))
    root = Root(tmp_path)
    root.write("file", [memoryview(whole).cast("d"), memoryview(whole).cast("B", (20, 12)), whole])
    root.close()
    assert (tmp_path / "file").read_bytes() == 3 * whole
