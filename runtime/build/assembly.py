"""Building a bundle: every file into a staging folder beside the target, then one rename."""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from runtime.build import config
from runtime.build.digests import (
    HEADS_CONTEXT,
    WEIGHTS_CONTEXT,
    TensorDigest,
    canonical_digest,
    file_digest,
    folder_digests,
)
from runtime.build.durable import publish_folder
from runtime.build.emitter import Numerics
from runtime.build.errors import TargetExists
from runtime.build.plan import Draft, Part, Plan, Progress
from runtime.build.source import Offer, Source
from runtime.build.source_parts import source_parts
from runtime.build.staging import Recipe, Staging, staging

#: Raised whenever the same source would give other bytes.
BUILDER_VERSION = 5
RECORD = "kvferry.json"
#: The share of the work that opening the source is taken to be.
_SOURCE_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class BuiltBundle:
    """A bundle that stands at ``path``. ``made`` is False when it stood there already. Digests in hex, time in seconds."""

    path: Path
    made: bool
    weights: str
    heads: str
    bytes: int
    seconds: float
    terms: str | None


def assemble(source: Source, out: Path, *, progress: Progress, numerics: Numerics | None = None) -> BuiltBundle:
    """Build a source that is open already. As :func:`build`."""
    offer = Offer(source.spec.name, source.origin, source.terms, lambda scratch: nullcontext(source))
    return build(offer, out, progress=progress, numerics=numerics)


def build(offer: Offer, out: Path, *, progress: Progress, numerics: Numerics | None = None) -> BuiltBundle:
    """Build the model as the bundle ``out``. As :func:`carry_out`."""
    numerics = numerics or Numerics()

    @contextmanager
    def opened(scratch: Path) -> Iterator[Plan]:
        with offer.open(scratch) as source:
            yield Plan(source.license, source_parts(source, numerics))

    return carry_out(Draft(offer.name, offer.origin, offer.terms, numerics, opened), out, progress=progress)


def carry_out(draft: Draft, out: Path, *, progress: Progress) -> BuiltBundle:
    """Build what is planned as the bundle ``out``. Raises TargetExists unless ``out`` is absent, empty, or already this bundle."""
    started = time.monotonic()
    recipe = _recipe(draft)
    record = _standing(out, recipe)
    made = record is None
    if record is None:
        progress("reading the weights", 0.0)
        with staging(out, recipe) as stage:
            with draft.open(stage.scratch) as plan:
                record = _fill(stage, plan, recipe, progress)
            stage.finish()
            try:
                publish_folder(stage.root, out)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
                raise _exists(out, "that somebody else filled it during the build", "Choose another folder") from error
    progress("done", 1.0)
    size = sum({(s.st_dev, s.st_ino): s.st_size for s in (path.stat() for path in out.rglob("*"))}.values())
    elapsed = time.monotonic() - started
    return BuiltBundle(out, made, record["weights"], record["heads"], size, elapsed, draft.terms)


def _fill(stage: Staging, plan: Plan, recipe: Recipe, progress: Progress) -> dict[str, Any]:
    """Make every part that the staging folder doesn't have yet, then the record of them all, which is returned."""
    whole = sum(part.work for part in plan.parts) / (1 - _SOURCE_SHARE)
    finished = whole * _SOURCE_SHARE
    for part in plan.parts:
        report = partial(_report, progress, part, finished, whole)
        report(0.0)
        stage.add(part.name, partial(_write, part, report))
        finished += part.work
    record = _record(plan, recipe, stage)
    (stage.root / RECORD).write_bytes(config.dump(record))
    return record


def _report(progress: Progress, part: Part, finished: float, whole: float, fraction: float) -> None:
    progress(part.name, (finished + part.work * fraction) / whole)


def _write(part: Part, report: Callable[[float], None], folder: Path) -> Mapping[str, TensorDigest]:
    return part.write(folder, report)


def _recipe(draft: Draft) -> dict[str, Any]:
    recipe: dict[str, Any] = {"builder": BUILDER_VERSION, "name": draft.name, "origin": dict(draft.origin)}
    if draft.numerics != Numerics():
        recipe["numerics"] = repr(draft.numerics)
    return recipe


def _record(plan: Plan, recipe: Recipe, stage: Staging) -> dict[str, Any]:
    digests = stage.digests()
    heads = {name: digest for name, digest in digests.items() if name.startswith("output")}
    weights = {name: digest for name, digest in digests.items() if name not in heads}
    return {
        "format": config.FORMAT,  # of the record, whatever the bundle's is
        "weights": canonical_digest(weights, WEIGHTS_CONTEXT),
        "heads": canonical_digest(heads, HEADS_CONTEXT),
        "license": plan.license,
        "source": dict(recipe),
        "files": folder_digests(stage.root, leave=(RECORD, *stage.own)),
    }


def _standing(out: Path, recipe: Recipe) -> dict[str, Any] | None:
    """The record of the bundle at ``out`` if it is the one to be built, and whole; None if nothing is there."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    fix = "Give a DIR for the new one, or remove this one first"
    try:
        record = json.loads((out / RECORD).read_bytes())
        found, files = record["source"], dict(record["files"])
    except (OSError, ValueError, KeyError, TypeError):
        raise _exists(out, "something that is no bundle of kvferry's builder", fix) from None
    if found != recipe:
        raise _exists(out, f"another bundle, {_difference(found, recipe)}", fix)
    for name, expected in files.items():
        path = out / name
        digest = file_digest(path) if path.is_file() else None
        if digest != expected:
            raise _exists(
                out, f"it damaged: {name} has BLAKE3 {digest}, not {expected}", "Remove it and build it again"
            )
    return dict(record)


def _difference(found: object, recipe: Recipe) -> str:
    """In words, what a bundle of the recipe ``found`` has that isn't as in ``recipe``."""
    theirs, ours = _flat(found), _flat(recipe)
    keys = [key for key in {**theirs, **ours} if theirs.get(key) != ours.get(key)]
    return "with " + ", ".join(f"{key} {theirs.get(key, 'unknown')}, not {ours.get(key, 'given')}" for key in keys)


def _flat(recipe: object) -> dict[str, str]:
    if not isinstance(recipe, Mapping):
        return {}
    origin = recipe.get("origin")
    values = {**recipe, **(origin if isinstance(origin, Mapping) else {})}
    # a digest is told apart by its beginning
    return {str(key): str(value)[:16] for key, value in values.items() if key != "origin"}


def _exists(out: Path, found: str, fix: str) -> TargetExists:
    message = f"{out}: expected no folder, an empty one or this very bundle, found {found}. {fix}."
    return TargetExists(message, target=str(out), found=found)
