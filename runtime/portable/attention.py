"""Attention over the slots that a mask lets through, in one step instead of a graph's dozen.

Narrow functions walk the cache in chunks on a fixed grid of slots and make, for each position, the same calls on
the same shapes whatever the number of positions: so each row is decode's row, bit for bit. Wide ones take GEMM.
Masked slots get a share of exactly 0 (exp of −4e4 underflows), so chunks without a visible slot are not visited.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.ops import Array
from runtime.portable.caches import Cache
from runtime.portable.recognise import Attention, Reads

# float32 numbers in one chunk of a cache: a quarter of a second-level cache.
_CHUNK_NUMBERS = 1 << 16
# Positions of one GEMM in wide functions: causal and window masks then leave out most of what they hide.
TILE = 64
_HIDDEN = np.float32(-4e4)
# An additive mask below this hides its slot: exp(score + mask − maximum) is 0 for any score a model makes.
_HIDES = np.float32(-8e3)

Round = Callable[[Array], Array]


def chunk_slots(width: int) -> int:
    """Slots of one chunk of a cache of ``width`` numbers a slot: a power of two, the same in every function."""
    slots = _CHUNK_NUMBERS // max(1, width)
    return max(64, 1 << (slots.bit_length() - 1)) if slots else 64


@dataclass(frozen=True, slots=True, eq=False)
class Sight:
    """A mask ready to use: ``mask`` float32 [n, slots], and per row the slots [first, last) that it shows.

    A row that hides everything (a padding row) shows everything: its scores decide, as in the program.
    """

    mask: NDArray[np.float32]
    first: tuple[int, ...]
    last: tuple[int, ...]


def sight(mask: Array) -> Sight:
    """The ``Sight`` of an additive mask [..., slots]."""
    rows = mask.reshape(-1, mask.shape[-1])
    slots = rows.shape[1]
    visible = rows > _HIDES
    # argmax is the first True, and 0 where there is none: then the row counts as showing everything
    first, last = visible.argmax(1), slots - visible[:, ::-1].argmax(1)
    return Sight(rows, tuple(first.tolist()), tuple(last.tolist()))


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Queries that share a position (wide: a tile of positions) and the columns they read."""

    rows: NDArray[np.intp]
    positions: NDArray[np.intp]
    key: slice
    value: slice


