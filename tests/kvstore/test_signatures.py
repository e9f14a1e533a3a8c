"""Signatures beside a manifest: their form, their way through collecting, trash, check and repair; and the keyring."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from kvmemory import save

from kvstore import Store, prune, repair, trash
from kvstore.check import check
from kvstore.codec import decode_signatures, encode_signatures
from kvstore.digest import SnapshotDigest
from kvstore.errors import InputInvalid, Refused, SignaturesCorrupt, SnapshotMissing
from kvstore.keyring import Keyring
from kvstore.signatures import MAX_SIGNATURES, Signature, is_true, joined, sign

DIGEST = SnapshotDigest(bytes(range(32)))
ONE, TWO = (sign(bytes([n]) * 32, DIGEST) for n in (1, 2))


def test_a_signature_is_of_one_snapshot_by_one_key() -> None:
    assert ONE.key.hex() == "8a88e3dd7409f195fd52db2d3cba5d72ca6709bf1d94121bf3748801b40f6f5c"
    assert is_true(ONE, DIGEST)
    Ed25519PublicKey.from_public_bytes(ONE.key).verify(ONE.raw, b"kvferry 2026-11-30 signed snapshot\0" + DIGEST.raw)
    assert not is_true(ONE, SnapshotDigest(bytes(32)))
    assert not is_true(Signature(TWO.key, ONE.raw), DIGEST)
    for bit in range(8 * 64):
        raw = bytearray(ONE.raw)
        raw[bit // 8] ^= 1 << bit % 8
        assert not is_true(Signature(ONE.key, bytes(raw)), DIGEST)
    assert not is_true(Signature(b"\xff" * 32, ONE.raw), DIGEST)
    for key, raw in ((ONE.key[1:], ONE.raw), (ONE.key, ONE.raw + b"\0")):
        with pytest.raises(InputInvalid, match="32 bytes and a signature of 64"):
            Signature(key, raw)


def test_the_file_and_its_limits() -> None:
    both = joined([TWO], [ONE])
    data = encode_signatures(DIGEST, both)
    assert decode_signatures(data, DIGEST) == both == tuple(sorted([ONE, TWO]))
    # As docs/format.md has it, in other words.
    pairs = b"".join(b"\x92\xc4\x20" + one.key + b"\xc4\x40" + one.raw for one in both)
    payload = b"\x82\xa8snapshot\xc4\x20" + DIGEST.raw + b"\xaasignatures\x92" + pairs
    name = blake3(payload, derive_key_context="kvferry 2026-11-30 format 1 signatures").digest()
    assert data[128:] == payload and data[10] == 5 and data[32:64] == data[64:96] == name
    for at in range(len(data)):
        with pytest.raises(SignaturesCorrupt):
            decode_signatures(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], DIGEST)
    for other in (data[:-1], data + b"\0", b""):
        with pytest.raises(SignaturesCorrupt):
            decode_signatures(other, DIGEST)
    with pytest.raises(SignaturesCorrupt, match="snapshot: expected"):
        decode_signatures(data, SnapshotDigest(bytes(32)))
    for wrong in ((), tuple(reversed(both)), (ONE, ONE)):
        with pytest.raises(SignaturesCorrupt, match="in order of their keys"):
            decode_signatures(encode_signatures(DIGEST, wrong), DIGEST)
    many = [Signature(n.to_bytes(32, "big"), bytes(64)) for n in range(MAX_SIGNATURES + 1)]
    assert len(joined(many[:-1], [])) == MAX_SIGNATURES
    with pytest.raises(InputInvalid, match="at most 64"):
        joined(many, [])
    with pytest.raises(SignaturesCorrupt, match="1 to 64"):
        decode_signatures(encode_signatures(DIGEST, many), DIGEST)


def test_what_is_there_is_not_replaced() -> None:
    later = Signature(ONE.key, bytes(64))
    assert joined([ONE], [later]) == (ONE,)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "s")


@pytest.fixture
def signed(store: Store) -> tuple[SnapshotDigest, Signature]:
    digest = save(store, [(3 * i) % 90 for i in range(100)], name="book").digest
    assert digest is not None
    made = sign(bytes([1]) * 32, digest)
    assert store.shelf.records.add_signatures(digest, [made]) == (made,)
    return digest, made


def file(store: Store, digest: SnapshotDigest) -> Path:
    return store.shelf.path / "snapshots" / f"{digest}.sig"


def test_they_go_with_the_manifest_and_come_back(store: Store, signed: tuple[SnapshotDigest, Signature]) -> None:
    digest, made = signed
    assert not check(store).problems and not check(store).notes
    store.shelf.records.remove(["book"])
    prune.apply(store, prune.plan(store))
    assert not file(store, digest).exists() and store.shelf.records.signatures(digest) == ()
    with pytest.raises(SnapshotMissing):
        store.shelf.records.add_signatures(digest, [made])
    trash.restore(store, "book")
    assert store.shelf.records.signatures(digest) == (made,)
    store.shelf.records.remove(["book"])
    prune.apply(store, prune.plan(store))
    prune.purge(store)
    assert not list(store.shelf.path.rglob("*.sig"))


def test_without_its_manifest_a_collector_takes_them(store: Store, signed: tuple[SnapshotDigest, Signature]) -> None:
    digest, _ = signed
    orphan = file(store, SnapshotDigest(bytes(32)))
    orphan.write_bytes(file(store, digest).read_bytes())
    assert [n for n in check(store).notes if orphan.name in n and "signatures without" in n]
    prune.apply(store, prune.plan(store))
    assert not orphan.exists() and file(store, digest).exists()


def test_check_finds_damage_and_repair_sets_it_aside(store: Store, signed: tuple[SnapshotDigest, Signature]) -> None:
    digest, made = signed
    data = bytearray(file(store, digest).read_bytes())
    data[-1] ^= 1
    file(store, digest).write_bytes(data)
    report = check(store)
    assert [(p.kind, p.path, p.names) for p in report.problems] == [
        ("signatures", f"snapshots/{digest}.sig", ("book",))
    ]
    done = repair.apply(store, report)
    assert not check(store).problems and store.shelf.records.signatures(digest) == () and not done.names
    assert [p.read_bytes() for p in store.shelf.path.glob("damaged/*/*.sig")] == [bytes(data)]
    assert store.match("book").common == 100, "the snapshot itself is whole"
    assert store.shelf.records.add_signatures(digest, [made]) == (made,)


def test_a_damaged_file_is_healed_by_signing(store: Store, signed: tuple[SnapshotDigest, Signature]) -> None:
    digest, made = signed
    file(store, digest).write_bytes(b"cut")
    with pytest.raises(SignaturesCorrupt):
        store.shelf.records.signatures(digest)
    assert store.shelf.records.add_signatures(digest, [made]) == (made,)
    assert store.shelf.records.signatures(digest) == (made,)


def test_the_keyring(tmp_path: Path) -> None:
    ring = Keyring(tmp_path / "config")
    assert ring.own() == () and ring.trusted() == {}
    with pytest.raises(Refused, match="none at all"):
        ring.sign(DIGEST, None)
    mac = ring.make("mac")
    key = bytes.fromhex(mac.key)
    assert ring.sign(DIGEST, None).key == key and is_true(ring.sign(DIGEST, "mac"), DIGEST)
    with pytest.raises(Refused, match="new name"):
        ring.make("mac")
    ring.make("other")
    with pytest.raises(Refused, match="found 2"):
        ring.sign(DIGEST, None)
    assert ring.trusted() == {}, "a key of one's own is not trusted unasked"
    ring.trust(mac.key, "mac")
    ring.trust(ONE.key.hex(), "one")
    assert ring.trusted() == {key: "mac", ONE.key: "one"}
    ring.trust(ONE.key.hex(), "mac")
    with pytest.raises(Refused, match="found 2"):
        ring.untrust("mac")
    assert ring.untrust(ONE.key.hex()).name == "mac" and ring.trusted() == {key: "mac"}
    for wrong in ("", "ab", "G" * 64, mac.key.upper()):
        with pytest.raises(InputInvalid, match="64 lowercase hex digits"):
            ring.trust(wrong, "x")
    path = tmp_path / "config" / "keys.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for text in ('{"own": 3}', "no", '{"own": [], "trusted": [{"name": "x", "key": "ab"}]}'):
        path.write_text(text)
        with pytest.raises(InputInvalid, match=r"keys\.json"):
            ring.trusted()
