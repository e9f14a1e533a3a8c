"""A check beside a collector: what goes between its listing and the look at it is no damage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kvmemory import save

from kvstore import Store
from kvstore.check import check
from kvstore.digest import ContentDigest
from kvstore.inventory import FULL, QUICK, Level
from kvstore.objects import Objects


@pytest.mark.parametrize("level", [QUICK, FULL], ids=["quick", "full"])
def test_an_object_that_is_collected_after_its_listing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: Level
) -> None:
    with Store.open(tmp_path / "s") as store:
        save(store, [1, 2, 3], name="kept")
        gone = save(store, [4, 5, 6])
        for end in ("", ".cov"):
            (tmp_path / "s" / "snapshots" / f"{gone.digest}{end}").unlink()
        listed = Objects.names
        files = [tmp_path / "s" / Objects.path(content) for content in gone.snapshot.blocks[0]]

        def names(self: Objects) -> Iterator[ContentDigest]:
            found = list(listed(self))
            for file in files:
                file.unlink(missing_ok=True)
            yield from found

        monkeypatch.setattr(Objects, "names", names)
        report = check(store, level)
        assert not any(file.exists() for file in files)
        assert report.ok, report


def test_what_is_no_file_is_still_told(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s") as store:
        saved = save(store, [1, 2, 3], name="kept")
        file = tmp_path / "s" / Objects.path(saved.snapshot.blocks[0][0])
        file.rename(tmp_path / "away")
        file.symlink_to(tmp_path / "away")
        (problem,) = check(store).problems
        assert problem.path == file.relative_to(tmp_path / "s").as_posix() and "not followed" in problem.found