def _groups(attention: Attention, tile: int) -> list[_Group]:
    heads: dict[tuple[int, int, int], list[int]] = {}
    for row in range(attention.rows):
        key, value = int(attention.keys.starts[row]), int(attention.values.starts[row])
        heads.setdefault((int(attention.mask_rows[row]) // tile, key, value), []).append(row)
    width = attention.head_dim
    return [
        _Group(np.array(rows), attention.mask_rows[rows], slice(k, k + width), slice(v, v + width))
        for (_, k, v), rows in heads.items()
    ]


def fits_exact(attention: Attention) -> bool:
    """Whether every position has as many queries as the next, as row-exact calls need."""
    return len({len(group.rows) for group in _groups(attention, 1)}) == 1


@dataclass(frozen=True, slots=True)
class Rounds:
    """What the program's element types do to the values in between: ``None`` in fp32, rounding in fp16."""

    scores: Round | None
    scaled: Round | None
    masked: Round | None
    shares: Round | None
    out: Round | None


def kernel(attention: Attention, exact: bool, rounds: Rounds) -> Callable[[Array, Sight, Cache, Cache], Array]:
    """The step (query, sight, keys, values) → float32 of ``attention.shape``.

    ``exact`` makes rows independent of how many there are. Scratch memory belongs to the step: calls must not overlap.
    """
    run = _exact(attention, rounds) if exact else _wide(attention, rounds)
    lead, rows, head_dim, shape = attention.shape[:-1], attention.rows, attention.head_dim, attention.shape
    flip = attention.flip_query

    def attend(query: Array, seen: Sight, keys: Cache, values: Cache) -> Array:
        if flip:
            query = query.swapaxes(-1, -2)
        flat = np.ascontiguousarray(np.broadcast_to(query, (*lead, head_dim))).reshape(rows, head_dim)
        return run(flat, seen, keys, values).reshape(shape)

    return attend


def _masked(scores: Array, mask: Array, scale: np.float32 | None, rounds: Rounds) -> None:
    """Scores to masked scores, in place."""
    if rounds.scores is not None:
        scores[...] = rounds.scores(scores)
    if scale is not None:
        scores *= scale
        if rounds.scaled is not None:
            scores[...] = rounds.scaled(scores)
    scores += mask
    if rounds.masked is not None:
        scores[...] = rounds.masked(scores)


def _scale(attention: Attention) -> np.float32 | None:
    return None if attention.scale is None else np.float32(attention.scale)


def _exact(attention: Attention, rounds: Rounds) -> Callable[[Array, Sight, Cache, Cache], Array]:
    groups = _groups(attention, 1)
    positions = [int(group.positions[0]) for group in groups]
    order = np.stack([group.rows for group in groups])
    heads = order.shape[1]
    # a slice where it does, because an index list copies
    in_turn = positions == list(range(positions[0], positions[0] + len(positions)))
    at_positions = slice(positions[0], positions[0] + len(positions)) if in_turn else positions
    # row r of the graph is number back[r] here; None when they already agree
    back = np.argsort(order.reshape(-1))
    same_order = bool((back == np.arange(attention.rows)).all())
    slots, scale = attention.keys.slots, _scale(attention)
    chunk = chunk_slots(max(attention.keys.width, attention.values.width))
    key_chunk = np.zeros((chunk, attention.keys.width), np.float32)
    value_chunk = np.zeros((chunk, attention.values.width), np.float32)
    keys_of = [key_chunk[:, group.key].T for group in groups]
    values_of = [value_chunk[:, group.value] for group in groups]
    matmul = np.matmul

    def run(query: Array, seen: Sight, keys: Cache, values: Cache) -> Array:
        spans = [(seen.first[p] // chunk, -(-seen.last[p] // chunk)) for p in positions]
        begin, end = min(span[0] for span in spans), max(span[1] for span in spans)
        start, stop = begin * chunk, min(end * chunk, slots)
        shown = min(seen.first[p] for p in positions), max(seen.last[p] for p in positions)
        queries = query.reshape(len(groups), heads, -1) if same_order else query[order]
        scores = np.zeros((len(groups), heads, (end - begin) * chunk), np.float32)
        windows = [(n, slice((n - begin) * chunk, (n - begin + 1) * chunk)) for n in range(begin, end)]
        for n, at in windows:
            keys.fetch(n * chunk, key_chunk, shown)
            for span, asks, key, out in zip(spans, queries, keys_of, scores, strict=True):
                if span[0] <= n < span[1]:
                    matmul(asks, key, out[:, at])
        inside = scores[..., : stop - start]
        _masked(inside, seen.mask[at_positions, None, start:stop], scale, rounds)
        inside -= np.maximum.reduce(inside, -1, keepdims=True)
        np.exp(inside, inside)
        # an order of additions that chunks of zeros don't change: each chunk by itself, then one after the other
        sums = np.add.reduce(scores.reshape(len(groups), heads, -1, chunk), -1)
        inside /= np.add.accumulate(sums, -1)[..., -1:]
        if rounds.shares is not None:
            inside[...] = rounds.shares(inside)
        out = np.zeros((len(groups), heads, attention.head_dim), np.float32)
        for n, at in windows:
            values.fetch(n * chunk, value_chunk, shown)
            for span, share, value, total in zip(spans, scores, values_of, out, strict=True):
                if span[0] <= n < span[1]:
                    total += matmul(share[:, at], value)
        result = out.reshape(attention.rows, -1)
        if not same_order:
            result = result[back]
        return result if rounds.out is None else rounds.out(result)

    return run


def _wide(attention: Attention, rounds: Rounds) -> Callable[[Array, Sight, Cache, Cache], Array]:
    groups = _groups(attention, TILE)
    scale = _scale(attention)

    def run(query: Array, seen: Sight, keys: Cache, values: Cache) -> Array:
        begin, end = min(seen.first), max(seen.last)
        held_keys, held_values = _held(keys, attention.keys, begin, end), _held(values, attention.values, begin, end)
        result = np.empty((attention.rows, attention.head_dim), np.float32)
        for group in groups:
            start = min(seen.first[p] for p in group.positions)
            stop = max(seen.last[p] for p in group.positions)
            at = slice(start - begin, stop - begin)
            scores = query[group.rows] @ held_keys[at, group.key].T
            _masked(scores, seen.mask[group.positions, start:stop], scale, rounds)
            scores -= np.maximum.reduce(scores, -1, keepdims=True)
            np.exp(scores, out=scores)
            scores /= np.add.reduce(scores, -1, keepdims=True)
            if rounds.shares is not None:
                scores = rounds.shares(scores)
            result[group.rows] = scores @ held_values[at, group.value]
        return result if rounds.out is None else rounds.out(result)

    return run


def _held(cache: Cache, reads: Reads, begin: int, end: int) -> Array:
    out = np.empty((end - begin, reads.width), np.float32)
    cache.fetch(begin, out, (begin, end))
    return out
