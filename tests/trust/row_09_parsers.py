"""Row 9: every parser gets inputs that somebody changed: bytes anywhere, and values where the hashes around them are right again.

Each (`parsers.PARSERS`) in a process of its own with 512 MiB of memory for data. What comes out is a value or an error of ours, nothing else,
within bounded memory and time; what is accepted is written again as the same bytes, wherever kvferry writes such a thing.

Measured: 2 s each at CI size, 60 s each at night; and about a second each to begin with.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from battery import Size, Tally
from parsers import PARSERS

TITLE = "fuzz every parser, 512 MiB each"
REQUIRED = len(PARSERS)
HERE = Path(__file__).parent
ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "RAYON_NUM_THREADS"), "1")
"""Threads have stacks and arenas: the limit is for what is parsed."""


def run(size: Size, tally: Tally, scratch: Path) -> None:
    for parser in PARSERS:
        command = [sys.executable, str(HERE / "fuzzing.py"), parser.name, str(size.seed), str(size.pick(1, 2, 60))]
        environment = {**os.environ, **ONE_THREAD, "TOKENIZERS_PARALLELISM": "false"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode == 0 and done.stdout:
            tally.add(json.loads(done.stdout))
        else:
            with tally.attempt(f"the parser {parser.name}"):
                raise AssertionError(f"its process ended with {done.returncode}: {done.stderr[-2000:]}")
