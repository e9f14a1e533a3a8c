"""Who vouches for what is pulled: true signatures travel, others don't, and what is required is asked for before any KV comes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from ferries import assert_restores, object_files, pulled, pushed, quarantined, save, verify
from live import serving

from kvstore import Store
from kvstore.codec import encode_ref, encode_signatures
from kvstore.digest import SnapshotDigest, label_file
from kvstore.errors import SignaturesCorrupt, Unsigned
from kvstore.signatures import Signature, sign
from kvstore.snapshot import Ref
from sync import Folder, plan_pull, pull, push
from sync.client import Client
from sync.onefile import export, import_, plan_export
from sync.server import Settings
from sync.tokens import NotAllowed

MAC, OTHER = bytes([1]) * 32, bytes([2]) * 32


def key_of(secret: bytes) -> bytes:
    return sign(secret, SnapshotDigest(bytes(32))).key


TRUSTED = {key_of(MAC): "mac"}


def signed(store: Store, name: str, tokens: int, *secrets: bytes, seed: str = "a") -> SnapshotDigest:
    digest = save(store, name, tokens, seed).digest
    assert digest is not None
    if secrets:
        store.shelf.records.add_signatures(digest, [sign(secret, digest) for secret in secrets])
    return digest


def nothing_came(store: Store) -> bool:
    return not (object_files(store.shelf.path) or quarantined(store.shelf.path) or list(store.shelf.records.refs()))


def put(stick: Path, digest: SnapshotDigest, *signatures: Signature) -> None:
    """Writes signatures as somebody who has the folder can: whatever they are."""
    (stick / "snapshots" / f"{digest}.sig").write_bytes(encode_signatures(digest, sorted(signatures)))


def test_they_travel_along(mac: Store, phone: Store, stick: Path) -> None:
    digest = signed(mac, "book", 200, MAC, OTHER)
    pushed(mac, stick, "book")
    with Folder.open(stick) as remote:
        pull(phone, remote, ["book"], required=TRUSTED)
    assert phone.shelf.records.signatures(digest) == mac.shelf.records.signatures(digest)
    assert_restores(phone, "book", 200)
    # Signed later: pushed and pulled without any object.
    later = bytes([3]) * 32
    mac.shelf.records.add_signatures(digest, [sign(later, digest)])
    assert pushed(mac, stick, "book").objects == 0 and pulled(phone, stick, "book").objects == 0
    assert key_of(later) in {s.key for s in phone.shelf.records.signatures(digest)}


def _bits(digest: SnapshotDigest) -> Signature:
    good = sign(MAC, digest)
    return Signature(good.key, good.raw[:40] + bytes([good.raw[40] ^ 8]) + good.raw[41:])


LIES: dict[str, Callable[[SnapshotDigest], Signature]] = {
    "flipped bits": _bits,
    "of another snapshot": lambda digest: sign(MAC, SnapshotDigest(bytes(32))),
    "by another key": lambda digest: sign(OTHER, digest),
    "another key's under a trusted one": lambda digest: Signature(key_of(MAC), sign(OTHER, digest).raw),
    "a plain digest": lambda digest: Signature(key_of(MAC), digest.raw * 2),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_are_refused_before_objects(lie: str, mac: Store, phone: Store, stick: Path) -> None:
    digest = signed(mac, "book", 200)
    pushed(mac, stick, "book")
    put(stick, digest, LIES[lie](digest))
    with Folder.open(stick) as remote:
        for ask in (plan_pull, pull):
            with pytest.raises(Unsigned) as told:
                ask(phone, remote, ["book"], required=TRUSTED)
        true = [key_of(OTHER).hex()] if lie == "by another key" else []
        assert told.value.details["signed_by"] == true and all(key in str(told.value) for key in true)
    assert nothing_came(phone)
    pulled(phone, stick, "book")  # without the demand it may come, and false signatures stay behind
    assert [s.key.hex() for s in phone.shelf.records.signatures(digest)] == true
    put(stick, digest, sign(MAC, digest))
    with Folder.open(stick) as remote:
        pull(phone, remote, ["book"], required=TRUSTED)


def test_unsigned_untrusted_and_no_longer_trusted(mac: Store, phone: Store, stick: Path) -> None:
    signed(mac, "book", 100)
    pushed(mac, stick, "book")
    with Folder.open(stick) as remote:
        with pytest.raises(Unsigned, match="signed by nobody"):
            pull(phone, remote, ["book"], required=TRUSTED)
        signed(mac, "book", 100, OTHER)
        pushed(mac, stick, "book")
        with pytest.raises(Unsigned, match=key_of(OTHER).hex()):
            pull(phone, remote, ["book"], required=TRUSTED)
        with pytest.raises(Unsigned):
            pull(phone, remote, ["book"], required={})
        assert nothing_came(phone)
        pull(phone, remote, ["book"], required={key_of(OTHER): "other"})
        with pytest.raises(Unsigned):  # what is here already is no excuse
            pull(phone, remote, ["book"], required=TRUSTED)


def test_a_name_that_is_moved_to_something_else_is_refused(mac: Store, phone: Store, stick: Path) -> None:
    """Who can write the remote lets a name stand for another snapshot, beside the signatures of the first."""
    good, bad = signed(mac, "book", 200, MAC), signed(mac, "trap", 200, seed="b")
    pushed(mac, stick, "book", "trap")
    (stick / "refs" / label_file("book")).write_bytes(encode_ref(Ref("book", bad, 0)))
    for copy in ((stick / "snapshots" / f"{good}.sig").read_bytes(), encode_signatures(bad, [sign(MAC, good)])):
        (stick / "snapshots" / f"{bad}.sig").write_bytes(copy)
        with Folder.open(stick) as remote, pytest.raises((Unsigned, SignaturesCorrupt)):
            pull(phone, remote, ["book"], required=TRUSTED)
        assert nothing_came(phone)
    pulled(phone, stick, "book", rename="seen")  # damaged or false signatures keep nobody who requires none
    verify(phone.shelf.path)


def test_a_signature_says_nothing_about_names(mac: Store, phone: Store, stick: Path) -> None:
    """What was signed may be given another name by whoever has the remote: the signature is the content's."""
    digest = signed(mac, "book", 100, MAC)
    pushed(mac, stick, "book")
    (stick / "refs" / label_file("other")).write_bytes(encode_ref(Ref("other", digest, 0)))
    with Folder.open(stick) as remote:
        pull(phone, remote, ["other"], required=TRUSTED)
    assert_restores(phone, "other", 100)


