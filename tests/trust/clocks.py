"""Clocks that lie, for a process that reads them; and every place of the shipped packages that reads one."""

from __future__ import annotations

import ast
import datetime
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MINUTES, DAY, YEAR = 60.0, 86400.0, 365.25 * 86400.0

Clock = Callable[[float], float]
"""What a clock shows, from what it ought to show (Unix seconds)."""


def backwards() -> Clock:
    """Each look shows a second less than the one before."""
    looks = 0

    def clock(now: float) -> float:
        nonlocal looks
        looks += 1
        return now - looks

    return clock


def stopped() -> Clock:
    began = time.time()
    return lambda _: began


CLOCKS: dict[str, Callable[[], Clock]] = {
    "31 minutes fast": lambda: lambda now: now + 31 * MINUTES,
    "31 minutes slow": lambda: lambda now: now - 31 * MINUTES,
    "a day fast": lambda: lambda now: now + DAY,
    "a day slow": lambda: lambda now: now - DAY,
    "running backwards": backwards,
    "stopped": stopped,
    "before 1970": lambda: lambda now: now - 70 * YEAR,
    "beyond the year 9999": lambda: lambda now: now + 8000 * YEAR,
}


@contextmanager
def showing(clock: Clock) -> Iterator[None]:
    """This process's clock; file systems keep the true one. `time.monotonic` goes on as it always does."""
    true, true_ns, gmtime, localtime, strftime = time.time, time.time_ns, time.gmtime, time.localtime, time.strftime

    def now() -> float:
        return clock(true())

    def of(call: Callable[[float], Any]) -> Callable[..., Any]:
        return lambda seconds=None: call(now() if seconds is None else seconds)

    time.time = now
    time.time_ns = lambda: int(now() * 1e9)
    time.gmtime = of(gmtime)
    time.localtime = of(localtime)
    time.strftime = lambda form, moment=None: strftime(form, time.localtime() if moment is None else moment)
    try:
        yield
    finally:
        time.time, time.time_ns, time.gmtime, time.localtime, time.strftime = true, true_ns, gmtime, localtime, strftime


READ = {"time", "time_ns", "gmtime", "localtime", "ctime", "asctime", "strftime"}
READ_NOW = {"now", "utcnow", "today"}


def readers() -> Iterator[tuple[str, int, str]]:
    """Every call in the shipped packages that reads the time of day: (module, line, call)."""
    for package in ("kvstore", "sync", "runtime"):
        for path in sorted((ROOT / package).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    owner = node.func.value
                    of = (
                        owner.id
                        if isinstance(owner, ast.Name)
                        else owner.attr
                        if isinstance(owner, ast.Attribute)
                        else ""
                    )
                    fixed = node.func.attr in ("gmtime", "localtime", "ctime", "asctime") and node.args
                    if (of == "time" and node.func.attr in READ and not fixed) or (
                        of in ("datetime", "date") and node.func.attr in READ_NOW
                    ):
                        yield module, node.lineno, f"{of}.{node.func.attr}"


assert datetime.datetime.now  # the names that `readers` looks for are those of the standard library
