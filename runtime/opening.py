"""What the commands that run a model share: opening what --bundle and its neighbours say, reading text, timing."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, TypeVar

import click

from kvstore.cli import cache_folder, progress
from kvstore.errors import InputInvalid
from kvstore.identity import DEFAULT_NAMESPACE
from kvstore.store import Store

from .bundle import Bundle
from .engine import Engine
from .session import Session

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Opened:
    """What --bundle, --compute, --threads and --namespace say, opened."""

    bundle: Bundle
    engine: Engine
    namespace: str

    def session(self, store: Store | None, *, decode_only: bool = False) -> Session:
        return Session.open(self.bundle, self.engine, store=store, namespace=self.namespace, decode_only=decode_only)


def bundle_path(given: str) -> Path:
    """A folder, or the name of a bundle in the cache."""
    path = Path(given).expanduser()
    cached = cache_folder() / "bundles" / given
    return cached if not path.exists() and "/" not in given and cached.is_dir() else path


def open_bundle(given: str) -> Bundle:
    """The bundle of a --bundle value."""
    return Bundle.open(bundle_path(given), digest_cache=cache_folder() / "digests.json")


def model_options(command: _F) -> _F:
    """--bundle and how to run it; the command gets them as ``opened``, a function that opens them."""
    options = [
        click.option(
            "--bundle", "bundle", required=True, metavar="DIR", help="Bundle folder, or a cached bundle's name."
        ),
        click.option(
            "--compute",
            type=click.Choice(["fp32", "fp16-rounding"]),
            default="fp32",
            show_default=True,
            help="Arithmetic: fp32, or every result rounded to fp16 (slow; finds overflow).",
        ),
        click.option("--threads", type=click.IntRange(1, 64), default=1, show_default=True, help="BLAS threads."),
        click.option(
            "--namespace", default=DEFAULT_NAMESPACE, show_default=True, help="Prefixes never cross namespaces."
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def open_model(bundle: str, compute: Literal["fp32", "fp16-rounding"], threads: int, namespace: str) -> Opened:
    """Opens the bundle and its engine; loads no function yet."""
    from .portable import PortableEngine

    opened = open_bundle(bundle)
    return Opened(opened, PortableEngine(opened.root, compute=compute, threads=threads), namespace)


def read_tokens(bundle: Bundle, file: Path, limit: int | None) -> list[int]:
    """The tokens of a UTF-8 text file (``-``: stdin), BOS first; the first ``limit`` of them if given."""
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise InputInvalid(f"{file}: expected UTF-8 text, found {error.reason} at byte {error.start}") from error
    tokens = bundle.tokenizer.encode(text)
    if limit is None:
        return tokens
    if not 1 <= limit <= len(tokens):
        raise InputInvalid(f"--tokens: expected 1 to {len(tokens)} (what {file} has), found {limit}")
    return tokens[:limit]


@dataclass(slots=True)
class Steps:
    """When each step of a feed ended, to tell the time of a token."""

    started: float = field(default_factory=perf_counter)
    ends: list[tuple[float, int]] = field(default_factory=list)

    @property
    def token_seconds(self) -> float | None:
        """Median seconds of the one-token steps, the first left out (it loads); None with fewer than two."""
        steps = [(at - before, done - had) for (before, had), (at, done) in zip(self.ends, self.ends[1:], strict=False)]
        singles = [seconds for seconds, tokens in steps if tokens == 1]
        return statistics.median(singles) if singles else None


@contextmanager
def feeding(total: int, steps: Steps | None = None) -> Iterator[Callable[[int, int], None]]:
    """Progress of feeding, as `Session.prompt` wants it; also notes the steps."""
    with progress("Prefilling", total, "tokens") as advance:
        before = 0

        def report(done: int, _: int) -> None:
            nonlocal before
            advance(done - before)
            before = done
            if steps is not None:
                steps.ends.append((perf_counter(), done))

        yield report
