"""Which ways to Core ML this machine has, and taking the best one."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from importlib import util

from runtime.coreml.edge import Edge
from runtime.coreml.through_coremltools import CoremltoolsEdge
from runtime.coreml.through_pyobjc import PyObjCEdge
from runtime.engine import EngineUnavailable

_ROUTES: dict[str, Callable[[], Edge]] = {"CoreML": PyObjCEdge, "coremltools": CoremltoolsEdge}
_SYSTEM = 15
"""Packages of several functions need this macOS."""


def missing() -> str | None:
    """Why the Core ML engine cannot run here, a clause; None if it can."""
    if sys.platform != "darwin":
        return f"expected macOS {_SYSTEM} or newer, found {platform.system()}"
    version = platform.mac_ver()[0]
    if int(version.partition(".")[0] or 0) < _SYSTEM:
        return f"expected macOS {_SYSTEM} or newer (packages of several functions), found macOS {version}"
    if not any(map(util.find_spec, _ROUTES)):
        return "expected pyobjc-framework-CoreML or coremltools, found neither: pip install 'kvferry[runtime]'"
    return None


def open_edge() -> Edge:
    """PyObjC where it is installed, else coremltools. Raises ``EngineUnavailable``."""
    reason = missing()
    if reason is not None:
        raise EngineUnavailable(f"--engine coreml: {reason}. Use --engine portable, which runs anywhere.")
    return next(make for module, make in _ROUTES.items() if util.find_spec(module))()
