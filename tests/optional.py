"""Packages that a test may lack on a developer's machine, never under CI; and those that are installed only where somebody asks for them."""

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


def opted_in(module: str, extra: str) -> None:
    """Skips, under CI too, where a package of ``extra`` is missing: an extra so large that no run installs it unasked."""
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed, as by default: pip install 'kvferry[test,{extra}]'")
