"""The commands about bundles: build and show."""

from __future__ import annotations

from pathlib import Path

import click

from kvstore.cli import Settings, cache_folder, common_options, progress, size_text

from .opening import open_bundle


@click.group()
def bundle() -> None:
    """Build and inspect model bundles."""


@bundle.command("build")
@click.argument("words", nargs=-1, metavar="[NAME] [DIR]")
@click.option("--from", "source", type=click.Path(path_type=Path, exists=True), help="A local GGUF file instead.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Weights of `tiny`.")
@common_options
def build(settings: Settings, words: tuple[str, ...], source: Path | None, seed: int) -> None:
    """Build the bundle NAME (gemma3-270m or tiny), or one from a local model file (--from), into DIR.

    Without DIR it goes to the cache, where --bundle NAME finds it.
    """
    from .build import build_bundle, estimate_build

    if source is None and not 1 <= len(words) <= 2:
        raise click.UsageError("Give NAME [DIR], or --from PATH DIR.")
    if source is not None and len(words) not in (1, 2):
        raise click.UsageError("Give DIR with --from PATH.")
    name = words[0] if source is None or len(words) == 2 else None
    out = Path(words[-1]) if len(words) == 2 or source is not None else cache_folder() / "bundles" / words[0]
    needs = estimate_build(name, source=source)
    click.echo(
        f"The bundle takes about {size_text(needs.bundle)} on disk ({size_text(needs.temporary)} more while it is built) and "
        f"{size_text(needs.memory)} of memory to build.",
        err=True,
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    with progress(f"Building {out.name}", 100, "%") as advance:
        before = 0.0

        def report(_: str, fraction: float) -> None:
            nonlocal before
            advance(100 * (fraction - before))
            before = fraction

        built = build_bundle(name, out, source=source, progress=report, seed=seed)
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
@click.argument("given", metavar="DIR")
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
        "bytes": sum(f.stat().st_size for f in opened.root.rglob("*") if f.is_file()),
    }
    settings.emit(value, lambda: "\n".join(f"{k:<28} {v}" for k, v in value.items()))
