"""A checkpoint folder on disk: read whole and checked, or written whole, durably, at once."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ..errors import InputInvalid, KVError, Refused, StoreBusy, StoreCorrupt
from ..files import Buffer, Root
from .corellm import (
    MANIFEST,
    MAX_MANIFEST,
    Checkpoint,
    decode_manifest,
    encode_manifest,
    k_file,
    parse,
    v_file,
)
from .corellm_geometry import FULL, Geometry, layout_of
from .corellm_rows import CheckpointRows
from .errors import CheckpointCorrupt, CheckpointMissing, corrupt

STAGING = ".partial"
"""How the folder ends that a checkpoint grows in, beside its target and hidden."""

WHEN = "createdAtISO8601"

Files = Sequence[tuple[str, Sequence[Buffer]]]


def read_folder(path: Path, geometry: Geometry, progress: Callable[[float], None]) -> tuple[Checkpoint, CheckpointRows]:
    """The checkpoint in the folder ``path``, for the model of ``geometry``; ``progress`` gets the bytes of each piece read.

    Raises what `corellm.decode_manifest` raises, `CheckpointMissing`, and `CheckpointCorrupt` for files of another length, links, values that
    are not finite, zeros in a full layer, and files that no checkpoint has. Hidden files, which Finder leaves, are let be. No link below ``path`` is followed.
    """
    with _opened(path) as root:
        try:
            data = root.read(MANIFEST, MAX_MANIFEST)
        except FileNotFoundError:
            raise CheckpointMissing(
                f"{path}: expected {MANIFEST}, found none. Give the folder that the app saved the checkpoint in.",
                file=MANIFEST,
            ) from None
        if len(data) > MAX_MANIFEST:
            raise corrupt(MANIFEST, "length", f"at most {MAX_MANIFEST} bytes", "more")
        checkpoint = decode_manifest(data, geometry)
        count = len(checkpoint.tokens)
        lengths = {
            name(layer): geometry.file_bytes(layer, count)
            for layer in range(geometry.first_shared)
            for name in (k_file, v_file)
        }
        foreign = [name for name in root.names("") if name not in lengths and name != MANIFEST and name[0] != "."]
        if foreign:
            raise corrupt(str(path), "files", f"{MANIFEST}, k_0.bin, v_0.bin, … alone", ", ".join(foreign[:5]))
        for name, length in lengths.items():  # before any memory is taken for rows
            _check_length(root, name, length)
        rows = CheckpointRows(layout_of(geometry), count)
        for layer in range(geometry.first_shared):
            for name, target in zip((k_file(layer), v_file(layer)), rows.files(layer), strict=True):
                _fill(root, name, target, progress)
            if (found := rows.not_finite(layer)) is not None:
                raise corrupt(f"{found[0]}_{layer}.bin", f"row {found[1]}", "finite values", "a NaN or an infinity")
            if geometry.layer_types[layer] == FULL and (zero := rows.unwritten(layer)) is not None:
                raise corrupt(
                    f"{zero[0]}_{layer}.bin",
                    f"row {zero[1]}" if zero[0] == "k" else "rows",
                    "what a model computed, which is never zero",
                    "zeros alone, as a copy that failed leaves them",
                )
    return checkpoint, rows


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Root]:
    try:
        root = Root(path)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointMissing(
            f"{path}: expected a checkpoint folder, found none. Give the folder that holds its {MANIFEST}.",
            file=str(path),
        ) from None
    try:
        yield root
    except StoreCorrupt as error:  # a link, a pipe or a folder where a file should be
        where = str(error.details.get("path", path))
        raise CheckpointCorrupt.at(where, error.found.removesuffix("."), file=where) from error
    finally:
        root.close()


def _check_length(root: Root, name: str, length: int) -> None:
    found = root.size(name)
    if found is None:
        try:
            with root.open(name):  # says what stands there instead
                pass
        except FileNotFoundError:
            raise CheckpointMissing(
                f"{name}: expected this file (a layer's rows), found none. Copy the whole folder again; nothing was imported.",
                file=name,
            ) from None
    if found != length:
        raise corrupt(name, "length", f"{length} bytes (rows x headDim x 2)", f"{found} bytes")


def _fill(root: Root, name: str, target: memoryview, progress: Callable[[float], None]) -> None:
    at = 0
    for chunk in root.chunks(name):
        if at + len(chunk) > len(target):
            raise corrupt(name, "length", f"{len(target)} bytes", "a file that grows while it is read")
        target[at : at + len(chunk)] = chunk
        at += len(chunk)
        progress(len(chunk))
    if at != len(target):
        raise corrupt(name, "length", f"{len(target)} bytes", f"{at}: the file shrank while it was read")


def write_folder(
    target: Path, geometry: Geometry, checkpoint: Checkpoint, rows: CheckpointRows, progress: Callable[[float], None]
) -> bool:
    """Writes a checkpoint to the folder ``target``, which isn't there yet or is empty. False where the same checkpoint is there already.

    It appears whole and durable, by one rename; a process that is killed before leaves a hidden folder beside it, which the next export to
    ``target`` deletes. `Refused` for anything else that is there: nothing is ever replaced.
    """
    target = Path(os.path.abspath(target))  # noqa: PTH100 - links in it stay as they are
    files: list[tuple[str, Sequence[Buffer]]] = []
    for layer in range(geometry.first_shared):
        k, v = rows.files(layer)
        files += [(k_file(layer), [k]), (v_file(layer), [v])]
    files.append((MANIFEST, [encode_manifest(geometry, checkpoint)]))
    try:
        parent = Root(target.parent)
    except (FileNotFoundError, NotADirectoryError):
        raise InputInvalid(
            f"{target}: expected a folder to write it into, found no {target.parent}. Make that first."
        ) from None
    try:
        if _is_there(target, files):
            return False
        _remove_left(parent, target.name)
        staging = f".{target.name}.{os.getpid():x}-{secrets.token_hex(4)}{STAGING}"
        parent.make_folder(staging)
        try:
            with parent.lock(staging, exclusive=True):
                with _room(target, sum(len(part) for _, parts in files for part in parts)):
                    for name, parts in files:
                        parent.write(f"{staging}/{name}", parts)
                        progress(sum(len(part) for part in parts))
                    parent.sync_all([staging])
                _rename(parent, staging, target)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                parent.remove_tree(staging)
            raise
    finally:
        parent.close()
    return True


@contextlib.contextmanager
def _room(target: Path, size: int) -> Iterator[None]:
    """Names the folder and the bytes that it takes where its disk is full: the store's disk may be another."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise KVError(
            f"{target}: expected room for {size} bytes, found a full disk ({error.strerror}). Nothing was written; make room on the disk "
            f"that holds {target.parent}, or give a folder on another.",
            path=str(target),
            expected=size,
        ) from error


