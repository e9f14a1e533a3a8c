"""The options that say what runs a bundle's functions, and the engine that they mean.

The only place below the verbs that looks at the machine and the environment: an engine is given what it needs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import click

from kvstore.cli import cache_folder
from kvstore.errors import InputInvalid

from .bundle import Bundle
from .engine import Engine

_F = TypeVar("_F", bound=Callable[..., Any])

Choice = Literal["auto", "portable", "coreml"]
Compute = Literal["fp32", "fp16-rounding"]
Units = Literal["all", "cpuAndGPU", "cpuAndNeuralEngine", "cpuOnly"]


def engine_options(command: _F) -> _F:
    """--engine and how it computes; `open_engine` takes them by the same names."""
    options = [
        click.option(
            "--engine",
            type=click.Choice(["auto", "portable", "coreml"]),
            default="auto",
            show_default=True,
            help="What computes: portable (numpy, anywhere), coreml (a Mac), or auto: coreml where it can run.",
        ),
        click.option(
            "--compute",
            type=click.Choice(["fp32", "fp16-rounding"]),
            default="fp32",
            show_default=True,
            help="portable: arithmetic in fp32, or every result rounded to fp16 (slow; finds overflow).",
        ),
        click.option(
            "--threads", type=click.IntRange(1, 64), default=1, show_default=True, help="portable: BLAS threads."
        ),
        click.option(
            "--compute-units",
            type=click.Choice(["all", "cpuAndGPU", "cpuAndNeuralEngine", "cpuOnly"]),
            help="coreml: what may compute. Default: the bundle's `computeUnits`, else all.",
        ),
        click.option(
            "--verify-head-units",
            type=click.Choice(["cpu", "gpu", "ane", "all"]),
            help="coreml: the same for the batched heads. Default: CORELLM_VERIFY_HEAD_CU, else cpu where --compute-units allows the "
            "Neural Engine.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def open_engine(
    bundle: Bundle,
    *,
    engine: Choice,
    compute: Compute,
    threads: int,
    compute_units: Units | None,
    verify_head_units: str | None,
) -> Engine:
    """The engine for ``bundle``; loads no function yet. Raises `EngineUnavailable`, and `InputInvalid` for an option of the other
    engine."""
    from .coreml import missing

    lacking = missing()
    if engine == "coreml" or (engine == "auto" and lacking is None):
        if compute != "fp32" or threads != 1:
            raise InputInvalid(
                f"--compute, --threads: expected their defaults, which the Core ML engine leaves as they are, found {compute}, {threads}. "
                "Add --engine portable."
            )
        return _coreml(bundle, compute_units, verify_head_units)
    if compute_units is not None or verify_head_units is not None:
        raise InputInvalid(
            "--compute-units, --verify-head-units: expected only with the Core ML engine, found the portable one"
            + (f" ({lacking})" if engine == "auto" else "")
            + ", which has no units to choose. Leave them out."
        )
    from .portable import PortableEngine

    return PortableEngine(bundle.root, compute=compute, threads=threads)


def units_of(engine: Engine, package: str) -> str | None:
    """The compute units that ``package`` runs on; None for an engine that has none."""
    from .coreml import CoreMLEngine

    return engine.units_of(package) if isinstance(engine, CoreMLEngine) else None


def _coreml(bundle: Bundle, asked: Units | None, verify_head: str | None) -> Engine:
    from .bundle.digests import DigestCache
    from .coreml import UNITS, CompiledPackages, CoreMLEngine, UnitsPolicy, open_edge, system

    wished = next((units for units in UNITS if units == bundle.config.compute_units), None)
    policy = UnitsPolicy.choose(asked, wished, verify_head or os.environ.get("CORELLM_VERIFY_HEAD_CU") or None)
    edge = open_edge()
    compiled = CompiledPackages(
        cache_folder() / "compiled", DigestCache.open(cache_folder() / "digests.json"), system()
    )
    return CoreMLEngine(edge, bundle.package_path, compiled, policy, bundle.config.lmhead_batched.values())
