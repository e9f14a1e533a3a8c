"""Restored is uninterrupted: the same rows, pending token, continuation and bytes, whole and trimmed, wherever a prompt is interrupted; and
receipts are true.

A producer is fed up to a place, saves with a receipt, and goes on: some tokens of the prompt one by one, then its own. For each kind of
snapshot a session of its own, decode-only, in an engine that has loaded nothing, restores and does the same. One continuation runs in
another process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from kvstore.layout import trim_start
from kvstore.snapshot import Receipt, trimmed
from kvstore.staging import Rows, Staging
from kvstore.store import Store
from runtime.reports import Generation
from runtime.session import Session

from .elsewhere import generate_elsewhere
from .held import Held, state_difference, token_difference
from .listening import Half, Listening
from .prompts import Prompt
from .report import Line
from .setup import Continuation, Setup, chosen_by, continuation, judged

Kind = Literal["whole", "trimmed"]


@dataclass(frozen=True, slots=True)
class Produced:
    """What the producer had at the interruption and after it: ``receipt`` as it saved it, ``went`` its continuation behind ``tail``. ``alone``, for
    another process: the continuation without a tail, all of it fed, and what was held then."""

    name: str
    split: int
    at: Held
    receipt: Continuation
    tail: tuple[int, ...]
    went: Continuation
    end: Held
    alone: tuple[Continuation, Held] | None


def keep_trimmed(source: Store, name: str, target: Store) -> None:
    """Publish the snapshot ``name`` in ``target`` with only the objects that continuing from its end reads."""
    digest = source.resolve(name)
    snapshot = source.shelf.records.snapshot(digest)
    coverage = trimmed(digest, snapshot)
    with target.shelf.shared(), Staging(target.shelf.root) as staging:
        for group in range(len(coverage.runs)):
            for block in coverage.blocks(group):
                content = snapshot.blocks[block][group]
                data = source.shelf.objects.read(content, snapshot.object_bytes(block, group))
                staging.publish(set(staging.add([Rows([data], content)])))
        target.publish(snapshot, coverage)
        target.shelf.records.move_ref(name, None, digest)


def places(setup: Setup, prompt: Prompt, following: Sequence[int]) -> tuple[int, ...]:
    """Where the prompt is interrupted; with all edges also within its continuation ``following``."""
    found = setup.splits(prompt)
    inside = len(prompt.tokens) + setup.size.tail + 1
    return (*found, inside) if setup.size.all_edges and inside <= len(prompt.tokens) + len(following) else found


def restored(
    setup: Setup, prompt: Prompt, following: Sequence[int], whole: Path, small: Path, *, elsewhere: bool
) -> Iterator[Line]:
    """Two lines, restore and receipt, for each place and kind of snapshot, saved to stores in the folders ``whole`` and ``small``. ``elsewhere``: one
    more, for another process at the prompt's end."""
    text = (*prompt.tokens, *following)
    # Rows of the widest function are only made where it starts at position 0: places from there on have a producer of their own.
    widest = max(setup.bundle.config.prefill_widths, default=0)
    found = places(setup, prompt, following)
    with Store.open(whole) as store, Store.open(small) as device:
        for walk in ([p for p in found if p < widest], [p for p in found if p >= widest]):
            engine = setup.listening(setup.main)
            producer = Session.open(setup.bundle, engine, store=store)
            for split in walk:
                _feed(producer, text[producer.position : split], len(prompt.tokens))
                process = elsewhere and split == len(prompt.tokens)
                produced = _produced(setup, prompt, producer, engine, text, split, process=process)
                kinds: list[tuple[Kind, Store]] = [("whole", store)]
                if any(trim_start(group.window, split) for group in setup.bundle.layout().groups):
                    keep_trimmed(store, produced.name, device)
                    kinds.append(("trimmed", device))
                for kind, where in kinds:
                    yield from _consumed(setup, prompt, where, produced, kind)
                if produced.alone is not None:
                    yield _elsewhere(setup, prompt, produced, produced.alone, kinds[-1])
                producer.rollback(split)


def _feed(session: Session, tokens: Sequence[int], prompt: int) -> None:
    """The prompt's tokens as the schedule has it, those behind it one by one, as decoding would."""
    scheduled = max(0, prompt - session.position)
    if tokens[:scheduled]:
        session.feed(tokens[:scheduled])
    for token in tokens[scheduled:]:
        session.feed([token])


