"""`kvferry demo`: a producer prefills a long text, a consumer with nothing but `decode` continues it.

Every step is a process of its own that runs a command a user could type, so the demo shows what the commands do and
nothing else. Only the stores' folders and the remote's folder connect them.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import click

from .cli import Settings, cache_folder, common_options, size_text, table
from .errors import KVError, Refused
from .layout import BLOCK, blocks_of

CONTEXT, CONTINUATION = 1500, 48
MODELS = ("gemma3-270m", "tiny")


class StepFailed(KVError):
    """A command that the demo ran ended with an error; it has said why on stderr."""


@dataclass(frozen=True, slots=True)
class Ferry:
    """Where things are while the demo runs."""

    model: str
    bundle: Path
    work: Path

    def step(self, title: str, store: str, *words: str) -> dict[str, Any]:
        """Runs ``kvferry`` on one of the two stores in a new process; its JSON answer."""
        click.echo(f"  {title}", err=True)
        click.echo(f"    $ kvferry {' '.join(w if ' ' not in w else repr(w[:40] + '…') for w in words)}", err=True)
        started = time.monotonic()
        answer = _kvferry("--store", str(self.work / store), "--json", *words)
        click.echo(f"    {time.monotonic() - started:.1f} s", err=True)
        return answer


def _kvferry(*words: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "kvstore", *words], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, check=False
    )
    if done.returncode:
        raise StepFailed(f"`kvferry {' '.join(words[:6])} …` ended with exit code {done.returncode}; see above.")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def bundle_of(model: str) -> Path:
    """The cached bundle of a demo model, built first if it is not there."""
    path = cache_folder() / "bundles" / model
    if not (path / "manifest.json").is_file():
        click.echo(f"Building the bundle {model} into {path} (once).", err=True)
        _kvferry("--json", "bundle", "build", model, str(path))
    return path


def run(model: str, *, trimmed: bool, keep: Path | None = None) -> dict[str, Any]:
    """The whole crossing; the value of ``--json``. Leaves nothing behind but the cached bundle (or all in ``keep``)."""
    bundle = bundle_of(model)
    with tempfile.TemporaryDirectory(prefix="kvferry-demo-") as temporary:
        return _cross(Ferry(model, bundle, keep or Path(temporary)), trimmed)


def _cross(ferry: Ferry, trimmed: bool) -> dict[str, Any]:
    text = ferry.work / "ferry.txt"
    text.write_bytes(resources.files("kvstore").joinpath("data/ferry.txt").read_bytes())
    model = ("--bundle", str(ferry.bundle))
    remote = str(ferry.work / "remote")
    made = ferry.step(
        f"Producer: prefill {CONTEXT:,} tokens, decode {CONTINUATION} more as a receipt, save.", "producer",
        "prefill", *model, str(text), "--name", "ferry", "--tokens", str(CONTEXT), "--receipt", str(CONTINUATION),
    )  # fmt: skip
    ferry.step("Producer: push.", "producer", "push", remote, "ferry")
    words = ("pull", remote, "ferry", *(["--trimmed"] if trimmed else []))
    moved = ferry.step("Consumer, another store: pull.", "consumer", *words)
    shown = ferry.step("Consumer: what is here.", "consumer", "show", "ferry")
    answer = ferry.step(
        "Consumer, decode only: restore and continue.", "consumer",
        "generate", *model, "--from", "ferry", "-n", str(CONTINUATION), "--decode-only",
    )  # fmt: skip
    alone = ferry.step(
        "Consumer, decode only: the last words without the context, fed token by token.", "consumer",
        "generate", *model, "--prompt", made["tail"], "-n", str(CONTINUATION), "--decode-only", "--no-reuse",
    )  # fmt: skip
    receipt = made["receipt"]
    feed = alone["feed_token_seconds"]
    return {
        "model": ferry.model,
        "trimmed": trimmed,
        "kv_bytes_per_token": made["kv_bytes_per_token"],
        "context_tokens": made["context_tokens"],
        "prefill_seconds": made["prefill_seconds"],
        "save_seconds": made["save_seconds"],
        "snapshot_bytes": made["snapshot_bytes"],
        "moved_bytes": moved["frame_bytes"],
        "pull_seconds": moved["seconds"],
        "restore_seconds": answer["restore_seconds"],
        "reused_tokens": answer["reused_tokens"],
        "producer_functions": made["functions"],
        "consumer_functions": answer["functions"],
        "decode_feed_seconds_estimate": feed * made["context_tokens"],
        "decode_feed_measured_tokens": alone["fed_tokens"],
        "break_even_tokens": math.ceil((moved["seconds"] + answer["restore_seconds"]) / feed),
        "identical": answer["tokens"] == list(receipt["tokens"]) and answer["finish"] == receipt["finish"],
        "continuation": answer["text"],
        "continuation_without_context": alone["text"],
        "tail": made["tail"],
        "blocks_here": {g["name"]: g["blocks_here"] for g in shown["groups"]},
    }


def picture(value: dict[str, Any]) -> str:
    """What moved, a mark for each block of 64 tokens, and what came of it."""
    count = blocks_of(value["context_tokens"])
    lines = [f"What moved, one mark for each {BLOCK} tokens (█ moved, ░ not needed, left behind):", ""]
    for name, runs in value["blocks_here"].items():
        marks = "".join("█" if any(a <= b < z for a, z in runs) else "░" for b in range(count))
        lines.append(f"  {name + ' attention':<20} {marks}")
    seconds = "{:,.2f} s".format
    rows: Sequence[Sequence[object]] = [
        ("context", f"{value['context_tokens']:,} tokens of {value['kv_bytes_per_token']:,} bytes"),
        ("prefill, producer", seconds(value["prefill_seconds"])),
        ("save, synced to disk", seconds(value["save_seconds"])),
        ("KV of the context", size_text(value["snapshot_bytes"])),
        ("moved", f"{size_text(value['moved_bytes'])} in {seconds(value['pull_seconds'])}"),
        ("restore, consumer", f"{seconds(value['restore_seconds'])}, every byte verified"),
        (
            "instead: feed by decode",
            f"{seconds(value['decode_feed_seconds_estimate'])} (estimate: measured on "
            f"{value['decode_feed_measured_tokens']} tokens, times {value['context_tokens']:,})",
        ),
        ("pays off from", f"{value['break_even_tokens']:,} tokens (pull and restore against feeding)"),
        ("functions, producer", " ".join(sorted({f.rpartition(":")[2] for f in value["producer_functions"]}))),
        ("functions, consumer", " ".join(sorted({f.rpartition(":")[2] for f in value["consumer_functions"]}))),
        ("identical", "yes: every token, and the finish" if value["identical"] else "NO"),
    ]
    lines += ["", table(rows, ("", "")).strip("\n"), ""]
    lines += [f"…{value['tail'][-160:].lstrip()}", ""]
    lines += [f"  with the context:     {_flat(value['continuation'])}"]
    lines += [f"  without the context:  {_flat(value['continuation_without_context'])}"]
    return "\n".join(lines)


def _flat(text: str) -> str:
    return " ".join(text.split())


@click.command()
@click.option(
    "--model", type=click.Choice(MODELS), default=MODELS[0], show_default=True, help="Model; its bundle is built once."
)
@click.option("--trimmed", is_flag=True, help="Move only what continuing from the end needs.")
@click.option(
    "--keep", type=click.Path(path_type=Path, file_okay=False), help="Work in this folder and leave it there."
)
@common_options
def demo(settings: Settings, model: str, trimmed: bool, keep: Path | None) -> None:
    """Prefill in one process, continue in another that has only the decode function."""
    if keep is not None:
        if keep.exists() and any(keep.iterdir()):
            raise Refused(f"--keep {keep}: expected an absent or empty folder, found files in it. Give another one.")
        keep.mkdir(parents=True, exist_ok=True)
    value = run(model, trimmed=trimmed, keep=keep)
    settings.emit(value, lambda: "\n" + picture(value))
    if not value["identical"]:
        raise click.exceptions.Exit(9)


def commands() -> dict[str, click.Command]:
    """The demo's verb."""
    return {"demo": demo}
