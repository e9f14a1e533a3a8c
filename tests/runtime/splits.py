"""Random splits of a text: saved at a, restored, fed to b, speculated, rolled back, saved, restored elsewhere, and gone on. Every token and every
KV row is compared with an uninterrupted run without speculation.

By itself: ``python tests/runtime/splits.py BUNDLE --count 10000``; it prints how many splits were tried and what differed.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Sequence
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
    _continued: dict[int, Continuation] = field(default_factory=dict)

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

    def _session(self, engine: PortableEngine) -> Session:
        """Decode-only, because functions wider than 8 round otherwise than decode does."""
        return Session.open(self.bundle, engine, store=self.store, decode_only=True, allow_verify=True)

    def continuation(self, position: int) -> Continuation:
        if position not in self._continued:
            self.plain.restore("whole", position)
            made = self.plain.generate(AHEAD)
            self._continued[position] = Continuation(made.tokens, span_bytes(self.plain, position, self.plain.position))
        return self._continued[position]

    def one(self, seed: int) -> None:
        rng = random.Random(seed)
        a = rng.randint(4, self.length - 1)
        b = min(self.length, a + rng.choice((0, 1, 3, 7, 12)))
        plan: list[Guess] = [(rng.randint(2, 3), rng.choice((None, None, 0, 1, 2))) for _ in range(4)]
        keep = rng.randint(max(4, b - 9), b + AHEAD - 1)
        told = f"seed {seed}: a={a}, b={b}, back to {keep}"
        self.tried += 1
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


def try_splits(bundle: Bundle, folder: Path, count: int, length: int, seed: int = 0) -> Splits:
    ids = bundle.tokenizer.encode(KITCHEN.strip() + "\n" + FERRY.strip())
    with Store.open(folder) as store:
        splits = Splits(bundle, store, ids, length)
        for i in range(count):
            splits.one(seed + i)
    return splits


def main() -> None:
    parser = argparse.ArgumentParser(description="random splits against an uninterrupted run")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--length", type=int, default=1_500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvferry-splits-") as folder:
        splits = try_splits(
            Bundle.open(options.bundle), Path(folder) / "store", options.count, options.length, options.seed
        )
    print(f"{splits.tried:,} splits, {splits.rounds:,} rounds of speculation, {len(splits.differences):,} differences")
    for difference in splits.differences[:20]:
        print(difference)
    raise SystemExit(bool(splits.differences))


if __name__ == "__main__":
    main()