def test_over_the_wire(mac: Store, phone: Store, tmp_path: Path) -> None:
    digest = signed(mac, "book", 200, MAC)
    with serving(tmp_path / "served") as peer, Client.open(peer) as client:
        push(mac, client, ["book"])
        pull(phone, client, ["book"], required=TRUSTED)
        with pytest.raises(Unsigned):
            pull(phone, client, ["book"], required={key_of(OTHER): "other"})
    assert phone.shelf.records.signatures(digest) == mac.shelf.records.signatures(digest)
    with serving(tmp_path / "served", Settings()) as peer, Client.open(peer) as client:
        assert list(client.signatures(digest)) == [sign(MAC, digest)]
        with pytest.raises(NotAllowed):
            client.add_signatures(digest, [sign(OTHER, digest)])


def test_in_one_file(mac: Store, phone: Store) -> None:
    def written(name: str) -> bytes:
        return b"".join(bytes(piece) for piece in export(mac, plan_export(mac, name, trimmed=False), lambda _: None))

    def take(data: bytes, required: dict[bytes, str] | None) -> None:
        import_(phone, iter([data]), "f.kvferry", name=None, force=False, advance=lambda _: None, required=required)

    digest = signed(mac, "book", 200, MAC)
    signed(mac, "plain", 200, seed="b")
    data, plain = written("book"), written("plain")
    assert len(data) == plan_export(mac, "book", trimmed=False).bytes
    for refused, required in ((data, {key_of(OTHER): "other"}), (plain, TRUSTED)):
        with pytest.raises(Unsigned):
            take(refused, required)
        assert nothing_came(phone)
    at = data.index(sign(MAC, digest).raw)
    false = encode_signatures(digest, [_bits(digest)])
    with pytest.raises(Unsigned):
        take(data.replace(encode_signatures(digest, [sign(MAC, digest)]), false), TRUSTED)
    with pytest.raises(Exception, match="signatures of"):
        take(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], None)
    assert nothing_came(phone)
    take(data, TRUSTED)
    take(plain, None)
    assert phone.shelf.records.signatures(digest) == (sign(MAC, digest),)
    assert_restores(phone, "book", 200)
    assert_restores(phone, "plain", 200, "b")
