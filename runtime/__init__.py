"""runtime: a language model whose KV cache lies on the host as plain arrays, run from its Core ML bundle on any machine.

    bundle = Bundle.open(Path("gemma3-270m"))
    session = Session.open(bundle, PortableEngine(bundle.root), store=store, decode_only=True)
    session.restore("book")
    session.generate(32, on_token=print)

The public names are imported when they are first used: `import runtime` itself loads nothing else, not even numpy.

Order: packaging · mlpackage · mil · ops · engine · portable · tokenizer_digest · cuts · tokenizer · bundle ·
coreml · hostkv · soft · chain · verify_head · lookup · speculation · verifier · state · reports · decoding ·
session · chat_turns · chat · profile · plan_sizes · plan · ledgers · metrics · metrics_option · build · gate ·
engine_options · speculation_options · opening · remote_option · bundle_commands · checkpoint_commands · send_command · chat_commands · plan_commands ·
stats_commands · explaining · gate_command · bench · bench_commands · cli
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .bundle import Bundle
    from .decoding import ContextOverflow
    from .engine import Engine, FunctionNotAllowed
    from .hostkv import HostKV
    from .portable import PortableEngine
    from .reports import Generation, ReceiptReport, Restored
    from .session import Session
    from .soft import SoftSpan
    from .speculation import Speculation, SpeculationStats

__all__ = [
    "Bundle",
    "ContextOverflow",
    "Engine",
    "FunctionNotAllowed",
    "Generation",
    "HostKV",
    "PortableEngine",
    "ReceiptReport",
    "Restored",
    "Session",
    "SoftSpan",
    "Speculation",
    "SpeculationStats",
]

_HOMES = {
    "Bundle": "bundle",
    "ContextOverflow": "decoding",
    "Engine": "engine",
    "FunctionNotAllowed": "engine",
    "Generation": "reports",
    "HostKV": "hostkv",
    "PortableEngine": "portable",
    "ReceiptReport": "reports",
    "Restored": "reports",
    "Session": "session",
    "SoftSpan": "soft",
    "Speculation": "speculation",
    "SpeculationStats": "speculation",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'runtime' has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
