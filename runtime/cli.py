"""The commands that run a model: prefill, generate, find, verify; `bundle_commands` has those about bundles."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import click

from kvstore.cli import Label, Settings, common_options, note, note_damaged, waiting
from kvstore.digest import SnapshotDigest
from kvstore.errors import InputInvalid, KVError, SnapshotMissing
from kvstore.explain import nearest
from kvstore.match import Match
from kvstore.plaintext import size_text
from kvstore.store import Store

from .bundle import Bundle
from .bundle_commands import bundle
from .explaining import explanation, explanation_text
from .ledgers import Gauge, Stats
from .metrics.journal import Journal
from .metrics_option import metrics_option
from .opening import Steps, feeding, model_options, note_makers, open_model, read_tokens
from .remote_option import bring, look, remote_option
from .speculation import Asked, Verify
from .speculation_options import as_json, chosen, speculation_options

TAIL = 64
"""Tokens of the context's end that ``prefill --json`` gives as text."""

STOPPED = {"eos": "the model ended its text", "contextFull": "the context is full"}
"""Why generation ended before it gave as many tokens as asked for."""


class ReceiptMismatch(KVError):
    """The continuation here is not the producer's. ``details``: first_difference, expected, found."""

    exit_code = 9


@click.command()
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False, allow_dash=True))
@click.option("--name", required=True, type=Label(), help="Name of the snapshot.")
@click.option("--tokens", type=click.IntRange(1), help="Only the first N tokens of the text.")
@click.option("--receipt", type=click.IntRange(0, 1024), default=32, show_default=True,
              help="Greedy tokens to record, so that a consumer can prove its continuation; 0: none.")  # fmt: skip
@click.option("--decode-only", is_flag=True, help="Feed every token through decode, as a small device would.")
@click.option("--no-reuse", is_flag=True, help="Compute all of it, and so mend what of it is damaged in the store.")
@click.option("--stats", is_flag=True, help="Measure the memory of this process before and after; a table on stderr.")
@metrics_option
@model_options
@common_options
def prefill(
    settings: Settings,
    file: Path,
    name: str,
    tokens: int | None,
    receipt: int,
    decode_only: bool,
    no_reuse: bool,
    stats: bool,
    journal: Journal,
    **model: Any,
) -> None:
    """Prefill the text of FILE, reusing what the store has, and save its KV as NAME.

    FILE is UTF-8, a plain file of at most 256 MB, or - for stdin; a byte order mark at its start is no part of the text.
    """
    opened = open_model(**model)
    journal.opened(opened.bundle, opened.engine)
    ids = read_tokens(opened.bundle, file, tokens, fitting=True)
    gauge = Gauge(stats)
    with Store.open(settings.store) as store:
        session = opened.session(store, decode_only=decode_only)
        with feeding(len(ids)) as report:
            journal.enter("prefill")
            started = perf_counter()
            prompted = None
            if no_reuse:
                session.feed(ids, report)
            else:
                prompted = session.prompt(ids, report)
            prefill_seconds = perf_counter() - started
        reused = 0 if prompted is None else prompted.reused
        makers = note_makers(prompted.match if prompted and prompted.source == "store" else None, opened.engine)
        made = None
        journal.enter("generate")
        if receipt:
            with waiting("Receipt"):
                made = session.receipt(receipt)
        before, damage = store.shelf.records.standing(name), store.shelf.records.damage(name)
        journal.enter("save")
        started = perf_counter()
        saved = session.save(name, made)
        save_seconds = perf_counter() - started
        journal.saved(saved, save_seconds, reused)
        measured = gauge.read(opened.engine, session.kv)
    if damage is not None:
        note_damaged(damage)
    note_moved(name, before, saved.digest)
    assert saved.snapshot is not None and saved.digest is not None
    kv_bytes = len(ids) * saved.snapshot.layout.bytes_per_token
    value = {
        "name": name,
        "snapshot": saved.digest.hex,
        "model": saved.snapshot.model,
        "context_tokens": len(ids),
        "reused_tokens": reused,
        "reused_lineages": makers,
        "prefill_seconds": prefill_seconds,
        "functions": list(opened.engine.ledger.names()),
        "specialisation_seconds": opened.engine.ledger.seconds(),
        "save_seconds": save_seconds,
        "written_objects": saved.written_objects,
        "written_bytes": saved.written_bytes,
        "snapshot_bytes": kv_bytes,
        "kv_bytes_per_token": saved.snapshot.layout.bytes_per_token,
        "tail": opened.bundle.tokenizer.decode(ids[-TAIL:]),
        "receipt": None if made is None else asdict(made) | {"text": opened.bundle.tokenizer.decode(made.tokens)},
        "stats": None if measured is None else measured.value(),
    }
    settings.emit(
        value,
        lambda: (
            f"{name}: {len(ids):,} tokens ({reused:,} reused) prefilled in {prefill_seconds:.2f} s, saved in "
            f"{save_seconds:.2f} s ({size_text(saved.written_bytes)} written of {size_text(kv_bytes)})"
        ),
    )
    _tell(settings, measured)


