"""What the app compares with its own bundle before it takes a checkpoint's KV, and which models it can say that of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from ..errors import Refused
from ..identity import Identity
from ..layout import ITEM_BYTES, Group, Layout

BUNDLE_FORMAT = "coreml-corellm-r1"
"""The format id of the bundles that the app loads."""

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True)
class Geometry:
    """The manifest's `identity`, and beside it ``vocab_size``, below which token ids lie, and ``layer_types`` of the layers that own KV.

    ``sliding``: the window, in tokens. ``store_layers``: the sliding one, the full one.
    """

    convert_config_sha256: str
    num_layers: int
    hidden: int
    ple_dim: int
    first_shared: int
    ctx: int
    head_dim: int
    global_head_dim: int
    sliding: int
    sidecar_stage: str
    store_layers: tuple[int, int]
    layer_types: tuple[str, ...]
    vocab_size: int

    def head_dim_of(self, layer: int) -> int:
        return self.global_head_dim if self.layer_types[layer] == FULL else self.head_dim

    def file_bytes(self, layer: int, rows: int) -> int:
        """Length of the layer's K file, and of its V file."""
        return rows * self.head_dim_of(layer) * ITEM_BYTES["float16"]

    def value(self) -> dict[str, Any]:
        """As the manifest has it."""
        return {
            "convertConfigSHA256": self.convert_config_sha256,
            "numLayers": self.num_layers,
            "hidden": self.hidden,
            "pleDim": self.ple_dim,
            "firstShared": self.first_shared,
            "ctx": self.ctx,
            "hd": self.head_dim,
            "ghd": self.global_head_dim,
            "sliding": self.sliding,
            "sidecarStage": self.sidecar_stage,
            "ownLayerHeadDims": [self.head_dim_of(layer) for layer in range(self.first_shared)],
            "storeLayers": {SLIDING: self.store_layers[0], FULL: self.store_layers[1]},
        }


def geometry_of(identity: Identity, layout: Layout, *, ctx: int, convert_config_sha256: str) -> Geometry:
    """The geometry of the KV of ``identity``. `Refused`, with every reason, for a model whose KV the app's format can't hold."""
    fields = identity.wire()
    ints = (
        "num_layers",
        "hidden",
        "ple_dim",
        "first_shared",
        "head_dim",
        "global_head_dim",
        "sliding_window",
        "kv_heads",
        "vocab_size",
    )
    why = [
        f"{name}: expected an integer, found {_shown(fields, name)}"
        for name in ints
        if type(fields.get(name)) is not int
    ]
    stage, kinds, stores = (fields.get(name) for name in ("sidecar_stage", "layer_types", "store_layers"))
    if not isinstance(stage, str):
        why.append(f"sidecar_stage: expected text, found {_shown(fields, 'sidecar_stage')}")
    if not isinstance(kinds, tuple) or set(kinds) - {SLIDING, FULL} or len(kinds) != fields.get("num_layers"):
        why.append(f"layer_types: expected the kind of every layer, found {_shown(fields, 'layer_types')}")
    if why:
        _refuse(why, "It was not made by a Core ML bundle.")
    number: dict[str, int] = {name: fields[name] for name in ints}  # type: ignore[misc]
    if number["kv_heads"] != 1:
        why.append(f"kv_heads: expected 1, found {number['kv_heads']}")
    if number["ple_dim"] < 1:
        why.append("ple_dim: expected 1 or more, found 0")
    if number["first_shared"] >= number["num_layers"]:
        why.append(
            f"first_shared: expected shared layers, found {number['first_shared']} of {number['num_layers']} without"
        )
    if not isinstance(stores, tuple) or len(stores) != 2 or not all(type(layer) is int for layer in stores):
        why.append(f"store_layers: expected a sliding and a full layer, found {_shown(fields, 'store_layers')}")
    if fields.get("adapter") is not None:
        why.append(f"adapter: expected none, found {_shown(fields, 'adapter')}")
    if why:
        _refuse(why, "The app can't load such a model (format kvferry-bundle-1).")
    assert isinstance(kinds, tuple) and isinstance(stores, tuple) and isinstance(stage, str)
    geometry = Geometry(
        convert_config_sha256=convert_config_sha256,
        num_layers=number["num_layers"],
        hidden=number["hidden"],
        ple_dim=number["ple_dim"],
        first_shared=number["first_shared"],
        ctx=ctx,
        head_dim=number["head_dim"],
        global_head_dim=number["global_head_dim"],
        sliding=number["sliding_window"],
        sidecar_stage=stage,
        store_layers=(int(str(stores[0])), int(str(stores[1]))),
        layer_types=tuple(str(kind) for kind in kinds[: number["first_shared"]]),
        vocab_size=number["vocab_size"],
    )
    if layout.digest != layout_of(geometry).digest:
        _refuse(
            [f"layout: expected that of its layer_types, found {layout.wire()}"], "It was not made by a Core ML bundle."
        )
    return geometry


def layout_of(geometry: Geometry) -> Layout:
    """The KV layout: the groups ``full`` and ``sliding``."""
    layers = range(geometry.first_shared)
    full = tuple(layer for layer in layers if geometry.layer_types[layer] == FULL)
    sliding = tuple(layer for layer in layers if geometry.layer_types[layer] == SLIDING)
    return Layout(
        (
            Group("full", None, full, 1, geometry.global_head_dim),
            Group("sliding", geometry.sliding, sliding, 1, geometry.head_dim),
        )
    )


def _shown(fields: Mapping[str, Any], name: str) -> str:
    return f"{fields[name]!r:.60}" if name in fields else "no such field"


def _refuse(why: Sequence[str], what: str) -> NoReturn:
    raise Refused(
        f"the app's checkpoint format can't hold this KV ({'; '.join(why)}). {what} It can be pushed and pulled as a snapshot instead.",
        why=list(why),
    )


def require_bundle_format(found: str) -> None:
    """`Refused` for a bundle that the app doesn't load."""
    if found != BUNDLE_FORMAT:
        raise Refused(
            f"bundle format: expected {BUNDLE_FORMAT}, which the app loads, found {found}. Its KV can be pushed and pulled as snapshots "
            f"instead.",
            expected=BUNDLE_FORMAT,
            found=found,
        )
