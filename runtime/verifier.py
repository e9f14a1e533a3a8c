"""Rounds of speculation: a draft and the pending token through a step of width 4, and which tokens that proves.

Writes rows, commits nothing: the caller keeps as many rows as it takes tokens, and drops the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import InputInvalid
from kvstore.items import Item

from .bundle import Bundle
from .chain import Chain, Step
from .engine import Engine, Function, FunctionNotAllowed, called
from .speculation import WIDTH, Speculation, Tally, can_verify, drafts_at, verify_assets
from .verify_head import HeadRefused, WidthUnknown, verified_head

Half = NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class Verdict:
    """``tokens``: what plain decoding would have chosen next, in order; as many rows, from the pending token's on, are the right ones to
    keep. ``settled``: False if the row after them is a near-tie, for decode to compute. ``corrected``: rows where the sequential head overruled
    the batched one."""

    tokens: tuple[int, ...]
    settled: bool = True
    corrected: int = 0


class Verifier:
    """What one session verifies with: the width-4 functions, loaded at the first round, and the batched head, proven before it."""

    def __init__(self, bundle: Bundle, engine: Engine, chain: Chain) -> None:
        self._bundle = bundle
        self._engine = engine
        self._chain = chain
        self._heads: dict[str | None, Function] = {}

    @property
    def function(self) -> str:
        """The name, the same in every chunk, of the function that computes a round's rows."""
        return self._bundle.config.verify_functions[WIDTH]

    def require(self, how: Speculation) -> None:
        """Raises `WidthUnknown` where the bundle lacks verification, `InputInvalid` where its heads lack what ``how`` needs, and `FunctionNotAllowed`
        where the session may not load it. Loads nothing."""
        config = self._bundle.config
        if not can_verify(config):
            raise WidthUnknown(
                f"speculation: expected a bundle with a function and a batched head of width {WIDTH} (corellm.verify), found one without. "
                "Generate without speculation.",
                width=WIDTH,
            )
        if how.verify == "margin" and config.margin_function is None:
            raise InputInvalid(
                "speculation: verify: expected trust or recheck with this bundle, whose heads don't say how far apart the best logits are "
                "(corellm.margin_function), found margin. Use recheck, or a bundle that this kvferry has built: format kvferry-bundle-1, or Gemma 4 with --margins."
            )
        for package, function in verify_assets(config):
            try:
                self._engine.ledger.check(package, function)
            except FunctionNotAllowed as error:
                name = called(package, function)
                raise FunctionNotAllowed(
                    f"speculation: function {name}: opened decode-only: expected a session that may verify, found one that may not load it. "
                    "Open it with allow_verify (--allow-verify), or generate without speculation.",
                    function=name,
                ) from error

    def head(self, how: Speculation) -> Function:
        """The batched head, proven when it is first asked for. Raises `HeadRefused`."""
        function = self._bundle.config.margin_function if how.verify == "margin" else None
        if function not in self._heads:
            self._heads[function] = verified_head(self._bundle, self._engine, WIDTH, function)
        return self._heads[function]

    def round(self, how: Speculation, start: int, fed: Sequence[int]) -> Verdict:
        """Compute the rows of ``fed``, the pending token and its drafts, at positions ``start``, … (written, not held), and judge them."""
        assert 1 < len(fed) <= WIDTH
        head = self.head(how)
        hidden = self._chain.run_rows(Step("verify", start, WIDTH), fed)
        said = head({"hidden": hidden})
        targets = [int(token) for token in said["token"].reshape(-1)[: len(fed)]]
        match how.verify:
            case "trust":
                return Verdict(accepted(fed[1:], targets))
            case "recheck":
                return self._rechecked(fed[1:], targets, hidden)
            case "margin":
                assert how.threshold is not None
                return settled(fed[1:], targets, said["margin"].reshape(-1), how.threshold)

    def _rechecked(self, drafts: Sequence[int], targets: Sequence[int], hidden: Half) -> Verdict:
        tokens: list[int] = []
        corrected = 0
        for row, target in enumerate(targets):
            tokens.append(self._chain.token(hidden[row]))
            corrected += tokens[row] != target
            if row == len(drafts) or tokens[row] != drafts[row]:
                break
        return Verdict(tuple(tokens), corrected=corrected)


class Speculator:
    """One generation's speculation: when to draft, and the statistics."""

    def __init__(self, how: Speculation, verifier: Verifier) -> None:
        """Raises as `Verifier.require` does."""
        verifier.require(how)
        self.tally = Tally()
        self._how = how
        self._verifier = verifier
        self._settled = True

    @property
    def function(self) -> str:
        return self._verifier.function

    def drafts(self, tokens: Sequence[Item], ctx: int, left: int) -> tuple[int, ...]:
        """The drafts for ``tokens``, the pending one last, with ``left`` tokens to give; empty where the next token is decode's."""
        settled, self._settled = self._settled, True
        if not settled or left < WIDTH or self.tally.refusal is not None:
            return ()
        drafts = drafts_at(self._how.draft, tokens, ctx)
        self.tally.fallback_rounds += not drafts
        return drafts

    def round(self, start: int, fed: Sequence[int]) -> Verdict:
        """`Verifier.round`; a verdict without tokens where decode is to give the next one."""
        try:
            verdict = self._verifier.round(self._how, start, fed)
        except HeadRefused as error:
            if self._how.refused == "raise":
                raise
            self.tally.refusal = str(error)
            return Verdict(())
        self.tally.begin(len(fed) - 1)
        self.tally.corrected += verdict.corrected
        self.tally.unsettled += not verdict.settled
        # If it gave no token at all, decode comes at once, and what follows is settled again.
        self._settled = verdict.settled or not verdict.tokens
        return verdict


def accepted(drafts: Sequence[int], targets: Sequence[int]) -> tuple[int, ...]:
    """``targets[r]``: the token after row r, so the one that ``drafts[r]`` must be. The drafts up to the first that is not, and the target there (or
    behind the last draft)."""
    assert len(targets) == len(drafts) + 1
    right = next((r for r, draft in enumerate(drafts) if draft != targets[r]), len(drafts))
    return tuple(targets[: right + 1])


def settled(drafts: Sequence[int], targets: Sequence[int], margins: NDArray[Any], threshold: float) -> Verdict:
    """As `accepted`, but only up to the first row whose entry of ``margins`` (best logit − second best) is at most ``threshold``, or is no number:
    that row's token is not believed."""
    tokens = accepted(drafts, targets)
    # not (m > t): a NaN is doubtful too
    doubtful = next((r for r in range(len(tokens)) if not float(margins[r]) > threshold), len(tokens))
    return Verdict(tokens[:doubtful], settled=doubtful == len(tokens))
