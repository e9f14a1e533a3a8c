"""The gate is green where everything holds, and red, with the place, where something was broken on purpose."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import every_family
from numpy.typing import NDArray

from kvstore import Store
from kvstore.errors import InputInvalid, ObjectMissing
from runtime.bundle import Bundle
from runtime.engine import Engine, Function, LoadLedger
from runtime.gate import Configuration, Line, Report, Setup, Size, run_gate
from runtime.gate.logits import Logits, logits_function
from runtime.gate.measuring import Said, measured, threshold
from runtime.gate.prompts import Prompt
from runtime.gate.report import NEAR_TIE, Threshold
from runtime.gate.restoring import places
from runtime.gate.speculating import plain
from runtime.gate.telling import report_text
from runtime.mil import open_model
from runtime.ops import OperationUnsupported
from runtime.portable import PortableEngine
from runtime.session import Session
from runtime.verify_head import check_head

SMALL = Size("small", continued=4, tail=2, receipt=3, speculated=16, crossed=40, cross_continued=8, all_edges=False)
BATCHED = "lmhead_v4.mlpackage"
CLOSE = 0.05
ROW = 20
"""The row that mutants break: below every place of interruption."""

Change = Callable[[Mapping[str, NDArray[Any]], dict[str, NDArray[Any]]], None]


class Answering:
    """The engine inside, but ``change`` may write into what ``package`` answers; ``fields`` are told instead of the engine's own."""

    def __init__(self, inside: Engine, package: str, change: Change, fields: Mapping[str, str] | None = None) -> None:
        self._inside, self._package, self._change = inside, package, change
        self._fields = fields or {}
        self.ledger: LoadLedger = inside.ledger

    def function(self, package: str, function: str | None) -> Function:
        found = self._inside.function(package, function)
        return _Answer(found, self._change) if package == self._package else found

    def describe(self) -> dict[str, str]:
        return {**self._inside.describe(), **self._fields}


class _Answer:
    def __init__(self, inside: Function, change: Change) -> None:
        self._inside, self._change = inside, change
        self.name, self.inputs, self.outputs = inside.name, inside.inputs, inside.outputs

    def __call__(
        self, inputs: Mapping[str, NDArray[Any]], *, kv_rows: tuple[int, int] | None = None
    ) -> dict[str, NDArray[Any]]:
        results = self._inside(inputs, kv_rows=kv_rows)
        self._change(inputs, results)
        return results


def configuration(bundle: Bundle, name: str, wrap: Callable[[Engine], Engine] = lambda engine: engine) -> Configuration:
    compute: Any = "fp16-rounding" if name == "fp16-rounding" else "fp32"
    words = ("--engine", "portable", "--compute", compute)
    return Configuration(name, lambda: wrap(PortableEngine(bundle.root, compute=compute)), words)


def setup(bundle: Bundle, ids: list[int], *configurations: Configuration, length: int = 70) -> Setup:
    """Of one prompt; the first configuration is the main one."""
    return Setup(bundle, configurations[0], configurations, [Prompt("text", tuple(ids[:length]), length)], SMALL)


@pytest.fixture
def elsewhere() -> None:
    """Asked for by tests in which the other process is real."""


