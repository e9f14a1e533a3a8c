"""The functions of a chunk package and of the head packages, as ML Program operations.

Two values of each layer have names that a reader may rely on: ``k_{i}_row`` (after norm and rotary position) and ``v_{i}_row``, [N, kv width]: the rows
as they enter the cache, before any row's attention reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.build.emitter import F16, Emitter, Numerics
from runtime.build.spec import FULL, SLIDING, Spec

KIND_SUFFIX = {SLIDING: "s", FULL: "f"}
Layer = Mapping[str, NDArray[np.float16]]


def fold(spec: Spec, numerics: Numerics, layer: Layer) -> Layer:
    """The layer with the residual scale and the attention scale folded into what precedes them. Shares what it doesn't change.

    That is the gain of the norm in between, or, in families without that norm, the matrix itself. Dividing a matrix of fp16 numbers is exact
    but for those that end up below fp16's smallest normal number, and they lose less than the others' last bit is worth.
    """
    folded = dict(layer)

    def multiply(norm: str, matrix: str, factor: float) -> None:
        name = norm if norm in layer else matrix
        folded[name] = (layer[name].astype(np.float32) * np.float32(factor)).astype(F16)

    multiply("post_attention_norm.weight", "attn_output.weight", 1 / numerics.residual_scale)
    multiply("post_ffw_norm.weight", "ffn_down.weight", 1 / numerics.residual_scale)
    multiply("attn_q_norm.weight", "attn_q.weight", spec.attention_scale)
    return folded


def chunk_inputs(spec: Spec, bounds: tuple[int, int], width: int | None, *, plain: bool) -> dict[str, tuple[int, ...]]:
    """Names and shapes (fp16) of a chunk function's inputs. ``width`` None is ``decode``; ``plain`` takes no KV."""
    rows: tuple[int, ...] = () if width is None else (width,)
    slots = width if plain and width is not None else spec.context
    inputs: dict[str, tuple[int, ...]] = {"hidden_in": (*rows, spec.hidden)}
    if not plain:
        inputs["onehot"] = (*rows, spec.context)
    for kind in spec.kinds(bounds):
        suffix = KIND_SUFFIX[kind]
        inputs[f"cos_{suffix}"] = inputs[f"sin_{suffix}"] = (*rows, spec.head_dim)
        inputs[f"mask_{suffix}"] = (*rows, slots)
    if not plain:
        for i in range(*bounds):
            inputs[f"k_{i}_in"] = inputs[f"v_{i}_in"] = (1, spec.context, spec.kv_width)
    return inputs


