"""A conversation with a model, saved after every turn: what is said, not how it is typed or shown.

Its tokens are the transcript. Those that were processed stay as they are, replies as they were generated; only what is new is encoded. The session
holds the KV of a beginning of them, mostly of all; whatever is missing is fed with the next turn. So a turn that fails, or that Ctrl-C
interrupts, needs no repair: the tokens say where the conversation stands.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal

from kvstore.backend import Backend
from kvstore.digest import SnapshotDigest
from kvstore.errors import InputInvalid, KVError, NotCovered, RefConflict
from kvstore.items import Item, common_prefix
from kvstore.saving import Saved

from .chat_turns import Turn, Writing
from .reports import MARGIN, Finish, Generation, Restored
from .session import Session
from .speculation import SpeculationStats

ReplyFinish = Finish | Literal["cancelled", "error"]
Generate = Callable[[int, Callable[[int], None]], Generation]
"""(how many tokens, called with each) → what `Session.generate` gives."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One turn. Positions and counts in tokens, times in seconds.

    ``taken``: whether the message, with what was replied, is in the conversation now. It is not where the context has no room for it, where
    Ctrl-C came before the first token, and after an ``error``; then the conversation is as before. ``reused``: tokens whose KV was there;
    ``fed``: those that were computed before the reply began. ``token_seconds``: of each generated token. ``saved``: None where there is no name, or
    where ``unsaved`` says why not. ``notice``: for people, what they can do. ``speculation``: as the generation says; None also where Ctrl-C ended it.
    """

    text: str
    tokens: tuple[int, ...]
    finish: ReplyFinish
    taken: bool
    reused: int = 0
    fed: int = 0
    feed_seconds: float = 0.0
    token_seconds: tuple[float, ...] = ()
    saved: Saved | None = None
    save_seconds: float = 0.0
    unsaved: BaseException | None = None
    error: Exception | None = None
    notice: str | None = None
    speculation: SpeculationStats | None = None


@dataclass(frozen=True, slots=True)
class SystemChange:
    """A resumed conversation goes on under another system text: its token ``at`` is the first that differs. ``before`` and ``now``: the text of
    that token; empty where one ends there. ``again``: tokens that have to be computed anew, as far as the store doesn't have them."""

    at: int
    before: str
    now: str
    again: int


@dataclass(slots=True)
class Totals:
    """Of all turns of this process."""

    turns: int = 0
    reused: int = 0
    fed: int = 0
    generated: int = 0
    feed_seconds: float = 0.0
    generate_seconds: float = 0.0


@dataclass(slots=True)
class _Given:
    """The tokens of a reply as they come. ``failure``: of the caller's own function, which is not the engine's."""

    count: int = 0
    last: float = 0.0
    seconds: list[float] = field(default_factory=list)
    failure: BaseException | None = None


