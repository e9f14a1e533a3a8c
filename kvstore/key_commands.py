"""The commands about who vouches for snapshots: keys, sign."""

from __future__ import annotations

import socket

import click

from .cli import Label, Settings, Text, common_options, config_folder, note, terminal_width
from .plaintext import table


@click.group()
def keys() -> None:
    """The keys that this machine signs with, and those of producers that it trusts."""


@keys.command("new")
@click.option("--name", type=Text(), help="For people.  [default: this machine's name]")
@common_options
def new(settings: Settings, name: str | None) -> None:
    """Make a key to sign with. Its secret half stays in the settings folder; the key it prints is for those who shall trust it."""
    from .keyring import Keyring

    made = Keyring(config_folder()).make(name or socket.gethostname())
    settings.emit({"name": made.name, "key": made.key}, made.key)
    note(f"elsewhere, `kvferry keys trust {made.key} --name {made.name}` trusts it")


@keys.command("ls")
@common_options
def ls(settings: Settings) -> None:
    """List the keys, own and trusted."""
    from .keyring import Keyring

    ring = Keyring(config_folder())
    trusted = ring.trusted()
    rows = [
        {"name": one.name, "key": one.key, "own": True, "trusted": bytes.fromhex(one.key) in trusted}
        for one in ring.own()
    ]
    own = {row["key"] for row in rows}
    rows += [
        {"name": name, "key": key.hex(), "own": False, "trusted": True}
        for key, name in trusted.items()
        if key.hex() not in own
    ]

    def text() -> str:
        cells = [
            (row["name"], "own" if row["own"] else "", "trusted" if row["trusted"] else "", row["key"]) for row in rows
        ]
        return table(cells, ("name", "own", "trusted", "key"), terminal_width()) if cells else ""

    settings.emit(rows, text)


@keys.command("trust")
@click.argument("key", type=Text())
@click.option("--name", type=Text(), help="For people.  [default: the key's first digits]")
@common_options
def trust(settings: Settings, key: str, name: str | None) -> None:
    """Trust a producer's KEY: what it signed passes `--require-signed` here."""
    from .keyring import Keyring

    given = Keyring(config_folder()).trust(key, name or key[:12])
    settings.emit({"name": given.name, "key": given.key}, f"{given.name} is trusted")


@keys.command("untrust")
@click.argument("key", type=Text())
@common_options
def untrust(settings: Settings, key: str) -> None:
    """Trust a producer's KEY, or name, no longer. What was fetched stays."""
    from .keyring import Keyring

    gone = Keyring(config_folder()).untrust(key)
    settings.emit({"name": gone.name, "key": gone.key}, f"{gone.name} is no longer trusted")


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...", type=Label())
@click.option("--key", type=Text(), help="The name of the key.  [default: the only one]")
@common_options
def sign(settings: Settings, names: tuple[str, ...], key: str | None) -> None:
    """Sign the snapshots that names stand for. `kvferry push` takes the signatures along."""
    from .keyring import Keyring
    from .store import Store

    ring = Keyring(config_folder())
    rows = []
    with Store.open(settings.store, create=False) as store:
        for name in names:
            digest = store.resolve(name)
            store.shelf.records.snapshot(digest)  # nobody signs what can't be read
            made = ring.sign(digest, key)
            store.shelf.records.add_signatures(digest, [made])
            rows.append({"name": name, "snapshot": digest.hex, "key": made.key.hex()})
    settings.emit(
        {"signed": rows},
        "\n".join(f"{row['name']} ({row['snapshot'][:12]}) is signed by {row['key'][:12]}" for row in rows),
    )


def commands() -> dict[str, click.Command]:
    """The commands by verb."""
    return {"keys": keys, "sign": sign}