@dataclass(slots=True)
class ChunkFunction:
    """One function of a chunk being emitted. ``width`` None is ``decode``."""

    emit: Emitter
    spec: Spec
    width: int | None
    plain: bool
    inputs: Mapping[str, Any]

    @property
    def rows(self) -> int:
        return 1 if self.width is None else self.width

    def outputs(self, bounds: tuple[int, int], layers: Mapping[int, Layer]) -> list[Any]:
        """Emit layers ``bounds``; the output values in order: hidden, then k and v of each layer."""
        mb, emit, spec = self.emit.mb, self.emit, self.spec
        hidden = emit.reshape(self.inputs["hidden_in"], (self.rows, spec.hidden), "hidden_rows")
        positions = self._positions(bounds)
        cache: list[Any] = []
        if not self.plain:
            self._prepare_onehot()
        for i in range(*bounds):
            hidden, written = self._layer(i, hidden, layers[i], positions[spec.layer_types[i]])
            cache += written
        if self.width is None:
            hidden = mb.reshape(x=hidden, shape=emit.ints(spec.hidden), name="hidden")
        else:
            hidden = mb.identity(x=hidden, name="hidden")
        return [hidden, *cache]

    def _positions(self, bounds: tuple[int, int]) -> dict[str, tuple[Any, Any, Any]]:
        """Per attention kind: cos and sin [N, 1, head_dim], mask [1, N, 1, slots]."""
        emit, spec, n = self.emit, self.spec, self.rows
        found = {}
        for kind in spec.kinds(bounds):
            s = KIND_SUFFIX[kind]
            mask = self.inputs[f"mask_{s}"]
            found[kind] = (
                emit.reshape(self.inputs[f"cos_{s}"], (n, 1, spec.head_dim), f"cos_{s}_rows"),
                emit.reshape(self.inputs[f"sin_{s}"], (n, 1, spec.head_dim), f"sin_{s}_rows"),
                emit.reshape(mask, (1, n, 1, mask.shape[-1]), f"mask_{s}_rows"),
            )
        return found

    def _prepare_onehot(self) -> None:
        """``onehot_slots`` [1, CTX, 1]: 1 at the slots this call writes; ``onehot_kept``: 1 at the others."""
        mb, emit, spec = self.emit.mb, self.emit, self.spec
        onehot = self.inputs["onehot"]
        if self.width is not None:
            onehot = mb.reduce_sum(x=onehot, axes=emit.ints(0), keep_dims=emit.boolean(False), name="onehot_sum")
        slots = emit.reshape(onehot, (1, spec.context, 1), "onehot_slots")
        emit.constants["onehot_slots"] = slots
        emit.constants["onehot_kept"] = mb.sub(x=emit.scalar(1.0), y=slots, name="onehot_kept")

    def _layer(self, i: int, hidden: Any, layer: Layer, positions: tuple[Any, Any, Any]) -> tuple[Any, list[Any]]:
        mb, emit, spec, n = self.emit.mb, self.emit, self.spec, self.rows
        cos, sin, mask = positions

        def linear(x: Any, tensor: str, name: str) -> Any:
            return emit.linear(x, f"blk.{i}.{tensor}", layer[tensor], f"l{i}_{name}")

        def norm(x: Any, tensor: str, name: str, epsilon: float) -> Any:
            return emit.norm(x, f"blk.{i}.{tensor}", layer[tensor], epsilon, f"l{i}_{name}")

        def own_norm(x: Any, name: str) -> Any:
            """A norm that not every family has."""
            tensor = f"{name}.weight"
            return norm(x, tensor, name.removeprefix("attn_"), spec.norm_epsilon) if tensor in layer else x

        # The residual stream is carried divided, so the epsilon of norms that read it is divided by the square.
        residual_epsilon = spec.norm_epsilon / emit.numerics.residual_scale**2
        x = norm(hidden, "attn_norm.weight", "attn_norm", residual_epsilon)
        q = emit.reshape(linear(x, "attn_q.weight", "q"), (n, spec.heads, spec.head_dim), f"l{i}_q_heads")
        k = emit.reshape(linear(x, "attn_k.weight", "k"), (n, spec.kv_heads, spec.head_dim), f"l{i}_k_heads")
        q = emit.rotate(own_norm(q, "attn_q_norm"), cos, sin, f"l{i}_q_rope")
        k = emit.rotate(own_norm(k, "attn_k_norm"), cos, sin, f"l{i}_k_rope")
        k_row = mb.reshape(x=k, shape=emit.ints(n, spec.kv_width), name=f"k_{i}_row")
        v_row = mb.identity(x=linear(x, "attn_v.weight", "v"), name=f"v_{i}_row")
        keys, k_out = self._cache(i, "k", k_row)
        values, v_out = self._cache(i, "v", v_row)
        attended = self._attend(i, q, keys, values, mask)
        attended = own_norm(linear(attended, "attn_output.weight", "attn_output"), "post_attention_norm")
        hidden = mb.add(x=hidden, y=attended, name=f"l{i}_after_attention")

        x = norm(hidden, "ffn_norm.weight", "ffn_norm", residual_epsilon)
        gate = linear(x, "ffn_gate.weight", "gate")
        if spec.activation == "silu":
            gate = mb.silu(x=gate, name=f"l{i}_silu")
        else:
            gate = mb.gelu(x=gate, mode=emit.text("TANH_APPROXIMATION"), name=f"l{i}_gelu")
        x = mb.mul(x=gate, y=linear(x, "ffn_up.weight", "up"), name=f"l{i}_gated")
        x = own_norm(linear(x, "ffn_down.weight", "down"), "post_ffw_norm")
        return mb.add(x=hidden, y=x, name=f"l{i}_after_ffn"), [k_out, v_out]

    def _cache(self, i: int, which: str, row: Any) -> tuple[Any, Any]:
        """What attention reads [1, slots, kv width], and the function's output: the whole cache (decode) or the N rows."""
        mb, emit, spec, n = self.emit.mb, self.emit, self.spec, self.rows
        name = f"{which}_{i}"
        if self.plain:
            read = emit.reshape(row, (1, n, spec.kv_width), f"{name}_read")
            return read, mb.identity(x=row, name=f"{name}_out")
        kept = mb.mul(x=self.inputs[f"{name}_in"], y=emit.constants["onehot_kept"], name=f"{name}_kept")
        if self.width is None:
            slot = emit.reshape(row, (1, 1, spec.kv_width), f"{name}_slot")
            written = mb.mul(x=slot, y=emit.constants["onehot_slots"], name=f"{name}_written")
            whole = mb.add(x=kept, y=written, name=f"{name}_out")
            return whole, whole
        written = mb.matmul(
            x=self.inputs["onehot"],
            y=row,
            transpose_x=emit.boolean(True),
            transpose_y=emit.boolean(False),
            name=f"{name}_scattered",
        )
        written = emit.reshape(written, (1, spec.context, spec.kv_width), f"{name}_written")
        return mb.add(x=kept, y=written, name=f"{name}_read"), mb.identity(x=row, name=f"{name}_out")

    def _attend(self, i: int, q: Any, keys: Any, values: Any, mask: Any) -> Any:
        """q [N, heads, head_dim], keys and values [1, slots, kv width] -> [N, heads · head_dim]. q carries the scale."""
        mb, emit, spec, n = self.emit.mb, self.emit, self.spec, self.rows
        groups, shared, width = spec.kv_heads, spec.heads // spec.kv_heads, spec.head_dim
        slots = keys.shape[1]
        if groups > 1:  # bring the KV head to the front: it is the batch of both products
            q = mb.transpose(
                x=emit.reshape(q, (n, groups, shared, width), f"l{i}_q_split"),
                perm=emit.ints(1, 0, 2, 3),
                name=f"l{i}_q_grouped",
            )
            keys, values = (
                mb.transpose(
                    x=emit.reshape(x, (slots, groups, width), f"{w}_{i}_split"),
                    perm=emit.ints(1, 0, 2),
                    name=f"{w}_{i}_grouped",
                )
                for w, x in (("k", keys), ("v", values))
            )
        q = emit.reshape(q, (groups, n * shared, width), f"l{i}_q_rows")
        scores = mb.matmul(
            x=q, y=keys, transpose_x=emit.boolean(False), transpose_y=emit.boolean(True), name=f"l{i}_scores"
        )
        scores = emit.reshape(scores, (groups, n, shared, slots), f"l{i}_scores_rows")
        scores = mb.add(x=scores, y=mask, name=f"l{i}_masked")
        shares = mb.softmax(x=scores, axis=emit.axis(-1), name=f"l{i}_shares")
        shares = emit.reshape(shares, (groups, n * shared, slots), f"l{i}_shares_rows")
        out = mb.matmul(
            x=shares, y=values, transpose_x=emit.boolean(False), transpose_y=emit.boolean(False), name=f"l{i}_attended"
        )
        if groups > 1:
            out = emit.reshape(out, (groups, n, shared, width), f"l{i}_attended_grouped")
            out = mb.transpose(x=out, perm=emit.ints(1, 0, 2, 3), name=f"l{i}_attended_rows")
        return emit.reshape(out, (n, spec.heads * width), f"l{i}_attended_flat")


