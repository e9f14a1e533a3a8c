"""Packages that a test may lack on a developer's machine, never under CI."""

from __future__ import annotations

import importlib.util
import os
from typing import NoReturn

import pytest


def require(module: str) -> None:
    """Skips where an optional package is missing; under CI that is a failure."""
    if importlib.util.find_spec(module) is None:
        missing(f"{module} is not installed")


def missing(what: str) -> NoReturn:
    """Skips; under CI that is a failure."""
    if os.environ.get("CI") == "true":
        pytest.fail(what)
    pytest.skip(what)
