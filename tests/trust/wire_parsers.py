"""Parsers of what other machines send, and of the files in which a server and its clients remember each other."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mutations import as_json, as_msgpack, as_text
from parsing import Case, Parser, files_in, in_folder


def maps(_: Path) -> Case:
    """Every map of the protocol. What is accepted is the same value when it is written and read again."""
    import msgspec

    from sync import bodies

    samples: dict[type, Any] = {
        int: 3,
        str: "default",
        bytes: bytes(range(32)),
        bool: True,
    }

    def sample(kind: Any) -> Any:
        """A value of an annotated type."""
        info = msgspec.inspect.type_info(kind) if not isinstance(kind, msgspec.inspect.Type) else kind
        match info:
            case msgspec.inspect.StructType():
                return {one.encode_name: sample(one.type) for one in info.fields}
            case msgspec.inspect.VarTupleType():
                return (sample(info.item_type),) * 2
            case msgspec.inspect.TupleType():
                return tuple(sample(one) for one in info.item_types)
            case msgspec.inspect.UnionType():
                return sample(next(one for one in info.types if not isinstance(one, msgspec.inspect.NoneType)))
        return samples[{"Int": int, "Str": str, "Bytes": bytes, "Bool": bool}[type(info).__name__.removesuffix("Type")]]

    shapes = {shape.__name__: shape for shape in bodies.Shape.__subclasses__()}
    assert len(shapes) > 10
    seeds = [(name, bodies.encode(msgspec.convert(sample(shape), shape))) for name, shape in shapes.items()]

    def read(name: str, data: bytes) -> None:
        value = bodies.decode(data, shapes[name], "a body")
        assert bodies.decode(bodies.encode(value), shapes[name], "a body") == value

    return Case(seeds, read, {"": as_msgpack})


def streams(folder: Path) -> Case:
    """Several objects' files one after the other, cut anywhere: each is verified, or the stream is refused."""
    from harmed import fill

    from kvstore.digest import ContentDigest
    from sync.frames import check_frame
    from sync.streams import frames

    fill(folder / "store")
    files = [path.read_bytes() for path in sorted(folder.glob("store/objects/*/*"))]
    good, chance = set(files), random.Random(5)

    def read(_: str, data: bytes) -> None:
        cuts = sorted(chance.randrange(len(data) + 1) for _ in range(chance.choice([0, 1, 20])))
        pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        got = b""
        for header, pieces_of_one in frames(iter(pieces), 8):
            checked = check_frame(ContentDigest(header.name), header.content_length, pieces_of_one)
            got += b"".join(bytes(piece) for piece in checked)
        assert got == data, "bytes between frames"

    assert len(good) > 8
    return Case([("body", b"".join(files[a : a + 4])) for a in range(0, 16, 4)], read)


def one_file(folder: Path) -> Case:
    """A snapshot as one file: taken in whole, or not at all."""
    from harmed import SAVED, fill, same
    from kvmemory import HEAD, load

    from kvstore import Store
    from kvstore.errors import KVError
    from sync.onefile import export, import_, plan_export

    fill(folder / "source")
    with Store.open(folder / "source") as source:
        made = {
            name: b"".join(
                bytes(piece) for piece in export(source, plan_export(source, name, trimmed=False), lambda _: None)
            )
            for name in ("a", "trimmed", "cold")
        }
    target = Store.open(folder / "target")

    def read(_: str, data: bytes) -> None:
        records = target.shelf.records
        try:
            import_(target, pieces(data), "file", name="taken", force=True, advance=lambda _: None)
        except KVError:
            assert records.ref("taken") is None, "refused, and given a name"
            raise
        match = target.match("taken", head=HEAD)
        records.remove(["taken"])
        items = list(match.snapshot.items)
        assert items in SAVED.values(), "a snapshot that nobody saved"
        same(load(target, match), match, items)

    def pieces(data: bytes) -> Iterator[bytes]:
        for at in range(0, len(data), 5000):
            yield data[at : at + 5000]

    return Case(list(made.items()), read)


def tokens(folder: Path) -> Case:
    from sync.tokens import TokenBook, TokenRefused

    good = folder / "good"
    book = TokenBook(good)
    text, _ = book.issue("phone", ("read",), ("default",))
    book.issue("tablet", ("read",), None)
    book.close()
    (good / "tmp").rmdir(), (good / "book").rmdir()

    def read(path: Path) -> None:
        opened = TokenBook(path)
        try:
            opened.tokens()
            with contextlib.suppress(TokenRefused):
                opened.check(text)
        finally:
            opened.close()

    return Case(files_in(good, "*.json"), in_folder(folder, good, read), {"json": as_json})


def offers(folder: Path) -> Case:
    from sync.pairing import Offers

    good = folder / "good"
    opened = Offers(good)
    secret = opened.open(("read",), None)
    opened.close()
    (good / "tmp").rmdir(), (good / "book").rmdir()

    def read(path: Path) -> None:
        again = Offers(path)
        try:
            again.take(secret)
            assert not again.waiting(), "taken, and still open"
        finally:
            again.close()

    return Case(files_in(good, "*.json"), in_folder(folder, good, read), {"json": as_json})


def invitations(_: Path) -> Case:
    from sync.pairing import Invitation

    one = Invitation("192.168.1.20", 8791, "ab" * 32, "ABCDEFGH")

    def read(kind: str, data: bytes) -> None:
        text = data.decode("utf-8", "replace")
        made = Invitation.from_url(text) if kind == "url" else Invitation.from_code(text, one.host, one.port)
        if kind == "url":
            assert Invitation.from_url(made.url) == made
        assert 0 < made.port < 65536 and len(made.secret) == 8

    words = as_text((b"[::1]", b"%00", b"@", b"#", b"&f=", b":99999", b"\xd9\xa1", b"\xff", b"kvferry://", b"?"))
    return Case([("url", one.url.encode()), ("code", one.code.encode())], read, {"": words})


def servers(folder: Path) -> Case:
    from sync.known import Known, Server

    good = folder / "good"
    Known(good).remember(
        Server("host", 8791, "ab" * 32, "kvf1.0.0", scopes=("read",), namespaces=("default",), name="mac")
    )
    (good / "tmp").rmdir()

    def read(path: Path) -> None:
        for server in Known(path).servers():
            assert Known(path).find(server.host, server.port) is not None
            server.peer()

    return Case(files_in(good, "*.json"), in_folder(folder, good, read), {"json": as_json})


def prefix_records(_: Path) -> Case:
    """A bucket's hints: anything else is a miss."""
    from kvstore.digest import BlockId, SnapshotDigest
    from kvstore.errors import InputInvalid
    from sync.prefixes import Record, decode, encode

    def read(_: str, data: bytes) -> None:
        record = decode(data)
        if record is None:
            raise InputInvalid("prefix record: expected a hint, found something else, which is a miss")
        assert decode(encode(record)) == record

    good = [Record(BlockId(bytes(range(32))), SnapshotDigest(bytes(32)), number) for number in (0, 1, 70_000)]
    return Case([("record", encode(record)) for record in good], read, {"": as_msgpack})


WIRE: tuple[Parser, ...] = (
    Parser("wire maps", ("sync.bodies",), maps),
    Parser("frame stream", ("sync.streams",), streams),
    Parser("one file", ("sync.onefile",), one_file),
    Parser("tokens", ("sync.tokens",), tokens),
    Parser("offers", ("sync.pairing",), offers),
    Parser("invitations", ("sync.pairing",), invitations),
    Parser("prefix records", ("sync.prefixes",), prefix_records),
    Parser("known servers", ("sync.known",), servers),
)
