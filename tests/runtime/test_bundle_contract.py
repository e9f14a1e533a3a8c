"""Every field of the two JSON files: absent, of another type, out of range; and fields that nobody knows."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bundle_folder import Json, convert_config, documents, holder, parse, refusal, write_bundle, write_json

from runtime.bundle import Bundle

FORMS = ("published", "ours")

REQUIRED = {
    "manifest.json": {"name", "architecture", "contextLength", "modelRelativePath", "tokenizerRelativePath"},
    "convert_config.json": {
        "num_layers",
        "hidden",
        "ple_dim",
        "first_shared",
        "store_layers",
        "store_layers.sliding_attention",
        "store_layers.full_attention",
        "chunk_bounds",
        "hostio",
        "hostio.CTX",
        "hostio.HD",
        "hostio.GHD",
        "hostio.SLIDING",
        "hostio.NEG",
        "hostio.layer_types",
        "hostio.inv_slide",
        "hostio.inv_full",
        "corellm",
        "corellm.chunks",
        "corellm.lmhead",
        "corellm.prefill",
        "corellm.prefill.N",
        "corellm.prefill.functions.128",
        "corellm.prefill.functions.32",
        "corellm.prefill.functions.16",
        "corellm.verify.functions.4",
        "corellm.verify.lmhead_batched.4",
        "corellm.sidecars",
        "corellm.sidecars.int8",
        "corellm.sidecars.int8.embed",
        "corellm.sidecars.int8.embed.file",
        "corellm.sidecars.int8.embed.shape",
        "corellm.sidecars.int8.ple",
        "corellm.sidecars.int8.ple.file",
        "corellm.sidecars.int8.ple.shape",
        "corellm.sidecars.fp16.embed",
        "corellm.sidecars.fp16.embed.file",
        "corellm.sidecars.fp16.embed.shape",
        "corellm.sidecars.fp16.ple",
        "corellm.sidecars.fp16.ple.file",
        "corellm.sidecars.fp16.ple.shape",
    },
}
# Absent, these fall back to what stands here (a BundleConfig field and its value), None: the configuration is the same.
OPTIONAL: dict[str, dict[str, tuple[str, Any] | None]] = {
    "manifest.json": {
        "format": None,
        "promptPrefix": ("prompt_prefix", None),
        "promptSuffix": ("prompt_suffix", None),
        "assistantSuffix": ("assistant_suffix", None),
        "promptSuffixThinking": ("prompt_suffix_thinking", None),
        "eos": ("eos_token_ids", frozenset({1})),
        "sidecarStage": ("sidecar_stage", "fp16"),
        "computeUnits": ("compute_units", None),
        "drafterRelativePath": None,
    },
    "convert_config.json": {
        "eos_token_ids": ("eos_token_ids", frozenset({3})),
        "corellm.decode_function": None,
        "corellm.margin_function": ("margin_function", None),
        "corellm.prefill.plain_N": ("plain_width", None),
        "corellm.prefill.functions.4": ("prefill_functions", "verify_4"),
        "corellm.verify": ("verify_functions", {}),
        "corellm.verify.widths": None,
        "corellm.sidecars.default_stage": None,
        "corellm.sidecars.fp16": None,
        "corellm.sidecars.int8.embed.scale": None,
        "corellm.sidecars.int8.embed.runtime_scale_sqrt": None,
        "corellm.sidecars.int8.ple.scale": None,
        "corellm.sidecars.int8.ple.runtime_scale_sqrt": None,
    },
}
# Absent as a whole, these make the first field below them the one that is missed.
REQUIRED_PARENTS = {
    "corellm.prefill.functions": "corellm.prefill.functions.4",
    "corellm.verify.functions": "corellm.verify.functions.4",
    "corellm.verify.lmhead_batched": "corellm.verify.lmhead_batched.4",
}
WRONG: list[Any] = [True, 7, -7, 2.5, 1e300, "", "text", [], ["text"], [None], [[]], {}, {"text": 1}, 2**62]


def walk(value: Json, at: str = "") -> Iterator[str]:
    for key, inner in value.items():
        yield at + key
        if isinstance(inner, dict):
            yield from walk(inner, f"{at}{key}.")


ALL_FIELDS = [(file, dotted) for file, document in documents().items() for dotted in walk(document)]


def test_the_tables_above_cover_every_field() -> None:
    known = {(f, d) for f, names in REQUIRED.items() for d in names}
    known |= {(f, d) for f, names in OPTIONAL.items() for d in names}
    known |= {("convert_config.json", d) for d in REQUIRED_PARENTS}
    assert set(ALL_FIELDS) == known


@pytest.mark.parametrize(("file", "dotted"), [(f, d) for f, names in REQUIRED.items() for d in sorted(names)])
@pytest.mark.parametrize("how", ["absent", "null"])
def test_a_missing_required_field_is_named(file: str, dotted: str, how: str) -> None:
    files = documents()
    inner, last = holder(files[file], dotted)
    if how == "absent":
        del inner[last]
    else:
        inner[last] = None
    error = refusal(files)
    assert (error.file, error.field) == (file, dotted)
    assert error.found == ("no such field" if how == "absent" or "_batched" in dotted else "null") or how == "null"
    assert f"{file}: {dotted}: expected " in str(error)


@pytest.mark.parametrize(("parent", "first"), REQUIRED_PARENTS.items())
def test_a_missing_function_table_names_the_first_function(parent: str, first: str) -> None:
    files = documents()
    inner, last = holder(files["convert_config.json"], parent)
    del inner[last]
    if parent == "corellm.prefill.functions":
        first = "corellm.prefill.functions.32"  # width 4 is found among the verify functions
    assert refusal(files).field == first


@pytest.mark.parametrize(("file", "dotted"), [(f, d) for f, names in OPTIONAL.items() for d in names])
@pytest.mark.parametrize("how", ["absent", "null"])
def test_an_absent_optional_field_has_its_documented_default(file: str, dotted: str, how: str) -> None:
    files = documents()
    inner, last = holder(files[file], dotted)
    if how == "null" and last.isdigit():
        pytest.skip("a function name is a name or is not there")
    if how == "absent":
        del inner[last]
    else:
        inner[last] = None
    change = OPTIONAL[file][dotted]
    found, whole = parse(files), parse(documents())
    if change is None:
        assert found == whole
    elif change[0] == "prefill_functions":
        assert found.prefill_functions == {**whole.prefill_functions, 4: change[1]}
    else:
        assert getattr(found, change[0]) == change[1]
        assert getattr(whole, change[0]) != change[1]


def allowed(dotted: str, value: Any, present: Any) -> bool:
    """Whether a value from WRONG is in fact right for the field that holds ``present``."""
    if isinstance(present, str):
        any_text = dotted.split(".")[-1] not in ("format", "sidecarStage", "computeUnits", "default_stage")
        may_be_empty = dotted.startswith(("prompt", "assistant", "drafter"))
        return isinstance(value, str) and any_text and (value != "" or may_be_empty)
    if dotted in ("contextLength", "hostio.CTX"):
        return value == 7 and value is not True
    if dotted.endswith("runtime_scale_sqrt"):
        return type(value) in (int, float) and 0 < value < 1e30
    if dotted in ("eos", "eos_token_ids", "corellm.verify.widths", "corellm.prefill.N"):
        return value == []
    if dotted == "corellm.verify":
        return isinstance(value, dict)  # says nothing, so there is no verification
    return False


@pytest.mark.parametrize(("file", "dotted"), ALL_FIELDS)
def test_a_field_of_another_type_or_range_is_named(file: str, dotted: str) -> None:
    tried = 0
    for wrong in WRONG:
        files = documents()
        inner, last = holder(files[file], dotted)
        if allowed(dotted, wrong, inner[last]):
            continue
        inner[last] = wrong
        error = refusal(files)
        # The field itself, or an entry of it; a changed geometry may first contradict a field that depends on it.
        depends = {
            "num_layers": {"first_shared", "hostio.layer_types"},
            "hidden": {"corellm.sidecars.int8.embed.shape"},
            "ple_dim": {"corellm.sidecars.int8.ple.shape"},
            "hostio.HD": {"hostio.inv_slide"},
            "hostio.GHD": {"hostio.inv_full"},
            "chunk_bounds": {"corellm.chunks"},
            "corellm.prefill.N": {"corellm.prefill.plain_N"},
        }.get(dotted, set())
        assert error.file == file
        assert error.field in depends or error.field == dotted or error.field.startswith((dotted + ".", dotted + "["))
        assert error.expected and error.found
        tried += 1
    assert tried >= 8


@pytest.mark.parametrize("form", FORMS)
def test_unknown_keys_are_ignored_everywhere(form: str) -> None:
    files = documents(form)
    whole = parse(files)

    def add(value: Json) -> None:
        for inner in list(value.values()):
            if isinstance(inner, dict):
                add(inner)
        value["somethingNew"] = {"deep": [1, None]}

    for document in files.values():
        add(document)
    assert parse(files) == whole


def test_the_parsed_values_are_the_written_ones() -> None:
    config = parse(documents())
    assert config.format == "coreml-corellm-r1"
    assert (config.num_layers, config.hidden, config.ple_dim, config.first_shared) == (6, 16, 4, 4)
    assert config.store_layers is not None
    assert (config.store_layers.sliding, config.store_layers.full) == (2, 3)
    assert config.chunk_bounds == ((0, 2), (2, 4), (4, 6))
    assert [config.chunk_owns_kv(c) for c in range(3)] == [True, True, False]
    assert config.eos_token_ids == {1, 3}
    assert (config.ctx, config.head_dim, config.global_head_dim, config.sliding_window) == (256, 8, 16, 64)
    assert config.neg == -40000.0
    assert config.kv_heads == 1
    assert config.prefill_widths == (128, 32, 16, 4)
    assert config.plain_width == 128
    assert config.verify_functions == {4: "prefill_4"}
    assert config.heads == ("lmhead.mlpackage", "lmhead_v4.mlpackage")
    assert (config.prompt_prefix, config.prompt_suffix) == ("<user>", "")
    assert [config.head_dim_of(i) for i in (0, 1)] == [8, 16]
    assert config.own_layers("full_attention") == (1, 3)


def test_ours_has_no_shared_layers_no_ple_and_several_heads() -> None:
    config = parse(documents("ours"))
    assert (config.format, config.ple, config.store_layers, config.kv_heads) == ("kvferry-bundle-1", None, None, 2)
    files = documents("ours")
    files["convert_config.json"]["store_layers"] = {}
    assert parse(files).store_layers is None


def test_the_default_plain_width_is_512_where_there_is_one() -> None:
    files = documents()
    prefill = files["convert_config.json"]["corellm"]["prefill"]
    prefill["N"].append(512)
    prefill["functions"]["512"] = "prefill_512"
    del prefill["plain_N"]
    assert parse(files).plain_width == 512


def test_opening_leaves_the_documents_alone() -> None:
    files = documents()
    before = copy.deepcopy(files)
    parse(files)
    assert files == before


def test_numbers_may_be_written_as_integers(tmp_path: Path) -> None:
    convert = convert_config()
    whole = Bundle.open(write_bundle(tmp_path)).identity()
    text = json.dumps(convert).replace("-40000.0", "-40000").replace(": 4.0", ": 4")
    convert["hostio"]["inv_full"][2:] = [0.0] * 6
    (tmp_path / "convert_config.json").write_text(text)
    assert Bundle.open(tmp_path).identity().digest == whole.digest
    write_json(tmp_path / "convert_config.json", convert)
    assert Bundle.open(tmp_path).identity().digest == whole.digest
