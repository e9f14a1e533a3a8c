"""`kvferry demo`: a producer prefills a long text, a consumer with nothing but `decode` continues it.

Every step is a process of its own that runs a command a user could type, so the demo shows what the commands do and
nothing else. Only the stores' folders and the remote's folder connect them.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import click

from .cli import Place, Settings, Text, cache_folder, common_options, ending_cleanly, terminal_width, waiting
from .errors import KVError, Refused
from .layout import BLOCK, blocks_of
from .plaintext import WIDTH, labelled, size_text

CONTEXT, CONTINUATION = 1500, 48
STEPS = 6
ANSWER = "Amber Heron"
"""What a reader of the story's 1,500 tokens says next. Whether a model does, its continuation shows."""

LEFT_OUT = {"smollm2": 141}
"""Characters at the story's start that a model isn't given, so that 1,500 of its tokens end where the name is asked for."""

BOAT = r"""
                            |\
  producer                  | \                  consumer
  every function        ____|__\____             decode only
                        \{cargo:^9}/
~~~~~~~~~~~~~~~~~~~~~~~~~\_______/~~~~~~~~~~~~~~~~~~~~~~~~~~~
""".strip("\n")


class StepFailed(KVError):
    """A command that the demo ran ended with an error; its exit code is the demo's. ``details``: step, command, error."""

    def __init__(self, message: str, *, code: int = 1, **details: Any) -> None:
        super().__init__(message, **details)
        self.exit_code = code if code > 0 else 1


@dataclass(slots=True)
class Ferry:
    """Where things are while the demo runs, and how far it is."""

    model: str
    engine: str
    work: Path
    done: int = field(default=0)

    def step(self, title: str, store: str, *words: str) -> dict[str, Any]:
        """Runs ``kvferry`` on one of the two stores in a new process; its JSON answer."""
        self.done += 1
        words = ("--store", store, *words)
        click.echo(f"{self.done}/{STEPS}  {title}\n{typed(words)}", err=True)
        started = time.monotonic()
        with waiting(f"     kvferry {words[2]}"):
            code, out, err = _kvferry("--json", *words, work=self.work)
        *notes, last = err.splitlines() or [""]
        if code:
            raise _failed(f"step {self.done} of {STEPS} ({title.rstrip('.')})", words, code, last)
        for line in filter(None, [*notes, last]):
            click.echo(f"     {line}", err=True)
        click.echo(f"     {time.monotonic() - started:.1f} s", err=True)
        answer: dict[str, Any] = json.loads(out)
        return answer


def typed(words: Sequence[str]) -> str:
    """The command as one would type it, over several lines if it is long. A long text is shown by its start."""
    shown = shlex.join(w if len(w) < 60 else f"{w[:40].strip()}…" for w in words)
    lines = textwrap.wrap(f"$ kvferry {shown}", WIDTH - 9, break_long_words=False, break_on_hyphens=False)
    return " \\\n".join(f"     {'  ' if i else ''}{line}" for i, line in enumerate(lines))


def _kvferry(*words: str, work: Path | None, heard: bool = True) -> tuple[int, str, str]:
    """Exit code, stdout and stderr (not ``heard``: shown to the user) of a command. It ends when the demo is made to end."""
    command = [sys.executable, "-m", "kvstore", *words]
    env = os.environ | {"KVFERRY_CACHE": str(cache_folder().absolute())}
    err = subprocess.PIPE if heard else None
    # A process group of its own: Ctrl-C reaches the demo alone, which ends the command and says so once.
    with subprocess.Popen(
        command, cwd=work, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=err, process_group=0,
        encoding="utf-8",
    ) as child:  # fmt: skip
        try:
            out, said = child.communicate()
        except BaseException:
            child.terminate()
            raise
    return child.returncode, out, said or ""


def _failed(step: str, words: Sequence[str], code: int, said: str) -> StepFailed:
    try:
        error = json.loads(said)
        message = f"{error['error']}: {error['message']}"
    except (ValueError, TypeError, KeyError):
        error = None
        message = said or (f"ended by signal {-code}" if code < 0 else f"exit code {code}; it said why above")
    command = f"kvferry {shlex.join(words)}"
    return StepFailed(f"{step} failed. `{command:.400}`: {message}", code=code, step=step, command=command, error=error)


def ensure_bundle(model: str) -> None:
    """Builds the bundle of a model into the cache, if it is not there."""
    path = cache_folder() / "bundles" / model
    if not (path / "manifest.json").is_file():
        words = ("bundle", "build", model)
        click.echo(f"Building the bundle {model} into {path} (once).\n{typed(words)}", err=True)
        code, _, _ = _kvferry(*words, work=None, heard=False)
        if code:
            raise _failed(f"building the bundle {model}", words, code, "")


def run(model: str, *, engine: str, trimmed: bool, keep: Path | None = None) -> dict[str, Any]:
    """The whole crossing; the value of ``--json``. Leaves nothing behind but the cached bundle (or all in ``keep``)."""
    with ending_cleanly():
        ensure_bundle(model)
        with tempfile.TemporaryDirectory(prefix="kvferry-demo-") as temporary:
            work = keep or Path(temporary)
            click.echo(f"In {work}:", err=True)
            return _cross(Ferry(model, engine, work), trimmed)


