"""The commands about what stays and what comes back: pin, unpin, trash."""

from __future__ import annotations

import click

from .cli import Label, Settings, common_options, progress, terminal_width
from .plaintext import counted, size_text, table


@click.command()
@click.argument("name", type=Label())
@click.option(
    "--as", "label", metavar="LABEL", help="Call the pin pin/LABEL.  [default: the name and the digest's first digits]"
)
@common_options
def pin(settings: Settings, name: str, label: str | None) -> None:
    """Keep the snapshot that NAME stands for now, whatever becomes of the name. NAME may be a digest, or its first 8 digits or more."""
    from . import pins
    from .shelf import Shelf

    with Shelf.open(settings.store, create=False) as shelf:
        ref = pins.pin(shelf.records, name, label)
    settings.emit({"pin": ref.label, "snapshot": ref.snapshot.hex}, f"{ref.label} keeps {ref.snapshot.hex[:12]}")


@click.command()
@click.argument("labels", nargs=-1, required=True, metavar="LABEL...", type=Label())
@common_options
def unpin(settings: Settings, labels: tuple[str, ...]) -> None:
    """Remove pins, with or without pin/ before their labels. What no other name keeps becomes cache."""
    from . import pins
    from .shelf import Shelf

    with Shelf.open(settings.store, create=False) as shelf:
        gone = pins.unpin(shelf.records, labels)
    removed = [{"pin": name, "snapshot": None if digest is None else digest.hex} for name, digest in gone]
    settings.emit({"unpinned": removed}, "\n".join(f"removed {name}" for name, _ in gone))


@click.group()
def trash() -> None:
    """List what was collected, bring it back, or delete it for good."""


@trash.command("ls")
@common_options
def trash_ls(settings: Settings) -> None:
    """List the snapshots in the trash, and names that were removed and can be given back."""
    from .gauge import tree_bytes
    from .shelf import Shelf
    from .trash import collected

    with Shelf.open(settings.store, create=False) as shelf:
        found, total = collected(shelf), tree_bytes(shelf.root, "trash")
    rows = [
        (
            one.digest.hex[:12],
            ", ".join(one.names),
            "unreadable" if one.tokens is None else f"{one.tokens:,}",
            "only the name" if one.in_store else size_text(one.bytes),
            "" if not one.lacking else f"{counted(one.lacking, 'object')} lost",
        )
        for one in found
    ]
    header = ("snapshot", "name", "tokens", "in the trash", "")
    shown = [table(rows, header, terminal_width(), right=("tokens", "in the trash"))] if rows else []
    settings.emit(
        {"trash_bytes": total, "snapshots": [one.value() for one in found]},
        "\n".join([*shown, f"{size_text(total)} in the trash"]),
    )


@trash.command("restore")
@click.argument("what", metavar="NAME", type=Label())
@click.option(
    "--as", "name", type=Label(), metavar="NEWNAME", help="Name it so; else it gets back the name it was removed with."
)
@common_options
def trash_restore(settings: Settings, what: str, name: str | None) -> None:
    """Bring back a snapshot by the NAME it was removed with, or by its digest's first 8 digits or more.

    By a digest and without --as it is cache again, which the next gc collects.
    """
    from .store import Store
    from .trash import restore

    with Store.open(settings.store, create=False) as store:
        done = restore(store, what, name)
    value = {
        "snapshot": done.digest.hex,
        "name": done.name,
        "tokens": done.tokens,
        "objects": done.objects,
        "lacking": done.lacking,
    }
    told = f"{done.name or done.digest.hex[:12]} is back: {counted(done.tokens, 'token')}, {counted(done.objects, 'object')} from the trash"
    if done.lacking:
        told += f"; {counted(done.lacking, 'object')} lost: `kvferry pull REMOTE NAME` fetches what is missing from a remote that has it"
    if done.name is None:
        told += f"; without a name the next gc collects it again, `kvferry pin {done.digest.hex[:12]}` keeps it"
    settings.emit(value, told)


@trash.command("empty")
@common_options
def trash_empty(settings: Settings) -> None:
    """Delete what lies in the trash for good. Works on a full disk."""
    from . import prune
    from .gauge import tree_bytes
    from .store import Store

    with Store.open(settings.store, create=False) as store:
        total = tree_bytes(store.shelf.root, "trash")
        with progress("Deleting", max(1, total), "bytes") as advance:
            freed = prune.purge(store, advance)
    settings.emit({"freed_bytes": freed}, f"deleted {size_text(freed)}")


def commands() -> dict[str, click.Command]:
    """The commands by verb."""
    return {"pin": pin, "unpin": unpin, "trash": trash}
