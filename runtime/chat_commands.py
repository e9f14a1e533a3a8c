"""The verb `kvferry chat`: a terminal, or a script's lines, around a `Conversation`."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import click

from kvstore.cli import Label, Settings, common_options, note, progress
from kvstore.errors import InputInvalid, KVError, SnapshotMissing
from kvstore.store import Store

from .chat import Conversation, Reply, SystemChange, problem
from .metrics.journal import Journal
from .metrics_option import metrics_option
from .opening import Opened, model_options, note_makers, open_model
from .reports import Generation, Restored
from .speculation import Asked, Choice, Speculation, SpeculationStats, Verify
from .speculation_options import as_json, chosen, speculation_options

HELP = """\
/help        this
/stats       the conversation in figures
/save NAME   save it under this name, now and after every turn
/reset       begin a new conversation; what was saved stays saved
/quit        end; so does Ctrl-D
Ctrl-C ends a reply, and what was said of it stays. A message that begins with a slash is typed with two."""

SHOWN = 3
"""Turns of a resumed conversation that a terminal shows."""


@click.command()
@click.option("--resume", metavar="NAME", type=Label(), help="Go on with the conversation saved under this name.")
@click.option(
    "--name", type=Label(), help="Save under this name after every turn. Default: the name of --resume, or not at all."
)
@click.option("--system", metavar="TEXT", help="What the model is told before the first message; empty: nothing.")
@click.option("-n", "count", type=click.IntRange(1), default=256, show_default=True, help="Tokens of a reply, at most.")
@click.option("--decode-only", is_flag=True, help="Refuse to load anything but decode, as on a small device.")
@speculation_options
@metrics_option
@model_options
@common_options
def chat(
    settings: Settings,
    resume: str | None,
    name: str | None,
    system: str | None,
    count: int,
    decode_only: bool,
    speculate: Asked,
    verify: Verify,
    threshold: float | None,
    allow_verify: bool,
    journal: Journal,
    **model: Any,
) -> None:
    """Talk with a model. Each line of stdin is a message; with --json, each reply is one line of JSON.

    The conversation is saved after every turn, and goes on with --resume, in another process or, pulled, on another machine. /help
    lists what can be typed besides messages. Replies are greedy.
    """
    if resume is not None and not settings.store.exists():
        raise SnapshotMissing(f"no snapshot named {resume!r}: there is no store at {settings.store}.", label=resume)
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
    with Store.open(settings.store) as store:
        session = opened.session(store, decode_only=decode_only, allow_verify=allow_verify)

        def generate(n: int, on_token: Callable[[int], None]) -> Generation:
            return session.generate(n, on_token, speculate=how)

        if resume is None:
            conversation = Conversation(session, store, system=system or "", generate=generate)
        else:
            journal.enter("restore")
            conversation, restored, change = Conversation.resume(
                session, store, resume, system=system, generate=generate
            )
            journal.restored(restored)
            _note_resumed(resume, name, conversation, restored, change, opened)
        if name is not None:
            conversation.claim(name)
        if not conversation.marked:
            note(
                f"{opened.bundle.config.name} has no markers of turns in its manifest: texts follow each other as they are."
            )
        code = _Talk(settings, conversation, count, journal, (how, choice)).run()
    if code:
        raise click.exceptions.Exit(code)


def _note_resumed(
    resume: str,
    name: str | None,
    conversation: Conversation,
    restored: Restored,
    change: SystemChange | None,
    opened: Opened,
) -> None:
    turns = conversation.turns
    said = sum(turn.role == "user" for turn in turns)
    note(
        f"{resume}: {_turns(said)}, {restored.reused_tokens:,} of {restored.n:,} tokens reused in {restored.seconds:.2f} s."
    )
    note_makers(restored.match, opened.engine)
    if change is not None:
        own = "" if name else f" Give another --name to keep {resume} as it is."
        note(
            f"--system is not {resume}'s: token {change.at:,} is {change.now!r}, and there it was {change.before!r}. The {change.again:,} tokens "
            f"from there on are computed again with the next message.{own}"
        )
    if sys.stdin.isatty():
        for turn in turns[-SHOWN:]:
            click.echo(f"{'> ' if turn.role == 'user' else ''}{turn.text}", err=True)


class _Talk:
    """Reads messages and commands until /quit or the end; data to stdout, talk to stderr."""

    def __init__(
        self,
        settings: Settings,
        conversation: Conversation,
        count: int,
        journal: Journal,
        speculation: tuple[Speculation | None, Choice],
    ) -> None:
        self._settings = settings
        self._journal = journal
        self._conversation = conversation
        self._count = count
        self._turns = sum(turn.role == "user" for turn in conversation.turns)
        self._code = 0
        self._speculation = speculation
        self._refusal: str | None = None

    def run(self) -> int:
        """The exit code: of a script, that of the first turn that failed."""
        terminal = sys.stdin.isatty()
        if terminal:
            note("Ctrl-D or /quit ends, Ctrl-C ends a reply, /help says more.")
        for line in _typed() if terminal else _lines():
            if not line.strip():
                continue
            if line.startswith("/") and not line.startswith("//"):
                if not self._command(line):
                    break
                continue
            try:
                self._turn(line[1:] if line.startswith("//") else line)
            except KeyboardInterrupt:  # twice, or between two steps
                note("interrupted.")
        if terminal and self._conversation.name is None and self._conversation.tokens:
            note("it was not saved: that takes --name, or /save NAME.")
        return 0 if terminal else self._code

    def _turn(self, text: str) -> None:
        as_json = self._settings.json
        with _Feeding() as fed:
            reply = self._conversation.say(
                text, self._count, None if as_json else lambda piece: click.echo(piece, nl=False), fed
            )
        self._turns += reply.taken
        self._record(reply)
        if reply.error is not None and not self._code:
            self._code = reply.error.exit_code if isinstance(reply.error, KVError) else 1
        if as_json:
            click.echo(json.dumps(self._value(reply), ensure_ascii=False, default=str))
        else:
            if reply.tokens:
                click.echo()
            self._note(reply)

    def _record(self, reply: Reply) -> None:
        """A record of each turn that got so far, of its save, and of what failed."""
        if reply.token_seconds:
            prompt = reply.reused + reply.fed
            self._journal.turn(reply.finish, reply.token_seconds, prompt, reply.reused, reply.feed_seconds)
        if reply.saved is not None:
            self._journal.saved(reply.saved, reply.save_seconds, reply.reused)
        if reply.error is not None:
            self._journal.failed(reply.error, "generate")
        if reply.unsaved is not None:
            self._journal.failed(reply.unsaved, "save")

    def _note(self, reply: Reply) -> None:
        if reply.error is not None:
            note(f"{problem(reply.error)} The turn was taken back; the conversation is as before it.")
        elif reply.taken:
            seconds = sum(reply.token_seconds)
            note(
                f"{reply.reused:,} reused, {reply.fed:,} fed in {reply.feed_seconds:.2f} s; {len(reply.token_seconds):,} tokens in "
                f"{seconds:.2f} s ({reply.finish}){_rounds(reply.speculation)}"
            )
        self._note_refusal(reply.speculation)
        if reply.notice is not None:
            note(reply.notice)
        if reply.unsaved is not None:
            note(
                f"not saved: {problem(reply.unsaved)}. What was saved before is kept; the next turn or /save saves this one too."
            )

    def _note_refusal(self, stats: SpeculationStats | None) -> None:
        """Once: it is the same in every turn."""
        if stats is not None and stats.refusal is not None and stats.refusal != self._refusal:
            self._refusal = stats.refusal
            note(f"decoded without speculation: {stats.refusal}")

    def _value(self, reply: Reply) -> dict[str, Any]:
        conversation, saved = self._conversation, reply.saved
        error = reply.error
        return {
            "turn": self._turns,
            "taken": reply.taken,
            "text": reply.text,
            "tokens": list(reply.tokens),
            "finish": reply.finish,
            "position": len(conversation.tokens),
            "room": conversation.room,
            "reused_tokens": reply.reused,
            "fed_tokens": reply.fed,
            "feed_seconds": reply.feed_seconds,
            "speculation": as_json(reply.speculation, *self._speculation),
            "token_seconds": statistics.median(reply.token_seconds[1:]) if len(reply.token_seconds) > 1 else None,
            "name": conversation.name,
            "saved": None if saved is None or saved.digest is None else saved.digest.hex,
            "saved_tokens": None if saved is None or saved.snapshot is None else saved.snapshot.tokens,
            "save_seconds": reply.save_seconds,
            "unsaved": None if reply.unsaved is None else problem(reply.unsaved),
            "notice": reply.notice,
            "error": None if error is None else _told(error),
        }

    def _command(self, line: str) -> bool:
        """Whether to go on."""
        word, _, rest = line.strip().partition(" ")
        match word, rest.strip():
            case "/quit", "":
                return False
            case "/help", "":
                click.echo(HELP, err=True)
            case "/stats", "":
                self._stats()
            case "/reset", "":
                self._conversation.reset()
                self._turns = 0
                note("a new conversation, without a name.")
            case "/save", name if name:
                self._save(name)
            case "/save", "":
                note("/save takes a name: /save NAME")
            case _:
                note(
                    f"{word} is no command with that; /help lists them. Type // for a message that begins with a slash."
                )
        return True

    def _save(self, name: str) -> None:
        try:
            saved = self._conversation.save(name)
        except (KVError, OSError, KeyboardInterrupt) as error:
            note(f"not saved: {problem(error)}")
            if isinstance(error, KVError) and not self._code:
                self._code = error.exit_code
            return
        assert saved.digest is not None and saved.snapshot is not None
        if self._settings.json:
            value = {"name": name, "saved": saved.digest.hex, "saved_tokens": saved.snapshot.tokens}
            click.echo(json.dumps(value, ensure_ascii=False))
        else:
            note(f"{name}: {saved.snapshot.tokens:,} tokens saved; every turn from now on, too.")

    def _stats(self) -> None:
        conversation, totals = self._conversation, self._conversation.totals
        ledger = conversation.session.engine.ledger
        value = {
            "turns": [{"role": t.role, "text": t.text, "tokens": t.stop - t.start} for t in conversation.turns],
            "position": len(conversation.tokens),
            "room": conversation.room,
            "context": conversation.session.bundle.config.ctx,
            "name": conversation.name,
            "turns_here": totals.turns,
            "reused_tokens": totals.reused,
            "fed_tokens": totals.fed,
            "generated_tokens": totals.generated,
            "feed_seconds": totals.feed_seconds,
            "generate_seconds": totals.generate_seconds,
            "functions": list(ledger.names()),
        }
        if self._settings.json:
            click.echo(json.dumps({"stats": value}, ensure_ascii=False))
            return
        rate = f", {totals.generated / totals.generate_seconds:.1f} a second" if totals.generate_seconds else ""
        note(
            f"{_turns(self._turns)}, {value['position']:,} of {value['context']:,} positions, {value['room']:,} left for a message; "
            f"saved as {conversation.name or 'nothing'}."
        )
        note(
            f"here: {_turns(totals.turns)}, {totals.reused:,} tokens reused, {totals.fed:,} fed in {totals.feed_seconds:.2f} s, "
            f"{totals.generated:,} generated{rate}."
        )


class _Feeding:
    """Progress of what is fed before a reply, on stderr; there is a bar only once there is something to feed, and it is gone before the reply begins."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._advance: Callable[[float], None] | None = None
        self._before = 0

    def __enter__(self) -> _Feeding:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __call__(self, done: int, total: int) -> None:
        if self._advance is None:
            self._advance = self._stack.enter_context(progress("Prefilling", total, "tokens"))
        self._advance(done - self._before)
        self._before = done
        if done == total:
            self._stack.close()