@pytest.fixture(autouse=True)
def nobody_elsewhere(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Another process takes a second to start and knows nothing of mutants: only the tests that are about it have one."""
    if "elsewhere" not in request.fixturenames:
        monkeypatch.setattr("runtime.gate.restoring.generate_elsewhere", lambda *_: ())


def gated(given: Setup) -> tuple[Report, list[Line]]:
    """The report, and of its lines all but the other process's."""
    report = run_gate(given)
    return report, [line for line in report.lines if line.check != "process"]


def red(lines: list[Line], check: str) -> list[Line]:
    return [line for line in lines if line.check == check and line.holds is False]


# green


@every_family
def test_everything_holds(bundle: Bundle, ids: list[int]) -> None:
    if bundle.config.architecture == "tiny-gemma4":
        ids = bundle.tokenizer.encode("The ferry leaves the harbour at noon. " * 30)
    both = (configuration(bundle, "fp32"), configuration(bundle, "fp16-rounding"))
    report, lines = gated(setup(bundle, ids, *both))
    assert not [line for line in lines if line.holds is False]
    checks = [line.check for line in lines]
    assert [checks.count(c) for c in ("heads", "speculation", "restore", "receipt", "cross")] == [1, 3, 2, 2, 4]
    told = [line.speculation for line in lines if line.speculation is not None and line.speculation.drafts == "told"]
    assert len(told) == 2
    for rounds in told:
        assert rounds.rounds >= 3 and 0 < rounds.accepted < rounds.drafted, "right and wrong drafts, whatever the text"
    rules = {(line.saved_under == line.restored_under, line.rule) for line in lines if line.check == "cross"}
    assert rules == {(True, "exact"), (False, "bounded")}
    assert {line.rule for line in lines if line.check != "cross"} == {"exact"}
    assert all(line.tokens == 8 for line in lines if line.check == "cross")
    apart = [line.drift for line in lines if line.rule == "bounded"]
    assert all(drift is not None and 0 < drift < 0.05 for drift in apart)
    assert report.margins and report.near_ties == tuple(dict.fromkeys(report.near_ties))
    assert all(tie.margin.margin <= NEAR_TIE for tie in report.near_ties)


def test_where_a_prompt_and_its_continuation_are_interrupted(bundle: Bundle, ids: list[int]) -> None:
    given = setup(bundle, ids, configuration(bundle, "fp32"), length=650)
    assert places(given, given.prompts[0], range(16)) == (64, 576, 650)
    given = replace(given, size=replace(SMALL, all_edges=True))
    assert places(given, given.prompts[0], range(16)) == (63, 64, 65, 511, 512, 513, 576, 650, 653)
    assert places(given, given.prompts[0], range(2))[-1] == 650, "there is no such place"


@pytest.mark.slow
def test_another_process_continues_alike(bundle: Bundle, ids: list[int], elsewhere: None) -> None:
    (line,) = [
        line for line in run_gate(setup(bundle, ids, configuration(bundle, "fp32"))).lines if line.check == "process"
    ]
    assert line.holds and line.tokens == 4 and "KV of 74 positions" in line.told


@pytest.mark.slow
def test_another_process_that_says_otherwise_is_told(
    bundle: Bundle, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.gate.restoring.generate_elsewhere", lambda *_: (1, 2, 3, 4))
    report = run_gate(setup(bundle, ids, configuration(bundle, "fp32")))
    (line,) = report.failed
    assert line.check == "process" and line.difference is not None and line.difference.position == 70


# red


@pytest.fixture
def break_row(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[memoryview], None]], None]:
    """Has every load end with the first layer's V row `ROW` changed in memory, after its bytes were verified."""
    load = Store.load

    def install(change: Callable[[memoryview], None]) -> None:
        def loaded(self: Store, match: Any, into: Any) -> int:
            read = load(self, match, into)
            change(into.spans(0, ROW, ROW + 1)[1])
            return read

        monkeypatch.setattr(Store, "load", loaded)

    return install


def test_a_flipped_kv_byte_after_loading_is_found(
    bundle: Bundle, ids: list[int], break_row: Callable[[Callable[[memoryview], None]], None]
) -> None:
    def flip(row: memoryview) -> None:
        row[3] ^= 1

    break_row(flip)
    report, lines = gated(setup(bundle, ids, configuration(bundle, "fp32")))
    found = red(lines, "restore")
    assert not report.ok and len(found) == 2 and len(red(lines, "cross")) == 1
    assert not red(lines, "speculation")
    for line in found:
        assert line.rows is not None and (line.rows.token, line.rows.part) == (ROW, "v")
        assert line.rows.layer == bundle.layout().groups[0].layers[0]
        assert f"the V row of token {ROW}" in line.told
    text = " ".join(report_text(report, 100).split())
    assert (
        text.startswith("tiny: NOT all holds: ")
        and f"does not hold: restored = uninterrupted, whole, text, at 64 KV: the V row of token {ROW}" in text
    )


