"""A continuation in a process of its own, by the command that a user would type."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from kvstore.errors import KVError


class ProcessFailed(KVError):
    """The other process ended with an error. ``details``: code, command."""


def generate_elsewhere(
    bundle: Path, store: Path, name: str, count: int, save_as: str, words: Sequence[str]
) -> tuple[int, ...]:
    """The tokens of `kvferry generate --decode-only` from the snapshot ``name``, whose end is then saved as ``save_as``.

    ``words`` choose the engine. The process ends when this one is made to end. Raises `ProcessFailed`.
    """
    command = [
        sys.executable, "-m", "kvstore", "--json", "generate", "--store", str(store), "--bundle", str(bundle), "--from", name,
        "-n", str(count), "--decode-only", "--save", save_as, *words,
    ]  # fmt: skip
    # A process group of its own: Ctrl-C reaches this process alone, which ends the other one.
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0, encoding="utf-8",
    ) as child:  # fmt: skip
        try:
            out, err = child.communicate()
        except BaseException:
            child.terminate()
            raise
    if child.returncode:
        last = (err.splitlines() or [""])[-1]
        raise ProcessFailed(
            f"kvferry generate: expected exit code 0, found {child.returncode}: {last:.500}",
            code=child.returncode,
            command=command,
        )
    return tuple(int(token) for token in json.loads(out)["tokens"])
