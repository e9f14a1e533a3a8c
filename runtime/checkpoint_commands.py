"""The commands about checkpoint folders of other programs: export and import."""

from __future__ import annotations

import time
from pathlib import Path
from time import perf_counter
from typing import Any

import click

from kvstore.cli import Label, Place, Settings, Text, common_options, note, progress
from kvstore.formats.corellm_store import AppBundle, export_snapshot, import_checkpoint
from kvstore.identity import DEFAULT_NAMESPACE
from kvstore.plaintext import size_text
from kvstore.records import check_label
from kvstore.store import Store

from .bundle import Bundle
from .metrics.journal import Journal
from .metrics_option import metrics_option
from .opening import BundleName, open_bundle


def app_bundle(bundle: Bundle) -> AppBundle:
    """The bundle as a checkpoint's reader knows it. May hash files, on the first call for a bundle."""
    return AppBundle(
        bundle.identity(),
        bundle.layout(),
        bundle.config.ctx,
        bundle.config_sha256,
        bundle.config.format,
        bundle.root.name,
        bundle.head_digest(),
    )


@click.command("export")
@click.argument("name", type=Label())
@click.argument("folder", type=Place(), metavar="DIR")
@click.option("--as", "form", type=click.Choice(["corellm"]), required=True,
              help="The format: `corellm`, the checkpoint folder of the app for coreml-corellm-r1 bundles.")  # fmt: skip
@click.option("--bundle", "given", metavar="DIR", type=BundleName(),
              help="The app's bundle: its folder, or a cached bundle's name. Needed where the snapshot doesn't say it.")  # fmt: skip
@metrics_option
@common_options
def export(settings: Settings, name: str, folder: Path, form: str, given: str | None, journal: Journal) -> None:
    """Write the snapshot NAME to the folder DIR, for another program to continue from.

    DIR is new or empty; it appears whole. Writing the same checkpoint again changes nothing.
    """
    journal.enter("export")
    started = perf_counter()
    opened = None if given is None else open_bundle(given)
    bundle = None if opened is None else app_bundle(opened)
    with Store.open(settings.store, create=False) as store:
        snapshot = store.shelf.records.snapshot(store.resolve(name))
        with progress("Exporting", snapshot.tokens * snapshot.layout.bytes_per_token, "bytes") as advance:
            made = export_snapshot(
                store,
                name,
                folder,
                bundle=bundle,
                created_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                progress=advance,
            )
    seconds = perf_counter() - started
    journal.about(snapshot.model, opened)
    journal.kv("export", made.bytes, seconds, prompt_tokens=made.tokens)
    for line in made.notes:
        note(line)
    value = {
        "name": name,
        "snapshot": made.snapshot.hex,
        "path": str(folder.absolute()),
        "format": form,
        "made": made.made,
        "tokens": made.tokens,
        "pending": made.pending,
        "bytes": made.bytes,
        "zeroed_rows": made.zeroed_rows,
        "soft_tokens": made.soft_tokens,
        "notes": list(made.notes),
        "seconds": seconds,
    }
    done = "written to" if made.made else "is there already, in"
    settings.emit(value, lambda: f"{name}: {made.tokens} tokens, {size_text(made.bytes)}, {done} {folder}")


@click.command("import")
@click.argument("folder", type=Place(), metavar="DIR")
@click.option("--bundle", "given", required=True, metavar="DIR", type=BundleName(),
              help="The bundle that it was saved with: its folder, or a cached bundle's name. The checkpoint names no weights: this is taken at its word.")  # fmt: skip
@click.option("--name", type=Label(), help="Name of the snapshot. Default: the name of the folder.")
@click.option(
    "--namespace", type=Text(), default=DEFAULT_NAMESPACE, show_default=True, help="Prefixes never cross namespaces."
)
@metrics_option
@common_options
def import_(settings: Settings, folder: Path, given: str, name: str | None, namespace: str, journal: Journal) -> None:
    """Save the checkpoint in the folder DIR, which the app wrote, as a snapshot."""
    label = folder.absolute().name if name is None else name
    check_label(label)
    journal.enter("import")
    started = perf_counter()
    opened = open_bundle(given)
    journal.about(opened.config.name, opened)
    bundle = app_bundle(opened)
    total = sum(f.stat(follow_symlinks=False).st_size for f in folder.glob("?_*.bin")) if folder.is_dir() else 0
    with Store.open(settings.store) as store:
        before = store.shelf.records.ref(label)
        with progress("Importing", total, "bytes") as advance:
            made = import_checkpoint(
                store,
                folder,
                bundle=bundle,
                namespace=namespace,
                name=label,
                model=opened.config.name,
                progress=advance,
            )
    saved = made.saved
    assert saved.digest is not None
    seconds = perf_counter() - started
    journal.kv(
        "import",
        made.bytes,
        seconds,
        prompt_tokens=len(made.checkpoint.tokens),
        written_bytes=saved.written_bytes,
        new_objects=saved.written_objects,
    )
    if before is not None and before.snapshot != saved.digest:
        note(f"{label} stood for {before.snapshot}, which is unnamed cache now.")
    for line in made.notes:
        note(line)
    value = {
        "name": label,
        "snapshot": saved.digest.hex,
        "path": str(folder.absolute()),
        "format": "corellm",
        "model": opened.config.name,
        "tokens": len(made.checkpoint.tokens),
        "pending": made.checkpoint.pending,
        "bytes": made.bytes,
        "uncovered_rows": made.uncovered_rows,
        "soft_tokens": made.soft_tokens,
        "bundle_name": made.checkpoint.bundle_name,
        "created_at": made.checkpoint.created_at,
        "created_on_os": made.checkpoint.created_on_os,
        "created_with_compute_units": made.checkpoint.created_with_compute_units,
        "written_objects": saved.written_objects,
        "written_bytes": saved.written_bytes,
        "notes": list(made.notes),
        "seconds": seconds,
    }
    settings.emit(
        value,
        lambda: (
            f"{label}: {len(made.checkpoint.tokens)} tokens, {size_text(made.bytes)} read, {size_text(saved.written_bytes)} written"
        ),
    )


def take_in(path: Path, folder: Path, given: str) -> dict[str, Any]:
    """Saves the checkpoint in ``folder`` under the folder's name in the store at ``path``; what `kvferry watch` tells of it. Errors as `import`."""
    opened = open_bundle(given)
    label = check_label(folder.absolute().name)
    with Store.open(path) as store:
        made = import_checkpoint(
            store,
            folder,
            bundle=app_bundle(opened),
            namespace=DEFAULT_NAMESPACE,
            name=label,
            model=opened.config.name,
            progress=lambda amount: None,
        )
    assert made.saved.digest is not None
    return {"name": label, "snapshot": made.saved.digest.hex, "tokens": len(made.checkpoint.tokens)}


def commands() -> dict[str, click.Command]:
    """These commands by verb."""
    return {c.name or "": c for c in (export, import_)}
