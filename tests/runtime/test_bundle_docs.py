"""`docs/bundle.md` names every field that a bundle has, every identity field, and the example it computes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from bundle_folder import convert_config, manifest, write_bundle

from runtime.bundle import Bundle
from runtime.bundle.parse import LEAST_MASK, MAX_LAYERS

DOCS = Path(__file__).parents[2] / "docs" / "bundle.md"
WORDS = set(re.findall(r"[A-Za-z_0-9]+", " ".join(re.findall(r"`([^`]+)`", DOCS.read_text(encoding="utf-8")))))


def names(value: object) -> set[str]:
    """Every key below ``value`` that is not a width."""
    if not isinstance(value, dict):
        return set()
    return {k for k in value if not k.isdigit()}.union(*(names(v) for v in value.values()))


@pytest.mark.parametrize("name", sorted(names(convert_config()) | names(manifest()) | {"KV_HEADS", "EMBED_DIVISOR"}))
def test_every_field_is_documented(name: str) -> None:
    assert name in WORDS


def test_every_identity_field_is_documented(tmp_path: Path) -> None:
    identity = Bundle.open(write_bundle(tmp_path)).identity()
    table = DOCS.read_text(encoding="utf-8").split("## Identity")[1].split("Not in it")[0]
    first_column = set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| ([^|]+) \|", table, re.M))))
    assert first_column == {name for name, _ in identity.fields}


def test_the_limits_are_the_documented_ones() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert f"1 to {MAX_LAYERS:,}" in text
    assert f"−65504 to −{-LEAST_MASK:.0f}" in text


def test_the_page_stands_by_itself() -> None:
    assert "../" not in DOCS.read_text(encoding="utf-8")
