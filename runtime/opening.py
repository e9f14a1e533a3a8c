"""What the commands that run a model share: opening what --bundle and its neighbours say, reading text, timing."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import click

from kvstore.cli import Text, cache_folder, note, progress
from kvstore.errors import InputInvalid
from kvstore.identity import DEFAULT_NAMESPACE
from kvstore.match import Match
from kvstore.plaintext import size_text
from kvstore.store import Store

from .bundle import Bundle
from .bundle.errors import BundleFileMissing
from .decoding import ContextOverflow
from .engine import Engine
from .engine_options import engine_options, open_engine
from .reports import makers, otherwise
from .session import Session

MOST_BYTES = 256_000_000
"""Length of the longest text that is read: far above any context, so that an endless one ends."""
_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Opened:
    """What --bundle, --namespace and the engine's options say, opened."""

    bundle: Bundle
    engine: Engine
    namespace: str

    def session(self, store: Store | None, *, decode_only: bool = False, allow_verify: bool = False) -> Session:
        return Session.open(
            self.bundle,
            self.engine,
            store=store,
            namespace=self.namespace,
            decode_only=decode_only,
            allow_verify=allow_verify,
        )


def bundle_path(given: str) -> Path:
    """A folder, or the name of a bundle in the cache. `BundleFileMissing` where neither is there."""
    path = Path(given).expanduser()
    cache = cache_folder() / "bundles"
    if path.exists():
        return path
    if "/" not in given and (cache / given).is_dir():
        return cache / given
    raise BundleFileMissing(
        f"no bundle named {given!r} in {cache}, and no such folder. `kvferry bundle build` makes one; or give a bundle's folder.",
        file=given,
    )


def open_bundle(given: str) -> Bundle:
    """The bundle of a --bundle value."""
    return Bundle.open(bundle_path(given), digest_cache=cache_folder() / "digests.json")


class BundleName(Text):
    """A --bundle value; the shell completes the cached bundles' names, and folders."""

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[click.shell_completion.CompletionItem]:
        from click.shell_completion import CompletionItem

        names = sorted(
            path.name for path in (cache_folder() / "bundles").glob("*") if (path / "manifest.json").is_file()
        )
        found = [CompletionItem(name) for name in names if name.startswith(incomplete)]
        return found or [CompletionItem(incomplete, type="dir")]


def model_options(command: _F) -> _F:
    """--bundle and how to run it; the command gets them as ``opened``, a function that opens them."""
    options = [
        click.option(
            "--bundle",
            required=True,
            metavar="DIR",
            type=BundleName(),
            help="Bundle folder, or a cached bundle's name.",
        ),
        click.option(
            "--namespace",
            type=Text(),
            default=DEFAULT_NAMESPACE,
            show_default=True,
            help="Prefixes never cross namespaces.",
        ),
    ]
    for option in reversed([options[0], engine_options, *options[1:]]):
        command = option(command)
    return command


def open_model(bundle: str, namespace: str, **engine: Any) -> Opened:
    """Opens the bundle and its engine, which ``engine`` says as `open_engine` takes it; loads no function yet."""
    opened = open_bundle(bundle)
    return Opened(opened, open_engine(opened, **engine), namespace)


def read_tokens(bundle: Bundle, file: Path, limit: int | None, *, fitting: bool) -> list[int]:
    """The tokens of a UTF-8 text file (``-``: stdin), BOS first; the first ``limit`` of them if given.

    No more of the text is tokenised than it takes. ``fitting``: raises `ContextOverflow` as soon as there are more tokens than the
    bundle's context holds.
    """
    text = _read_text(file)
    most = bundle.config.ctx - 1
    if limit is not None and fitting and limit > most:
        raise _overflow("--tokens", most, limit, f"{limit:,}")
    tokens: list[int] = []
    with progress("Tokenising", len(text), "characters") as advance:
        left = len(text)
        for ids, characters in bundle.tokenizer.encode_parts(text):
            tokens += ids
            left -= characters
            advance(characters)
            if limit is not None and len(tokens) >= limit:
                return tokens[:limit]
            if fitting and len(tokens) > most:
                raise _overflow(
                    str(file), most, len(tokens), f"more than {len(tokens):,}" if left else f"{len(tokens):,}"
                )
    if limit is not None:
        raise InputInvalid(
            f"--tokens: expected at most {len(tokens):,}, which {file} has, found {limit:,}. Give fewer."
        )
    return tokens


def _read_text(file: Path) -> str:
    """The text of a plain file (``-``: stdin), line ends as one newline, without the byte order mark that some editors put first."""
    if str(file) == "-":
        data = sys.stdin.buffer.read(MOST_BYTES + 1)
    else:
        if not file.is_file():
            raise InputInvalid(
                f"{file}: expected a regular file, found a device, a pipe or something else. `-` reads from a pipe."
            )
        with file.open("rb") as opened:
            data = opened.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise InputInvalid(
            f"{file}: expected at most {size_text(MOST_BYTES)} of text, found more. Give the part that is meant (`head -c`)."
        )
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputInvalid(f"{file}: expected UTF-8 text, found {error.reason} at byte {error.start}") from error
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def _overflow(what: str, most: int, found: int, told: str) -> ContextOverflow:
    return ContextOverflow(
        f"{what}: expected at most {most:,} tokens (of the context's {most + 1:,} positions one stays free), found {told}. "
        f"--tokens {most} takes as much as fits.",
        expected=most,
        found=found,
    )


def note_makers(match: Match | None, engine: Engine) -> list[dict[str, str]]:
    """The lineages of what was reused, for --json; one line on stderr says in what they differ from ``engine``."""
    if match is None or not match.n:
        return []
    found = makers(match)
    if told := otherwise(found, engine.describe()):
        note(f"{match.n:,} reused tokens were computed otherwise than here: {told}.")
    return [dict(lineage.fields) for lineage in found]


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
