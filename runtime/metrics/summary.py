"""Sums up a metrics file, line by line: what is kept does not grow with the file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import BinaryIO

from .records import LineDamaged, Record, decode
from .spread import Spread

LONGEST = 16 << 20
"""Bytes of a line that is still read; a generation of 2,000 tokens takes 16 kB."""
NAMED = 20
"""Damaged lines that are named; the others are counted."""
MODELS = 64
"""Models that are told apart, and reasons of errors for each; what comes after them is joined."""
OTHERS = "(others)"


@dataclass(slots=True)
class Acceptance:
    """Drafted and accepted tokens, counted without the pending token that each round computes besides its draft, or with it."""

    rounds: int = 0
    fallback_rounds: int = 0
    drafted: int = 0
    accepted: int = 0

    def add(self, record: Record) -> None:
        """Of a record of kind message, whose own counts include the pending tokens, or kv, whose don't."""
        if not record.spec_rounds or record.spec_drafted is None or record.spec_accepted is None:
            return
        pending = record.spec_rounds if record.kind == "message" else 0
        self.rounds += record.spec_rounds
        self.fallback_rounds += record.spec_fallback_rounds or 0
        self.drafted += record.spec_drafted - pending
        self.accepted += record.spec_accepted - pending

    def without_pending(self) -> float | None:
        return self.accepted / self.drafted if self.drafted > 0 else None

    def with_pending(self) -> float | None:
        return (self.accepted + self.rounds) / (self.drafted + self.rounds) if self.rounds else None


@dataclass(slots=True)
class Messages:
    """Generations of one model. ``per_token_ms``: of every token but each generation's first, which was at hand. ``per_step_ms``: the same by
    steps, a round of speculation being one, of generations that speculated and say their steps."""

    count: int = 0
    finish: Counter[str] = field(default_factory=Counter)
    prompt_tokens: Spread = field(default_factory=Spread)
    generated_tokens: Spread = field(default_factory=Spread)
    prefill_seconds: Spread = field(default_factory=Spread)
    ttft_seconds: Spread = field(default_factory=Spread)
    tokens_per_second: Spread = field(default_factory=Spread)
    per_token_ms: Spread = field(default_factory=Spread)
    per_step_ms: Spread = field(default_factory=Spread)
    acceptance: Acceptance = field(default_factory=Acceptance)
    prompted: int = 0
    reused: int = 0

    def add(self, record: Record) -> None:
        self.count += 1
        count_of(self.finish, record.finish_reason or "unknown")
        for spread, value in (
            (self.prompt_tokens, record.prompt_tokens),
            (self.generated_tokens, record.generated_tokens),
            (self.prefill_seconds, record.prefill_seconds),
            (self.ttft_seconds, record.ttft_seconds),
            (self.tokens_per_second, record.decode_tok_per_sec),
        ):
            if value is not None:
                spread.add(value)
        self.per_token_ms.extend((record.per_token_millis or [])[1:])
        self.per_step_ms.extend(steps(record)[1:])
        if record.prompt_tokens is not None and record.reused_tokens is not None:
            self.prompted += record.prompt_tokens
            self.reused += record.reused_tokens
        self.acceptance.add(record)

    def reuse_share(self) -> float | None:
        """Tokens of all prompts whose KV was at hand, of all their tokens."""
        return self.reused / self.prompted if self.prompted else None


@dataclass(slots=True)
class Operations:
    """KV operations of one name. Megabytes are 10^6 bytes."""

    count: int = 0
    bytes: Spread = field(default_factory=Spread)
    seconds: Spread = field(default_factory=Spread)
    megabytes_per_second: Spread = field(default_factory=Spread)
    acceptance: Acceptance = field(default_factory=Acceptance)

    def add(self, record: Record) -> None:
        self.count += 1
        if record.kv_bytes is not None:
            self.bytes.add(record.kv_bytes)
        if record.kv_duration_seconds is not None:
            self.seconds.add(record.kv_duration_seconds)
        if record.kv_bytes is not None and record.kv_duration_seconds:
            self.megabytes_per_second.add(record.kv_bytes / 1e6 / record.kv_duration_seconds)
        self.acceptance.add(record)


@dataclass(slots=True)
class Model:
    """All records of one model; ``kinds`` counts them."""

    kinds: Counter[str] = field(default_factory=Counter)
    messages: Messages = field(default_factory=Messages)
    operations: dict[str, Operations] = field(default_factory=dict)
    errors: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, record: Record) -> None:
        count_of(self.kinds, record.kind)
        if record.kind == "message":
            self.messages.add(record)
        elif record.kind == "kv":
            name = record.kv_op or "unknown"
            known = name in self.operations or len(self.operations) < MODELS
            self.operations.setdefault(name if known else OTHERS, Operations()).add(record)
        if record.kind == "error" or record.error_reason is not None:
            reason = (record.error_phase or "unknown", record.error_reason or "unknown")
            self.errors[reason if reason in self.errors or len(self.errors) < MODELS else (OTHERS, OTHERS)] += 1


@dataclass(slots=True)
class Summary:
    """Of a whole file. ``models`` by ``modelID``; None: records that name none. ``drawn``: the message that was asked for, counted from 1, or the last one;
    None where no message has times of tokens, or not so many."""

    lines: int = 0
    bytes: int = 0
    records: int = 0
    damaged: int = 0
    damaged_lines: list[tuple[int, str]] = field(default_factory=list)
    models: dict[str | None, Model] = field(default_factory=dict)
    drawn: Record | None = None
    drawn_number: int = 0

    def add(self, record: Record) -> None:
        self.records += 1
        known = record.model_id in self.models or len(self.models) < MODELS
        self.models.setdefault(record.model_id if known else OTHERS, Model()).add(record)


def steps(record: Record) -> list[float]:
    """Milliseconds of each step of a generation with rounds of speculation; empty where it doesn't say its steps, or not those of its tokens."""
    millis, ours = record.per_token_millis or [], record.kvferry
    if not record.spec_rounds or ours is None or ours.spec_step_tokens is None:
        return []
    if min(ours.spec_step_tokens, default=0) < 1 or sum(ours.spec_step_tokens) != len(millis):
        return []
    ends = list(accumulate(ours.spec_step_tokens))
    return [sum(millis[start:stop]) for start, stop in zip([0, *ends], ends, strict=False)]


def count_of(counter: Counter[str], name: str) -> None:
    counter[name if name in counter or len(counter) < MODELS else OTHERS] += 1


def summarise(file: BinaryIO, message: int | None = None) -> Summary:
    """Reads ``file`` from where it stands to its end. ``message``: which generation with times of tokens to keep for drawing; None: the last."""
    found = Summary()
    timed = 0
    for line in lines(file):
        found.lines += 1
        found.bytes += len(line) if line is not None else LONGEST
        if line is not None and not line.strip():
            continue
        try:
            if line is None:
                raise LineDamaged(f"expected at most {LONGEST:,} bytes, found more")
            record = decode(line)
        except LineDamaged as error:
            found.damaged += 1
            if len(found.damaged_lines) < NAMED:
                found.damaged_lines.append((found.lines, error.message))
            continue
        found.add(record)
        if record.kind == "message" and record.per_token_millis:
            timed += 1
            if message is None or message == timed:
                found.drawn, found.drawn_number = record, timed
    return found


def lines(file: BinaryIO) -> Iterator[bytes | None]:
    """Its lines; None in place of one that is too long."""
    while line := file.readline(LONGEST + 1):
        if len(line) <= LONGEST:
            yield line
            continue
        yield None
        while line and not line.endswith(b"\n"):
            line = file.readline(LONGEST + 1)
