"""From the two parsed JSON files to a `BundleConfig`: every field by type and range, then against each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvstore.layout import BLOCK

from .config import FULL, OURS, PUBLISHED, SLIDING, BundleConfig, SidecarSpec, StoreLayers
from .fields import Fields, shown

MANIFEST = "manifest.json"
CONVERT_CONFIG = "convert_config.json"

MAX_LAYERS = 1024
MAX_DIM = 1 << 20
MAX_CTX = 1 << 24
MAX_ROWS = 1 << 28
MAX_TOKEN = (1 << 31) - 1
MAX_WIDTH = 1 << 20
MAX_CHUNKS = MAX_LAYERS
MAX_WIDTHS = 64
MAX_EOS = 1024

STAGES = ("int8", "fp16")
DEFAULT_SCALES = {"embed": "embed_scale_f32.bin", "ple": "ple_scale_f32.bin"}
COMPUTE_UNITS = ("all", "cpuAndGPU", "cpuAndNeuralEngine", "cpuOnly")
DEFAULT_PLAIN = 512
F16_MAX = 65504.0
LEAST_MASK = -1000.0
MAX_DIVISOR = 65504.0


@dataclass(frozen=True, slots=True)
class _Manifest:
    name: str
    architecture: str
    format: str
    eos: tuple[int, ...]
    stage: str | None
    compute_units: str | None
    prompts: tuple[str | None, str | None, str | None, str | None]


def parse_config(manifest: Mapping[str, Any], convert: Mapping[str, Any]) -> BundleConfig:
    """The configuration of a bundle, given its two JSON files parsed. Raises `BundleFieldError`; touches no file.

    Unknown keys are ignored, as the published app does; a missing key, another type or another range is an error.
    """
    head = _manifest(Fields(MANIFEST, manifest))
    root = Fields(CONVERT_CONFIG, convert)
    ours = head.format == OURS
    layers = root.integer("num_layers", 1, MAX_LAYERS)
    hidden = root.integer("hidden", 1, MAX_DIM)
    ple_dim = root.integer("ple_dim", 0, MAX_DIM)
    first_shared = root.integer("first_shared", 1, layers)
    if not ours and ple_dim == 0:
        raise root.error("ple_dim", f"1 or more in format {PUBLISHED!r} (0 needs {OURS!r} in {MANIFEST})")
    if not ours and first_shared == layers:
        raise root.error(
            "first_shared", f"less than num_layers in format {PUBLISHED!r} (no shared layers needs {OURS!r})"
        )

    io = root.child("hostio")
    head_dim = _even(io, "HD")
    global_head_dim = _even(io, "GHD")
    kv_heads = io.integer("KV_HEADS", 1, 1024) if io.has("KV_HEADS") else 1
    if not ours and kv_heads != 1:
        raise io.error("KV_HEADS", f"1 in format {PUBLISHED!r} (more need {OURS!r} in {MANIFEST})")
    kinds = io.each("layer_types", MAX_LAYERS, f"{SLIDING!r} or {FULL!r}", _kind)
    if len(kinds) != layers:
        raise io.error("layer_types", f"{layers} entries (num_layers)", f"{len(kinds)}")

    if SLIDING not in kinds:
        _nothing_sliding(io, head_dim, global_head_dim)

    corellm = root.child("corellm")
    bounds = _bounds(root, layers, first_shared)
    chunks = corellm.each("chunks", MAX_CHUNKS, "a package name", _name)
    if len(chunks) != len(bounds):
        raise corellm.error("chunks", f"{len(bounds)} names (one per entry of chunk_bounds)", f"{len(chunks)}")
    if len(set(chunks)) != len(chunks):
        raise corellm.error("chunks", "distinct names")
    stage, embed, ple = _sidecars(corellm.child("sidecars"), head.stage, hidden, ple_dim, layers)
    widths, functions, plain, verify, batched = _functions(corellm)

    return BundleConfig(
        name=head.name,
        architecture=head.architecture,
        format=head.format,
        num_layers=layers,
        hidden=hidden,
        ple_dim=ple_dim,
        first_shared=first_shared,
        store_layers=_store_layers(root, kinds, first_shared, layers),
        chunk_bounds=bounds,
        eos_token_ids=_eos(root, head.eos, embed.rows),
        ctx=io.integer("CTX", 1, MAX_CTX),
        head_dim=head_dim,
        global_head_dim=global_head_dim,
        sliding_window=_window(io) if SLIDING in kinds else None,
        neg=_mask(io),
        embed_divisor=_divisor(io, ours),
        kv_heads=kv_heads,
        layer_types=kinds,
        inv_slide=_frequencies(io, "inv_slide", "HD", head_dim) if SLIDING in kinds else None,
        inv_full=_frequencies(io, "inv_full", "GHD", global_head_dim),
        chunks=chunks,
        lmhead=corellm.text("lmhead"),
        decode_function=corellm.text("decode_function") if corellm.has("decode_function") else "decode",
        prefill_widths=widths,
        prefill_functions=functions,
        plain_width=plain,
        verify_functions=verify,
        lmhead_batched=batched,
        margin_function=corellm.text("margin_function") if corellm.has("margin_function") else None,
        sidecar_stage=stage,
        embed=embed,
        ple=ple,
        compute_units=head.compute_units,
        prompt_prefix=head.prompts[0],
        prompt_suffix=head.prompts[1],
        assistant_suffix=head.prompts[2],
        prompt_suffix_thinking=head.prompts[3],
    )


def spare_tables(convert: Mapping[str, Any], config: BundleConfig) -> Iterator[str]:
    """The files of the sidecar stages that ``config``, which was parsed from ``convert``, does not use."""
    tables = convert["corellm"]["sidecars"]
    for stage in STAGES:
        for name in ("embed", "ple"):
            if stage != config.sidecar_stage and (table := (tables.get(stage) or {}).get(name)):
                yield table["file"]
                yield table.get("scale") or DEFAULT_SCALES[name]


def _manifest(fields: Fields) -> _Manifest:
    form = fields.choice("format", (PUBLISHED, OURS)) if fields.has("format") else PUBLISHED
    fields.integer("contextLength", 1, MAX_CTX)
    fields.text("modelRelativePath")
    fields.text("tokenizerRelativePath")
    fields.optional_text("drafterRelativePath")
    return _Manifest(
        name=fields.text("name"),
        architecture=fields.text("architecture"),
        format=form,
        eos=fields.integers("eos", MAX_EOS, 0, MAX_TOKEN) if fields.has("eos") else (),
        stage=fields.choice("sidecarStage", STAGES) if fields.has("sidecarStage") else None,
        compute_units=fields.choice("computeUnits", COMPUTE_UNITS) if fields.has("computeUnits") else None,
        prompts=(
            fields.optional_text("promptPrefix"),
            fields.optional_text("promptSuffix"),
            fields.optional_text("assistantSuffix"),
            fields.optional_text("promptSuffixThinking"),
        ),
    )


def _kind(value: object) -> str | None:
    return value if isinstance(value, str) and value in (SLIDING, FULL) else None


def _name(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _even(io: Fields, name: str) -> int:
    value = io.integer(name, 2, 65536)
    if value % 2:
        raise io.error(name, "an even head dimension (RoPE turns pairs)")
    return value


def _nothing_sliding(io: Fields, head_dim: int, global_head_dim: int) -> None:
    """One spelling, and so one identity, of a model whose layers all see everything."""
    for name in ("SLIDING", "inv_slide"):
        if io.has(name):
            raise io.error(name, "no such field (no layer in layer_types is sliding)")
    if head_dim != global_head_dim:
        raise io.error("HD", f"GHD {global_head_dim} (no layer in layer_types is sliding)")


def _window(io: Fields) -> int:
    window = io.integer("SLIDING", 1, MAX_CTX)
    if window % BLOCK:
        raise io.error("SLIDING", f"a multiple of {BLOCK} tokens (KV is stored in blocks of {BLOCK} tokens)")
    return window


def _mask(io: Fields) -> float:
    neg = io.number("NEG", -1e300, 0.0)
    # Rounded to fp16 it has to stay finite, and small enough that softmax gives a masked slot exactly 0.
    if not -F16_MAX <= neg <= LEAST_MASK:
        raise io.error("NEG", f"a mask value from {-F16_MAX:g} to {LEAST_MASK:g} (finite in fp16)")
    return neg


def _divisor(io: Fields, ours: bool) -> float | None:
    if io.has("EMBED_DIVISOR"):
        return io.number("EMBED_DIVISOR", 1.0, MAX_DIVISOR)
    return None if ours else 1.0  # the published contract feeds an encoder's rows as they are


def _frequencies(io: Fields, name: str, of: str, head_dim: int) -> tuple[float, ...]:
    values = io.numbers(name, 65536)
    if len(values) != head_dim // 2:
        raise io.error(name, f"{head_dim // 2} entries (half of {of} {head_dim})", f"{len(values)}")
    return values


def _bounds(root: Fields, layers: int, first_shared: int) -> tuple[tuple[int, int], ...]:
    pairs = root.each("chunk_bounds", MAX_CHUNKS, "a pair of layer numbers [from, to)", _pair)
    reached = 0
    for i, (start, stop) in enumerate(pairs):
        place = f"chunk_bounds[{i}]"
        if start != reached or not start < stop <= layers:
            expected = f"[{reached}, to) with {reached} < to <= {layers} (chunks follow each other)"
            raise root.error(place, expected, shown([start, stop]))
        if start < first_shared < stop:
            raise root.error(
                place, f"layers on one side of first_shared {first_shared}", f"{[start, stop]}, which straddles it"
            )
        reached = stop
    if reached != layers:
        raise root.error("chunk_bounds", f"bounds that end at num_layers {layers}", f"an end at {reached}")
    return pairs


def _pair(value: object) -> tuple[int, int] | None:
    if isinstance(value, list) and len(value) == 2 and all(type(v) is int and 0 <= v <= MAX_LAYERS for v in value):
        return value[0], value[1]
    return None


def _store_layers(root: Fields, kinds: tuple[str, ...], first_shared: int, layers: int) -> StoreLayers | None:
    if first_shared == layers and not root.has("store_layers"):
        return None
    store = root.child("store_layers")
    if first_shared == layers and not store.values:
        return None

    def layer(kind: str) -> int:
        index = store.integer(kind, 0, first_shared - 1)
        if kinds[index] != kind:
            raise store.error(kind, f"a layer of that kind (layer_types[{index}])", f"{index}, a {kinds[index]} layer")
        return index

    return StoreLayers(layer(SLIDING), layer(FULL))


def _eos(root: Fields, manifest_eos: tuple[int, ...], rows: int) -> frozenset[int]:
    own = root.integers("eos_token_ids", MAX_EOS, 0, MAX_TOKEN) if root.has("eos_token_ids") else ()
    for i, token in enumerate(own):
        if token >= rows:
            raise root.error(f"eos_token_ids[{i}]", f"a token id below {rows} (rows of the embedding)", f"{token}")
    for i, token in enumerate(manifest_eos):
        if token >= rows:
            raise Fields(MANIFEST, {}).error(f"eos[{i}]", f"a token id below {rows} (embedding rows)", f"{token}")
    return frozenset(own + manifest_eos)


def _functions(
    corellm: Fields,
) -> tuple[tuple[int, ...], dict[int, str], int | None, dict[int, str], dict[int, str]]:
    prefill = corellm.child("prefill")
    widths = prefill.integers("N", MAX_WIDTHS, 1, MAX_WIDTH)
    if len(set(widths)) != len(widths):
        raise prefill.error("N", "distinct widths")
    named = prefill.by_width("functions") if prefill.has("functions") else {}
    plain: int | None = DEFAULT_PLAIN if DEFAULT_PLAIN in widths else None
    if prefill.has("plain_N"):
        plain = prefill.integer("plain_N", 1, MAX_WIDTH)
        if plain not in widths:
            raise prefill.error("plain_N", f"one of the widths in N {list(widths)}")

    verify: dict[int, str] = {}
    batched: dict[int, str] = {}
    if (block := corellm.optional_child("verify")) is not None:
        verify = block.by_width("functions") if block.has("functions") else {}
        batched = block.by_width("lmhead_batched") if block.has("lmhead_batched") else {}
        asked = block.integers("widths", MAX_WIDTHS, 1, MAX_WIDTH) if block.has("widths") else ()
        for width in sorted({*asked, *verify, *batched}):
            for name, having in (("functions", verify), ("lmhead_batched", batched)):
                if width not in having:
                    expected = f"a name: verification of width {width} needs both functions and lmhead_batched"
                    raise block.error(f"{name}.{width}", expected, "no such field")

    functions: dict[int, str] = {}
    for width in widths:
        if (function := named.get(width, verify.get(width))) is None:
            raise prefill.error(f"functions.{width}", f"a function name (N lists {width})", "no such field")
        functions[width] = function
    decode = corellm.text("decode_function") if corellm.has("decode_function") else "decode"
    used = [decode, *functions.values()]
    if len(set(used)) != len(used):
        raise prefill.error("functions", "a function of its own for each width and for decode", f"{used}")
    verify = {width: named.get(width, name) for width, name in verify.items()}
    return tuple(sorted(widths, reverse=True)), functions, plain, verify, batched


def _sidecars(
    sidecars: Fields, manifest_stage: str | None, hidden: int, ple_dim: int, layers: int
) -> tuple[str, SidecarSpec, SidecarSpec | None]:
    default = sidecars.choice("default_stage", STAGES) if sidecars.has("default_stage") else "fp16"
    stage = manifest_stage or default
    found: dict[str, tuple[SidecarSpec, SidecarSpec | None]] = {}
    for name in STAGES:
        if (fields := sidecars.optional_child(name)) is None:
            continue
        embed = _sidecar(fields.child("embed"), name, hidden, hidden, DEFAULT_SCALES["embed"])
        ple = None
        if ple_dim:
            ple = _sidecar(fields.child("ple"), name, layers * ple_dim, ple_dim, DEFAULT_SCALES["ple"])
        elif fields.has("ple"):
            raise fields.error("ple", "no such field (ple_dim is 0)")
        found[name] = embed, ple
    if stage not in found:
        raise sidecars.error(stage, f"an object (the sidecar stage is {stage!r})")
    return stage, *found[stage]


def _sidecar(fields: Fields, stage: str, cols: int, default_square: int, default_scale: str) -> SidecarSpec:
    shape = fields.integers("shape", 2, 0, MAX_ROWS)
    if len(shape) != 2 or shape[0] < 1 or shape[1] != cols:
        raise fields.error("shape", f"[rows, {cols}] with rows from 1 to {MAX_ROWS}")
    file = fields.text("file")
    if stage == "fp16":
        return SidecarSpec(file, shape[0], shape[1], None, None)
    square = float(default_square)
    if fields.has("runtime_scale_sqrt"):
        square = fields.number("runtime_scale_sqrt", 1e-30, 1e30)
    scale = fields.text("scale") if fields.has("scale") else default_scale
    return SidecarSpec(file, shape[0], shape[1], scale, square)
