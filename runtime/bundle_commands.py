"""The commands about bundles: build and show."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import click

from kvstore.cli import Place, Settings, Text, cache_folder, common_options, progress, terminal_width
from kvstore.errors import KVError
from kvstore.plaintext import WIDTH, labelled, short, size_text, table

from .engine_options import engine_options, open_engine, units_of
from .opening import BundleName, open_bundle


@click.group()
def bundle() -> None:
    """Build and inspect model bundles."""


@bundle.command("build")
@click.argument("words", nargs=-1, metavar="[NAME] [DIR]", type=Text())
@click.option(
    "--from",
    "source",
    type=Place(exists=True),
    help="A local GGUF file, or the folder of a Gemma 4 model, instead.",
)
@click.option(
    "--weights", type=click.Choice(["pal6", "int8", "fp16"]), help="Gemma 4: form of the chunks' weights (pal6)."
)
@click.option(
    "--verify-head", type=click.Choice(["same", "pal6"]), help="Gemma 4: weights of the verification head (same)."
)
@click.option("--sidecars", type=click.Choice(["int8", "fp16"]), help="Gemma 4: form of the embedding tables (int8).")
@click.option(
    "--margins",
    is_flag=True,
    help="Gemma 4: heads that also say how clear each choice was, for --verify margin; a function more than the published shape has.",
)
@click.option(
    "--seed", type=click.IntRange(0, 2**63 - 1), help="Weights of the tiny models, which are random (default: 0)."
)
@common_options
def build(
    settings: Settings,
    words: tuple[str, ...],
    source: Path | None,
    weights: Literal["pal6", "int8", "fp16"] | None,
    verify_head: Literal["same", "pal6"] | None,
    sidecars: Literal["int8", "fp16"] | None,
    margins: bool,
    seed: int | None,
) -> None:
    """Build the bundle NAME (gemma3-270m, smollm2, tiny, tiny-gemma4 or tiny-llama), or one from a local model file (--from), into DIR.

    Without DIR it goes to the cache, where --bundle NAME finds it.
    """
    from .build import MODELS, Packing, build_bundle, estimate_build

    if not 1 <= len(words) <= 2:
        raise click.UsageError(f"Give NAME [DIR] (NAME: {', '.join(MODELS)}), or [NAME] DIR with --from PATH.")
    if source is not None and words[0] in MODELS:
        raise click.UsageError(
            f"{words[0]} and --from {source} name two models. Leave --from out, or give the bundle of {source} a name and folder "
            "of its own."
        )
    if seed is not None and (source is not None or not words[0].startswith("tiny")):
        raise click.UsageError(f"--seed is for the tiny models; {source or words[0]} has weights of its own.")
    name = words[0] if source is None or len(words) == 2 else None
    out = Path(words[-1]) if len(words) == 2 or source is not None else cache_folder() / "bundles" / words[0]
    asked = weights or verify_head or sidecars or margins
    packing = Packing(weights or "pal6", verify_head or "same", sidecars or "int8", margins) if asked else None
    needs = estimate_build(name, source=source, packing=packing)
    click.echo(
        f"The bundle takes about {size_text(needs.bundle)} on disk ({size_text(needs.temporary)} more while it is built) and "
        f"{size_text(needs.memory)} of memory to build.",
        err=True,
    )
    if verify_head == "pal6":
        click.echo(
            f"The verification head, in 6 bits, may say another token than the sequential one, in int8: `kvferry bundle heads {out}` tells. "
            "Where they differ, speculation is refused.",
            err=True,
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    with progress(f"Building {out.name}", 100, "%") as advance:
        before = 0.0

        def report(_: str, fraction: float) -> None:
            nonlocal before
            advance(100 * (fraction - before))
            before = fraction

        try:
            built = build_bundle(
                name,
                out,
                source=source,
                packing=packing,
                downloads=cache_folder() / "downloads",
                progress=report,
                seed=seed or 0,
            )
        except (KVError, OSError, KeyboardInterrupt) as error:
            for note in getattr(error, "__notes__", ()):  # of what is left on the disk
                click.echo(f"\n{note}", err=True)
            raise
    if built.terms:
        click.echo(built.terms, err=True)
    settings.emit(
        {
            "path": str(built.path),
            "made": built.made,
            "weights": built.weights,
            "heads": built.heads,
            "bytes": built.bytes,
            "seconds": built.seconds,
            "terms": built.terms,
        },
        f"{built.path}: {size_text(built.bytes)}, {'built in' if built.made else 'was there, checked in'} {built.seconds:.1f} s",
    )


@bundle.command("show")
@click.argument("given", metavar="DIR", type=BundleName())
@common_options
def show(settings: Settings, given: str) -> None:
    """Show a bundle: geometry, functions, identity."""
    opened = open_bundle(given)
    config, layout, identity = opened.config, opened.layout(), opened.identity()
    fields = identity.wire()
    value = {
        "path": str(opened.root),
        "name": config.name,
        "format": config.format,
        "architecture": config.architecture,
        "context": config.ctx,
        "layers": config.num_layers,
        "hidden": config.hidden,
        "kv_bytes_per_token": layout.bytes_per_token,
        "groups": [
            {
                "name": g.name,
                "window": g.window,
                "layers": list(g.layers),
                "kv_heads": g.kv_heads,
                "head_dim": g.head_dim,
            }
            for g in layout.groups
        ],
        "chunks": list(config.chunks),
        "decode": config.decode_function,
        "prefill": {str(width): name for width, name in config.prefill_functions.items()},
        "plain_width": config.plain_width,
        "identity": identity.digest.hex,
        "weights": fields["weights"],
        "tokenizer": fields["tokenizer"],
        "heads": opened.head_digest(),
        "weights_depend_on_packaging": not opened.has_record,
        "unverified": list(opened.unverified),
        "bytes": opened.disk_bytes(),
    }
    settings.emit(value, lambda: _shown(value, terminal_width() or WIDTH))


def _shown(value: Mapping[str, Any], width: int) -> str:
    """`show` for people."""
    apart = ("path", "name", "groups", "kv_bytes_per_token", "bytes", "weights_depend_on_packaging", "unverified")
    rows = [
        ("path", value["path"]),
        ("size", f"{size_text(value['bytes'])}; {size_text(value['kv_bytes_per_token'])} of KV a token"),
    ]
    for name, found in value.items():
        text = None if name in apart else short(list(found.values()) if isinstance(found, dict) else found, 16)
        if text is not None:
            rows.append((name.replace("_", " "), text))
    packaging = "no record: a compiled copy is another model" if value["weights_depend_on_packaging"] else "recorded"
    rows += [("packaging", packaging), ("unverified", short(value["unverified"], 16) or "none")]
    groups = [
        (g["name"], len(g["layers"]), g["kv_heads"], g["head_dim"], g["window"] or "all") for g in value["groups"]
    ]
    layers = table(groups, ("group", "layers", "KV heads", "head size", "window"))
    return f"{value['name']}\n{labelled(rows, width, '  ')}\n\n{layers}"


@bundle.command("heads")
@click.argument("given", metavar="DIR", type=BundleName())
@engine_options
@common_options
def heads(settings: Settings, given: str, **engine: Any) -> None:
    """Run a bundle's batched heads beside its sequential head; exit 7 if one says another token.

    The rows are hidden states of decode steps of the bundle itself.
    """
    from .verify_head import check_head, require_agreement

    opened = open_bundle(given)
    runs = open_engine(opened, **engine)
    checks = [check_head(opened, runs, width) for width in sorted(opened.config.lmhead_batched)]
    found: list[dict[str, Any]] = [
        {
            "package": check.package,
            "width": check.width,
            "units": units_of(runs, check.package),
            "positions": list(check.positions),
            "sequential": list(check.sequential),
            "batched": list(check.batched),
            "rows": list(check.rows),
        }
        for check in checks
    ]
    value = {
        "path": str(opened.root),
        "sequential": opened.config.lmhead,
        "sequential_units": units_of(runs, opened.config.lmhead),
        "heads": found,
        "engine": runs.describe(),
        "specialisation_seconds": runs.ledger.seconds(),
    }
    settings.emit(value, lambda: "\n".join(map(_agreement, found)) or "no batched heads")
    for check in checks:
        require_agreement(check)


def _agreement(head: dict[str, Any]) -> str:
    where = f" on {head['units']}" if head["units"] else ""
    rows = f"differs in rows {', '.join(map(str, head['rows']))}" if head["rows"] else "agrees in every row"
    return f"{head['package']} (width {head['width']}){where}: {rows}: {head['sequential']}, {head['batched']}"
