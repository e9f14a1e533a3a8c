"""What the gate found, as values: a line for each comparison, and whether all of it holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Check = Literal["heads", "speculation", "restore", "receipt", "process", "cross"]
Rule = Literal["exact", "bounded"]
Verify = Literal["trust", "recheck", "margin"]

NEAR_TIE = 0.1
"""Logits. Where the best two are no further apart, an engine that rounds otherwise may choose the other one. What it was set by: docs/gate.md."""

BOUND = f"the first token that differs stands at a near-tie: the two best logits at most {NEAR_TIE} apart"


@dataclass(frozen=True, slots=True)
class Margin:
    """How clear a choice was, by logits recomputed in fp32 from the hidden state that the head was given: ``margin`` = best − second best.

    ``best`` and ``second`` are token ids.
    """

    best: int
    second: int
    margin: float

    @property
    def near_tie(self) -> bool:
        return self.margin <= NEAR_TIE


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token that differs. ``index``: among the compared tokens; ``position``: in the whole sequence. ``expected``, ``found``: None where
    one of the two ended before. ``margin``: of the choice that made ``expected``; None where it could not be recomputed."""

    index: int
    position: int
    expected: int | None
    found: int | None
    margin: Margin | None


@dataclass(frozen=True, slots=True)
class RowDifference:
    """The first token whose K (``part`` "k") or V row of ``layer`` has other bytes."""

    token: int
    layer: int
    part: Literal["k", "v"]


@dataclass(frozen=True, slots=True)
class Rounds:
    """Speculation that was compared: where drafts came from, how they were verified, and what came of it, pending tokens left out."""

    drafts: Literal["lookup", "told"]
    verify: Verify
    rounds: int
    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Line:
    """One comparison. ``holds``: None where there was nothing to compare. ``told``: what was found, for people.

    ``prompt``: its name; None for the heads. ``split``: tokens before the interruption. ``kind``: of the snapshot. ``saved_under``,
    ``restored_under``: configurations. ``bound``: what a bounded comparison allows. ``tokens``: how many were compared. ``drift``: how far the rows
    that two configurations computed for the same tokens are apart, root mean square over that of the first's.
    """

    check: Check
    rule: Rule
    holds: bool | None
    told: str
    prompt: str | None = None
    split: int | None = None
    kind: Literal["whole", "trimmed"] | None = None
    saved_under: str | None = None
    restored_under: str | None = None
    bound: str | None = None
    tokens: int | None = None
    difference: Difference | None = None
    rows: RowDifference | None = None
    speculation: Rounds | None = None
    drift: float | None = None


@dataclass(frozen=True, slots=True)
class NearTie:
    """A token of a continuation (at ``position`` of the sequence, under ``configuration``) that was chosen by no more than `NEAR_TIE`."""

    prompt: str
    configuration: str
    position: int
    margin: Margin


@dataclass(frozen=True, slots=True)
class Threshold:
    """What `--verify margin` needs for this bundle on this engine: ``threshold``, in logits.

    ``rows``: computed four at a time and one by one. ``flips``: how many of them chose another token, ``flip`` the largest margin among those;
    ``move``: the most that a margin of the others changed. By what means: `measuring`.
    """

    rows: int
    flips: int
    flip: float
    move: float
    threshold: float


@dataclass(frozen=True, slots=True)
class Report:
    """``engine``: the main configuration, as `Engine.describe` says it. ``prompts``: name, tokens fed, tokens of the text, splits.

    ``margins``: whether logits could be recomputed. ``verify``: how speculation was verified. ``threshold``: measured for "margin" alone.
    ``processor_seconds``: of this process and the one it started, which a busy machine changes less than ``seconds``.
    """

    bundle: str
    path: str
    identity: str
    size: str
    engine: Mapping[str, str]
    configurations: tuple[str, ...]
    prompts: tuple[tuple[str, int, int, tuple[int, ...]], ...]
    lines: tuple[Line, ...]
    near_ties: tuple[NearTie, ...]
    margins: bool
    seconds: float
    processor_seconds: float
    verify: Verify = "trust"
    threshold: Threshold | None = None

    @property
    def ok(self) -> bool:
        """Nothing that must hold failed, and something was compared."""
        return any(line.holds for line in self.lines) and not self.failed

    @property
    def failed(self) -> tuple[Line, ...]:
        return tuple(line for line in self.lines if line.holds is False)

    def value(self) -> dict[str, Any]:
        """For --json."""
        return {
            "ok": self.ok,
            "bundle": self.bundle,
            "path": self.path,
            "identity": self.identity,
            "size": self.size,
            "engine": dict(self.engine),
            "configurations": list(self.configurations),
            "near_tie": NEAR_TIE,
            "margins": self.margins,
            "verify": self.verify,
            "threshold": None if self.threshold is None else asdict(self.threshold),
            "prompts": [
                {"name": name, "tokens": tokens, "given": given, "splits": list(splits)}
                for name, tokens, given, splits in self.prompts
            ],
            "lines": [_line(line) for line in self.lines],
            "near_ties": [
                {"prompt": t.prompt, "configuration": t.configuration, "position": t.position, **asdict(t.margin)}
                for t in self.near_ties
            ],
            "seconds": self.seconds,
            "processor_seconds": self.processor_seconds,
        }


def _line(line: Line) -> dict[str, Any]:
    """Flat but for the speculation: what a reader sorts and counts by is a key of every line, null where it says nothing."""
    value = asdict(line)
    difference, rows = value.pop("difference"), value.pop("rows")
    margin = None if line.difference is None else line.difference.margin
    if difference is None:
        difference = dict.fromkeys(("index", "position", "expected", "found"))
    if rows is None:
        rows = dict.fromkeys(("token", "layer", "part"))
    return value | {
        "first_difference": difference["index"],
        "position": difference["position"],
        "expected": difference["expected"],
        "found": difference["found"],
        "margin": None if margin is None else margin.margin,
        "second": None if margin is None else margin.second,
        "near_tie": None if margin is None else margin.near_tie,
        **{f"kv_{key}": told for key, told in rows.items()},
    }
