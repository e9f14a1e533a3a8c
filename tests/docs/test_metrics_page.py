"""docs/metrics.md has a row for every field of a record, in its order, and for none that isn't there."""

from __future__ import annotations

import re

from pages import ROOT

from runtime.metrics.records import FIELDS, OUR_FIELDS

PAGE = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")


def rows(heading: str) -> list[str]:
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `(\w+)` \|", section, re.M)


def test_every_field_has_a_row() -> None:
    assert rows("Fields") == list(FIELDS)
    assert rows("The object `kvferry`") == list(OUR_FIELDS)
