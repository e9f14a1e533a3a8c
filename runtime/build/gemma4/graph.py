"""The functions of a Gemma 4 chunk and head, as ML Program operations.

Values that a reader may rely on: ``k_{i}_row`` (after norm and rotary position) and ``v_{i}_row`` (after its norm), [N, head_dim]: the rows as they enter the
cache, before any row's attention reads them; ``l{i}_out``, the residual stream after layer i, divided by the residual scale.

The first chunk divides the stream itself, so the tables, and an image's or a sound's rows in their place, are fed as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.build.compress import Matrix, scaled
from runtime.build.emitter import F16, Emitter, Numerics
from runtime.build.gemma4.spec import PLE_NORM, PLE_PROJECTION, Gemma4Spec
from runtime.build.graph import best_margin, greedy_token
from runtime.build.spec import FULL, SLIDING

KIND_SUFFIX = {SLIDING: "s", FULL: "f"}
#: K and V of the store layer of each kind, as inputs of the chunks that share them.
STORES = {SLIDING: ("sks", "svs"), FULL: ("skf", "svf")}
_RESIDUAL_GAINS = ("post_attention_layernorm", "post_feedforward_layernorm", "post_per_layer_input_norm")


@dataclass(frozen=True, slots=True)
class ChunkWeights:
    """A chunk's tensors by name: matrices, and fp16 vectors. Of :data:`PLE_PROJECTION` only the rows of the chunk's layers."""

    matrices: Mapping[str, Matrix]
    vectors: Mapping[str, NDArray[np.float16]]


def fold(spec: Gemma4Spec, numerics: Numerics, bounds: tuple[int, int], weights: ChunkWeights) -> ChunkWeights:
    """The weights for a residual stream that is carried divided by the residual scale. Shares the large arrays.

    What adds to the stream is divided: the gains of three norms. The one matrix that reads it through no norm, the gate of the per-layer
    embedding, is multiplied. Raises SourceFieldError where that doesn't fit fp16.
    """
    by = numerics.residual_scale
    matrices, vectors = dict(weights.matrices), dict(weights.vectors)
    for i in range(*bounds):
        for norm in _RESIDUAL_GAINS:
            name = f"layers.{i}.{norm}.weight"
            vectors[name] = (vectors[name].astype(np.float32) / by).astype(F16)
        gate = f"layers.{i}.per_layer_input_gate.weight"
        matrices[gate] = scaled(gate, matrices[gate], by)
    return ChunkWeights(matrices, vectors)


def chunk_inputs(
    spec: Gemma4Spec, bounds: tuple[int, int], width: int | None, *, plain: bool
) -> dict[str, tuple[int, ...]]:
    """Names and shapes (fp16) of a chunk function's inputs. ``width`` None is ``decode``; ``plain`` takes no KV of its own layers."""
    rows: tuple[int, ...] = () if width is None else (width,)
    slots = width if plain and width is not None else spec.context
    owns = spec.owns(bounds[0])
    inputs: dict[str, tuple[int, ...]] = {
        "hidden_in": (*rows, spec.hidden),
        "inputs_embeds": (*rows, spec.hidden),
        "tokid": (*rows, spec.layers, spec.ple),
    }
    if owns and not plain:
        inputs["onehot"] = (*rows, spec.context)
    for kind in spec.kinds(bounds):
        suffix = KIND_SUFFIX[kind]
        inputs[f"cos_{suffix}"] = inputs[f"sin_{suffix}"] = (*rows, _head_dim(spec, kind))
        inputs[f"mask_{suffix}"] = (*rows, slots)
        if not owns:
            inputs |= {name: (1, slots, _head_dim(spec, kind)) for name in STORES[kind]}
    if owns and not plain:
        for i in range(*bounds):
            inputs[f"k_{i}_in"] = inputs[f"v_{i}_in"] = (1, spec.context, spec.head_dim_of(i))
    return inputs


def _head_dim(spec: Gemma4Spec, kind: str) -> int:
    return spec.global_head_dim if kind == FULL else spec.head_dim


