"""Packages that a test may lack on a developer's machine, never under CI."""

from __future__ import annotations

import importlib.util
import os

import pytest


def require(module: str) -> None:
    """Skips where an optional package is missing; under CI that is a failure."""
    if importlib.util.find_spec(module) is None:
        message = f"{module} is not installed"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