def _rounds(stats: SpeculationStats | None) -> str:
    """Of a turn with rounds of speculation, for people."""
    if stats is None or not stats.rounds:
        return ""
    rounds = "1 round" if stats.rounds == 1 else f"{stats.rounds:,} rounds"
    return f"; {rounds}, {stats.accepted:,} of {stats.drafted:,} drafts accepted"


def _turns(count: int) -> str:
    return "1 turn" if count == 1 else f"{count:,} turns"


def _told(error: Exception) -> dict[str, Any]:
    """As errors of other verbs stand on stderr."""
    message, details = (error.message, dict(error.details)) if isinstance(error, KVError) else (str(error), {})
    return {"error": type(error).__name__, "message": message, "details": details}


def _typed() -> Iterator[str]:
    """Lines from a terminal, with its editing where Python has it. Ctrl-C drops the line that is being typed."""
    with suppress(ImportError):
        import readline  # noqa: F401  (input() then edits lines)
    while True:
        try:
            yield input("> ")
        except EOFError:
            click.echo(err=True)
            return
        except KeyboardInterrupt:
            click.echo(err=True)


def _lines() -> Iterator[str]:
    """Lines from a pipe or a file."""
    try:
        for line in sys.stdin:
            yield line.removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise InputInvalid(f"stdin: expected UTF-8 text, found {error.reason} at byte {error.start}") from error


def commands() -> dict[str, click.Command]:
    """Its verb."""
    return {"chat": chat}