@click.command()
@click.option("--from", "source", metavar="NAME", type=Label(), help="Snapshot to continue.")
@click.option("--at", type=click.IntRange(1), help="Continue after its first N tokens instead of its end.")
@click.option("--prompt", help="Text to feed first.")
@click.option("-n", "count", type=click.IntRange(0), default=64, show_default=True, help="Tokens to generate.")
@click.option("--decode-only", is_flag=True, help="Refuse to load anything but decode, as on a small device.")
@click.option("--no-reuse", is_flag=True, help="Ignore what the store has for the prompt.")
@remote_option(
    "With --prompt alone: fetch what the prompt can use of REMOTE's snapshots first. It is told the prompt's tokens."
)
@click.option("--save", "save_as", metavar="NAME", type=Label(), help="Save the KV of all of it under this name.")
@click.option("--stats", is_flag=True, help="Measure the memory of this process before and after; a table on stderr.")
@speculation_options
@metrics_option
@model_options
@common_options
def generate(
    settings: Settings,
    source: str | None,
    at: int | None,
    prompt: str | None,
    count: int,
    decode_only: bool,
    no_reuse: bool,
    remote: str | None,
    save_as: str | None,
    stats: bool,
    speculate: Asked,
    verify: Verify,
    threshold: float | None,
    allow_verify: bool,
    journal: Journal,
    **model: Any,
) -> None:
    """Continue a snapshot (--from) or a prompt, greedily; the text goes to stdout as it comes."""
    if source is None and not prompt:
        found = "" if prompt is None else " The prompt is empty."
        raise click.UsageError(f"Give --from NAME, --prompt TEXT or both.{found}")
    if source is None and at is not None:
        raise click.UsageError("--at says where to continue a snapshot: it needs --from NAME.")
    if source is not None and no_reuse:
        raise click.UsageError("--no-reuse is for a prompt alone: what --from names is what to reuse.")
    if remote is not None and (source is not None or no_reuse):
        raise click.UsageError(
            "--remote fetches what a prompt can reuse: it goes with --prompt, without --from and --no-reuse."
        )
    opened = open_model(**model)
    journal.opened(opened.bundle, opened.engine)
    how, choice = chosen(
        opened.bundle.config,
        decode_only=decode_only,
        speculate=speculate,
        verify=verify,
        threshold=threshold,
        allow_verify=allow_verify,
    )
    tokenizer = opened.bundle.tokenizer
    gauge = Gauge(stats)
    needs_store = source is not None or save_as is not None or remote is not None
    if source is not None and not settings.store.exists():
        raise SnapshotMissing(f"no snapshot named {source!r}: there is no store at {settings.store}.", label=source)
    store = Store.open(settings.store) if needs_store or (not no_reuse and settings.store.exists()) else None
    try:
        restored = None
        reused = 0
        match = None
        session = opened.session(store, decode_only=decode_only, allow_verify=allow_verify)
        if source is not None:
            journal.enter("restore")
            restored = session.restore(source, at)
            journal.restored(restored)
            reused, match = restored.reused_tokens, restored.match
        ids = tokenizer.encode(prompt, bos=source is None) if prompt else []
        fetched = bring(store, remote, opened, ids) if store is not None and remote is not None else None
        steps = Steps()
        journal.enter("prefill")
        if ids:
            with feeding(len(ids), steps) as report:
                if source is None and not no_reuse:
                    prompted = session.prompt(ids, report)
                    reused, match = prompted.reused, prompted.match if prompted.source == "store" else None
                else:
                    session.feed(ids, report)
        feed_seconds = perf_counter() - steps.started
        makers = note_makers(match, opened.engine)
        text: list[str] = []
        stream = tokenizer.stream()

        def show(piece: str) -> None:
            text.append(piece)
            if not settings.json:
                click.echo(piece, nl=False)

        journal.enter("generate")
        made = session.generate(count, lambda token: show(stream.feed(token)), speculate=how)
        journal.message(made, reused_tokens=reused)
        show(stream.finish())
        saved = None
        if save_as is not None:
            journal.enter("save")
            if session.emitted and session.pending is not None and made.finish != "eos":
                session.feed(
                    [session.pending]
                )  # so that continuing goes on after the last token, and does not give it again
            assert store is not None
            before = store.shelf.records.standing(save_as)
            started = perf_counter()
            saved = session.save(save_as)
            journal.saved(saved, perf_counter() - started, reused)
            note_moved(save_as, before, saved.digest)
        measured = gauge.read(opened.engine, session.kv)
        value = {
            "text": "".join(text),
            "tokens": list(made.tokens),
            "finish": made.finish,
            "position": session.position,
            "reused_tokens": reused,
            "reused_lineages": makers,
            "fetched": fetched,
            "restore_seconds": None if restored is None else restored.seconds,
            "restored_bytes": None if restored is None else restored.bytes,
            "fed_tokens": len(ids) if source is not None else len(ids) - reused,
            "feed_seconds": feed_seconds,
            "feed_token_seconds": steps.token_seconds,
            "token_seconds": made.token_seconds,
            "speculation": as_json(made.speculation, how, choice),
            "functions": list(opened.engine.ledger.names()),
            "specialisation_seconds": opened.engine.ledger.seconds(),
            "saved": None if saved is None or saved.digest is None else saved.digest.hex,
            "stats": None if measured is None else measured.value(),
        }
    finally:
        if store is not None:
            store.close()
    settings.emit(value, "")
    if not settings.json:
        if made.tokens:
            click.echo()
        if made.finish in STOPPED:
            note(f"stopped after {len(made.tokens):,} of {count:,} tokens: {STOPPED[made.finish]}.")
    if made.speculation is not None and made.speculation.refusal is not None:
        note(f"decoded without speculation: {made.speculation.refusal}")
    _tell(settings, measured)


