"""Feeds a bundle's chunk functions directly, without the runtime's own chain: inputs by their published rules."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.engine import Engine, Function

Half = NDArray[np.float16]
KV = dict[str, Half]


class Feeder:
    """The chunks and heads of one bundle over plain arrays. ``kv`` is the host's memory: read and written here."""

    def __init__(self, root: Path, engine: Engine) -> None:
        config = json.loads((root / "convert_config.json").read_text())
        host = config["hostio"]
        self.engine = engine
        self.ctx, self.window, self.neg = host["CTX"], host.get("SLIDING"), host["NEG"]
        self.hidden, self.per_layer = config["hidden"], config["num_layers"] * config["ple_dim"]
        kinds = host["layer_types"][: config["first_shared"]]
        heads = host.get("KV_HEADS", 1)
        self.widths = [heads * host["GHD" if kind == "full_attention" else "HD"] for kind in kinds]
        self.width = self.widths[0]
        stores = config.get("store_layers", {})
        self.stores = {
            f"s{part}{kind[0]}": f"{part}_{layer}" for kind, layer in stores.items() for part in "kv"
        }  # sks, svs, skf, svf
        self.inverse = {"f": np.array(host["inv_full"])}
        if self.window is not None:
            self.inverse["s"] = np.array(host["inv_slide"])
        self.chunks = config["corellm"]["chunks"]
        self.kv = self.empty()

    def empty(self) -> KV:
        return {
            f"{part}_{i}": np.zeros((1, self.ctx, width), np.float16)
            for part in "kv"
            for i, width in enumerate(self.widths)
        }

    def feed(self, function: str, rows: Half, start: int, *, real: int | None = None) -> Half:
        """Runs ``rows`` [n, hidden] at ``start``; returns hidden [n, hidden]. Rows from ``real`` on are padding.

        A per-layer embedding is made of its row's numbers, over and over.
        """
        n = len(rows)
        real = n if real is None else real
        plain = "onehot" not in self.engine.function(self.chunks[0], function).inputs
        made = self.common(n, start, n if plain else self.ctx, real)
        rows = rows.copy()
        rows[real:] = 0
        made |= {"inputs_embeds": rows, "tokid": np.stack([np.resize(row, self.per_layer) for row in rows])}
        for chunk in self.chunks:
            called = self.engine.function(chunk, function)
            given = self.inputs(called, rows, made, n if plain else self.ctx)
            whole = function == "decode"
            results = called(given, kv_rows=(start, start + 1) if whole else None)
            for name, value in results.items():
                if name != "hidden":
                    kept = self.kv[name.removesuffix("_out")]
                    kept[0, start : start + real] = value.reshape(n, kept.shape[2])[:real]
            rows = results["hidden"].reshape(n, self.hidden)
        return rows

    def inputs(
        self, function: Function, hidden: Half, made: Mapping[str, Half], slots: int | None = None
    ) -> dict[str, NDArray[Any]]:
        """Exactly what ``function`` declares. ``slots``: how many of the cache a shared layer sees, by default all."""
        given: dict[str, NDArray[Any]] = {}
        for name, spec in function.inputs.items():
            if name == "hidden_in":
                array = hidden
            elif name in self.stores:
                array = self.kv[self.stores[name]][:, :slots]
            else:
                array = made[name] if name in made else self.kv[name.removesuffix("_in")]
            given[name] = array.reshape(spec.shape)
        return given

    def common(self, n: int, start: int, slots: int, real: int) -> dict[str, Half]:
        """One-hot rows, masks and RoPE rows for positions start..start+n−1."""
        position, slot = np.arange(start, start + n)[:, None], np.arange(slots)[None]
        is_real = np.arange(n)[:, None] < real
        full = (slot <= position) & is_real
        made = {
            "onehot": ((slot == position) & is_real).astype(np.float16),
            "mask_f": np.where(full, 0, self.neg).astype(np.float16),
        }
        if self.window is not None:
            sliding = full & (position - slot < self.window)
            made["mask_s"] = np.where(sliding, 0, self.neg).astype(np.float16)
        for kind, inverse in self.inverse.items():
            for part, turn in (("cos", np.cos), ("sin", np.sin)):
                half = turn(position * inverse).astype(np.float16)
                made[f"{part}_{kind}"] = np.concatenate([half, half], 1)
        return made

    def rows_of(self, start: int, stop: int) -> dict[str, bytes]:
        """The KV bytes of positions [start, stop), per layer and part."""
        return {name: array[0, start:stop].tobytes() for name, array in self.kv.items()}


def decode_each(feeder: Feeder, rows: Half, start: int) -> Half:
    return np.concatenate([feeder.feed("decode", row[None], start + i) for i, row in enumerate(rows)])


def fill(feeder: Feeder, rows: Half, widths: Sequence[tuple[str, int]]) -> None:
    """KV for all of ``rows`` by the given functions, widest first."""
    at = 0
    for function, width in widths:
        while at + width <= len(rows) and not (function == "prefill_512" and at):
            feeder.feed(function, rows[at : at + width], at)
            at += width
    if at < len(rows):
        decode_each(feeder, rows[at:], at)
