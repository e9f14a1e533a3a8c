"""What the comparisons with independent implementations share. They need the extra ``reference``."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from measured import RESULTS, Figures
from recorded import GEMMA_TOKENS, TINY_TOKENS, Run, record

from runtime.bundle import Bundle

TEXT = Path(__file__).parents[2] / "kvstore" / "data" / "ferry.txt"
"""English prose of our own, about 1,300 words."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Known where this folder is named on pytest's command line; elsewhere nothing is recorded."""
    parser.addoption("--record", action="store_true", help="write the measured figures to benchmarks/results/checks/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.reference)


@pytest.fixture(scope="session")
def require() -> Callable[[str], ModuleType]:
    """Imports a module that is not ours. Where it is missing the test is skipped, and fails where CI=true."""

    def imported(name: str) -> ModuleType:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as missing:
            message = f"{missing.name} is not installed: pip install 'kvferry[test,reference]'"
            if os.environ.get("CI") == "true":
                pytest.fail(message)
            pytest.skip(message)

    return imported


@pytest.fixture(scope="module")
def figures(request: pytest.FixtureRequest) -> Iterator[Figures]:
    """What the module measures; recorded, if asked for, when its last test has run."""
    noted = Figures()
    yield noted
    if request.config.getoption("--record", default=False) and noted.noted:
        noted.write(RESULTS / f"{request.path.stem.removeprefix('test_')}.json")


@pytest.fixture(scope="session")
def prose() -> str:
    return TEXT.read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def tiny_run(tiny_bundle: Path, prose: str) -> Run:
    return record(tiny_bundle, Bundle.open(tiny_bundle).tokenizer.encode(prose)[:TINY_TOKENS])


@pytest.fixture(scope="session")
def gemma_run(gemma_bundle: Path, prose: str) -> Run:
    return record(gemma_bundle, Bundle.open(gemma_bundle).tokenizer.encode(prose)[:GEMMA_TOKENS])