def _tell(settings: Settings, measured: Stats | None) -> None:
    """What --stats measured, on stderr; with --json it is part of the answer."""
    if measured is not None and not settings.json:
        click.echo(measured.text(), err=True)


def note_moved(name: str, before: SnapshotDigest | None, now: SnapshotDigest | None) -> None:
    """Says on stderr that a name was taken from another snapshot."""
    if before is not None and before != now:
        note(f"{name} stood for {before}, which is unnamed cache now.")


@click.command()
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False, allow_dash=True))
@click.option("--tokens", type=click.IntRange(1), help="Only the first N tokens of the text.")
@click.option("--explain", is_flag=True, help="Also show the nearest snapshot, whosever it is: where it parts from the text, and why it serves no further.")  # fmt: skip
@remote_option("Also say how much of it REMOTE has. It is told the text's tokens.")
@model_options
@common_options
def find(settings: Settings, file: Path, tokens: int | None, explain: bool, remote: str | None, **model: Any) -> None:
    """Say how much of FILE's text the store already has, and where it first differs. FILE as for prefill; the store may be read-only."""
    opened = open_model(**model)
    ids = read_tokens(opened.bundle, file, tokens, fitting=False)
    bundle = opened.bundle
    value: dict[str, Any] = {"asked_tokens": len(ids), "reused_tokens": 0, "snapshot": None}
    told = f"0 of {len(ids):,} tokens"
    near = None
    if settings.store.exists():
        asked = (bundle.layout(), bundle.identity(), ids)
        with Store.open(settings.store, create=False) as store:
            match = store.look(*asked, namespace=opened.namespace, head=bundle.head_digest())
            if match is not None:
                names = [r.label for r in store.shelf.records.readable_refs() if r.snapshot == match.digest]
                value, told = _found(match, names, ids, bundle)
            if explain:
                near = nearest(store, *asked, namespace=opened.namespace, head=bundle.head_digest())
    if explain:
        value["nearest"] = None if near is None else explanation(near, ids, bundle.tokenizer)
        none = "nearest: no snapshot begins with the text's first token, in any namespace and of any model"
        told += "\n" + (none if near is None else explanation_text(value["nearest"]))
    if remote is not None:
        there = look(remote, opened, ids)
        value["remote"] = {
            "address": remote,
            "reused_tokens": 0 if there is None else there.n,
            "snapshot": None if there is None else there.digest.hex,
        }
        told += f"\n{remote}: {0 if there is None else there.n:,} of {len(ids):,} tokens"
    settings.emit(value, told)


