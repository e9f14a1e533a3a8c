"""The command that tries all that is promised of a bundle on this machine."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvstore.cli import Place, Settings, common_options, ending_cleanly, progress, terminal_width
from kvstore.errors import KVError
from kvstore.plaintext import WIDTH

from .engine_options import engine_options, open_engine
from .opening import BundleName, open_bundle

if TYPE_CHECKING:
    from .bundle import Bundle
    from .gate import Configuration
    from .gate.report import Verify

COMPUTES = ("fp32", "fp16-rounding")


class GateFailed(KVError):
    """Something that must hold does not. ``details``: failed, how many lines."""

    exit_code = 9


@click.command()
@click.option(
    "--bundle",
    "given",
    required=True,
    metavar="DIR",
    type=BundleName(),
    help="Bundle folder, or a cached bundle's name.",
)
@click.option(
    "--prompts",
    type=Place(exists=True),
    metavar="FILE",
    help="Run on these instead of three texts of kvferry's own: one prompt a line; of a .jsonl file, the `text` of each line's object.",
)
@click.option(
    "--verify",
    type=click.Choice(["trust", "recheck", "margin"]),
    default="trust",
    show_default=True,
    help="How speculation is to be verified, and so what must hold. margin: also measures the threshold for --threshold.",
)
@click.option("--quick", is_flag=True, help="Fewer places and shorter continuations.")
@engine_options
@common_options
def gate(settings: Settings, given: str, prompts: Path | None, verify: Verify, quick: bool, **engine: Any) -> None:
    """Try what is promised of a bundle here, and tell it line by line; exit 9 unless all that must hold holds.

    Speculation on is speculation off; restored is uninterrupted, whole and trimmed; receipts are true; batched heads agree; and KV saved
    under each configuration (portable: fp32 and fp16-rounding; Core ML: each choice of compute units) is restored under each other. Stores are
    temporary: --store is not looked at.
    """

    from .gate import DEFAULT, QUICK, Setup, run_gate
    from .gate.prompts import own_prompts, read_prompts
    from .gate.running import expected_lines
    from .gate.telling import report_text

    bundle, size = open_bundle(given), QUICK if quick else DEFAULT
    main, configurations = configured(bundle, engine)
    texts = own_prompts(bundle, size.most) if prompts is None else read_prompts(bundle, prompts, size.most)
    setup = Setup(bundle, main, configurations, texts, size, verify)
    with ending_cleanly(), progress("Gate", expected_lines(setup), "comparisons") as advance:
        report = run_gate(setup, lambda _: advance(1))
    settings.emit(report.value(), lambda: report_text(report, terminal_width() or WIDTH))
    if not report.ok:
        failed = [f"{line.check}, {line.prompt or 'no prompt'}: {line.told}" for line in report.failed]
        raise GateFailed(
            f"{report.bundle}: {len(failed)} of {len(report.lines)} comparisons do not hold"
            + (f", the first: {failed[0]}" if failed else ": nothing could be compared"),
            failed=len(failed),
        )


def configured(bundle: Bundle, engine: dict[str, Any]) -> tuple[Configuration, tuple[Configuration, ...]]:
    """The configuration that the options ``engine`` mean, and all that this machine can cross it with."""
    from .coreml.units import UNITS

    described = open_engine(bundle, **engine).describe()
    coreml = described["engine"] == "coreml"
    which, chosen = ("compute_units", described["compute_units"]) if coreml else ("compute", engine["compute"])
    fixed = engine | {"engine": "coreml" if coreml else "portable"}
    all_of_them = tuple(
        _configuration(bundle, value, fixed | {which: value}) for value in (UNITS if coreml else COMPUTES)
    )
    return next(one for one in all_of_them if one.name == chosen), all_of_them


def _configuration(bundle: Bundle, name: str, engine: dict[str, Any]) -> Configuration:
    from .gate import Configuration

    words = [
        word
        for key, value in engine.items()
        if value is not None
        for word in (f"--{key.replace('_', '-')}", str(value))
    ]
    return Configuration(name, partial(open_engine, bundle, **engine), tuple(words))


def commands() -> dict[str, click.Command]:
    """The gate's verb."""
    return {"gate": gate}
