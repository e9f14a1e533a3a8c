"""Random splits of a text: saved at a, restored, fed to b, speculated, rolled back, saved, restored elsewhere, and gone on. Every token and every
KV row is compared with an uninterrupted run without speculation.

By itself: ``python tests/runtime/splits.py BUNDLE --count 10000``; it prints how many splits were tried and what differed. With ``--record FILE``
the counts so far stand in that file after every piece, as JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from drafters import Guess, Oracle
from text import FERRY, KITCHEN

from kvstore import Store
from runtime.bundle import Bundle
from runtime.portable import PortableEngine
from runtime.session import Session
from runtime.speculation import Speculation

AHEAD = 10
"""Tokens that are generated behind b."""

BLOCK = 64
LENGTHS = (150, 330, 520, 600, 720, 1_100, 1_500, 2_030)
"""Of a piece's text, one after the other: within the window, at its end, past it, and such that generation reaches the end of a context of 2,048."""
PIECE = 100
"""Splits that share a text, a store and sessions. Short enough that what earlier ones left in the store costs little."""


def span_bytes(session: Session, start: int, stop: int) -> list[bytes]:
    return [bytes(s) for group in range(len(session.kv.covered)) for s in session.kv.spans(group, start, stop)]


@dataclass(frozen=True)
class Continuation:
    """What follows the first tokens of the text: ``AHEAD`` greedy tokens, and the rows of all of them but the last."""

    tokens: tuple[int, ...]
    rows: list[bytes]


