"""One parser fed with changed inputs until its time is over, in a process that may take little memory.

    python tests/trust/fuzzing.py PARSER SEED SECONDS [ROUND]

Round n of a seed is always the same input; with ROUND that one alone is done, and its error is shown whole.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

MEMORY = 512 << 20
"""Bytes of data that the process may have, all libraries' included."""
STUCK = 20
"""Seconds of computing after which one input counts as one that would never end. (A shared machine may stand still for longer.)"""


class Stuck(AssertionError):
    """An input that takes far longer than its size allows."""


def stuck(_: int, __: FrameType | None) -> None:
    raise Stuck(f"still reading after {STUCK} s")


def main(name: str, seed: int, seconds: float, only: int | None) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    signal.signal(signal.SIGPROF, stuck)
    # Imported here: the limit is to hold for everything.
    from battery import Tally
    from parsers import PARSERS
    from parsing import changed

    from kvstore.errors import KVError

    tally, accepted, number = Tally(), 0, 0
    (parser,) = [one for one in PARSERS if one.name == name]
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        prefix="kvferry-fuzz-", dir=memory if os.access(memory, os.W_OK) else None
    ) as scratch:
        case = parser.prepare(Path(scratch))
        with tally.attempt(f"{name}: what is valid"):
            for file, data in case.seeds:
                case.read(file, data)
        end = time.monotonic() + seconds
        while time.monotonic() < end and len(tally.failures) < 5:
            number += 1
            if only is not None:
                number, end = only, 0.0
            file, data = changed(case, random.Random(f"{name} {seed} {number}"))
            with tally.attempt(f"{name}, round {number} of seed {seed}: {file}"):
                signal.setitimer(signal.ITIMER_PROF, STUCK)
                try:
                    case.read(file, data)
                    accepted += 1
                except KVError as error:
                    assert type(error) is not KVError and 10 < len(str(error)) < 5000, f"{error!r:.500}"
                    if only is not None:
                        print(f"{error!r:.2000}", file=sys.stderr)
                except BaseException as error:  # a library's panic is no Exception
                    raise RuntimeError(f"{type(error).__name__} instead of an error of ours") from error
                finally:
                    signal.setitimer(signal.ITIMER_PROF, 0)
    tally.facts = {
        f"{name}: inputs": number,
        f"{name}: accepted": accepted,
        f"{name}: most memory, MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }
    print(json.dumps(tally.plain()))
    if only is not None:
        print(*tally.failures, sep="\n", file=sys.stderr)


if __name__ == "__main__":
    importlib.import_module("fuzzing").main(
        sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]) if sys.argv[4:] else None
    )
