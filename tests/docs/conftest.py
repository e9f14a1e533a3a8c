"""The `kvferry` fixture of the command line's tests, for the commands that the documents show."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

CLI = Path(__file__).parents[1] / "cli"
sys.path.insert(0, str(CLI))
sys.path.insert(0, str(CLI.parent / "runtime"))  # metrics_lines
_spec = importlib.util.spec_from_file_location("cli_fixtures", CLI / "conftest.py")
assert _spec is not None and _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
kvferry = _module.kvferry
