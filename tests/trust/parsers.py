"""Every parser of what comes from a disk or another machine. A new one joins one of the lists; `test_parsers.py` fails where a module parses and
is in none of them."""

from __future__ import annotations

from model_parsers import MODELS
from parsing import Parser
from store_parsers import STORE
from wire_parsers import WIRE

PARSERS: tuple[Parser, ...] = (*STORE, *WIRE, *MODELS)