@dataclass(slots=True)
class ChunkFunction:
    """One function of a chunk being emitted. ``width`` None is ``decode``. ``weights`` are folded."""

    emit: Emitter
    spec: Gemma4Spec
    bounds: tuple[int, int]
    width: int | None
    plain: bool
    weights: ChunkWeights
    inputs: Mapping[str, Any]
    _hit: Any = field(default=None, init=False)
    _kept: Any = field(default=None, init=False)

    @property
    def rows(self) -> int:
        return 1 if self.width is None else self.width

    def outputs(self) -> list[Any]:
        """Emit the layers; the output values in order: hidden, then k and v of each layer that owns them."""
        mb, emit, spec, n = self.emit.mb, self.emit, self.spec, self.rows
        hidden = emit.reshape(self.inputs["hidden_in"], (n, spec.hidden), "hidden_rows")
        if self.bounds[0] == 0:
            hidden = mb.mul(x=hidden, y=emit.scalar(1 / emit.numerics.residual_scale), name="hidden_divided")
        per_layer = self._per_layer()
        positions = {kind: self._positions(kind) for kind in spec.kinds(self.bounds)}
        if "onehot" in self.inputs:
            self._prepare_onehot()
        cache: list[Any] = []
        for i in range(*self.bounds):
            attended, written = self._attention(i, hidden, positions[spec.layer_types[i]])
            cache += written
            hidden = mb.add(x=hidden, y=attended, name=f"l{i}_after_attention")
            hidden = mb.add(x=hidden, y=self._feed_forward(i, hidden), name=f"l{i}_after_mlp")
            hidden = mb.add(x=hidden, y=self._gated(i, hidden, per_layer), name=f"l{i}_after_ple")
            scalar = emit.weight(f"layers.{i}.layer_scalar", self.weights.vectors[f"layers.{i}.layer_scalar"])
            hidden = mb.mul(x=hidden, y=scalar, name=f"l{i}_out")
        if self.width is None:
            hidden = mb.reshape(x=hidden, shape=emit.ints(spec.hidden), name="hidden")
        else:
            hidden = mb.identity(x=hidden, name="hidden")
        return [hidden, *cache]

    # Parts of a layer

    def _linear(self, x: Any, tensor: str, name: str) -> Any:
        return self.emit.project(x, self.emit.matrix(tensor, self.weights.matrices[tensor]), name)

    def _norm(self, x: Any, tensor: str, epsilon: float, name: str) -> Any:
        return self.emit.norm(x, tensor, self.weights.vectors[tensor], epsilon, name)

    @property
    def _residual_epsilon(self) -> float:
        """Of norms that read the residual stream: it is carried divided, so epsilon is divided by the square."""
        return self.spec.norm_epsilon / self.emit.numerics.residual_scale**2

    def _per_layer(self) -> Any:
        """The per-layer embeddings of the chunk's layers, [N, layers, ple], times √2.

        The model has norm(projection · embedding / √hidden) + row, all divided by √2. The norm undoes its divisor, which stays in epsilon
        alone; √2 is left out here, because the norm after the layer's own projection undoes it too (see :meth:`_gated`).
        """
        mb, emit, spec, n = self.emit.mb, self.emit, self.spec, self.rows
        first, stop = self.bounds
        shape = (n, stop - first, spec.ple)
        embeddings = emit.reshape(self.inputs["inputs_embeds"], (n, spec.hidden), "embedding_rows")
        projected = emit.reshape(self._linear(embeddings, PLE_PROJECTION, "ple_projected"), shape, "ple_by_layer")
        normed = self._norm(projected, PLE_NORM, spec.norm_epsilon * spec.hidden, "ple_norm")
        table = emit.reshape(self.inputs["tokid"], (n, spec.layers, spec.ple), "tokid_rows")
        table = mb.slice_by_size(x=table, begin=emit.ints(0, first, 0), size=emit.ints(*shape), name="tokid_layers")
        return mb.add(x=normed, y=table, name="ple")

    def _gated(self, i: int, hidden: Any, per_layer: Any) -> Any:
        """What the per-layer embedding adds to the stream."""
        mb, emit, spec, n = self.emit.mb, self.emit, self.spec, self.rows
        at, name = f"layers.{i}.", f"l{i}_ple"
        own = mb.slice_by_size(
            x=per_layer,
            begin=emit.ints(0, i - self.bounds[0], 0),
            size=emit.ints(n, 1, spec.ple),
            name=f"{name}_slice",
        )
        own = emit.reshape(own, (n, spec.ple), f"{name}_row")
        gate = self._gelu(self._linear(hidden, f"{at}per_layer_input_gate.weight", f"{name}_gate"), f"{name}_gelu")
        x = mb.mul(x=gate, y=own, name=f"{name}_gated")
        x = self._linear(x, f"{at}per_layer_projection.weight", f"{name}_projection")
        # x is √2 times the model's, so its mean square is twice as large
        return self._norm(x, f"{at}post_per_layer_input_norm.weight", 2 * spec.norm_epsilon, f"{name}_norm")

    def _gelu(self, x: Any, name: str) -> Any:
        return self.emit.mb.gelu(x=x, mode=self.emit.text("TANH_APPROXIMATION"), name=name)

    def _feed_forward(self, i: int, hidden: Any) -> Any:
        at, name = f"layers.{i}.", f"l{i}_mlp"
        x = self._norm(hidden, f"{at}pre_feedforward_layernorm.weight", self._residual_epsilon, f"{name}_norm")
        gate = self._gelu(self._linear(x, f"{at}mlp.gate_proj.weight", f"{name}_gate"), f"{name}_gelu")
        x = self.emit.mb.mul(x=gate, y=self._linear(x, f"{at}mlp.up_proj.weight", f"{name}_up"), name=f"{name}_gated")
        x = self._linear(x, f"{at}mlp.down_proj.weight", f"{name}_down")
        return self._norm(x, f"{at}post_feedforward_layernorm.weight", self.spec.norm_epsilon, f"{name}_post_norm")

    def _attention(self, i: int, hidden: Any, positions: tuple[Any, Any, Any]) -> tuple[Any, list[Any]]:
        """What attention adds to the stream, and the layer's K and V outputs."""
        mb, emit, spec, n = self.emit.mb, self.emit, self.spec, self.rows
        at, width = f"layers.{i}.", spec.head_dim_of(i)
        cos, sin, mask = positions
        x = self._norm(hidden, f"{at}input_layernorm.weight", self._residual_epsilon, f"l{i}_input_norm")

        def heads(which: str, count: int) -> Any:
            rows = self._linear(x, f"{at}self_attn.{which}_proj.weight", f"l{i}_{which}")
            rows = emit.reshape(rows, (n, count, width), f"l{i}_{which}_heads")
            rows = self._norm(rows, f"{at}self_attn.{which}_norm.weight", spec.norm_epsilon, f"l{i}_{which}_norm")
            return emit.rotate(rows, cos, sin, f"l{i}_{which}_rope")

        q = heads("q", spec.heads)
        if spec.owns(i):
            k_row = mb.reshape(x=heads("k", 1), shape=emit.ints(n, width), name=f"k_{i}_row")
            v_row = self._value_norm(self._linear(x, f"{at}self_attn.v_proj.weight", f"l{i}_v"), f"v_{i}_row")
            (keys, k_out), (values, v_out) = self._cache(f"k_{i}", k_row, width), self._cache(f"v_{i}", v_row, width)
            written = [k_out, v_out]
        else:
            keys, values = (self.inputs[name] for name in STORES[spec.layer_types[i]])
            written = []
        out = self._attend(i, q, keys, values, mask)
        out = self._linear(out, f"{at}self_attn.o_proj.weight", f"l{i}_o")
        return (
            self._norm(out, f"{at}post_attention_layernorm.weight", spec.norm_epsilon, f"l{i}_attention_norm"),
            written,
        )

    def _value_norm(self, value: Any, name: str) -> Any:
        """V's norm has no gain."""
        return self.emit.norm(value, "", None, self.spec.norm_epsilon, name)

    # Positions and cache

    def _positions(self, kind: str) -> tuple[Any, Any, Any]:
        """cos and sin [N, 1, head_dim], mask [N, 1, slots]."""
        emit, n, s = self.emit, self.rows, KIND_SUFFIX[kind]
        cos, sin = (
            emit.reshape(self.inputs[f"{w}_{s}"], (n, 1, _head_dim(self.spec, kind)), f"{w}_{s}_rows")
            for w in ("cos", "sin")
        )
        mask = self.inputs[f"mask_{s}"]
        return cos, sin, emit.reshape(mask, (n, 1, mask.shape[-1]), f"mask_{s}_rows")

    def _prepare_onehot(self) -> None:
        """[1, CTX, 1]: 1 at the slots this call writes, and 1 at the others."""
        mb, emit = self.emit.mb, self.emit
        onehot = self.inputs["onehot"]
        if self.width is not None:
            onehot = mb.reduce_sum(x=onehot, axes=emit.ints(0), keep_dims=emit.boolean(False), name="onehot_sum")
        self._hit = emit.reshape(onehot, (1, self.spec.context, 1), "onehot_slots")
        self._kept = mb.sub(x=emit.scalar(1.0), y=self._hit, name="onehot_kept")

    def _cache(self, name: str, row: Any, width: int) -> tuple[Any, Any]:
        """What attention reads [1, slots, head_dim], and the function's output: the whole cache (decode) or the N rows."""
        mb, emit, n = self.emit.mb, self.emit, self.rows
        if self.plain:
            return emit.reshape(row, (1, n, width), f"{name}_read"), mb.identity(x=row, name=f"{name}_out")
        kept = mb.mul(x=self.inputs[f"{name}_in"], y=self._kept, name=f"{name}_kept")
        if self.width is None:
            slot = emit.reshape(row, (1, 1, width), f"{name}_slot")
            whole = mb.add(x=kept, y=mb.mul(x=slot, y=self._hit, name=f"{name}_written"), name=f"{name}_out")
            return whole, whole
        written = self._product(self.inputs["onehot"], row, f"{name}_scattered", turn_x=True)
        written = emit.reshape(written, (1, self.spec.context, width), f"{name}_written")
        return mb.add(x=kept, y=written, name=f"{name}_read"), mb.identity(x=row, name=f"{name}_out")

    def _attend(self, i: int, q: Any, keys: Any, values: Any, mask: Any) -> Any:
        """q [N, heads, head_dim], keys and values [1, slots, head_dim] -> [N, heads · head_dim]. The scale is 1."""
        mb, emit, n, heads = self.emit.mb, self.emit, self.rows, self.spec.heads
        width, slots = self.spec.head_dim_of(i), keys.shape[1]
        q = emit.reshape(q, (1, n * heads, width), f"l{i}_q_rows")
        scores = self._product(q, keys, f"l{i}_scores", turn_y=True)
        scores = emit.reshape(scores, (n, heads, slots), f"l{i}_scores_rows")
        scores = mb.add(x=scores, y=mask, name=f"l{i}_masked")
        shares = mb.softmax(x=scores, axis=emit.axis(-1), name=f"l{i}_shares")
        shares = emit.reshape(shares, (1, n * heads, slots), f"l{i}_shares_rows")
        out = self._product(shares, values, f"l{i}_attended")
        return emit.reshape(out, (n, heads * width), f"l{i}_attended_rows")

    def _product(self, x: Any, y: Any, name: str, *, turn_x: bool = False, turn_y: bool = False) -> Any:
        flag = self.emit.boolean
        return self.emit.mb.matmul(x=x, y=y, transpose_x=flag(turn_x), transpose_y=flag(turn_y), name=name)


def head_outputs(
    emit: Emitter, spec: Gemma4Spec, hidden: Any, gain: NDArray[np.float16], name: str, matrix: Matrix, *, margin: bool
) -> list[Any]:
    """The head: final norm, output matrix (``name`` is its key), argmax. ``hidden`` [H] or [N, H], divided by the residual scale -> ``token`` int32 [1] or [N];
    with ``margin`` also ``margin``, of the logits without the cap.

    The model caps logits by tanh, which changes no argmax but in fp16, where it makes equal what was not: it is left out.
    """
    n = 1 if len(hidden.shape) == 1 else hidden.shape[0]
    epsilon = spec.norm_epsilon / emit.numerics.residual_scale**2
    x = emit.norm(emit.reshape(hidden, (n, spec.hidden), "hidden_rows"), "output_norm", gain, epsilon, "output_normed")
    logits = emit.project(x, emit.matrix(name, matrix), "logits")
    return [greedy_token(emit, logits), *([best_margin(emit, logits)] if margin else [])]
