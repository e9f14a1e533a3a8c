"""The battery's frame: what it counts, what it calls ok. And every row at its smallest size."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import battery
import pytest
from battery import Lost, Missing, Size, Tally, WrongBytes
from optional import missing

ROWS = battery.rows()


def judged(tally: Tally, required: int | str = 1, size: str = "ci", skipped: str | None = None) -> bool:
    line = battery.judged(1, "a row", required, Size(size), tally, skipped, 0.1)
    return bool(line["ok"])


def test_each_way_of_ending_badly_is_counted_as_what_it_is() -> None:
    tally = Tally()
    endings: list[BaseException | None] = [None, None, Lost("book"), WrongBytes("row 3"), ValueError("odd")]
    for error in endings:
        with tally.attempt("ending"):
            if error is not None:
                raise error
    with tally.attempt("a byte nobody reads"):
        tally.harmless()
    with tally.attempt("another"):
        pass
    assert (tally.tried, tally.caught, tally.unused) == (7, 3, 1)
    assert (tally.lost, tally.wrong_bytes, tally.failed) == (1, 1, 1)
    assert [failure.partition(":")[0] for failure in tally.failures] == ["ending"] * 3 and "ValueError: odd" in str(
        tally
    )


@pytest.mark.parametrize("error", [Lost(), WrongBytes(), OSError()])
def test_one_bad_attempt_spoils_the_row(error: Exception) -> None:
    tally = Tally()
    with tally.attempt("good"):
        pass
    assert judged(tally)
    with tally.attempt("bad"):
        raise error
    assert not judged(tally)


def test_too_few_attempts_are_not_ok_except_at_the_smallest_size() -> None:
    tally = Tally()
    assert not judged(tally, "all") and not judged(tally, 1, "smoke")
    with tally.attempt("one"):
        pass
    assert judged(tally, "all") and judged(tally, 400, "smoke")
    assert not judged(tally, 400)


def test_a_missing_tool_fails_only_under_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    assert judged(Tally(), skipped="no strace")
    monkeypatch.setenv("CI", "true")
    assert not judged(Tally(), skipped="no strace")


def test_a_row_that_needs_what_is_missing_stops() -> None:
    tally = Tally()
    with pytest.raises(Missing, match="no-such-program"), tally.attempt("anything"):
        battery.need("no-such-program")
    assert tally.tried == 0


def test_counts_of_several_processes_are_joined() -> None:
    tally, other = Tally(), Tally(facts={"rounds": 2})
    with other.attempt("bad"):
        raise Lost("book")
    for _ in range(2):
        tally.add(json.loads(json.dumps(other.plain())))
    assert (tally.tried, tally.caught, tally.lost, len(tally.failures), tally.facts) == (2, 0, 2, 2, {"rounds": 4})


def test_a_row_that_does_not_end_well_is_not_ok(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No result of its process, and a row that raises."""
    monkeypatch.setattr(battery, "rows", lambda: {77: "row_77_absent"})
    line = battery.run_apart(77, Size("smoke"))
    assert not line["ok"] and line["failed"] == 1
    (tmp_path / "row_77_absent.py").write_text("TITLE, REQUIRED = 'odd', 0\ndef run(*_): raise OSError('disk')\n")
    monkeypatch.syspath_prepend(tmp_path)
    line = battery.run_row(77, Size("smoke"))
    assert not line["ok"] and "disk" in line["failures"][0]


@pytest.mark.parametrize("number", ROWS)
def test_row_says_what_it_is(number: int) -> None:
    module = importlib.import_module(ROWS[number])
    assert module.__doc__ and module.TITLE and callable(module.run)
    assert isinstance(module.REQUIRED, str) or module.REQUIRED > 0


@pytest.mark.slow
@pytest.mark.parametrize("number", ROWS)
def test_row_at_its_smallest_size(number: int) -> None:
    line = battery.run_apart(number, Size("smoke"))
    if line["skipped"] is not None:
        missing(line["skipped"])
    assert line["ok"], "\n".join([battery.row_text(line), *line["failures"]])