def _cross(ferry: Ferry, trimmed: bool) -> dict[str, Any]:
    text = "ferry.txt"
    story = resources.files("kvstore").joinpath("data", text).read_text("utf-8")
    (ferry.work / text).write_text(story[LEFT_OUT.get(ferry.model, 0) :], "utf-8")
    model = ("--bundle", ferry.model, "--engine", ferry.engine)
    made = ferry.step(
        f"Producer: prefill {CONTEXT:,} tokens, decode {CONTINUATION} more as a receipt, save.", "producer",
        "prefill", *model, text, "--name", "ferry", "--tokens", str(CONTEXT), "--receipt", str(CONTINUATION),
    )  # fmt: skip
    ferry.step("Producer: push.", "producer", "push", "remote", "ferry")
    words = ("pull", "remote", "ferry", *(["--trimmed"] if trimmed else []))
    moved = ferry.step("Consumer, another store: pull.", "consumer", *words)
    shown = ferry.step("Consumer: what is here.", "consumer", "show", "ferry")
    answer = ferry.step(
        "Consumer, decode only: restore and continue.", "consumer",
        "generate", *model, "--from", "ferry", "-n", str(CONTINUATION), "--decode-only",
    )  # fmt: skip
    alone = ferry.step(
        "Consumer, decode only: the last words without the context, token by token.", "consumer",
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
        "answer": ANSWER if ANSWER in _flat(answer["text"]) else None,
        "continuation": answer["text"],
        "continuation_without_context": alone["text"],
        "tail": made["tail"],
        "blocks_here": {g["name"]: g["blocks_here"] for g in shown["groups"]},
    }


def picture(value: Mapping[str, Any], width: int) -> str:
    """What moved, a mark for each block of 64 tokens, and what came of it."""
    count = blocks_of(value["context_tokens"])
    some_left = any(sum(z - a for a, z in runs) < count for runs in value["blocks_here"].values())
    left = "; ░ not needed, left behind" if some_left else ""
    lines = [BOAT.format(cargo=size_text(value["moved_bytes"])), ""]
    lines += [f"What moved, one mark for each {BLOCK} tokens (█ moved{left}):", ""]
    for name, runs in value["blocks_here"].items():
        marks = "".join("█" if any(a <= b < z for a, z in runs) else "░" for b in range(count))
        lines.append(f"  {name + ' attention':<20} {marks}")
    if value["trimmed"] and not some_left:
        lines += ["", "  Every layer of this model reads all of it: trimming leaves nothing behind."]
    seconds = "{:,.2f} s".format
    token = value["decode_feed_seconds_estimate"] / value["context_tokens"]
    rows = [
        ("context", f"{value['context_tokens']:,} tokens of {value['kv_bytes_per_token']:,} bytes"),
        ("prefill, producer", seconds(value["prefill_seconds"])),
        ("save, synced to disk", seconds(value["save_seconds"])),
        ("KV of the context", size_text(value["snapshot_bytes"])),
        ("moved", f"{size_text(value['moved_bytes'])} in {seconds(value['pull_seconds'])}"),
        ("restore, consumer", f"{seconds(value['restore_seconds'])}, every byte verified"),
        (
            "instead: feed by decode",
            f"{seconds(value['decode_feed_seconds_estimate'])} (estimate: {1000 * token:,.1f} ms a token, measured on "
            f"{value['decode_feed_measured_tokens']:,}, times {value['context_tokens']:,})",
        ),
        (
            "break-even",
            f"{value['break_even_tokens']:,} tokens: feeding so many takes as long as it took to pull and restore "
            f"{value['context_tokens']:,}",
        ),
        ("functions, producer", _functions(value["producer_functions"])),
        ("functions, consumer", _functions(value["consumer_functions"])),
        ("identical", "yes: every token, and the finish" if value["identical"] else "NO"),
    ]
    lines += ["", labelled(rows, width)]
    if value["answer"]:
        tail = textwrap.wrap(f"…{value['tail'][-160:].lstrip()}", width)
        said = [
            ("with the context:", _flat(value["continuation"])),
            ("without the context:", _flat(value["continuation_without_context"])),
        ]
        lines += ["", *tail, "", labelled(said, width, "  ")]
    return "\n".join(lines)


def _functions(names: Sequence[str]) -> str:
    return " ".join(sorted({name.rpartition(":")[2] for name in names}))


def _flat(text: str) -> str:
    return " ".join(text.split())


@click.command()
@click.option(
    "--model", type=Text(), default="gemma3-270m", show_default=True,
    help="A model that `kvferry bundle build` knows; its bundle is built once.",
)  # fmt: skip
@click.option("--trimmed", is_flag=True, help="Move only what continuing from the end needs.")
@click.option(
    "--engine", type=click.Choice(["portable", "auto", "coreml"]), default="portable", show_default=True,
    help="What runs the bundle. The portable engine runs, and has been run, everywhere that kvferry does.",
)  # fmt: skip
@click.option("--keep", type=Place(file_okay=False), help="Work in this folder and leave it there.")
@common_options
def demo(settings: Settings, model: str, trimmed: bool, engine: str, keep: Path | None) -> None:
    """Prefill in one process, continue in another that has only the decode function.

    Break-even, in tokens, is (pull + restore) / one decode step, rounded up: from that length on, carrying a context over
    is faster than feeding it token by token.
    """
    if keep is not None:
        if keep.exists() and any(keep.iterdir()):
            raise Refused(f"--keep {keep}: expected an absent or empty folder, found files in it. Give another one.")
        keep = keep.absolute()
        keep.mkdir(parents=True, exist_ok=True)
    value = run(model, engine=engine, trimmed=trimmed, keep=keep)
    settings.emit(value, lambda: "\n" + picture(value, terminal_width() or WIDTH))
    if not value["identical"]:
        raise click.exceptions.Exit(9)


def commands() -> dict[str, click.Command]:
    """The demo's verb."""
    return {"demo": demo}