class Conversation:
    """Not thread-safe. Uses, and does not close, the session and the store."""

    def __init__(
        self, session: Session, store: Backend | None = None, *, system: str = "", generate: Generate | None = None
    ) -> None:
        """An empty one over an empty session. ``store``: the session's, for `save`. ``system``: empty for none. ``generate``: what makes a reply,
        by default `Session.generate`."""
        self._session = session
        self._store = store
        self._system = system
        self._generate: Generate = generate or session.generate
        self._writing = Writing.of(session.bundle)
        self._tokens: tuple[Item, ...] = ()
        self._said = False  # a user's turn is in it
        self._answered = False  # and what ends a reply
        self._again = 0  # tokens that the session holds, but that were not reused to get there
        self._name: str | None = None
        self._standing: SnapshotDigest | None = None
        self.totals = Totals()

    @classmethod
    def resume(
        cls, session: Session, store: Backend, name: str, *, system: str | None = None, generate: Generate | None = None
    ) -> tuple[Conversation, Restored, SystemChange | None]:
        """The conversation of the snapshot ``name``, to be saved under that name. Its turns are read from its tokens.

        ``system``: go on under another system text (empty: under none); by default under its own. What `Session.restore` raises.
        """
        restored = session.restore(name)
        made = cls(session, store, generate=generate)
        held = session.items
        turns = made._writing.read(held)
        own = made._writing.system_of(turns)
        made._tokens = held
        made._said = any(turn.role == "user" for turn in turns)
        made._system = own if system is None else system
        made._again = restored.n - restored.reused_tokens
        if store.standing(name) is not None:  # else it is a digest
            made._name, made._standing = name, restored.match.digest
        change = made._change(held) if made._said and made._system != own else None
        if made._said:
            made._close()
        return made, restored, change

    @property
    def session(self) -> Session:
        return self._session

    @property
    def name(self) -> str | None:
        """The name that it is saved under; None: it is not saved."""
        return self._name

    @property
    def tokens(self) -> tuple[Item, ...]:
        """All of it, in order."""
        return self._tokens

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Who said what, as its tokens say."""
        return self._writing.read(self._tokens)

    @property
    def marked(self) -> bool:
        """Whether the bundle has markers that tell turns apart. Without, texts follow each other as they are."""
        return self._writing.marked

    @property
    def room(self) -> int:
        """Positions left for a message and its markers, so that a reply can begin."""
        return max(0, self._most - len(self._tokens))

    def say(
        self,
        text: str,
        n: int = 256,
        on_text: Callable[[str], None] | None = None,
        on_fed: Callable[[int, int], None] | None = None,
    ) -> Reply:
        """The reply to ``text``: up to ``n`` tokens, whole characters passed to ``on_text`` as they come. Saved, where there is a name.

        Ctrl-C ends the reply, and what was said of it stays (``cancelled``). Any error of the engine, the store or the tokenizer is
        answered (``error``), and the conversation is as before the turn. Errors of ``on_text`` are raised; then it is as before, too, but for the last
        piece of a reply, which comes when the turn is over. ``on_fed``: called with (tokens fed, of how many) after each step before the reply.
        """
        before = self._tokens
        reused, fed, feed_seconds = 0, 0, 0.0
        given = _Given()
        stream = self._session.bundle.tokenizer.stream()

        def show(piece: str) -> None:
            if piece and on_text is not None:
                try:
                    on_text(piece)
                except BaseException as error:
                    given.failure = error
                    raise

        def give(token: int) -> None:
            now = perf_counter()
            given.seconds.append(now - given.last)
            given.last = now
            piece = stream.feed(token)
            given.count += 1
            show(piece)

        finish: ReplyFinish = "cancelled"
        speculation: SpeculationStats | None = None
        start: int | None = None  # of the reply
        began = perf_counter()
        try:
            asked = before + self._encoded(text)
            if len(asked) > self._most:
                return self._no_room(len(asked) - len(before))
            reused = self._hold(asked, on_fed)
            start = len(asked)
            fed, feed_seconds = start - reused, perf_counter() - began
            given.last = perf_counter()
            made = self._generate(n, give)
            finish, given.seconds, speculation = made.finish, list(made.seconds), made.speculation
        except KeyboardInterrupt:
            pass
        except Exception as error:
            said = self._replied(start)
            self._undo()
            if error is given.failure:
                raise
            return Reply(self._text(said), said, "error", False, reused, fed, feed_seconds, error=error)
        said = self._replied(start)
        if not said:
            self._undo()
            return Reply("", (), "cancelled", False, reused, fed, feed_seconds, notice="The message was taken back.")
        if said[-1] in self._session.bundle.config.eos_token_ids:
            finish, said = "eos", said[:-1]
        self._tokens, self._said = (*asked, *said), True
        self._close()
        seconds = tuple(given.seconds)
        self._count(reused, fed, feed_seconds, seconds)
        for token in said[given.count :]:  # chosen, but Ctrl-C came before it was shown
            show(stream.feed(token))
        show(stream.finish())
        saved, save_seconds, unsaved = self._keep()
        notice = f"The context is full: the reply ends here. {self._way_on()}" if finish == "contextFull" else None
        return Reply(
            self._text(said), said, finish, True, reused, fed, feed_seconds, seconds, saved, save_seconds, unsaved, notice=notice,
            speculation=speculation,
        )  # fmt: skip

    def save(self, name: str | None = None) -> Saved:
        """Save all of it under ``name``, and from now on every turn; by default under the name that it has.

        The end of what is saved is the end of the last turn, where nothing that may follow changes its tokens. Raises `RefConflict` where the name
        stands for something else than this conversation; then nothing is changed.
        """
        target = name or self._name
        if target is None or self._store is None:
            raise InputInvalid("save: expected a name and a store, found none. Give the conversation both.")
        if not self._tokens:
            raise InputInvalid("save: expected at least one turn, found none. Say something first.")
        before = self._require_own(self._store, target)
        self._hold(self._tokens)
        saved = self._session.save(target, expect=before)
        self._name, self._standing = target, saved.digest
        return saved

    def claim(self, name: str) -> None:
        """Save every turn from now on as ``name``. Raises `RefConflict` where the name is taken."""
        if self._store is None:
            raise InputInvalid("name: expected a store to save in, found none. Give the conversation one.")
        if name != self._name:
            self._require_own(self._store, name)
            self._name, self._standing = name, None

    def reset(self) -> None:
        """Begin anew, under the same system text and without a name: what was saved stays saved."""
        self._tokens, self._said, self._answered = (), False, False
        self._name = self._standing = None

    @property
    def _most(self) -> int:
        """The longest prompt that leaves room for one generated token."""
        return self._session.bundle.config.ctx - MARGIN - 1

    def _encoded(self, text: str) -> tuple[int, ...]:
        system = None if self._said else self._system
        return tuple(self._writing.user(text, system=system, first=not self._tokens, after_reply=self._answered))

    def _hold(self, asked: tuple[Item, ...], on_fed: Callable[[int, int], None] | None = None) -> int:
        """Have the session hold exactly ``asked``; how many of its tokens were reused."""
        session = self._session
        held = session.position
        if held and session.items == asked[:held]:
            reused, self._again = held - self._again, 0
            if held < len(asked):
                session.feed(self._ids(asked, held), on_fed)
            return reused
        self._again = 0
        return session.prompt(self._ids(asked, 0), on_fed).reused

    def _ids(self, items: tuple[Item, ...], start: int) -> list[int]:
        ids = [item for item in items[start:] if isinstance(item, int)]
        if len(ids) < len(items) - start:
            raise InputInvalid(
                "conversation: it holds images or audio, whose rows are not at hand to compute them again. Go on without --system, or begin a "
                "new conversation."
            )
        return ids

    def _replied(self, start: int | None) -> tuple[int, ...]:
        """What was generated from position ``start`` on (None: nothing), as the session has it: also right after an interrupt."""
        session = self._session
        if start is None:
            return ()
        said = [item for item in session.items[start:] if isinstance(item, int)]
        if session.pending is not None and session.emitted:
            said.append(session.pending)
        return tuple(said)

    def _text(self, tokens: tuple[int, ...]) -> str:
        return self._session.bundle.tokenizer.decode(tokens)

    def _close(self) -> None:
        """End the last turn, if it is not and there is room."""
        self._answered = True
        if not self._writing.closed(self._tokens):
            closed = (*self._tokens, *self._writing.closing)
            if len(closed) < self._session.bundle.config.ctx:
                self._tokens = closed

    def _undo(self) -> None:
        """The session back to what it shares with the conversation."""
        with suppress(NotCovered):  # then the next turn finds the rest, in the store or by computing
            self._session.rollback(common_prefix(self._session.items, self._tokens))

    def _keep(self) -> tuple[Saved | None, float, BaseException | None]:
        """Feeds the end of the turn, now that nobody waits, and saves, if there is a name. What goes wrong is no reason to lose the reply."""
        try:
            self._hold(self._tokens)
            started = perf_counter()
            return None if self._name is None else self.save(), perf_counter() - started, None
        except (Exception, KeyboardInterrupt) as error:
            return None, 0.0, error

    def _require_own(self, store: Backend, name: str) -> SnapshotDigest | None:
        """Where a name stands that may be moved: one that another process moved in the meantime stands for turns that are not here."""
        found = store.standing(name)
        mine = self._standing if name == self._name else None
        if found is None or found == mine:
            return found
        if mine is not None:
            raise RefConflict(
                f"name {name!r}: expected {mine}, which this conversation was saved as, found {found}: somebody else moved it. `/save OTHER` "
                f"keeps this one beside it.",
                expected=mine.hex,
                found=found.hex,
            )
        raise RefConflict(
            f"name {name!r}: expected a free one for a new conversation, found snapshot {found}. Go on with it (--resume), choose another "
            f"name, or remove it with `kvferry rm`.",
            expected=None,
            found=found.hex,
        )

    def _change(self, held: tuple[Item, ...]) -> SystemChange:
        now = self._writing.with_system(held, self._system)
        at = common_prefix(held, now)
        self._ids(held, at)  # an image would be lost without a word
        self._tokens = now
        writing = self._writing
        return SystemChange(at, writing.text(held[at : at + 1]), writing.text(now[at : at + 1]), len(now) - at)

    def _no_room(self, needed: int) -> Reply:
        ctx = self._session.bundle.config.ctx
        notice = (
            f"The context is full: the message takes {needed:,} positions with its markers, and {self.room:,} of {ctx:,} are left for one. "
            f"{'A shorter one may fit. ' if self.room else ''}{self._way_on()}"
        )
        return Reply("", (), "contextFull", False, notice=notice)

    def _way_on(self) -> str:
        kept = "" if self._name is None else f"; {self._name} stays saved as it is"
        return f"/reset begins a new conversation{kept}."

    def _count(self, reused: int, fed: int, feed_seconds: float, seconds: tuple[float, ...]) -> None:
        totals = self.totals
        totals.turns += 1
        totals.reused += reused
        totals.fed += fed
        totals.generated += len(seconds)
        totals.feed_seconds += feed_seconds
        totals.generate_seconds += sum(seconds)


def problem(error: BaseException) -> str:
    """In one line, for people."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, KVError):
        return f"{type(error).__name__}: {error.message}"
    return f"{type(error).__name__}: {error}"