def head_logits(
    emit: Emitter,
    spec: Spec,
    hidden: Any,
    gain: NDArray[np.float16],
    rows: NDArray[np.int8],
    scales: NDArray[np.float16],
) -> Any:
    """The logits of the head, [1, V] or [N, V]: final norm, int8 output rows. ``hidden`` is [H] or [N, H]."""
    mb = emit.mb
    n = 1 if len(hidden.shape) == 1 else hidden.shape[0]
    epsilon = spec.norm_epsilon / emit.numerics.residual_scale**2
    x = emit.norm(
        emit.reshape(hidden, (n, spec.hidden), "hidden_rows"), "output_norm", gain, epsilon, "output_norm_rows"
    )
    weight = mb.constexpr_blockwise_shift_scale(
        data=emit.weight("output_rows", rows), scale=emit.weight("output_scales", scales), name="output_weight"
    )
    return emit.project(x, weight, "logits")


def greedy_token(emit: Emitter, logits: Any) -> Any:
    """``token`` int32 [N], the first of the best."""
    return emit.mb.reduce_argmax(x=logits, axis=emit.axis(-1), keep_dims=emit.boolean(False), name="token")


def best_margin(emit: Emitter, logits: Any) -> Any:
    """``margin`` fp16 [N]: how far the second best logit is below the best, 0 where they are equal."""
    mb, n = emit.mb, logits.shape[0]
    two = mb.topk(
        x=logits, k=emit.axis(2), axis=emit.axis(-1), ascending=emit.boolean(False), sort=emit.boolean(True),
        return_indices=emit.boolean(False), name="best_two",
    )  # fmt: skip
    first = mb.slice_by_size(x=two, begin=emit.ints(0, 0), size=emit.ints(n, 1), name="best")
    second = mb.slice_by_size(x=two, begin=emit.ints(0, 1), size=emit.ints(n, 1), name="second_best")
    return emit.reshape(mb.sub(x=first, y=second, name="margin_rows"), (n,), "margin")