def _rename(parent: Root, staging: str, target: Path) -> None:
    try:
        parent.move([(staging, target.name)])
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise _taken(target, "something that appeared meanwhile") from error
        raise


def _taken(target: Path, found: str) -> Refused:
    return Refused(
        f"{target}: expected nothing there, or this very checkpoint, found {found}. Nothing was changed; give another folder, or move that "
        f"one away.",
        path=str(target),
        found=found,
    )


def _is_there(target: Path, files: Files) -> bool:
    """Whether ``target`` is this checkpoint, whenever it was saved. `Refused` where it is anything else but absent or an empty folder."""
    if not os.path.lexists(target):
        return False
    if target.is_symlink() or not target.is_dir():
        raise _taken(target, "a link or a file")
    root = Root(target)
    try:
        names = root.names("")
        if not names:
            return False
        different = {name for name, _ in files} ^ {name for name in names if name[0] != "."}
        if different:
            raise _taken(target, f"other files ({', '.join(sorted(different)[:3])})")
        for name, parts in files:
            if not _same(root, name, parts):
                raise _taken(target, f"another {name}")
    except StoreCorrupt as error:
        raise _taken(target, "a link or something else among its files") from error
    finally:
        root.close()
    return True


def _same(root: Root, name: str, parts: Sequence[Buffer]) -> bool:
    content = b"".join(parts)
    found = root.read(name, max(len(content), MAX_MANIFEST if name == MANIFEST else 0))
    if name != MANIFEST:
        return found == content
    try:
        mine, theirs = parse(content), parse(found)
    except CheckpointCorrupt:
        return False
    return mine | {WHEN: None} == theirs | {WHEN: None}


def _remove_left(parent: Root, name: str) -> None:
    """Deletes what exports of ``name`` left that were killed: their folders are not locked any more."""
    ours = re.compile(rf"\.{re.escape(name)}\.[0-9a-f]+-[0-9a-f]{{8}}{re.escape(STAGING)}")
    for entry in parent.names(""):
        if ours.fullmatch(entry):
            with (
                contextlib.suppress(StoreBusy, StoreCorrupt, FileNotFoundError),
                parent.lock(entry, exclusive=True, seconds=0),
            ):
                parent.remove_tree(entry)
