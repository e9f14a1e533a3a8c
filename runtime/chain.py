"""One step through the chunks: which function runs next, its inputs, and the rows that go into the host's KV.

Rows are written once. A chunk's K and V are in host memory before a later chunk runs (it may read them), and `HostKV.position` moves
only when every chunk has run, so a step that fails or is interrupted has changed nothing that anyone reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import Refused
from kvstore.layout import first_read

from .bundle import Bundle, BundleConfig
from .bundle.errors import BundleFieldError, field_error
from .bundle.parse import CONVERT_CONFIG
from .engine import Engine, Function, called
from .hostkv import HostKV
from .soft import Position, SoftRow, look_up

Half = NDArray[np.float16]


class InputUnknown(Refused):
    """A function of the bundle declares an input that this runtime does not know how to make."""


@dataclass(frozen=True, slots=True)
class Step:
    """``width`` tokens from position ``start`` on, through one function of every chunk. Decode has width 1. A verify step is an offset one that may
    be given fewer tokens: its last rows are then padding."""

    kind: Literal["plain", "offset", "decode", "verify"]
    start: int
    width: int


def schedule(position: int, count: int, ctx: int, widths: Sequence[int], plain: int | None) -> tuple[Step, ...]:
    """How the published runtime splits ``count`` tokens from ``position`` on, in a context of ``ctx`` tokens.

    ``plain``: the width that runs at position 0 only, and only where that many tokens are left. Then the widest of the other
    ``widths`` that fits both what is left and the context; once none fits, all the rest goes one by one through decode. No step is
    ever padded.
    """
    steps: list[Step] = []
    at, end = position, position + count
    if plain is not None and plain in widths and at == 0 and end >= plain:
        steps.append(Step("plain", 0, plain))
        at = plain
    for width in sorted(set(widths) - {plain}, reverse=True):
        while width <= end - at and at + width <= ctx:
            steps.append(Step("offset", at, width))
            at += width
    steps.extend(Step("decode", p, 1) for p in range(at, end))
    return tuple(steps)


def decode_only(position: int, count: int) -> tuple[Step, ...]:
    """The same tokens, each through decode."""
    return tuple(Step("decode", p, 1) for p in range(position, position + count))


def write_mask(out: Half, start: int, window: int | None, neg: float, real: int | None = None) -> None:
    """Fill ``out`` [rows, slots]: row r belongs to position ``start + r``; 0 where it sees the slot, ``neg`` elsewhere.

    A full layer (``window`` None) sees slots up to its own position, a sliding one the last ``window`` of those. Rows from ``real`` on (by
    default none) are padding, which sees nothing.
    """
    out.fill(neg)
    for r in range(len(out) if real is None else real):
        p = start + r
        out[r, first_read(window, p) : p + 1] = 0


def write_onehot(out: Half, start: int, real: int | None = None) -> None:
    """Fill ``out`` [rows, slots] with 1 at slot ``start + r`` of row r, 0 elsewhere and in the rows from ``real`` on (by default none)."""
    out.fill(0)
    rows = np.arange(len(out) if real is None else real)
    out[rows, start + rows] = 1


def rope_rows(start: int, rows: int, inverse: Sequence[float]) -> tuple[Half, Half]:
    """cos and sin, [rows, 2 * len(inverse)]: position * inverse in double, cast to fp16, the half repeated twice."""
    angles = np.outer(np.arange(start, start + rows, dtype=np.float64), np.asarray(inverse, np.float64))
    cos, sin = np.cos(angles).astype(np.float16), np.sin(angles).astype(np.float16)
    return np.concatenate((cos, cos), axis=1), np.concatenate((sin, sin), axis=1)


def padded(rows: Half, width: int) -> Half:
    """``rows`` [n, …], and zero rows behind them up to ``width``; as they are where none is missing."""
    if len(rows) == width:
        return rows
    out = np.zeros((width, *rows.shape[1:]), rows.dtype)
    out[: len(rows)] = rows
    return out


class Chain:
    """The chunks and the head of a bundle over one `HostKV`, which it writes to and never swaps.

    Functions are loaded when a step first needs them. Mask and one-hot buffers are reused from step to step: an engine reads its inputs
    during the call and keeps none (`engine.Function`).
    """

    def __init__(self, bundle: Bundle, engine: Engine, kv: HostKV) -> None:
        self._bundle = bundle
        self._engine = engine
        self._kv = kv
        self._buffers: dict[tuple[str, int, int], Half] = {}
        self._fitting: set[tuple[str, str, str]] = set()

    def function_name(self, step: Step) -> str:
        """The name, the same in every chunk, of the function that computes ``step``."""
        config = self._bundle.config
        match step.kind:
            case "decode":
                return config.decode_function
            case "verify":
                return config.verify_functions[step.width]
            case _:
                return config.prefill_functions[step.width]

    def load_decode(self) -> None:
        """Load every chunk's decode function, and nothing else."""
        self._loaded(Step("decode", 0, 1))

    def run(self, step: Step, fed: Sequence[Position]) -> Half:
        """Compute ``step`` for its positions ``fed``, write their K and V rows, and return the last one's hidden state, [hidden], owned by the
        caller.

        Does not move `HostKV.position`; raises whatever loading or the engine raises, then only rows above it may have changed. Token ids
        are checked before anything runs.
        """
        last: Half = self.run_rows(step, fed)[-1]
        return last

    def run_rows(self, step: Step, fed: Sequence[Position]) -> Half:
        """The same, with every row's hidden state, [width, hidden]. Of a verify step given fewer positions than its width, the last rows
        are padding's: finite, and meaningless; only the rows of ``fed`` are written."""
        real = len(fed)
        assert real == step.width or (step.kind == "verify" and 0 < real < step.width)
        assert step.start == self._kv.position
        rows_of_tables = look_up(fed)
        embeddings = padded(self._bundle.embed.take(rows_of_tables), step.width)
        for i, one in enumerate(fed):
            if isinstance(one, SoftRow):
                embeddings[i] = one.row
        inputs = _Inputs(self._bundle, self._kv, self._buffers, step, rows_of_tables, embeddings)
        hidden: Half = embeddings
        functions = self._loaded(step)
        rows = (step.start, step.start + 1) if step.kind == "decode" else None
        for function in functions:
            given = {i: inputs.make(function, i, hidden).reshape(spec.shape) for i, spec in function.inputs.items()}
            results = function(given, kv_rows=rows)
            for layer in self._kv.layers:
                if f"k_{layer}_out" in results:
                    k, v = (results[f"{part}_{layer}_out"].reshape(step.width, -1)[:real] for part in "kv")
                    self._kv.write_rows(layer, step.start, k, v)
            hidden = results["hidden"]
        return hidden.reshape(step.width, -1)

    def _loaded(self, step: Step) -> list[Function]:
        """Every chunk's function for ``step``. Raises `BundleFieldError` where one declares an input of another size than the host makes."""
        name, found = self.function_name(step), []
        for package in self._bundle.config.chunks:
            function = self._engine.function(package, name)
            found.append(function)
            if (package, name, step.kind) not in self._fitting:
                # one position of row 0, the rest padding: only the sizes matter
                embeddings = padded(self._bundle.embed.take((0,)), step.width)
                blank = _Inputs(self._bundle, self._kv, self._buffers, Step(step.kind, 0, step.width), (0,), embeddings)
                made = {i: blank.make(function, i, embeddings) for i in function.inputs}
                _require_fit(called(package, name), step, function, made)
                self._fitting.add((package, name, step.kind))
        return found

    def token(self, hidden: Half) -> int:
        """The greedy token after ``hidden`` [hidden], by the sequential head."""
        head = self._engine.function(self._bundle.config.lmhead, None)
        return int(head({"hidden": hidden})["token"].reshape(-1)[0])


