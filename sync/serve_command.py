"""The command serve."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import signal
import socket
import ssl
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from kvstore.cli import Settings, Text, cache_folder, common_options, config_folder, note
from kvstore.errors import InputInvalid, Unreachable

from .remotes import DEFAULT_PORT

if TYPE_CHECKING:
    from .served import Served
    from .server import Settings as How


@click.command()
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="The address to listen on; 0.0.0.0 is all of this machine's."
)
@click.option(
    "--port", type=click.IntRange(0, 65535), default=DEFAULT_PORT, show_default=True, help="0: one that is free."
)
@click.option(
    "--from", "origin", metavar="REMOTE", type=Text(),
    help="Serve what REMOTE (a bucket, say) has, read-only: fetched when it is asked for, kept in the store as far as its quota allows.",
)  # fmt: skip
@click.option(
    "--allow",
    type=click.Choice(["push"]),
    multiple=True,
    help="What clients may do beside reading, if their tokens allow it.",
)
@click.option(
    "--tls/--no-tls", default=None, help="TLS and tokens (see `kvferry pair`). Default: yes, but on loopback."
)
@click.option("--insecure", is_flag=True, help="With --no-tls beyond loopback: anybody on the way reads tokens and KV.")
@click.option(
    "--announce/--no-announce", default=True, show_default=True, help="Tell the network (mDNS) of a server with TLS."
)
@click.option(
    "--log/--no-log", default=None, help="A JSON line a request on stderr. Default: unless stderr is a terminal."
)
@common_options
def serve(
    settings: Settings,
    host: str,
    port: int,
    origin: str | None,
    allow: tuple[str, ...],
    tls: bool | None,
    insecure: bool,
    announce: bool,
    log: bool | None,
) -> None:
    """Serve the store to other machines until Ctrl-C. Read-only unless --allow push.

    On loopback by plain HTTP, to everybody on this machine; elsewhere by TLS, to devices that were paired (`kvferry pair`).
    """
    from .certificate import Certificate
    from .pairing import Offers
    from .served import Served
    from .server import Settings as How
    from .tokens import TokenBook

    loopback = is_loopback(host)
    secure = not loopback if tls is None else tls
    if not secure and not loopback and not insecure:
        raise InputInvalid(
            f"--no-tls with --host {host}: expected a loopback address, because tokens and KV would travel unprotected, found another. Leave "
            f"--no-tls out, or say --insecure."
        )
    folder = config_folder() / "server"
    certificate = Certificate(folder) if secure else None
    logging = not sys.stderr.isatty() if log is None else log
    tokens = secure or not loopback
    how = How(
        allow=frozenset({"read", *allow}),
        book=TokenBook(folder) if tokens else None,
        offers=Offers(folder) if tokens else None,
        name=socket.gethostname(),
        log=_line if logging else lambda line: None,
    )
    if origin is not None and allow:
        raise InputInvalid(
            "--from: expected no --allow beside it, because a gateway only reads, found one. Push to REMOTE itself."
        )
    with Served(settings.store) if origin is None else _gateway(settings, origin) as served:
        asyncio.run(
            _serve(served, how, settings, origin, host, port, certificate, announce and secure and not loopback)
        )


def _gateway(settings: Settings, origin: str) -> Served:
    """Serves also while the remote is away; but a mistyped one is told at once."""
    from kvstore.digest import label_file
    from kvstore.quota import read_quota

    from .cli import token
    from .gateway import Gateway
    from .remotes import open_remote

    names = cache_folder() / "gateway" / f"{label_file(origin)}.json"
    made = Gateway(settings.store, origin, lambda: open_remote(origin, config=config_folder(), token=token()), names)
    try:
        if read_quota(made.shelf.root) is None:
            note(f"{settings.store} has no quota and may grow as large as {origin}: `kvferry quota SIZE` bounds it")
        made.connect()
    except Unreachable as error:
        note(f"{error.message} Until then what is here is served.")
    except BaseException:
        made.close()
        raise
    return made


async def _serve(
    served: Served,
    how: How,
    settings: Settings,
    origin: str | None,
    host: str,
    port: int,
    certificate: Any,
    announce: bool,
) -> None:
    from .listening import listening, more_files
    from .server import application

    context: ssl.SSLContext | None = None if certificate is None else certificate.context()
    more_files()
    try:
        runner, bound = await listening(application(served, how), host, port, context)
    except OSError as error:
        raise Unreachable(
            f"{host}:{port}: expected to listen there, found that it can't be: {error.strerror or error}. Choose another --port or --host.",
            errno=error.errno,
        ) from error
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    shown = f"[{host}]" if ":" in host else host
    address = f"{'http' if context is None else 'https'}://{shown}:{bound}"
    value = {
        "address": address,
        "store": str(settings.store),
        "from": origin,
        "allow": sorted(how.allow),
        "fingerprint": None if certificate is None else certificate.fingerprint,
    }
    settings.emit(value, f"serving {settings.store} at {address}")
    sys.stdout.flush()
    with contextlib.ExitStack() as stack:
        if announce:
            # A thread of its own, so that the first client needn't wait for it.
            await asyncio.to_thread(_announce, stack, how.name, host, bound, certificate.fingerprint)
        await stop.wait()
    note("stopping: requests under way are finished first")
    with contextlib.suppress(asyncio.CancelledError):
        await runner.cleanup()


def _announce(stack: contextlib.ExitStack, name: str, host: str, port: int, fingerprint: str) -> None:
    """Told by name in `kvferry peers`; where the network can't be told, the address still works."""
    from .discovery import announced
    from .pair_commands import own_address

    addresses = [own_address()] if host in ("0.0.0.0", "::") else [host]
    try:
        stack.enter_context(announced(name, addresses, port, fingerprint))
    except (OSError, ValueError) as error:
        note(f"the network was not told of this server ({error}); its address works all the same")


def is_loopback(host: str) -> bool:
    """Whether an address can't be reached from another machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _line(line: dict[str, Any]) -> None:
    sys.stderr.write(json.dumps({"time": round(time.time(), 3), **line}, separators=(",", ":")) + "\n")


def commands() -> dict[str, click.Command]:
    """The command by verb."""
    return {"serve": serve}