def _produced(
    setup: Setup,
    prompt: Prompt,
    producer: Session,
    engine: Listening,
    text: Sequence[int],
    split: int,
    *,
    process: bool,
) -> Produced:
    name = f"{prompt.name} {split}"
    first = chosen_by(engine)
    engine.heard.clear()
    receipt = producer.receipt(setup.size.receipt)
    receipt_hidden = (first, *engine.heard)
    producer.save(name, receipt)
    at = Held.by(producer)
    alone = _alone(setup, producer, engine, first) if process else None
    # At the end of the text there is nothing left to feed but what the model says itself.
    tail = tuple(text[split : split + setup.size.tail]) or receipt.tokens[:1]
    _feed(producer, tail, 0)
    went = continuation(producer, engine, setup.size.continued, chosen_by(engine))
    said = Continuation(_as_generation(receipt, split), receipt_hidden[: len(receipt.tokens)])
    return Produced(name, split, at, said, tail, went, Held.by(producer), alone)


def _as_generation(receipt: Receipt, split: int) -> Generation:
    return Generation(receipt.tokens, "cap", split, ())


def _alone(setup: Setup, producer: Session, engine: Listening, first: Half) -> tuple[Continuation, Held]:
    """What the command does and saves: the last token is fed too, unless it ends the text. The producer is rewound."""
    split = producer.position
    went = continuation(producer, engine, setup.size.continued, first)
    if went.made.finish != "eos" and producer.emitted and producer.pending is not None:
        producer.feed([producer.pending])
    held = Held.by(producer)
    producer.rollback(split)
    return went, held


def _consumed(setup: Setup, prompt: Prompt, store: Store, want: Produced, kind: Kind) -> Iterator[Line]:
    restore = Line("restore", "exact", None, "", prompt.name, want.split, kind)
    receipt = replace(restore, check="receipt", tokens=len(want.receipt.made.tokens))
    session = Session.open(setup.bundle, setup.main.open(), store=store, decode_only=True)

    def come_back() -> Line:
        reused = session.restore(want.name).reused_tokens
        apart, rows = state_difference(want.at, Held.by(session))
        if apart is None and reused != want.split:
            apart = f"expected {want.split} tokens from the store, found {reused}"
        return replace(restore, holds=apart is None, told=apart or "", rows=rows)

    back = judged(restore, come_back)
    proved = judged(receipt, lambda: _receipt(setup, receipt, session, store, want))

    def go_on() -> Line:
        _feed(session, want.tail, 0)
        made = session.generate(setup.size.continued)
        found, difference = token_difference(want.went.made, made, lambda at: want.went.margin(at, setup.logits))
        apart, rows = state_difference(want.end, Held.by(session))
        found = found or apart
        count = len(made.tokens)
        told = f"{want.split} tokens restored, {len(want.tail)} fed, {count} decoded: tokens and KV the same"
        return replace(restore, holds=found is None, told=found or told, tokens=count, difference=difference, rows=rows)

    # Where it already came back otherwise, that is the finding; how it goes on then shows the first token that it costs.
    onward = judged(restore, go_on)
    if back.holds:
        yield onward
    else:
        then = f"; then {onward.told}" if onward.difference is not None else ""
        yield replace(back, told=f"{back.told}{then}", tokens=onward.tokens, difference=onward.difference)
    yield proved


def _receipt(setup: Setup, line: Line, session: Session, store: Store, want: Produced) -> Line:
    """The receipt that came with the snapshot, against what is decoded here."""
    receipt = store.shelf.records.snapshot(store.resolve(want.name)).receipt
    if receipt is None:
        return replace(line, holds=False, told="expected a receipt in the snapshot, found none")
    report = session.verify_receipt(receipt)
    said, here = (_as_generation(r, want.split) for r in (report.receipt, report.decoded))
    found, difference = token_difference(said, here, lambda at: want.receipt.margin(at, setup.logits))
    if found is None and not report.identical:
        found = f"the finish: expected {report.receipt.finish}, found {report.decoded.finish}"
    told = f"{len(receipt.tokens)} tokens as the producer said"
    return replace(line, holds=found is None, told=found or told, difference=difference)


def _elsewhere(
    setup: Setup, prompt: Prompt, want: Produced, alone: tuple[Continuation, Held], where: tuple[Kind, Store]
) -> Line:
    (went, held), (kind, store) = alone, where
    made = went.made
    line = Line("process", "exact", None, "", prompt.name, want.split, kind, tokens=len(made.tokens))

    def compare() -> Line:
        name = f"{want.name} elsewhere"
        tokens = generate_elsewhere(
            setup.bundle.root, store.shelf.path, want.name, setup.size.continued, name, setup.main.words
        )
        there = Generation(tokens, made.finish, made.prompt, ())
        found, difference = token_difference(made, there, lambda at: went.margin(at, setup.logits))
        if found is not None:
            return replace(line, holds=False, told=found, difference=difference)
        session = Session.open(setup.bundle, setup.main.open(), store=store, decode_only=True)
        session.restore(name)
        apart, rows = state_difference(held, Held.by(session))
        told = f"{len(tokens)} tokens, and the KV of {len(held.items)} positions, the same in a process of its own"
        return replace(line, holds=apart is None, told=apart or told, rows=rows)

    return judged(line, compare)