def _found(match: Match, names: list[str], ids: list[int], bundle: Bundle) -> tuple[dict[str, Any], str]:
    """What `find` says of a match, as JSON and for people."""
    at, lineage = match.first_difference, match.lineage
    text = None if at is None else bundle.tokenizer.decode(ids[at : at + 1])
    value = {
        "asked_tokens": len(ids),
        "reused_tokens": match.n,
        "common_tokens": match.common,
        "snapshot": match.digest.hex,
        "names": names,
        "first_difference": at,
        "first_difference_text": text,
        "reason": match.reason,
        "objects": len(match.objects()),
        "lineage": None if lineage is None else dict(lineage.fields),
    }
    told = f"{match.n:,} of {len(ids):,} tokens, from {', '.join(names) or match.digest.hex[:12]} ({match.reason})"
    return value, told + ("" if at is None else f"; first difference at token {at:,}: {text!r}")


@click.command()
@click.argument("name", type=Label())
@click.option("--prefill-functions", is_flag=True, help="Do not hold the session to decode alone.")
@model_options
@common_options
def verify(settings: Settings, name: str, prefill_functions: bool, **model: Any) -> None:
    """Continue NAME here and compare with the producer's receipt; exit 9 if a token differs."""
    opened = open_model(**model)
    with Store.open(settings.store, create=False) as store:
        session = opened.session(store, decode_only=not prefill_functions)
        restored = session.restore(name)
        receipt = restored.match.snapshot.receipt
        if receipt is None:
            raise InputInvalid(f"{name!r} has no receipt. `kvferry prefill` records one unless --receipt 0 is given.")
        if restored.match.pending is None:
            raise InputInvalid(f"{name!r}: its receipt was made with another head, so it proves nothing here.")
        note_makers(restored.match, opened.engine)
        with waiting("Decoding"):
            report = session.verify_receipt(receipt)
    value = {
        "name": name,
        "identical": report.identical,
        "tokens": len(receipt.tokens),
        "finish": receipt.finish,
        "first_difference": report.first_difference,
        "expected": report.expected,
        "found": report.found,
        "functions": list(opened.engine.ledger.names()),
        "specialisation_seconds": opened.engine.ledger.seconds(),
    }
    if report.identical:
        settings.emit(value, f"{name}: identical, {len(receipt.tokens)} tokens and the finish ({receipt.finish})")
        return
    if settings.json:
        settings.emit(value, "")
    raise ReceiptMismatch(
        f"{name}: token {report.first_difference} of the continuation differs: the producer's is {report.expected}, "
        f"here it is {report.found}. The KV is intact; this engine rounds otherwise (see `kvferry show {name}`).",
        first_difference=report.first_difference,
        expected=report.expected,
        found=report.found,
    )


def commands() -> dict[str, click.Command]:
    """The runtime's commands by verb."""
    return {c.name or "": c for c in (bundle, prefill, generate, find, verify)}
