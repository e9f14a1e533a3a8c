"""Fields that are each well-formed and contradict one another, or the rules of the format: which one the error names."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
from bundle_folder import LAYERS, Json, all_full, documents, holder, parse, refusal

Change = Callable[[Json, Json], None]


def set_field(dotted: str, value: Any) -> Change:
    def change(head: Json, convert: Json) -> None:
        inner, last = holder(convert, dotted)
        inner[last] = value

    return change


def set_head(name: str, value: Any) -> Change:
    return lambda head, convert: head.__setitem__(name, value)


CONTRADICTIONS: list[tuple[str, str, Change, str, str]] = [
    (
        "a layer kind too few",
        "published",
        set_field("hostio.layer_types", ["full_attention"] * 5),
        "hostio.layer_types",
        "5",
    ),
    (
        "an unknown layer kind",
        "published",
        set_field("hostio.layer_types", ["full_attention"] * 5 + ["ring"]),
        "hostio.layer_types[5]",
        "'ring'",
    ),
    (
        "a gap between chunks",
        "published",
        set_field("chunk_bounds", [[0, 2], [3, 4], [4, 6]]),
        "chunk_bounds[1]",
        "[3, 4]",
    ),
    (
        "chunks that overlap",
        "published",
        set_field("chunk_bounds", [[0, 2], [1, 4], [4, 6]]),
        "chunk_bounds[1]",
        "[1, 4]",
    ),
    ("an empty chunk", "published", set_field("chunk_bounds", [[0, 2], [2, 2], [2, 6]]), "chunk_bounds[1]", "[2, 2]"),
    ("chunks that end early", "published", set_field("chunk_bounds", [[0, 2], [2, 4], [4, 5]]), "chunk_bounds", "5"),
    (
        "chunks that end late",
        "published",
        set_field("chunk_bounds", [[0, 2], [2, 4], [4, 7]]),
        "chunk_bounds[2]",
        "[4, 7]",
    ),
    ("no chunks", "published", set_field("chunk_bounds", []), "chunk_bounds", "an end at 0"),
    (
        "a triple for bounds",
        "published",
        set_field("chunk_bounds", [[0, 2, 4], [4, 6]]),
        "chunk_bounds[0]",
        "[0, 2, 4]",
    ),
    (
        "a chunk over first_shared",
        "published",
        set_field("chunk_bounds", [[0, 2], [2, 5], [5, 6]]),
        "chunk_bounds[1]",
        "straddles",
    ),
    ("a chunk name too few", "published", set_field("corellm.chunks", ["chunk_0.mlpackage"]), "corellm.chunks", "1"),
    ("a chunk twice", "published", set_field("corellm.chunks", ["chunk_0.mlpackage"] * 3), "corellm.chunks", "chunk_0"),
    ("shared layers from the start", "published", set_field("first_shared", 0), "first_shared", "0"),
    ("shared layers after the last", "published", set_field("first_shared", 7), "first_shared", "7"),
    ("no shared layers, published", "published", set_field("first_shared", LAYERS), "first_shared", "6"),
    ("no PLE, published", "published", set_field("ple_dim", 0), "ple_dim", "0"),
    ("several KV heads, published", "published", set_field("hostio.KV_HEADS", 2), "hostio.KV_HEADS", "2"),
    ("no KV heads", "ours", set_field("hostio.KV_HEADS", 0), "hostio.KV_HEADS", "0"),
    ("no embedding divisor", "ours", set_field("hostio.EMBED_DIVISOR", 0), "hostio.EMBED_DIVISOR", "0"),
    ("a divisor as text", "published", set_field("hostio.EMBED_DIVISOR", "32"), "hostio.EMBED_DIVISOR", "'32'"),
    ("a divisor past fp16", "ours", set_field("hostio.EMBED_DIVISOR", 65505), "hostio.EMBED_DIVISOR", "65505"),
    (
        "PLE tables without PLE",
        "ours",
        set_field("corellm.sidecars.int8.ple", {"file": "x", "shape": [1, 1]}),
        "corellm.sidecars.int8.ple",
        "'x'",
    ),
    (
        "a store layer of the other kind",
        "published",
        set_field("store_layers.sliding_attention", 3),
        "store_layers.sliding_attention",
        "full_attention",
    ),
    (
        "a store layer that is shared",
        "published",
        set_field("store_layers.full_attention", 5),
        "store_layers.full_attention",
        "5",
    ),
    ("shared layers without store layers", "ours", set_field("first_shared", 3), "store_layers", "no such field"),
    ("frequencies for another head", "published", set_field("hostio.inv_slide", [1.0] * 8), "hostio.inv_slide", "8"),
    ("full frequencies for another head", "published", set_field("hostio.inv_full", [1.0] * 4), "hostio.inv_full", "4"),
    (
        "a negative frequency",
        "published",
        set_field("hostio.inv_slide", [1.0, 0.5, -0.1, 0.0]),
        "hostio.inv_slide[2]",
        "-0.1",
    ),
    ("an odd head dimension", "published", set_field("hostio.HD", 7), "hostio.HD", "7"),
    ("a window off the block grid", "published", set_field("hostio.SLIDING", 100), "hostio.SLIDING", "100"),
    ("a mask that is infinite in fp16", "published", set_field("hostio.NEG", -65520.0), "hostio.NEG", "-65520.0"),
    ("a mask that masks little", "published", set_field("hostio.NEG", -10), "hostio.NEG", "-10"),
    ("a positive mask", "published", set_field("hostio.NEG", 40000.0), "hostio.NEG", "40000.0"),
    ("a width of nothing", "published", set_field("corellm.prefill.N", [128, 32, 0]), "corellm.prefill.N[2]", "0"),
    ("a width twice", "published", set_field("corellm.prefill.N", [128, 32, 32]), "corellm.prefill.N", "[128, 32, 32]"),
    (
        "a width without a function",
        "published",
        set_field("corellm.prefill.N", [128, 64, 4]),
        "corellm.prefill.functions.64",
        "no such field",
    ),
    (
        "a plain width that is no width",
        "published",
        set_field("corellm.prefill.plain_N", 512),
        "corellm.prefill.plain_N",
        "512",
    ),
    (
        "a width with a leading zero",
        "published",
        set_field("corellm.prefill.functions", {"0128": "f"}),
        "corellm.prefill.functions.0128",
        "0128",
    ),
    (
        "one function for two widths",
        "published",
        set_field("corellm.prefill.functions.32", "prefill_16"),
        "corellm.prefill.functions",
        "prefill_16",
    ),
    (
        "a function that is the decode function",
        "published",
        set_field("corellm.decode_function", "prefill_16"),
        "corellm.prefill.functions",
        "prefill_16",
    ),
    (
        "verification without a head",
        "published",
        set_field("corellm.verify.lmhead_batched", {}),
        "corellm.verify.lmhead_batched.4",
        "no such field",
    ),
    (
        "verification without a function",
        "published",
        set_field("corellm.verify.functions", {}),
        "corellm.verify.functions.4",
        "no such field",
    ),
    (
        "a verify width without both",
        "published",
        set_field("corellm.verify.widths", [8]),
        "corellm.verify.functions.8",
        "no such field",
    ),
    (
        "a stage that is not there",
        "published",
        set_head("sidecarStage", "fp16"),
        "corellm.sidecars.fp16",
        "no such field",
    ),
    (
        "a table of another width",
        "published",
        set_field("corellm.sidecars.int8.embed.shape", [320, 17]),
        "corellm.sidecars.int8.embed.shape",
        "[320, 17]",
    ),
    (
        "a PLE table of another width",
        "published",
        set_field("corellm.sidecars.int8.ple.shape", [320, 4]),
        "corellm.sidecars.int8.ple.shape",
        "[320, 4]",
    ),
    (
        "a table without rows",
        "published",
        set_field("corellm.sidecars.int8.embed.shape", [0, 16]),
        "corellm.sidecars.int8.embed.shape",
        "[0, 16]",
    ),
    (
        "a table of absurd size",
        "published",
        set_field("corellm.sidecars.int8.embed.shape", [2**62, 16]),
        "corellm.sidecars.int8.embed.shape[0]",
        str(2**62),
    ),
    (
        "a table with three dimensions",
        "published",
        set_field("corellm.sidecars.int8.embed.shape", [320, 4, 4]),
        "corellm.sidecars.int8.embed.shape",
        "[320, 4, 4]",
    ),
    (
        "a scale of zero",
        "published",
        set_field("corellm.sidecars.int8.embed.runtime_scale_sqrt", 0),
        "corellm.sidecars.int8.embed.runtime_scale_sqrt",
        "0",
    ),
    ("an end token beyond the vocabulary", "published", set_field("eos_token_ids", [320]), "eos_token_ids[0]", "320"),
    ("a manifest end token beyond the vocabulary", "published", set_head("eos", [1, 320]), "eos[1]", "320"),
    ("an unknown format", "published", set_head("format", "coreml-corellm-r2"), "format", "'coreml-corellm-r2'"),
]


@pytest.mark.parametrize(
    ("form", "change", "field", "found"), [c[1:] for c in CONTRADICTIONS], ids=[c[0] for c in CONTRADICTIONS]
)
def test_fields_that_contradict_each_other_are_named(form: str, change: Change, field: str, found: str) -> None:
    files = documents(form)
    change(files["manifest.json"], files["convert_config.json"])
    if field == "corellm.sidecars.fp16":
        del files["convert_config.json"]["corellm"]["sidecars"]["fp16"]
    error = refusal(files)
    assert error.field == field
    assert found in error.found
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.field, again.file) == (str(error), error.field, error.file)


@pytest.mark.parametrize(
    ("dotted", "value"), [("hostio.SLIDING", 64), ("hostio.inv_slide", [1.0] * 8), ("hostio.HD", 8)]
)
def test_without_sliding_layers_nothing_is_said_about_them(dotted: str, value: Any) -> None:
    """One spelling: otherwise one model would have two identities."""
    files = documents("ours")
    all_full(files["convert_config.json"])
    assert parse(files).sliding_window is None
    set_field(dotted, value)({}, files["convert_config.json"])
    error = refusal(files)
    assert error.field == dotted and "no layer in layer_types is sliding" in error.expected


@pytest.mark.parametrize("name", ["SLIDING", "inv_slide"])
def test_with_sliding_layers_it_has_to_be_said(name: str) -> None:
    files = documents("ours")
    del files["convert_config.json"]["hostio"][name]
    assert refusal(files).field == f"hostio.{name}"


def test_the_reason_for_a_window_off_the_grid_is_given() -> None:
    files = documents()
    files["convert_config.json"]["hostio"]["SLIDING"] = 500
    assert "blocks of 64 tokens" in str(refusal(files))
