"""The commands that decide who may ask whom: pair, tokens, servers."""

from __future__ import annotations

import socket
from pathlib import Path

import click

from kvstore.cli import Number, Place, Settings, Text, common_options, config_folder, note
from kvstore.errors import InputInvalid, SnapshotMissing
from kvstore.plaintext import table

from .remotes import DEFAULT_PORT
from .tokens import SCOPES

_SCOPE = click.option(
    "--scope", "scopes", type=click.Choice(SCOPES), multiple=True, help="What it may do, several times. Default: read."
)
_SPACE = click.option(
    "--namespace", "namespaces", multiple=True, type=Text(), help="What it may see, several times. Default: all."
)


@click.command()
@click.argument("invitation", required=False, type=Text(), metavar="[URL|CODE]")
@click.option("--at", metavar="HOST[:PORT]", type=Text(), help="With a CODE: the server's address.")
@click.option("--device", type=Text(), help="This machine's name for the server's list. Default: its host name.")
@click.option(
    "--host", type=Text(), help="On the server: the address that the other device reaches it by. Default: a guess."
)
@click.option(
    "--port", type=click.IntRange(1, 65535), default=DEFAULT_PORT, show_default=True, help="On the server: its port."
)
@_SCOPE
@_SPACE
@click.option("--png", type=Place(), metavar="FILE", help="On the server: write the QR code to FILE too.")
@common_options
def pair(
    settings: Settings,
    invitation: str | None,
    at: str | None,
    device: str | None,
    host: str | None,
    port: int,
    scopes: tuple[str, ...],
    namespaces: tuple[str, ...],
    png: Path | None,
) -> None:
    """Let another device use this machine's `kvferry serve`; or, with what that shows, become that device.

    Without an argument it shows a URL, a QR code and a code to type, for one device and ten minutes.
    """
    if invitation is None:
        _offer(settings, host, port, scopes or ("read",), namespaces or None, png)
    else:
        _accept(settings, invitation, at, device or socket.gethostname())


def _offer(
    settings: Settings,
    host: str | None,
    port: int,
    scopes: tuple[str, ...],
    namespaces: tuple[str, ...] | None,
    png: Path | None,
) -> None:
    import segno

    from .certificate import Certificate
    from .pairing import MINUTES, Invitation, Offers

    folder = config_folder() / "server"
    fingerprint = Certificate(folder).fingerprint
    offers = Offers(folder)
    try:
        secret = offers.open(scopes, namespaces)
    finally:
        offers.close()
    made = Invitation(host or own_address(), port, fingerprint, secret)
    code = segno.make(made.url, error="m")
    if png is not None:
        code.save(str(png), kind="png", scale=8, border=4)

    def text() -> str:
        import io

        drawn = io.StringIO()
        code.terminal(drawn, compact=True, border=2)
        return (
            f"{drawn.getvalue()}\n{made.url}\n\nOn the other device, within {MINUTES} minutes:\n"
            f"  kvferry pair '{made.url}'\nor, typed:\n  kvferry pair {made.code} --at {made.host}:{made.port}"
        )

    value = {"url": made.url, "code": made.code, "host": made.host, "port": made.port, "fingerprint": fingerprint,
             "scopes": list(scopes), "namespaces": None if namespaces is None else list(namespaces), "minutes": MINUTES}  # fmt: skip
    settings.emit(value, text)


def _accept(settings: Settings, invitation: str, at: str | None, device: str) -> None:
    from .bodies import MAP_TYPE, MAX_MAP, Pair, Paired, decode, encode
    from .connection import Connection, Peer
    from .known import Known, Server
    from .pairing import Invitation, check_paired

    if "://" in invitation:
        given = Invitation.from_url(invitation)
    elif at is None:
        raise InputInvalid("--at HOST[:PORT]: expected the server's address beside a code, found none")
    else:
        host, port = _host_and_port(at)
        given = Invitation.from_code(invitation, host, port)
    connection = Connection(Peer(given.host, given.port, given.fingerprint))
    body = encode(Pair(given.secret, device))
    try:
        with connection.asking("POST", "/v1/pair", body, {"Content-Type": MAP_TYPE}) as answer:
            paired = check_paired(decode(connection.map(answer, MAX_MAP), Paired, "the answer"))
    finally:
        connection.close()
    assert connection.shown is not None
    server = Server(
        given.host, given.port, connection.shown, paired.token, paired.name, paired.scopes, paired.namespaces
    )
    Known(config_folder()).remember(server)
    address = f"https://{given.host}:{given.port}"
    value = {"address": address, "name": paired.name, "fingerprint": connection.shown, "scopes": list(paired.scopes),
             "namespaces": None if paired.namespaces is None else list(paired.namespaces)}  # fmt: skip
    settings.emit(value, f"paired with {paired.name}: `kvferry pull {address} NAME`; may {', '.join(paired.scopes)}")