@dataclass
class Splits:
    """Tries splits of the first ``length`` tokens of a text. ``differences`` names what was not as in the uninterrupted run."""

    bundle: Bundle
    store: Store
    ids: Sequence[int]
    length: int
    differences: list[str] = field(default_factory=list)
    tried: int = 0
    rounds: int = 0
    at_edges: Counter[str] = field(default_factory=Counter)
    """How many of the places a, b and the one rolled back to were at most one token from a block's end, the window's, or the text's."""
    continued: dict[int, Continuation] = field(default_factory=dict)
    """By position; what is given is added to. It depends on the text before the position alone, so pieces of one text share it."""

    def __post_init__(self) -> None:
        # Two engines: what is restored elsewhere shares nothing with who saved it but the store.
        here, elsewhere = (PortableEngine(self.bundle.root) for _ in range(2))
        whole = Session.open(self.bundle, here, store=self.store)
        for start in range(0, self.length, 8):  # the widest step whose rows are decode's bit for bit
            whole.feed(self.ids[start : min(start + 8, self.length)])
        whole.save("whole")
        self.truth = span_bytes(whole, 0, self.length)
        # Sessions go from split to split: what one leaves behind must not matter to the next.
        self.plain, self.first, self.second = (self._session(here) for _ in range(3))
        self.third = self._session(elsewhere)

    def _edges(self) -> dict[str, list[int]]:
        windows = {g.window for g in self.bundle.layout().groups if g.window is not None}
        found = {
            "block": [*range(BLOCK, self.length, BLOCK)],
            "window": [at for window in windows for at in (window, window + BLOCK) if at < self.length],
            "end": [self.length - 1],
        }
        return {name: near for name, near in found.items() if near}

    def _place(self, rng: random.Random) -> int:
        """Anywhere, or, every second one, at an edge or one token from it."""
        if rng.random() < 0.5:
            return rng.randint(4, self.length - 1)
        edges = self._edges()
        at = rng.choice(edges[rng.choice(sorted(edges))]) + rng.choice((-1, 0, 1))
        return min(at, self.length - 1)

    def _count(self, *places: int) -> None:
        for name, edges in self._edges().items():
            self.at_edges[name] += sum(any(abs(place - edge) <= 1 for edge in edges) for place in places)

    def _session(self, engine: PortableEngine) -> Session:
        """Decode-only, because functions wider than 8 round otherwise than decode does."""
        return Session.open(self.bundle, engine, store=self.store, decode_only=True, allow_verify=True)

    def continuation(self, position: int) -> Continuation:
        if position not in self.continued:
            self.plain.restore("whole", position)
            made = self.plain.generate(AHEAD)
            self.continued[position] = Continuation(made.tokens, span_bytes(self.plain, position, self.plain.position))
        return self.continued[position]

    def one(self, seed: int) -> None:
        rng = random.Random(seed)
        a = self._place(rng)
        b = min(self.length, a + rng.choice((0, 1, 3, 7, 12)))
        plan: list[Guess] = [(rng.randint(2, 3), rng.choice((None, None, 0, 1, 2))) for _ in range(4)]
        keep = rng.randint(max(4, b - 9), b + AHEAD - 1)
        told = f"seed {seed}: a={a}, b={b}, back to {keep}"
        self.tried += 1
        self._count(a, b, keep)
        self.first.restore("whole", a)
        self.first.save("a")
        second, third = self.second, self.third
        second.restore("a")
        second.feed(self.ids[a:b])
        ahead = self.continuation(b)
        known = (*self.ids[:b], *ahead.tokens)
        made = second.generate(AHEAD, speculate=Speculation(draft=Oracle(known, plan, strict=False)))
        assert made.speculation is not None
        self.rounds += made.speculation.rounds
        self._same(f"{told}: speculated tokens", made.tokens, ahead.tokens)
        self._rows(f"{told}: speculated rows", second, b, ahead.rows)
        second.rollback(keep)
        second.save("b")
        third.restore("b")
        self._rows(f"{told}: restored rows", third, min(keep, b), ahead.rows)
        rest = self.continuation(keep).tokens if keep <= b else ahead.tokens[keep - b :]
        after = (*known[:keep], *rest)
        went = third.generate(len(rest), speculate=Speculation(draft=Oracle(after, plan, strict=False)))
        self._same(f"{told}: tokens elsewhere", went.tokens, rest)
        if keep > b:
            self._rows(f"{told}: rows elsewhere", third, b, ahead.rows)

    def _same(self, what: str, found: object, expected: object) -> None:
        if found != expected:
            self.differences.append(f"{what}: expected {expected}, found {found}")

    def _rows(self, what: str, session: Session, b: int, ahead: list[bytes]) -> None:
        """Rows below ``b`` are the text's, those behind it begin as ``ahead`` does; all others are zero."""
        n = session.position
        below = [full[: len(full) // self.length * b] for full in self.truth]
        behind = [rows[: len(rows) // (AHEAD - 1) * (n - b)] for rows in ahead]
        wanted = [x + y for x, y in zip(below, behind, strict=True)]
        if span_bytes(session, 0, n) != wanted or any(s.strip(b"\0") for s in span_bytes(session, n, session.kv.ctx)):
            self.differences.append(what)


def try_splits(
    bundle: Bundle,
    folder: Path,
    count: int,
    length: int,
    seed: int = 0,
    continued: dict[int, Continuation] | None = None,
) -> Splits:
    ids = bundle.tokenizer.encode(KITCHEN.strip() + "\n" + FERRY.strip())
    with Store.open(folder) as store:
        splits = Splits(bundle, store, ids, length, continued={} if continued is None else continued)
        for i in range(count):
            splits.one(seed + i)
    return splits


def try_pieces(
    bundle: Bundle, count: int, lengths: Sequence[int], seed: int, after: Callable[[dict[str, object]], None]
) -> dict[str, object]:
    """``count`` splits in pieces of one of ``lengths`` after the other, each piece in a store of its own; ``after`` is given the figures so far after each."""
    began = time.perf_counter()
    tried, rounds = 0, 0
    differences: list[str] = []
    edges: Counter[str] = Counter()
    of_length: Counter[int] = Counter()
    figures: dict[str, object] = {}
    continued: dict[int, Continuation] = {}
    while tried < count:
        length = lengths[tried // PIECE % len(lengths)]
        with tempfile.TemporaryDirectory(prefix="kvferry-splits-") as folder:
            piece = try_splits(
                bundle, Path(folder) / "store", min(PIECE, count - tried), length, seed + tried, continued
            )
        tried, rounds = tried + piece.tried, rounds + piece.rounds
        differences += [f"length {length}, {found}" for found in piece.differences]
        edges += piece.at_edges
        of_length[length] += piece.tried
        figures = {
            "check": "splits",
            "bundle": bundle.config.name,
            "splits": tried,
            "seeds": [seed, seed + tried],
            "text_lengths": {str(length): of_length[length] for length in sorted(of_length)},
            "rounds": rounds,
            "places_at_edges": dict(sorted(edges.items())),
            "differences": len(differences),
            "first_differences": differences[:20],
            "seconds": round(time.perf_counter() - began),
            "machine": {
                "system": platform.system(),
                "machine": platform.machine(),
                "python": platform.python_version(),
                "date": time.strftime("%Y-%m-%d"),
            },
        }
        after(figures)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description="random splits against an uninterrupted run")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument(
        "--length", type=int, help=f"of the text, in tokens (default: one of {LENGTHS} after the other)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, metavar="FILE")
    options = parser.parse_args()
    lengths = LENGTHS if options.length is None else (options.length,)

    def after(figures: dict[str, object]) -> None:
        print(f"{figures['splits']:,} splits, {figures['differences']:,} differences", file=sys.stderr, flush=True)
        if options.record is not None:
            options.record.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")

    found = try_pieces(Bundle.open(options.bundle), options.count, lengths, options.seed, after)
    print(json.dumps(found, indent=2))
    raise SystemExit(bool(found["differences"]))


if __name__ == "__main__":
    main()