def test_a_row_that_is_wrong_enough_also_shows_the_first_token_it_costs(
    bundle: Bundle, ids: list[int], break_row: Callable[[Callable[[memoryview], None]], None]
) -> None:
    def spoil(row: memoryview) -> None:
        row[:] = np.full(len(row) // 2, 300, np.float16).tobytes()

    break_row(spoil)
    _, lines = gated(setup(bundle, ids, configuration(bundle, "fp32")))
    line = red(lines, "restore")[0]
    difference = line.difference
    assert line.rows is not None and line.rows.token == ROW and difference is not None
    assert line.split is not None and difference.position == line.split + SMALL.tail + difference.index
    assert difference.margin is not None and difference.margin.best == difference.expected != difference.found
    assert f"position {difference.position}" in line.told and f"margin {difference.margin.margin:.4f}" in line.told


def test_a_receipt_that_lies_is_found(bundle: Bundle, ids: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    save, at = Session.save, 2

    def lie(self: Session, name: str | None = None, receipt: Any = None, model: str = "") -> Any:
        if receipt is not None:
            tokens = list(receipt.tokens)
            tokens[at] ^= 1
            receipt = replace(receipt, tokens=tuple(tokens))
        return save(self, name, receipt, model)

    monkeypatch.setattr(Session, "save", lie)
    report, lines = gated(setup(bundle, ids, configuration(bundle, "fp32")))
    assert not report.ok and not red(lines, "restore")
    found = red(lines, "receipt")
    assert len(found) == 2
    for line in found:
        assert line.difference is not None and line.split is not None
        assert (line.difference.index, line.difference.position) == (at, line.split + at)


def checked_rows(bundle: Bundle) -> set[bytes]:
    """The hidden states that a batched head is checked with before its first use."""
    rows: set[bytes] = set()

    def keep(inputs: Mapping[str, NDArray[Any]], _: object) -> None:
        rows.update(row.tobytes() for row in inputs["hidden"])

    check_head(bundle, Answering(PortableEngine(bundle.root), BATCHED, keep), 4)
    assert len(rows) == 4
    return rows


def second_best(bundle: Bundle, below: float, spared: Collection[bytes] = ()) -> Change:
    """A head that says its second best token where the best is less than ``below`` ahead, but for the rows ``spared``."""
    logits = Logits(bundle)

    def change(inputs: Mapping[str, NDArray[Any]], results: dict[str, NDArray[Any]]) -> None:
        hidden = inputs["hidden"].reshape(-1, bundle.config.hidden)
        for row, one in enumerate(hidden):
            margin = logits.margin(one)
            assert margin is not None
            if margin.margin < below and one.tobytes() not in spared:
                results["token"].reshape(-1)[row] = margin.second

    return change


def test_a_batched_head_that_is_wrong_at_near_ties_is_found(bundle: Bundle, ids: list[int]) -> None:
    """It passes the check before its first use; speculation then says another token than plain decoding."""
    wrong = second_best(bundle, CLOSE, checked_rows(bundle))
    main = configuration(bundle, "fp32", lambda engine: Answering(engine, BATCHED, wrong))
    given = setup(bundle, ids, main, length=40)
    report, lines = gated(replace(given, size=replace(SMALL, speculated=30)))
    assert not report.ok and not red(lines, "heads") and not red(lines, "restore")
    trusted, rechecked = (
        next(x for x in lines if x.speculation is not None and (x.speculation.drafts, x.speculation.verify) == way)
        for way in (("told", "trust"), ("told", "recheck"))
    )
    assert rechecked.holds, "the sequential head's word counts there"
    difference = trusted.difference
    assert trusted.holds is False and difference is not None and difference.margin is not None
    assert difference.position == 40 + difference.index
    assert difference.margin.margin < CLOSE and difference.found == difference.margin.second
    assert f"token {difference.index} (position {difference.position})" in trusted.told and "a near-tie" in trusted.told


@pytest.mark.slow
def test_where_narrow_steps_promise_no_bytes_a_near_tie_is_within_bounds(bundle: Bundle, ids: list[int]) -> None:
    """As on Core ML: the same mutant is told and let through, and one that is wrong where nothing is close is not."""

    spared = checked_rows(bundle)

    def wrapped(below: float) -> Configuration:
        wrong = second_best(bundle, below, spared)
        return configuration(bundle, "all", lambda e: Answering(e, BATCHED, wrong, {"engine": "coreml"}))

    lines: dict[float, Line] = {}
    for below in (CLOSE, 0.4):
        given = setup(bundle, ids, wrapped(below), length=40)
        _, all_lines = gated(replace(given, size=replace(SMALL, speculated=30)))
        found = [x for x in all_lines if x.check == "speculation"]
        assert {x.rule for x in found} == {"bounded"} and all(x.bound for x in found)
        lines[below] = found[1]
    close, clear = lines[CLOSE], lines[0.4]
    assert close.holds and close.difference is not None and close.difference.margin is not None
    assert clear.holds is False


@pytest.mark.slow
def test_a_batched_head_of_zeros_is_found_twice(bundle: Bundle, ids: list[int]) -> None:
    def zeros(_: object, results: dict[str, NDArray[Any]]) -> None:
        results["token"][:] = 0

    main = configuration(bundle, "fp32", lambda engine: Answering(engine, BATCHED, zeros))
    report, lines = gated(setup(bundle, ids, main))
    (head,) = red(lines, "heads")
    assert "rows 0, 1, 2, 3 of 4 differ" in head.told
    told = red(lines, "speculation")
    assert [line.told.partition(":")[0] for line in told] == ["HeadRefused"] * len(told) and len(told) >= 2
    assert not red(lines, "restore") and not report.ok


@pytest.mark.slow
def test_another_configuration_may_differ_at_near_ties_and_nowhere_else(bundle: Bundle, ids: list[int]) -> None:
    """``close`` decides near-ties otherwise, ``far`` also what is clear. Each agrees with itself."""
    head = bundle.config.lmhead
    plain = configuration(bundle, "fp32")
    close = configuration(bundle, "close", lambda engine: Answering(engine, head, second_best(bundle, 0.06)))
    far = configuration(bundle, "far", lambda engine: Answering(engine, head, second_best(bundle, 3.0)))
    given = replace(setup(bundle, ids, plain, close, far, length=40), size=replace(SMALL, cross_continued=40))
    _, lines = gated(given)
    cross = {(x.saved_under, x.restored_under): x for x in lines if x.check == "cross"}
    assert len(cross) == 9
    for name in ("fp32", "close", "far"):
        assert cross[name, name].holds and cross[name, name].rule == "exact" and cross[name, name].difference is None
    within, outside = cross["fp32", "close"], cross["fp32", "far"]
    assert within.holds and within.difference is not None and within.difference.margin is not None
    assert 0 <= within.difference.margin.margin < 0.06 and within.rows is None
    assert outside.holds is False and outside.difference is not None and outside.difference.margin is not None
    assert outside.difference.margin.margin > NEAR_TIE and "no near-tie" in outside.told
    assert not [x for x in lines if x.check in ("restore", "receipt", "speculation") and x.holds is False]


@pytest.mark.slow
def test_an_error_in_a_comparison_is_a_line_and_the_others_go_on(
    bundle: Bundle, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: object, **__: object) -> int:
        raise ObjectMissing("an object that was here")

    monkeypatch.setattr(Store, "load", lost)
    report, lines = gated(setup(bundle, ids, configuration(bundle, "fp32")))
    assert len(red(lines, "restore")) == len(red(lines, "receipt")) == 2 and len(red(lines, "cross")) == 1
    assert "ObjectMissing: an object that was here" in red(lines, "restore")[0].told
    assert not red(lines, "speculation") and not report.ok


# what it leaves behind


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder


@pytest.mark.slow
@pytest.mark.parametrize("ends", [None, KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_nothing_is_left_behind(bundle: Bundle, ids: list[int], temporary: Path, ends: BaseException | None) -> None:
    seen: list[int] = []

    def look(line: Line) -> None:
        if line.check == "restore":
            seen.append(len(list(temporary.iterdir())))
            if ends is not None:
                raise ends

    given = setup(bundle, ids, configuration(bundle, "fp32"))
    if ends is None:
        run_gate(given, look)
    else:
        with pytest.raises(type(ends)):
            run_gate(given, look)
    assert set(seen) == {1} and not list(temporary.iterdir())


# logits


def test_logits_are_those_of_the_heads_own_weights(bundle: Bundle, ids: list[int]) -> None:
    """Against the head written directly: RMS norm, gain, int8 rows times their scales."""
    model = open_model(bundle.root, bundle.config.lmhead)
    ops = {op.name: op for op in model.function(None).ops}
    weight = ops["output_weight"].inputs
    rows = model.array(weight["data"][0]).astype(np.float32) * model.array(weight["scale"][0]).astype(np.float32)  # type: ignore[arg-type]
    gain = model.array(ops["output_norm"].attributes["val"]).astype(np.float32)
    engine, logits = PortableEngine(bundle.root), Logits(bundle)
    rng = np.random.default_rng(7)
    for _ in range(20):
        hidden = (rng.standard_normal(bundle.config.hidden) * 0.3).astype(np.float16)
        x = hidden.astype(np.float64)
        x /= np.sqrt(np.mean(x**2) + 1e-6 / 32**2)
        direct = rows.astype(np.float64) @ (x * gain)
        found, margin = logits.of(hidden), logits.margin(hidden)
        assert found is not None and margin is not None
        assert np.abs(found - direct).max() < 1e-4 * np.abs(direct).max()
        best, second = np.sort(direct)[::-1][:2]
        assert abs(margin.margin - (best - second)) < 1e-3
        assert margin.best == engine.function(bundle.config.lmhead, None)({"hidden": hidden})["token"][0]
        assert found[margin.best] > found[margin.second] and margin.second == np.argsort(direct)[-2]


def test_a_head_of_another_form_has_no_margins_and_says_why(bundle: Bundle, ids: list[int]) -> None:
    function = open_model(bundle.root, bundle.config.lmhead).function(None)
    without = replace(function, ops=tuple(op for op in function.ops if op.type != "reduce_argmax"))
    with pytest.raises(OperationUnsupported, match="the argmax of one row of logits"):
        logits_function(without)


@pytest.mark.slow
def test_without_margins_nothing_bounded_is_let_through(
    bundle: Bundle, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    head = bundle.config.lmhead
    close = configuration(bundle, "close", lambda engine: Answering(engine, head, second_best(bundle, 0.06)))
    given = replace(
        setup(bundle, ids, configuration(bundle, "fp32"), close, length=40), size=replace(SMALL, cross_continued=40)
    )
    close.open()  # the mutant has its own logits, read before they are taken away

    def unknown(self: Logits) -> None:
        if self is given.logits:
            self.refusal = "another form"
        else:
            load(self)

    load = Logits._load
    monkeypatch.setattr(Logits, "_load", unknown)
    report, lines = gated(given)
    assert not report.margins and not report.near_ties
    assert [x.told for x in red(lines, "cross") if "no logits to judge it by" in x.told]


with_margins = pytest.mark.parametrize(
    "bundle", ["tiny", pytest.param("tiny-gemma4-margins", marks=pytest.mark.slow)], indirect=True, scope="session"
)


@pytest.mark.slow
@with_margins
def test_what_breaks_plain_verification_is_harmless_with_margins_at_the_measured_threshold(
    bundle: Bundle, ids: list[int]
) -> None:
    """The stand-in passes the check before its first use, and flips near-ties from then on."""
    wrong = second_best(bundle, CLOSE, checked_rows(bundle))
    main = configuration(bundle, "fp32", lambda engine: Answering(engine, BATCHED, wrong))
    given = replace(setup(bundle, ids, main, length=40), size=replace(SMALL, speculated=30, measured=40))
    report, lines = gated(given)
    assert [x.check for x in lines if x.holds is False] == ["speculation"] and report.threshold is None

    report, lines = gated(replace(given, verify="margin"))
    assert not [x for x in lines if x.holds is False]
    ways = [(x.speculation.drafts, x.speculation.verify) for x in lines if x.speculation is not None]
    assert ways == [("lookup", "margin"), ("told", "margin")]
    told = next(x for x in lines if x.speculation is not None and x.speculation.drafts == "told")
    assert told.holds and "near-tie ended" in told.told and "the KV too" in told.told
    found = report.threshold
    assert found is not None and found.rows >= 40 and found.flips >= 1 and found.move == 0
    assert 0 < found.flip < CLOSE and 2 * found.flip <= found.threshold < 2 * found.flip + 2e-4
    text = report_text(report, 110)
    assert f"--threshold {found.threshold}" in text and f"{found.flips} chose another token" in text
    assert report.value()["threshold"]["flips"] == found.flips and report.value()["verify"] == "margin"


def test_an_honest_engine_measures_a_threshold_of_nothing(bundle: Bundle, ids: list[int]) -> None:
    given = setup(bundle, ids, configuration(bundle, "fp32"), length=20)
    found = measured(given, [plain(given, prompt)[0] for prompt in given.prompts])
    # 20 tokens but the first, and 16 behind them, in steps of 4.
    assert found == Threshold(rows=32, flips=0, flip=0.0, move=0.0, threshold=0.0)


def test_the_threshold_is_twice_what_moved_or_flipped() -> None:
    same, moved = (Said(3, 0.5), Said(3, 0.5)), (Said(3, 0.5), Said(3, 0.25))
    assert threshold([same]) == Threshold(1, 0, 0.0, 0.0, 0.0)
    assert threshold([same, moved]) == Threshold(2, 0, 0.0, 0.25, 0.5)
    flip = (Said(3, 0.01), Said(4, 0.30001))
    assert threshold([same, moved, flip]) == Threshold(3, 1, 0.30001, 0.25, 0.6001)


def test_heads_without_margins_are_refused_before_anything_runs(tiny_gemma4_bundle: Path, ids: list[int]) -> None:
    bundle = Bundle.open(tiny_gemma4_bundle)
    given = replace(setup(bundle, ids, configuration(bundle, "fp32"), length=9), verify="margin")
    with pytest.raises(InputInvalid, match=r"corellm\.margin_function.*found margin.*--margins"):
        run_gate(given)


def test_recheck_asks_for_nothing_of_the_batched_head_alone(bundle: Bundle, ids: list[int]) -> None:
    wrong = second_best(bundle, CLOSE, checked_rows(bundle))
    main = configuration(bundle, "fp32", lambda engine: Answering(engine, BATCHED, wrong))
    given = replace(setup(bundle, ids, main, length=40), size=replace(SMALL, speculated=30), verify="recheck")
    _, lines = gated(given)
    assert not [x for x in lines if x.holds is False]
    assert {x.speculation.verify for x in lines if x.speculation is not None} == {"recheck"}