def _require_fit(label: str, step: Step, function: Function, made: dict[str, Half]) -> None:
    """Raises `BundleFieldError` unless every input of ``function`` is declared with as many elements as the host has ``made``."""
    wrong = [name for name, spec in function.inputs.items() if spec.size != made[name].size]
    # where the context is another one, the masks say so plainly, and K and V differ only because of it
    for name in wrong:
        if name in ("onehot", "mask_s", "mask_f") and step.kind != "plain":
            declared, slots = function.inputs[name].size, made[name].shape[-1]
            if declared % step.width == 0:
                expected = f"{declared // step.width} ({label} declares {name} so)"
                raise field_error(CONVERT_CONFIG, "hostio.CTX", expected, f"{slots}")
    for name in wrong:
        expected, found = str(list(function.inputs[name].shape)), str(list(made[name].shape))
        raise BundleFieldError(
            f"{label}: input {name}: expected {expected}, as it is declared, found {found}, as {CONVERT_CONFIG} has it. "
            "Take the bundle from its source again, or rebuild it.",
            file=CONVERT_CONFIG,
            field=name,
            expected=expected,
            found=found,
            function=label,
        )


class _Inputs:
    """Makes the inputs of one step by their declared names, each at most once."""

    def __init__(
        self,
        bundle: Bundle,
        kv: HostKV,
        buffers: dict[tuple[str, int, int], Half],
        step: Step,
        tokens: Sequence[int],
        embeddings: Half,
    ) -> None:
        self._bundle = bundle
        self._config: BundleConfig = bundle.config
        self._kv = kv
        self._buffers = buffers
        self._step = step
        self._tokens = tokens
        self._made: dict[str, Half] = {"inputs_embeds": embeddings}

    def make(self, function: Function, name: str, hidden: Half) -> Half:
        """The array of input ``name`` of ``function``; ``hidden`` is what the chunk before returned."""
        if name == "hidden_in":
            return hidden
        if name in _STORES:
            return self._stored(*_STORES[name])
        if name[:2] in ("k_", "v_") and name.endswith("_in") and name[2:-3].isdigit():
            return self._kv.inputs(int(name[2:-3]))[name[0] == "v"]
        if name not in self._made:
            self._made.update(self._common(function, name))
        return self._made[name]

    def _common(self, function: Function, name: str) -> dict[str, Half]:
        """Inputs that every chunk of the step shares."""
        start, rows = self._step.start, self._step.width
        match name:
            case "onehot":
                return {name: self._filled(name, self._kv.ctx)}
            case "mask_s" | "mask_f" if name == "mask_f" or self._config.sliding_window is not None:
                return {name: self._filled(name, rows if self._step.kind == "plain" else self._kv.ctx)}
            case "cos_s" | "sin_s" if self._config.inv_slide is not None:
                return dict(zip(("cos_s", "sin_s"), rope_rows(start, rows, self._config.inv_slide), strict=True))
            case "cos_f" | "sin_f":
                return dict(zip(("cos_f", "sin_f"), rope_rows(start, rows, self._config.inv_full), strict=True))
            case "tokid" if self._bundle.ple is not None:
                return {name: padded(self._bundle.ple.take(self._tokens), rows)}
        raise InputUnknown(
            f"{function.name}: input {name!r}: expected one that the host can make (hidden_in, onehot, masks, RoPE rows, K and V), "
            f"found another. Use a bundle of format coreml-corellm-r1 or kvferry-bundle-1, or a newer kvferry.",
            function=function.name,
            found=name,
        )

    def _filled(self, name: str, slots: int) -> Half:
        start, rows = self._step.start, self._step.width
        key = (name, rows, slots)
        if key not in self._buffers:
            self._buffers[key] = np.empty((rows, slots), np.float16)
        out = self._buffers[key]
        if name == "onehot":
            write_onehot(out, start, len(self._tokens))
        else:
            window = self._config.sliding_window if name == "mask_s" else None
            write_mask(out, start, window, self._config.neg, len(self._tokens))
        view = out.view()
        view.flags.writeable = False
        return view

    def _stored(self, which: Literal["sliding", "full"], index: int) -> Half:
        """K (0) or V (1) of a store layer, for layers that own none: the whole context, or in a plain step its rows."""
        stores = self._config.store_layers
        assert stores is not None, "a chunk of shared layers in a bundle without store layers"
        array = self._kv.inputs(stores.sliding if which == "sliding" else stores.full)[index]
        return array[:, : self._step.width] if self._step.kind == "plain" else array


_STORES: dict[str, tuple[Literal["sliding", "full"], int]] = {
    "sks": ("sliding", 0),
    "svs": ("sliding", 1),
    "skf": ("full", 0),
    "svf": ("full", 1),
}
