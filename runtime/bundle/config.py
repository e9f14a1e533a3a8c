"""What `manifest.json` and `convert_config.json` say, as one value with checked fields."""

from __future__ import annotations

from dataclasses import dataclass

PUBLISHED = "coreml-corellm-r1"
OURS = "kvferry-bundle-1"
SLIDING = "sliding_attention"
FULL = "full_attention"


@dataclass(frozen=True, slots=True)
class StoreLayers:
    """The layers whose K and V the shared layers read, one of each kind."""

    sliding: int
    full: int


@dataclass(frozen=True, slots=True)
class SidecarSpec:
    """One embedding table on disk, ``[rows, cols]``.

    ``scale_file`` None: fp16 values. Otherwise int8 values and one float32 scale a row in ``scale_file``, and
    ``scale_square`` is the number whose square root every row is multiplied by.
    """

    file: str
    rows: int
    cols: int
    scale_file: str | None
    scale_square: float | None


@dataclass(frozen=True, slots=True)
class BundleConfig:
    """The geometry, function names and file names of a bundle. All sizes in elements, positions in tokens.

    ``embed_divisor`` is what the embedding rows that the chunks are given, the table's or an encoder's, have been divided by; None where the
    bundle doesn't say. ``head_dim`` is a sliding layer's, ``global_head_dim`` a full layer's; ``sliding_window`` and ``inv_slide`` are None exactly where no
    layer is sliding, and then the two head dimensions are equal. ``prefill_widths`` are descending;
    ``plain_width`` is one of them or None. ``verify_functions[w]`` is the function to run for a verification of width
    ``w``, which is the prefill function of that width where there is one; ``lmhead_batched`` has the same keys. ``margin_function`` is a second
    function of every head, which also says how clear each choice was.
    """

    name: str
    architecture: str
    format: str
    num_layers: int
    hidden: int
    ple_dim: int
    first_shared: int
    store_layers: StoreLayers | None
    chunk_bounds: tuple[tuple[int, int], ...]
    eos_token_ids: frozenset[int]
    ctx: int
    head_dim: int
    global_head_dim: int
    sliding_window: int | None
    neg: float
    embed_divisor: float | None
    kv_heads: int
    layer_types: tuple[str, ...]
    inv_slide: tuple[float, ...] | None
    inv_full: tuple[float, ...]
    chunks: tuple[str, ...]
    lmhead: str
    decode_function: str
    prefill_widths: tuple[int, ...]
    prefill_functions: dict[int, str]
    plain_width: int | None
    verify_functions: dict[int, str]
    lmhead_batched: dict[int, str]
    margin_function: str | None
    sidecar_stage: str
    embed: SidecarSpec
    ple: SidecarSpec | None
    compute_units: str | None
    prompt_prefix: str | None
    prompt_suffix: str | None
    assistant_suffix: str | None
    prompt_suffix_thinking: str | None

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding: token ids are below this."""
        return self.embed.rows

    @property
    def heads(self) -> tuple[str, ...]:
        """Every head package, the sequential one first."""
        return (self.lmhead, *(p for _, p in sorted(self.lmhead_batched.items()) if p != self.lmhead))

    def head_dim_of(self, layer: int) -> int:
        return self.global_head_dim if self.layer_types[layer] == FULL else self.head_dim

    def own_layers(self, kind: str) -> tuple[int, ...]:
        """The layers of one kind that own KV, ascending."""
        return tuple(i for i in range(self.first_shared) if self.layer_types[i] == kind)

    def chunk_owns_kv(self, chunk: int) -> bool:
        return self.chunk_bounds[chunk][0] < self.first_shared
