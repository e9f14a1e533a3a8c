"""Makers of bundles from the runtime's tests, and the `kvferry` command of the command line's tests."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
for folder in ("runtime", "cli"):
    sys.path.insert(0, str(TESTS / folder))
_spec = importlib.util.spec_from_file_location("cli_fixtures", TESTS / "cli" / "conftest.py")
assert _spec is not None and _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
kvferry, story = _module.kvferry, _module.story
