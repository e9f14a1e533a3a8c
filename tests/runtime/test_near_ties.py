"""Near-ties: heads say how clear a choice was, and with that a head that decides them otherwise does no harm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from drafters import Oracle
from numpy.typing import NDArray

from kvstore.errors import InputInvalid
from runtime.bundle import Bundle
from runtime.engine import Engine, Function
from runtime.gate.logits import Logits
from runtime.portable import PortableEngine
from runtime.session import Session
from runtime.speculation import Speculation

BATCHED = "lmhead_v4.mlpackage"
own_families = pytest.mark.parametrize(
    "bundle", ["tiny", "tiny-llama", "tiny-gemma4-margins"], indirect=True, scope="session"
)
"""Those whose heads have margins: the published shape itself has none."""


@pytest.fixture(scope="module")
def logits(bundle: Bundle) -> Logits:
    return Logits(bundle)


@own_families
@pytest.mark.parametrize("compute", ["fp32", "fp16-rounding"])
def test_both_heads_say_how_far_the_second_best_is_behind(bundle: Bundle, logits: Logits, compute: Any) -> None:
    engine = PortableEngine(bundle.root, compute=compute)
    single = engine.function(bundle.config.lmhead, bundle.config.margin_function)
    batched = engine.function(BATCHED, bundle.config.margin_function)
    plain = engine.function(BATCHED, None)
    for seed in range(6):
        rows = np.random.default_rng(seed).standard_normal((4, bundle.config.hidden)).astype(np.float16)
        said = batched({"hidden": rows})
        assert said["token"].tolist() == plain({"hidden": rows})["token"].tolist()
        one = [single({"hidden": row}) for row in rows]
        assert [float(each["margin"][0]) for each in one] == said["margin"].tolist()
        assert [int(each["token"][0]) for each in one] == said["token"].tolist()
        for row, margin in zip(rows, said["margin"], strict=True):
            best = np.sort(logits.of(row))[-2:]  # type: ignore[type-var]
            assert abs(float(margin) - float(best[1] - best[0])) < (0.002 if compute == "fp32" else 0.1)
    # And rows of one number, whose logits are all alike up to rounding, or all zero.
    zeros = batched({"hidden": np.zeros((4, bundle.config.hidden), np.float16)})
    assert zeros["margin"].tolist() == [0, 0, 0, 0] and zeros["token"].tolist() == [0, 0, 0, 0]


class Perturbed:
    """An engine whose batched head takes the second best token of every near-tie, in steps that do not begin at position 0."""

    def __init__(self, inside: Engine, logits: Logits, near: float) -> None:
        self._inside, self._logits, self._near = inside, logits, near
        self.ledger, self.describe = inside.ledger, inside.describe
        self.flips = 0
        self.position = 0

    def function(self, package: str, function: str | None) -> Function:
        found = self._inside.function(package, function)
        return _Perturbed(found, self, package == BATCHED)

    def flipped(self, hidden: NDArray[np.float16], tokens: NDArray[Any]) -> NDArray[Any]:
        out = tokens.copy()
        for i, row in enumerate(hidden):
            margin = self._logits.margin(row)
            assert margin is not None
            if self.position > 0 and margin.margin <= self._near:
                out[i] = margin.second
                self.flips += 1
        return out


@dataclass(frozen=True)
class _Perturbed:
    inside: Function
    engine: Perturbed
    head: bool

    @property
    def name(self) -> str:
        return self.inside.name

    @property
    def inputs(self) -> Mapping[str, Any]:
        return self.inside.inputs

    @property
    def outputs(self) -> Mapping[str, Any]:
        return self.inside.outputs

    def __call__(
        self, inputs: Mapping[str, NDArray[Any]], *, kv_rows: tuple[int, int] | None = None
    ) -> dict[str, NDArray[Any]]:
        results = self.inside(inputs, kv_rows=kv_rows)
        if "onehot" in inputs:
            self.engine.position = int(inputs["onehot"].reshape(-1).argmax())
        if self.head:
            results["token"] = self.engine.flipped(inputs["hidden"], results["token"])
        return results


def rows_of(session: Session) -> tuple[Any, ...]:
    return (
        session.items,
        session.pending,
        [bytes(s) for g in range(len(session.kv.covered)) for s in session.kv.spans(g, 0, session.kv.ctx)],
    )


N = 40


@own_families
def test_a_head_that_decides_near_ties_otherwise_is_harmless_with_margins(
    bundle: Bundle, engine: PortableEngine, ids: list[int], logits: Logits
) -> None:
    fed = ids[:50]
    off = Session.open(bundle, engine)
    off.feed(fed)
    expected = off.generate(N).tokens
    known = (*fed, *expected)
    margins = choices(bundle, engine, known, len(fed), logits)
    near = sorted(margins)[N // 6]  # a sixth of the choices count as near-ties

    def speculated(how: Speculation) -> tuple[Session, Perturbed, Any]:
        inside = Perturbed(PortableEngine(bundle.root), logits, near)
        session = Session.open(bundle, inside)
        session.feed(fed)
        # The heads were proven before: the check's rows are not what this is about.
        session._verifier._heads |= {f: inside.function(BATCHED, f) for f in (None, bundle.config.margin_function)}
        return session, inside, session.generate(N, speculate=how)

    draft = Oracle(known, [(3, None)], strict=False)
    # The comparison that the gate makes, on with off, finds it.
    _, inside, made = speculated(Speculation(draft=draft))
    assert inside.flips and made.tokens != expected
    # With margins each such row is decode's.
    session, inside, made = speculated(Speculation("margin", near + 0.001, draft=Oracle(known, [(3, None)])))
    assert made.tokens == expected and rows_of(session) == rows_of(off)
    assert inside.flips and made.speculation.unsettled >= 3 and made.speculation.rounds > made.speculation.unsettled
    assert sum(made.speculation.step_tokens) == N
    # A threshold of what is nearly no tie does not help.
    _, _, made = speculated(Speculation("margin", min(margins) / 2, draft=draft))
    assert made.tokens != expected


def choices(bundle: Bundle, engine: PortableEngine, known: Sequence[int], start: int, logits: Logits) -> list[float]:
    """The margin of each choice from position ``start`` on."""
    rows: list[NDArray[np.float16]] = []
    head = bundle.config.lmhead

    class Listening:
        ledger, describe = engine.ledger, staticmethod(engine.describe)

        def function(self, package: str, function: str | None) -> Any:
            found = engine.function(package, function)
            return found if package != head else lambda inputs: (rows.append(inputs["hidden"]), found(inputs))[1]

    session = Session.open(bundle, Listening())  # type: ignore[arg-type]
    session.feed(list(known[:start]))
    session.generate(len(known) - start)
    made = [logits.margin(row) for row in rows]
    return [margin.margin for margin in made if margin is not None]


@own_families
def test_margins_of_an_honest_head_cost_fallbacks_and_change_nothing(
    bundle: Bundle, engine: PortableEngine, ids: list[int]
) -> None:
    off = Session.open(bundle, engine)
    off.feed(ids[:50])
    known = (*ids[:50], *off.generate(24).tokens)
    for threshold in (0.0, 0.05, 1e9):
        session = Session.open(bundle, engine)
        session.feed(ids[:50])
        made = session.generate(
            24, speculate=Speculation("margin", threshold, draft=Oracle(known, [(3, None), (3, 1)]))
        )
        assert rows_of(session) == rows_of(off) and made.speculation is not None
        if threshold == 1e9:
            # Every round is in vain, and decode gives each token.
            assert made.speculation.rounds == made.speculation.unsettled and made.speculation.accepted == 0
            assert set(made.speculation.step_tokens) == {0, 1}


def test_the_published_shape_has_no_margins_and_says_so(tiny_gemma4_bundle: Any, ids: list[int]) -> None:
    bundle = Bundle.open(tiny_gemma4_bundle)
    engine = PortableEngine(bundle.root)
    assert bundle.config.margin_function is None
    assert set(engine.function(BATCHED, None).outputs) == {"token"}
    session = Session.open(bundle, engine)
    session.feed(ids[:9])
    with pytest.raises(InputInvalid, match=r"expected trust or recheck.*margin_function"):
        session.generate(9, speculate=Speculation("margin", 0.1))
