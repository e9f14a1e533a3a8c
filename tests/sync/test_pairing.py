"""Pairing over TLS: invitations, offers, tokens, revocation; and who sees what."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from ferries import assert_restores, save
from live import serving

from kvstore import Store
from kvstore.errors import InputInvalid, ObjectMissing, RefConflict, SnapshotMissing
from sync import pull, push
from sync.bodies import MAP_TYPE, MAX_MAP, Pair, Paired, decode, encode
from sync.certificate import Certificate
from sync.client import Client
from sync.connection import Connection, FingerprintMismatch, Peer
from sync.pairing import ATTEMPTS, Invitation, Offers
from sync.plan import objects
from sync.server import Settings
from sync.tokens import NotAllowed, TokenBook, TokenRefused

SEEN = frozenset({"read", "push"})
INVITATION = Invitation("10.0.0.5", 8765, "00112233445566778899" + "ab" * 22, "AW340Y65")


class Host:
    """A server with TLS and tokens, and the folder that says who may ask."""

    def __init__(self, folder: Path, peer: Peer, fingerprint: str) -> None:
        self.folder, self.peer, self.fingerprint = folder, replace(peer, fingerprint=fingerprint), fingerprint

    def token(self, *scopes: str, namespaces: list[str] | None = None) -> Peer:
        text, _ = TokenBook(self.folder).issue("test", scopes, namespaces)
        return replace(self.peer, token=text)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    folder = tmp_path / "config"
    certificate = Certificate(folder)
    how = Settings(allow=SEEN, book=TokenBook(folder), offers=Offers(folder), name="producer")
    with serving(tmp_path / "served", how, certificate.context()) as peer:
        yield Host(folder, peer, certificate.fingerprint)


def paired(host: Host, secret: str, fingerprint: str | None = None) -> Paired:
    connection = Connection(replace(host.peer, fingerprint=fingerprint or host.fingerprint))
    try:
        with connection.asking("POST", "/v1/pair", encode(Pair(secret, "phone")), {"Content-Type": MAP_TYPE}) as answer:
            return decode(connection.map(answer, MAX_MAP), Paired, "answer")
    finally:
        connection.close()


def test_an_invitation_there_and_back() -> None:
    assert Invitation.from_url(INVITATION.url) == INVITATION
    assert INVITATION.code == "AW34-0Y65-008J-4CT4-ANK7-F24S"
    again = Invitation.from_code("aw34 oy65 oo8j-4ct4-ank7-f24s", "10.0.0.5", 8765)
    assert again == replace(INVITATION, fingerprint=INVITATION.fingerprint[:20])
    assert Invitation.from_url(replace(INVITATION, host="fe80::1").url).host == "fe80::1"


@pytest.mark.parametrize("url", ["", "kvferry://", "kvferry://h:1/?f=00&s=AW340Y65", "https://h:1/?f=" + "0" * 64 + "&s=AW340Y65",
                                 "kvferry://h/?f=" + "0" * 64 + "&s=AW340Y65", "kvferry://h:99999/?f=" + "0" * 64 + "&s=AW340Y65",
                                 "kvferry://h:1/?f=" + "0" * 64 + "&s=AW340Y6", "kvferry://h:1/?f=" + "0" * 64 + "&s=AW340Y65&x=1"])  # fmt: skip
def test_what_is_no_invitation(url: str) -> None:
    with pytest.raises(InputInvalid):
        Invitation.from_url(url)


def test_a_secret_works_once(host: Host) -> None:
    secret = Offers(host.folder).open(["read"], ["default"])
    got = paired(host, secret.lower())
    assert (got.scopes, got.namespaces, got.name) == (("read",), ("default",), "producer")
    with Client.open(replace(host.peer, token=got.token)) as client:
        assert client.info.namespaces == ("default",)
    with pytest.raises(TokenRefused):
        paired(host, secret)


def test_wrong_secrets_close_the_offer(host: Host) -> None:
    secret = Offers(host.folder).open(["read"], None)
    for wrong in ["00000000"] * (ATTEMPTS - 1) + ["x" * 3000]:
        assert Offers(host.folder).waiting()
        with pytest.raises(TokenRefused):
            paired(host, wrong)
    assert not Offers(host.folder).waiting()
    with pytest.raises(TokenRefused):
        paired(host, secret)


def test_an_offer_ends_and_a_clock_set_back_ends_it_too(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    for shift in (601.0, -1.0, -86400.0):
        secret = Offers(host.folder).open(["read"], None)
        now = time.time()
        with monkeypatch.context() as patched:
            patched.setattr("sync.pairing.time.time", lambda at=now + shift: at)
            with pytest.raises(TokenRefused):
                paired(host, secret)


def test_another_certificate_is_told_nothing(host: Host) -> None:
    secret = Offers(host.folder).open(["read"], None)
    for wrong in ("0" * 64, "0" * 20):
        with pytest.raises(FingerprintMismatch, match="Nothing was sent"):
            paired(host, secret, wrong)
    assert paired(host, secret, host.fingerprint[:20]).scopes == ("read",)


def test_the_certificate_stays_the_same(tmp_path: Path) -> None:
    assert Certificate(tmp_path).fingerprint == Certificate(tmp_path).fingerprint
    assert (tmp_path / "certificate.pem").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "token", [None, "", "kvf1", "kvf1.0123456789abcdef." + "A" * 43, "kvf1.0123456789abcdef." + "A" * 4000]
)
def test_no_token_no_answer(host: Host, token: str | None) -> None:
    with pytest.raises(TokenRefused):
        Client.open(replace(host.peer, token=token))


def test_a_wrong_secret_of_a_known_id(host: Host) -> None:
    peer = host.token("read")
    assert peer.token is not None
    last = "A" if peer.token[-1] != "A" else "B"
    with pytest.raises(TokenRefused):
        Client.open(replace(peer, token=peer.token[:-2] + last + peer.token[-1]))


def test_a_revoked_token_is_refused_at_once(host: Host) -> None:
    peer = host.token("read")
    book = TokenBook(host.folder)
    with Client.open(peer) as client:
        assert list(client.refs()) == []
        book.revoke(book.tokens()[0].id)
        with pytest.raises(TokenRefused):
            list(client.refs())
    with pytest.raises(SnapshotMissing):
        book.revoke("0" * 16)


def test_secrets_are_not_kept(host: Host) -> None:
    peer = host.token("read")
    assert peer.token is not None
    kept = b"".join(path.read_bytes() for path in host.folder.rglob("*") if path.is_file())
    assert peer.token.rpartition(".")[2].encode() not in kept
    assert (host.folder / "tokens.json").stat().st_mode & 0o777 == 0o600


def test_scopes(host: Host, tmp_path: Path) -> None:
    with Store.open(tmp_path / "mine") as mine:
        save(mine, "book", 100)
        with Client.open(host.token("read")) as reader, pytest.raises(NotAllowed):
            push(mine, reader, ["book"])
        with Client.open(host.token("read", "push")) as pusher:
            assert push(mine, pusher, ["book"]).objects == 4
    with Client.open(host.token("read")) as reader, Store.open(tmp_path / "other") as other:
        pull(other, reader, ["book"])
        assert_restores(other, "book", 100)


def test_other_namespaces_do_not_exist(host: Host, tmp_path: Path) -> None:
    """Names, manifests, coverage, objects: not to be read, not to be asked about, not to be taken over."""
    with Store.open(tmp_path / "mine") as mine, Client.open(host.token("read", "push")) as everything:
        save(mine, "book", 100)
        push(mine, everything, ["book"])
        digest = mine.resolve("book")
        snapshot = mine.shelf.records.snapshot(digest)
        coverage = mine.shelf.records.coverage(digest, snapshot)
        names = objects(snapshot, coverage)
        with Client.open(host.token("read", "push", namespaces=["default"])) as same:
            assert same.have(names) == set(names)
            assert [ref.label for ref in same.refs()] == ["book"]
        with Client.open(host.token("read", "push", namespaces=["another"])) as other:
            assert list(other.refs()) == []
            assert other.ref("book") is None
            assert other.have(names) == set()
            assert other.sound(names) == set()
            with pytest.raises(SnapshotMissing):
                other.snapshot(digest)
            assert not any(other.coverage(digest, snapshot).runs)
            for _, frame in other.fetch(list(names)[:1]):
                with pytest.raises(ObjectMissing):
                    list(frame)
            with pytest.raises(InputInvalid):
                other.publish(snapshot, coverage, "stolen", None)
            # A manifest of its own namespace that names their objects does not make them its own.
            mimic = replace(snapshot, namespace="another")
            theirs = replace(coverage, snapshot=encode_digest(mimic))
            with pytest.raises(ObjectMissing):
                other.publish(mimic, theirs, "stolen", None)
            with pytest.raises((RefConflict, ObjectMissing)):
                other.publish(mimic, theirs, "book", None)


def encode_digest(snapshot: object) -> object:
    from kvstore.codec import encode_snapshot

    return encode_snapshot(snapshot)[0]  # type: ignore[arg-type]
