"""Feeding tokens and choosing the next ones, greedily, over one `HostKV`. Knows tokens and soft tokens; text is the
tokenizer's, and rows of media are the caller's.

State changes by one assignment after every chunk's rows are written. So a step that fails, or that Ctrl-C interrupts, leaves everything as
it was before that step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

from kvstore.errors import InputInvalid, Refused
from kvstore.items import Item
from kvstore.snapshot import Lineage, Receipt

from .bundle import Bundle
from .chain import Chain, Step, decode_only, schedule
from .engine import Engine
from .hostkv import HostKV
from .reports import Fed, Generation, ReceiptReport, budget, compare
from .soft import Input, Position, items_of, positions
from .speculation import Speculation
from .state import State, made_by
from .verifier import Speculator, Verifier


class ContextOverflow(Refused):
    """More tokens than the context holds. ``details``: expected (the most that fits), found."""


class Decoding:
    """A sequence of tokens with their KV rows, and the next token. Not thread-safe. Owns ``kv``; uses the bundle and the engine, and closes
    neither."""

    def __init__(self, bundle: Bundle, engine: Engine, *, only_decode: bool) -> None:
        """``only_decode``: feed every token through decode."""
        self.bundle = bundle
        self.engine = engine
        self.kv = HostKV(bundle.layout(), bundle.config.ctx)
        self._only_decode = only_decode
        self._chain = Chain(bundle, engine, self.kv)
        self._verifier = Verifier(bundle, engine, self._chain)
        # What the checkpoint folder of another runtime wants to know, besides who computed the rows.
        mine = {"context": str(bundle.config.ctx), "convert_config": bundle.config_sha256}
        self._engine_fields = {**engine.describe(), **mine}
        self._state = State()

    @property
    def items(self) -> tuple[Item, ...]:
        """Everything fed so far, in order."""
        return self._state.items

    @property
    def position(self) -> int:
        """How many tokens are fed; each has its KV row."""
        return len(self._state.items)

    @property
    def pending(self) -> int | None:
        """The next token: chosen, not fed. None where nothing was chosen for this position."""
        return self._state.pending

    @property
    def emitted(self) -> bool:
        """Whether `generate` has already given the pending token out."""
        return self._state.emitted

    @property
    def lineage(self) -> tuple[Lineage, ...]:
        """Per block, who computed its rows and how."""
        return self._state.lineage()

    def feed(self, tokens: Sequence[Input], progress: Callable[[int, int], None] | None = None) -> Fed:
        """Append ``tokens``, ids and soft spans, and choose the pending token after the last. A pending token that was there is dropped, not
        fed.

        Raises `ContextOverflow` unless one position stays free, `TokenOutOfRange`, and `InputInvalid` for a span of another width than the
        bundle's, all before anything changes. An error later leaves the steps done so far. ``progress(done, total)`` is called after each
        step, in tokens (a span's rows are one each).
        """
        return self._feed(self._checked(tokens), progress)

    def _feed(self, fed: Sequence[Position], progress: Callable[[int, int], None] | None = None) -> Fed:
        """`feed`, of positions that were checked."""
        self._require_room(self.position + len(fed))
        config = self.bundle.config
        if self._only_decode:
            steps = decode_only(self.position, len(fed))
        else:
            steps = schedule(self.position, len(fed), config.ctx, config.prefill_widths, config.plain_width)
        started = perf_counter()
        done = 0
        for step in steps:
            self._step(step, fed[done : done + step.width], choose=done + step.width == len(fed))
            done += step.width
            if progress is not None:
                progress(done, len(fed))
        functions = dict.fromkeys(self._chain.function_name(step) for step in steps)
        return Fed(done, tuple(functions), perf_counter() - started)

    def generate(
        self, n: int, on_token: Callable[[int], None] | None = None, *, speculate: Speculation | None = None
    ) -> Generation:
        """Up to ``n`` greedy tokens, each passed to ``on_token`` as soon as it is chosen. The last one is not fed: it stays pending.

        Called again it goes on: the pending token that was given out is fed first and not given out twice. Where no token is pending
        (after `rollback`), the last one is decoded again. Stops early at an EOS token and, with ``contextFull``, 8 positions before the
        context ends.

        ``speculate``: several tokens a step where the text repeats itself and at least a full round of tokens is left to give. When
        ``on_token`` is called, and when it raises, the session is what it is there without speculation; so it is at the end. Raises `WidthUnknown`
        and `FunctionNotAllowed` before anything is done, where the bundle or the session has no verification; `HeadRefused` at the first round.
        """
        if n < 0 or not self._state.items:
            raise InputInvalid(
                f"generate: expected n of 0 or more and a token fed before, found n={n}, position {self.position}."
            )
        last, began = perf_counter(), self.position + (self.pending is not None and self.emitted)
        limit, finish = budget(n, self.bundle.config.ctx, began)
        tokens: list[int] = []
        seconds: list[float] = []
        speculator = None if speculate is None else Speculator(speculate, self._verifier)

        def give(token: int) -> bool:
            """Hands out the pending token; whether it ends the text."""
            nonlocal last
            self._state = self._state.with_emitted(True)
            tokens.append(token)
            now = perf_counter()
            seconds.append(now - last)
            last = now
            if speculator is not None:
                speculator.tally.token()
            if on_token is not None:
                on_token(token)
            return token in self.bundle.config.eos_token_ids

        while len(tokens) < limit:
            if speculator is None or not self._round(speculator, limit - len(tokens), give):
                token = self._next()
                if speculator is not None:
                    speculator.tally.begin()
                give(token)
            if tokens[-1] in self.bundle.config.eos_token_ids:
                finish = "eos"
                break
        stats = None if speculator is None else speculator.tally.stats()
        return Generation(tuple(tokens), finish, began, tuple(seconds), stats)

    def rollback(self, position: int) -> None:
        """Keep the first ``position`` tokens. `NotCovered` where a trimmed restore lacks the rows; then nothing changes."""
        self.kv.require(position)
        if position != self.position:
            self._state = self._state.cut(position)
            self.kv.rollback(position)

    def receipt(self, n: int = 32) -> Receipt:
        """The next ``n`` tokens from here, the pending one first. The session is afterwards exactly as before."""
        before = self._state
        if before.pending is None:
            raise InputInvalid("receipt: expected a pending token, found none. Feed a token, or call generate, first.")
        try:
            self._state = before.with_emitted(False)
            made = self.generate(n)
        finally:
            self._state = before
            self.kv.rollback(len(before.items))
        return Receipt(made.tokens, n, made.finish)

    def verify_receipt(self, receipt: Receipt) -> ReceiptReport:
        """Whether this session continues as the producer did. The session is afterwards exactly as before."""
        return compare(receipt, self.receipt(receipt.asked))

    def _next(self) -> int:
        """A pending token that was not emitted."""
        state = self._state
        if state.pending is not None and not state.emitted:
            return state.pending
        token = state.pending
        if token is None:
            last = state.items[-1]
            if not isinstance(last, int):
                raise InputInvalid(
                    f"generate: item {self.position - 1}, the last, is a soft token, whose row is not at hand to decode it again. Roll back "
                    f"to {self.position - 1} and feed its row, or give the whole sequence to Session.prompt."
                )
            token = last
            self.rollback(self.position - 1)
        self._step(Step("decode", self.position, 1), [token], choose=True)
        assert self.pending is not None
        return self.pending

    def _round(self, speculator: Speculator, left: int, give: Callable[[int], bool]) -> bool:
        """One round of speculation, its tokens handed to ``give``. False, and nothing is done, where decode is to give the next token."""
        state = self._state
        if state.pending is None or not state.emitted:
            return False
        drafts = speculator.drafts((*state.items, state.pending), self.bundle.config.ctx, left)
        if not drafts:
            return False
        self._heal()
        maker = made_by(self._engine_fields, [speculator.function])
        fed = [state.pending, *drafts]
        try:
            tokens = speculator.round(self.position, fed).tokens
            for row, token in zip(fed, tokens, strict=False):
                # What a step of decode commits: this row, and what was chosen after it.
                after = self._state.fed((row,), maker, token)
                self.kv.advance(len(after.items))
                self._state = after
                if give(token):
                    break
        finally:
            self.kv.rollback(self.position)
        return bool(tokens)

    def _heal(self) -> None:
        if self.kv.position != self.position:  # an interrupt fell between a commit's two assignments
            self.kv.rollback(self.position)

    def _step(self, step: Step, fed: Sequence[Position], *, choose: bool) -> None:
        self._heal()
        try:
            hidden = self._chain.run(step, fed)
            pending = self._chain.token(hidden) if choose else None
            maker = made_by(self._engine_fields, [self._chain.function_name(step)])
            after = self._state.fed(items_of(fed), maker, pending)
            self.kv.advance(step.start + step.width)
            self._state = after
        except BaseException:
            self.kv.rollback(self.position)
            raise

    def _checked(self, tokens: Sequence[Input]) -> list[Position]:
        made = positions(tokens, self.bundle.config.hidden)
        for one in made:
            if isinstance(one, int) and not 0 <= one < self.bundle.embed.rows:
                self.bundle.embed.row(one)  # raises TokenOutOfRange, in its words
        return made

    def _require_room(self, tokens: int) -> None:
        most = self.bundle.config.ctx - 1
        if tokens > most:
            raise ContextOverflow(
                f"tokens: expected at most {most} (one of the context's positions stays free), found {tokens}. Shorten the text: `kvferry prefill --tokens {most}` takes as much as fits.",
                expected=most,
                found=tokens,
            )
