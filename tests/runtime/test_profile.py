"""Profiles: every number says where it comes from, and a file is read as it was printed or refused by its field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import InputInvalid
from runtime.profile import FIELDS, GIB, PROFILES, SOURCES, Profile, profile_of, read_profile


@pytest.mark.parametrize("profile", PROFILES.values(), ids=list(PROFILES))
def test_every_number_is_in_range_and_says_where_it_is_from(profile: Profile) -> None:
    for name, figure in profile.figures().items():
        assert FIELDS[name].low <= figure.value <= FIELDS[name].high, name
        assert figure.source in SOURCES and figure.why, name
    assert profile.limit_share.source == "assumption", "the kill limit isn't published"
    assert profile.limit_bytes == profile.physical_bytes.value / 2
    assert PROFILES[profile.name] is profile


def test_speculation_is_off_below_7_gib() -> None:
    assert {name: profile.speculates for name, profile in PROFILES.items()} == {
        "iphone15": False,
        "iphone17pro": True,
        "mac": True,
    }
    document = PROFILES["iphone15"].document()
    for size, on in ((7 * GIB - 1, False), (7 * GIB, True)):
        document["physical_bytes"]["value"] = size
        assert read_profile(document, "f").speculates is on


@pytest.mark.parametrize("profile", PROFILES.values(), ids=list(PROFILES))
def test_a_printed_profile_is_read_as_it_was(profile: Profile, tmp_path: Path) -> None:
    file = tmp_path / "device.json"
    file.write_text(json.dumps(profile.document()))
    assert profile_of(str(file)) == profile


def changed(**fields: Any) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(json.dumps(PROFILES["mac"].document()))
    for name, value in fields.items():
        if value is None:
            del document[name]
        elif isinstance(value, dict) and name in document:
            document[name] |= value
        else:
            document[name] = value
    return document


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"name": None}, "name"),
        ({"name": ""}, "name"),
        ({"name": 5}, "name"),
        ({"memory": 5}, "memory"),
        ({"app_bytes": None}, "app_bytes"),
        ({"app_bytes": 500}, "app_bytes"),
        ({"app_bytes": {"value": -1}}, "app_bytes.value"),
        ({"app_bytes": {"value": 1.5}}, "app_bytes.value"),
        ({"app_bytes": {"value": True}}, "app_bytes.value"),
        ({"app_bytes": {"value": "5"}}, "app_bytes.value"),
        ({"app_bytes": {"unit": "MB"}}, "app_bytes.unit"),
        ({"limit_share": {"value": 0}}, "limit_share.value"),
        ({"limit_share": {"value": 1.01}}, "limit_share.value"),
        ({"limit_share": {"source": "guess"}}, "limit_share.source"),
        ({"limit_share": {"why": 5}}, "limit_share.why"),
        ({"decode_ms_per_token": {"value": 0}}, "decode_ms_per_token.value"),
    ],
)
def test_a_wrong_file_is_refused_by_its_field(fields: dict[str, Any], field: str, tmp_path: Path) -> None:
    file = tmp_path / "device.json"
    file.write_text(json.dumps(changed(**fields)))
    with pytest.raises(InputInvalid) as refused:
        profile_of(str(file))
    assert refused.value.details["field"] == field and refused.value.exit_code == 7
    assert str(refused.value).startswith(f"device.json: {field}: expected ") and "--show-profile" in str(refused.value)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"name": "a", "name": "b"}', '{"name": NaN}', "\xff"])
def test_what_is_not_one_json_object_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "device.json"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(InputInvalid, match=r"device\.json: "):
        profile_of(str(file))


def test_an_unknown_name_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    for given in ("iphone99", str(tmp_path)):
        with pytest.raises(InputInvalid, match="iphone15, iphone17pro, mac or a file"):
            profile_of(given)
