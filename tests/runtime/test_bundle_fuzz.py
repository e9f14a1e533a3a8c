"""Whatever the files hold, opening a bundle ends in a bundle or in one of its named errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bundle_folder import convert_config, documents, manifest, parse
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.jsonfile import JsonInvalid, parse_object
from runtime.bundle import BundleConfig, BundleError
from runtime.bundle.digests import DigestCache

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["int8", "fp16", "sliding_attention", "a.mlpackage", 0, 1, 2, 4, 6, 64, [0, 2], [320, 16]])
)
values = st.recursive(
    scalars, lambda v: st.lists(v, max_size=4) | st.dictionaries(st.text(max_size=4), v, max_size=4), max_leaves=8
)


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [at] if at else []
    if isinstance(value, dict):
        for key, inner in value.items():
            found += places(inner, (*at, key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            found += places(inner, (*at, i))
    return found


PLACES = [("manifest.json", p) for p in places(manifest())] + [
    (f, p) for f, p in (("convert_config.json", p) for p in places(convert_config()))
]


@settings(max_examples=400)
@given(
    form=st.sampled_from(["published", "ours"]),
    changes=st.lists(st.tuples(st.sampled_from(PLACES), values), max_size=4),
)
def test_any_values_anywhere(form: str, changes: list[tuple[tuple[str, tuple[Any, ...]], Any]]) -> None:
    files = documents(form)
    for (file, place), value in changes:
        inner: Any = files[file]
        try:
            for step in place[:-1]:
                inner = inner[step]
            inner[place[-1]] = value
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change took this place away
    try:
        made = parse(files)
    except BundleError as error:
        assert error.message and len(error.message) < 2000
    else:
        assert isinstance(made, BundleConfig)
        assert len(made.layer_types) == made.num_layers and made.sliding_window % 64 == 0


TEXT = json.dumps(convert_config()).encode()


@settings(max_examples=400)
@given(edits=st.lists(st.tuples(st.integers(0, len(TEXT)), st.integers(0, 3), st.binary(max_size=6)), max_size=5))
def test_any_bytes(edits: list[tuple[int, int, bytes]]) -> None:
    data = TEXT
    for at, cut, insert in edits:
        data = data[:at] + insert + data[at + cut :]
    try:
        made = parse_object(data, "file.json")
    except JsonInvalid as error:
        assert error.file == "file.json" and error.field
    else:
        assert made == json.loads(data)


@settings(max_examples=200)
@given(files=values, derived=values, version=st.just(1) | values)
def test_any_cache(tmp_path_factory: Any, files: Any, derived: Any, version: Any) -> None:
    cache: Path = tmp_path_factory.getbasetemp() / "fuzzed.json"
    cache.write_text(json.dumps({"version": version, "files": files, "derived": derived}))
    assert isinstance(DigestCache.open(cache), DigestCache)
