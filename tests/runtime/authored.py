"""Small packages that the tests author with coremltools: a Gemma-3-shaped chunk and a head, random weights.

This is not the builder: it exists so that the engine is tested on graphs it was not built together with.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Geometry:
    """What a chunk looks like. ``full`` are the layers with full attention."""

    hidden: int = 64
    ffn: int = 160
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 32
    ctx: int = 256
    window: int = 64
    layers: int = 2
    full: tuple[int, ...] = (1,)
    vocab: int = 512
    seed: int = 7

    @property
    def kv(self) -> int:
        return self.kv_heads * self.head_dim


def weights(geometry: Geometry) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(geometry.seed)
    g, out = geometry, {}

    def dense(name: str, rows: int, cols: int) -> None:
        out[name] = (rng.standard_normal((rows, cols)) / np.sqrt(cols)).astype(np.float16)

    for i in range(g.layers):
        dense(f"{i}.q", g.heads * g.head_dim, g.hidden)
        dense(f"{i}.k", g.kv, g.hidden)
        dense(f"{i}.v", g.kv, g.hidden)
        dense(f"{i}.o", g.hidden, g.heads * g.head_dim)
        dense(f"{i}.gate", g.ffn, g.hidden)
        dense(f"{i}.up", g.ffn, g.hidden)
        dense(f"{i}.down", g.hidden, g.ffn)
        for norm, size in (
            ("in", g.hidden), ("post", g.hidden), ("pre", g.hidden), ("ffw", g.hidden),
            ("qn", g.head_dim), ("kn", g.head_dim),
        ):  # fmt: skip
            out[f"{i}.{norm}"] = (1 + 0.2 * rng.standard_normal(size)).astype(np.float16)
    dense("head", g.vocab, g.hidden)
    return out


def _norm(mb: Any, x: Any, gain: np.ndarray) -> Any:
    top = mb.maximum(x=mb.reduce_max(x=mb.abs(x=x), axes=[-1], keep_dims=True), y=np.float16(1e-3))
    scaled = mb.real_div(x=x, y=top)
    square = mb.reduce_mean(x=mb.mul(x=scaled, y=scaled), axes=[-1], keep_dims=True)
    eps = mb.real_div(x=np.float16(1e-3), y=top)
    inverse = mb.rsqrt(x=mb.add(x=square, y=mb.mul(x=eps, y=eps)), epsilon=np.float16(1e-7))
    return mb.mul(x=mb.mul(x=scaled, y=inverse), y=gain)


def _rope(mb: Any, x: Any, cos: Any, sin: Any, head_dim: int) -> Any:
    """x [heads, N, head_dim], cos and sin [N, head_dim]."""
    heads, n, _ = x.shape
    half = head_dim // 2
    low = mb.slice_by_size(x=x, begin=[0, 0, 0], size=[heads, n, half])
    high = mb.slice_by_size(x=x, begin=[0, 0, half], size=[heads, n, half])
    turned = mb.concat(values=[mb.mul(x=high, y=np.float16(-1)), low], axis=-1)
    return mb.add(x=mb.mul(x=x, y=cos), y=mb.mul(x=turned, y=sin))


def chunk_function(geometry: Geometry, w: Mapping[str, np.ndarray], width: int | None, plain: bool) -> Any:
    """A MIL program with one function: ``decode`` (width None) or a prefill of ``width`` rows."""
    from coremltools.converters.mil import Builder as mb

    g = geometry
    n = width or 1
    span = n if plain else g.ctx
    lead = [] if width is None else [n]
    names = {"hidden_in": [*lead, g.hidden]}
    if not plain:
        names["onehot"] = [*lead, g.ctx]
    kinds = {"f" if i in g.full else "s" for i in range(g.layers)}
    for kind in sorted(kinds):
        names |= {f"mask_{kind}": [*lead, span], f"cos_{kind}": [*lead, g.head_dim], f"sin_{kind}": [*lead, g.head_dim]}
    if not plain:
        for i in range(g.layers):
            names |= {f"k_{i}_in": [1, g.ctx, g.kv], f"v_{i}_in": [1, g.ctx, g.kv]}

    def body(**v: Any) -> Any:
        hidden = mb.reshape(x=v["hidden_in"], shape=[n, g.hidden])
        outs = []
        if not plain:
            onehot = mb.reshape(x=v["onehot"], shape=[n, g.ctx])
            hit = mb.reshape(x=mb.reduce_sum(x=onehot, axes=[0]), shape=[1, g.ctx, 1])
            keep = mb.sub(x=np.float16(1), y=hit)
        for i in range(g.layers):
            kind = "f" if i in g.full else "s"
            cos, sin, mask = (mb.reshape(x=v[f"{part}_{kind}"], shape=[n, -1]) for part in ("cos", "sin", "mask"))
            x = _norm(mb, hidden, w[f"{i}.in"])
            q, k, val = (mb.linear(x=x, weight=w[f"{i}.{p}"]) for p in "qkv")
            q = mb.transpose(x=mb.reshape(x=q, shape=[n, g.heads, g.head_dim]), perm=[1, 0, 2])
            k = mb.transpose(x=mb.reshape(x=k, shape=[n, g.kv_heads, g.head_dim]), perm=[1, 0, 2])
            q = _rope(mb, _norm(mb, q, w[f"{i}.qn"]), cos, sin, g.head_dim)
            k = _rope(mb, _norm(mb, k, w[f"{i}.kn"]), cos, sin, g.head_dim)
            k = mb.reshape(x=mb.transpose(x=k, perm=[1, 0, 2]), shape=[n, g.kv])
            caches = []
            for part, rows in (("k", k), ("v", val)):
                if plain:
                    cache, out = mb.expand_dims(x=rows, axes=[0]), mb.identity(x=rows, name=f"{part}_{i}_out")
                elif width is None:
                    row = mb.reshape(x=rows, shape=[1, 1, g.kv])
                    cache = out = mb.add(
                        x=mb.mul(x=v[f"{part}_{i}_in"], y=keep), y=mb.mul(x=row, y=hit), name=f"{part}_{i}_out"
                    )
                else:
                    placed = mb.matmul(x=onehot, y=rows, transpose_x=True)
                    cache = mb.add(x=mb.mul(x=v[f"{part}_{i}_in"], y=keep), y=placed)
                    out = mb.identity(x=rows, name=f"{part}_{i}_out")
                outs.append(out)
                caches.append(mb.transpose(
                    x=mb.reshape(x=cache, shape=[span, g.kv_heads, g.head_dim]), perm=[1, 0, 2]
                ))  # fmt: skip
            group = g.heads // g.kv_heads
            q = mb.reshape(x=q, shape=[g.kv_heads, group * n, g.head_dim])
            scores = mb.mul(x=mb.matmul(x=q, y=caches[0], transpose_y=True), y=np.float16(g.head_dim**-0.5))
            scores = mb.add(x=mb.reshape(x=scores, shape=[g.heads, n, span]), y=mask)
            probs = mb.reshape(x=mb.softmax(x=scores, axis=-1), shape=[g.kv_heads, group * n, span])
            mixed = mb.reshape(x=mb.matmul(x=probs, y=caches[1]), shape=[g.heads, n, g.head_dim])
            mixed = mb.reshape(x=mb.transpose(x=mixed, perm=[1, 0, 2]), shape=[n, g.heads * g.head_dim])
            mixed = mb.linear(x=mixed, weight=w[f"{i}.o"])
            hidden = mb.add(x=hidden, y=_norm(mb, mixed, w[f"{i}.post"]))
            x = _norm(mb, hidden, w[f"{i}.pre"])
            gate = mb.gelu(x=mb.linear(x=x, weight=w[f"{i}.gate"]), mode="TANH_APPROXIMATION")
            x = mb.linear(x=mb.mul(x=gate, y=mb.linear(x=x, weight=w[f"{i}.up"])), weight=w[f"{i}.down"])
            hidden = mb.add(x=hidden, y=_norm(mb, x, w[f"{i}.ffw"]))
        return (mb.reshape(x=hidden, shape=[*lead, g.hidden], name="hidden"), *outs)

    return program(names, body)


def head_function(geometry: Geometry, w: Mapping[str, np.ndarray], width: int | None) -> Any:
    """A MIL program: hidden [H] or [width, H] -> token int32."""
    from coremltools.converters.mil import Builder as mb

    def body(hidden: Any) -> Any:
        x = mb.reshape(x=hidden, shape=[width or 1, geometry.hidden])
        return mb.reduce_argmax(x=mb.linear(x=x, weight=w["head"]), axis=-1, keep_dims=False, name="token")

    return program({"hidden": [geometry.hidden] if width is None else [width, geometry.hidden]}, body)


def program(inputs: Mapping[str, list[int]], body: Callable[..., Any]) -> Any:
    """A MIL program whose fp16 ``inputs`` are passed to ``body`` by name."""
    import coremltools as ct
    from coremltools.converters.mil import Builder as mb
    from coremltools.converters.mil.mil import types

    specs = [mb.TensorSpec(shape=tuple(shape), dtype=types.fp16) for shape in inputs.values()]
    namespace: dict[str, Any] = {}
    arguments = ", ".join(inputs)
    # mb.program names inputs after the function's parameters, so it needs a function that has them.
    exec(f"def call({arguments}): return body({', '.join(f'{n}={n}' for n in inputs)})", {"body": body}, namespace)
    return mb.program(input_specs=specs, opset_version=ct.target.iOS18)(namespace["call"])


def save(programs: Mapping[str, Any], path: Path) -> Path:
    """Converts each program to a package at ``path``: multifunction unless its only name is ``main``."""
    logging.getLogger("coremltools").setLevel(logging.ERROR)
    import coremltools as ct

    descriptor = ct.utils.MultiFunctionDescriptor()
    for name, built in programs.items():
        part = path.with_name(f"{path.stem}-{name}.mlpackage") if len(programs) > 1 or name != "main" else path
        function = built.functions["main"]
        model = ct.convert(
            built,
            minimum_deployment_target=ct.target.iOS18,
            compute_precision=ct.precision.FLOAT16,
            skip_model_load=True,
            inputs=[ct.TensorType(name=key, shape=tuple(var.shape), dtype=np.float16) for key, var in function.inputs.items()],
            outputs=[ct.TensorType(name=var.name, dtype=np.float16 if "fp16" in str(var.dtype) else None) for var in function.outputs],
            pass_pipeline=ct.PassPipeline.EMPTY,
        )  # fmt: skip
        model.save(str(part))
        if part != path:
            descriptor.add_function(str(part), "main", name)
    if len(programs) > 1 or "main" not in programs:
        descriptor.default_function_name = next(iter(programs))
        ct.utils.save_multifunction(descriptor, str(path))
    return path
