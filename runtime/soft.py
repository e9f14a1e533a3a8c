"""Soft tokens: positions whose embedding is given as a row (of an image or of audio) and not looked up by a token id.

A caller mixes ids and `SoftSpan`s in one sequence. Here it becomes one entry a position, so that whoever cuts it, at a step, a block or a
common prefix, may cut inside a span.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.digest import soft_row_digest
from kvstore.errors import InputInvalid, Refused
from kvstore.items import MAX_ID, Item, SoftToken

from .bundle import Bundle

Half = NDArray[np.float16]


@dataclass(frozen=True, slots=True, eq=False)
class SoftSpan:
    """Consecutive positions with the embeddings ``rows``, fp16 [n, hidden], n of 1 or more, all finite.

    A row is what a chunk gets as ``inputs_embeds``, bit for bit: in the unit of ``Bundle.embed``'s rows, which a bundle may hold divided;
    `of` makes such rows from an encoder's output. ``placeholder``: the id that stands for the medium in the model's
    vocabulary; nothing is looked up by it. The span keeps a read-only copy. `InputInvalid` names what is wrong.
    """

    placeholder: int
    rows: Half

    def __post_init__(self) -> None:
        placeholder = operator.index(self.placeholder)
        if not 0 <= placeholder <= MAX_ID:
            raise InputInvalid(f"soft span: placeholder: expected an id of 0 to {MAX_ID}, found {placeholder}")
        rows = np.array(self.rows)
        if rows.dtype != np.float16:
            raise InputInvalid(
                f"soft span: rows: expected float16, found {rows.dtype}. Use SoftSpan.of for an encoder's float32."
            )
        if rows.ndim != 2 or not len(rows):
            raise InputInvalid(f"soft span: rows: expected [n, hidden] with n of 1 or more, found {list(rows.shape)}")
        finite = np.isfinite(rows).all(axis=1)
        if not finite.all():
            raise InputInvalid(
                f"soft span: rows: expected finite fp16 values, found others in row {int(np.argmin(finite))} of {len(rows)}"
            )
        rows.flags.writeable = False
        object.__setattr__(self, "placeholder", placeholder)
        object.__setattr__(self, "rows", rows)

    @classmethod
    def of(cls, bundle: Bundle, placeholder: int, values: NDArray[Any]) -> SoftSpan:
        """From an encoder's rows [n, hidden] in the model's own unit, the unit of its scaled embeddings: ``fp16(f32(value) / divisor)`` with
        the bundle's divisor of embedding rows. `Refused` for a bundle of ours that is too old to say its divisor."""
        divisor = bundle.config.embed_divisor
        if divisor is None:
            raise Refused(
                "convert_config.json: hostio.EMBED_DIVISOR: expected what the bundle's embedding rows are divided by, found no such "
                "field. Build the bundle again, or make a SoftSpan of rows in the unit of its embeddings.",
                field="hostio.EMBED_DIVISOR",
            )
        with np.errstate(over="ignore"):  # what passes fp16's range is refused as not finite
            rows = (np.asarray(values, np.float32) / np.float32(divisor)).astype(np.float16)
        return cls(placeholder, rows)

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True, eq=False)
class SoftRow:
    """One position of a span: how it is named, and its row [hidden]."""

    item: SoftToken
    row: Half


Input = int | SoftSpan
"""What a caller's sequence is made of."""

Position = int | SoftRow
"""The same, one entry a position."""


def positions(inputs: Sequence[Input], hidden: int) -> list[Position]:
    """One entry a position, in order. `InputInvalid` unless every span's rows are ``hidden`` wide. Token ids are not checked."""
    made: list[Position] = []
    for given in inputs:
        if not isinstance(given, SoftSpan):
            made.append(operator.index(given))
            continue
        if given.rows.shape[1] != hidden:
            raise InputInvalid(
                f"soft span at position {len(made)}: rows: expected [{len(given)}, {hidden}] (the bundle's hidden size), found "
                f"{list(given.rows.shape)}. Use the encoder that belongs to this model.",
                position=len(made),
                expected=hidden,
                found=given.rows.shape[1],
            )
        little = given.rows.astype("<f2", copy=False)
        made += [
            SoftRow(SoftToken(given.placeholder, soft_row_digest(stored.tobytes())), row)
            for stored, row in zip(little, given.rows, strict=True)
        ]
    return made


def items_of(fed: Sequence[Position]) -> tuple[Item, ...]:
    """How positions are named in keys and snapshots."""
    return tuple(one if isinstance(one, int) else one.item for one in fed)


def look_up(fed: Sequence[Position]) -> list[int]:
    """The row of the tables that each position takes: its token's, and row 0 for a soft one."""
    return [one if isinstance(one, int) else 0 for one in fed]