def _host_and_port(text: str) -> tuple[str, int]:
    from urllib.parse import urlsplit

    try:
        url = urlsplit(f"//{text}")
        host, port = url.hostname, url.port
    except ValueError:
        host, port = None, None
    if not host:
        raise InputInvalid(f"--at: expected HOST or HOST:PORT, found {text!r:.80}")
    return host, port or DEFAULT_PORT


def own_address() -> str:
    """The address that this machine is reached by in its network, as far as its routes say; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            found: str = probe.getsockname()[0]
        except OSError:
            note("no network was found: give the address that the other device reaches this machine by, with --host")
            return "127.0.0.1"
    return found


@click.group()
def tokens() -> None:
    """Who may use this machine's `kvferry serve`."""


@tokens.command("ls")
@common_options
def tokens_ls(settings: Settings) -> None:
    """List the tokens: who has them, what they may do and see."""
    from .tokens import TokenBook

    book = TokenBook(config_folder() / "server")
    rows = [
        {
            "id": t.id,
            "device": t.device,
            "scopes": list(t.scopes),
            "namespaces": None if t.namespaces is None else list(t.namespaces),
            "created": t.created,
        }
        for t in book.tokens()
    ]
    shown = [
        (t.id, t.device, ", ".join(t.scopes), "all" if t.namespaces is None else ", ".join(t.namespaces))
        for t in book.tokens()
    ]
    settings.emit(
        rows,
        lambda: (
            table(shown, ("token", "device", "may", "namespaces")) if shown else "no tokens; `kvferry pair` gives one"
        ),
    )


@tokens.command("add")
@click.argument("device", type=Text())
@_SCOPE
@_SPACE
@common_options
def tokens_add(settings: Settings, device: str, scopes: tuple[str, ...], namespaces: tuple[str, ...]) -> None:
    """Make a token for DEVICE by hand, shown once: for KVFERRY_TOKEN where pairing can't be."""
    from .tokens import TokenBook

    text, token = TokenBook(config_folder() / "server").issue(device, scopes or ("read",), namespaces or None)
    settings.emit({"id": token.id, "token": text, "device": device, "scopes": list(token.scopes)}, text)


@tokens.command("revoke")
@click.argument("id", type=Text())
@common_options
def tokens_revoke(settings: Settings, id: str) -> None:
    """Take a token away. It counts at once, in a running server too."""
    from .tokens import TokenBook

    gone = TokenBook(config_folder() / "server").revoke(id)
    settings.emit({"id": gone.id, "device": gone.device}, f"revoked {gone.id} of {gone.device}")


@click.group()
def servers() -> None:
    """The servers that this machine was paired with."""


@servers.command("ls")
@common_options
def servers_ls(settings: Settings) -> None:
    """List them."""
    from .known import Known

    known = Known(config_folder()).servers()
    rows = [{"address": f"https://{s.host}:{s.port}", "name": s.name, "fingerprint": s.fingerprint, "scopes": list(s.scopes),
             "namespaces": None if s.namespaces is None else list(s.namespaces)} for s in known]  # fmt: skip
    shown = [(f"https://{s.host}:{s.port}", s.name, ", ".join(s.scopes)) for s in known]
    settings.emit(rows, lambda: table(shown, ("address", "name", "may")) if shown else "none; `kvferry pair` adds one")


@servers.command("forget")
@click.argument("address", metavar="HOST[:PORT]", type=Text())
@common_options
def servers_forget(settings: Settings, address: str) -> None:
    """Forget a server and the token that it gave. Its own list keeps the token until it is revoked there."""
    from .known import Known

    host, port = _host_and_port(address.removeprefix("https://").removeprefix("kvferry://").rstrip("/"))
    if not Known(config_folder()).forget(host, port):
        raise SnapshotMissing(f"no server {host}:{port}. `kvferry servers ls` lists them.", address=address)
    settings.emit({"address": f"https://{host}:{port}"}, f"forgot {host}:{port}")


@click.command()
@click.option("--seconds", type=Number(0.1, 60.0), default=3.0, show_default=True, help="How long to listen.")
@common_options
def peers(settings: Settings, seconds: float) -> None:
    """List the servers that announce themselves on this network, and whether this machine was paired with them."""
    from kvstore.cli import waiting

    from .discovery import peers as listen
    from .known import Known

    with waiting("Listening"):
        found = listen(seconds)
    known = {server.fingerprint for server in Known(config_folder()).servers()}
    rows = [
        {
            "name": f.name,
            "addresses": list(f.addresses),
            "port": f.port,
            "fingerprint": f.fingerprint,
            "paired": f.fingerprint in known,
        }
        for f in found
    ]
    shown = [
        (f.name, ", ".join(f"https://{a}:{f.port}" for a in f.addresses), "yes" if f.fingerprint in known else "no")
        for f in found
    ]
    settings.emit(
        rows,
        lambda: (
            table(shown, ("server", "address", "paired"))
            if shown
            else "none answered; an address that you know always works"
        ),
    )


def commands() -> dict[str, click.Command]:
    """These commands by verb."""
    return {"peers": peers, "pair": pair, "tokens": tokens, "servers": servers}
