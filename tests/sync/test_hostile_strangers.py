"""Who may what: every route with no token, a wrong one, one of another scope, and one of another namespace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgpack
import pytest
from ferries import LAYOUT, Ram, assert_restores
from raw_http import IN_FRAMES, IN_MAP, ONE, TOKENS, ask, files, routes, shown

from kvstore import Store
from kvstore.codec import encode_coverage, encode_snapshot
from kvstore.errors import ObjectMissing
from kvstore.signatures import sign
from kvstore.snapshot import Coverage, whole
from sync import pull, push
from sync.bodies import Fetch, Find, Had, Have, Info, Pair, Publish, Signatures, decode, encode
from sync.bodies import Signature as SignatureShape
from sync.client import Client
from sync.connection import Peer
from sync.pairing import ATTEMPTS, Offers
from sync.plan import objects
from sync.server import FAILURES
from sync.tokens import TokenBook


def requests(folder: Path) -> dict[str, tuple[str, str, bytes, dict[str, str]]]:
    """A request for each route that would succeed for somebody who sees the snapshot ``book``."""
    digest, snapshot, names = shown(folder)
    name = bytes.fromhex(names[0])
    covered = encode_coverage(whole(digest, snapshot))
    items = (folder / "snapshots" / digest.hex).read_bytes()
    find = Find("default", snapshot.root.raw, msgpack.packb(LAYOUT.wire()), b"", None)
    at = {"If-Match": f'"{digest}"'}
    signed = sign(bytes(32), digest)
    return {
        "GET /v1/info": ("GET", "/v1/info", b"", {}),
        "GET /v1/openapi.json": ("GET", "/v1/openapi.json", b"", {}),
        "GET /v1/refs": ("GET", "/v1/refs", b"", {}),
        "GET /v1/refs/{label}": ("GET", "/v1/refs/book", b"", {}),
        "GET /v1/snapshots/{digest}": ("GET", f"/v1/snapshots/{digest}", b"", {}),
        "GET /v1/snapshots/{digest}/coverage": ("GET", f"/v1/snapshots/{digest}/coverage", b"", {}),
        "GET /v1/objects/{name}": ("GET", f"/v1/objects/{names[0]}", b"", {}),
        "GET /v1/snapshots/{digest}/signatures": ("GET", f"/v1/snapshots/{digest}/signatures", b"", {}),
        "PUT /v1/snapshots/{digest}/signatures": (
            "PUT",
            f"/v1/snapshots/{digest}/signatures",
            encode(Signatures((SignatureShape(signed.key, signed.raw),))),
            IN_MAP,
        ),
        "POST /v1/have": ("POST", "/v1/have", encode(Have(((name, snapshot.object_bytes(0, 0)),), True)), IN_MAP),
        "POST /v1/fetch": ("POST", "/v1/fetch", encode(Fetch((name,))), IN_MAP),
        "POST /v1/find": ("POST", "/v1/find", encode(find), IN_MAP),
        "PUT /v1/objects": ("PUT", "/v1/objects", ONE, IN_FRAMES),
        "PUT /v1/refs/{label}": ("PUT", "/v1/refs/book", encode(Publish(items, covered)), {**IN_MAP, **at}),
        "DELETE /v1/refs/{label}": ("DELETE", "/v1/refs/book", b"", at),
        "GET /metrics": ("GET", "/metrics", b"", {}),
    }


FREE = {"GET /healthz", "POST /v1/pair"}


SCOPE = {
    "PUT /v1/snapshots/{digest}/signatures": "push",
    "PUT /v1/objects": "push",
    "PUT /v1/refs/{label}": "push",
    "DELETE /v1/refs/{label}": "admin",
    "GET /metrics": "admin",
}


ANY = {"GET /v1/openapi.json"}


def test_every_route_wants_a_token_and_its_scope(guarded: Peer, folder: Path, book: TokenBook) -> None:
    all_requests = requests(folder)
    there = {f"{method} {path}" for method, path in routes(folder) if method != "HEAD"}
    assert there - FREE == set(all_requests), "a route that this test doesn't know"
    for number, (route, request) in enumerate(all_requests.items()):
        near = f"127.0.1.{number + 1}"  # failures are counted by address
        assert ask(guarded, *request, source=near).status == 401, route
        for wrong in ("kvf1.0123456789abcdef." + "A" * 43, "", "kvf1", "A" * 4000):
            assert ask(replace(guarded, token=wrong), *request, source=near).status == 401, route
        needed = SCOPE.get(route, "read")
        others = [scope for scope in ("read", "push", "admin") if scope != needed]
        if route == "POST /v1/have":
            others.remove("push")  # who pushes asks what is there
        text, _ = book.issue("without", others, None)
        assert ask(replace(guarded, token=text), *request).status == (200 if route in ANY else 403), route
    # Last what changes something, with everything allowed.
    text, _ = book.issue("all", ["read", "push", "admin"], None)
    for route, request in sorted(all_requests.items(), key=lambda item: item[0].startswith("DELETE")):
        assert ask(replace(guarded, token=text), *request).status in (200, 204), route


NOTHING: dict[str, tuple[int, str | None]] = {
    "GET /v1/refs/{label}": (404, "SnapshotMissing"),
    "GET /v1/snapshots/{digest}": (404, "SnapshotMissing"),
    "GET /v1/snapshots/{digest}/coverage": (404, "SnapshotMissing"),
    "GET /v1/snapshots/{digest}/signatures": (404, "SnapshotMissing"),
    "PUT /v1/snapshots/{digest}/signatures": (404, "SnapshotMissing"),
    "GET /v1/objects/{name}": (404, "ObjectMissing"),
    "POST /v1/fetch": (404, "ObjectMissing"),
    "PUT /v1/refs/{label}": (400, "InputInvalid"),
    "DELETE /v1/refs/{label}": (404, "SnapshotMissing"),
}
"""What each route says of another namespace's."""


def test_another_namespace_at_every_route(guarded: Peer, folder: Path, book: TokenBook) -> None:
    text, _ = book.issue("stranger", ["read", "push", "admin"], ["another"])
    stranger = replace(guarded, token=text)
    digest, _, names = shown(folder)
    before = files(folder)
    for route, request in requests(folder).items():
        said = ask(stranger, *request)
        if route in NOTHING:
            status, error = NOTHING[route]
            assert (said.status, said.error) == (status, error), route
        else:
            assert said.status == 200, route
        seen = said.body.replace(b"Grant", b"")
        for secret in (b"book", digest.raw, bytes.fromhex(names[0])):
            echoed = secret == b"book" and route in NOTHING
            assert echoed or secret not in seen or route in ("GET /v1/openapi.json",), route
    assert decode(ask(stranger, *requests(folder)["POST /v1/have"]).body, Had, "it").have == b"\0"
    assert decode(ask(stranger, "GET", "/v1/info").body, Info, "it").namespaces == ("another",)
    assert files(folder) == before


def test_naming_an_object_is_no_leave_to_read_it(guarded: Peer, folder: Path, book: TokenBook) -> None:
    """A manifest of one's own namespace that names others' objects, and promises none of them."""
    text, _ = book.issue("stranger", ["read", "push"], ["another"])
    stranger = replace(guarded, token=text)
    _, snapshot, names = shown(folder)
    mimic = replace(snapshot, namespace="another")
    digest, manifest = encode_snapshot(mimic)
    nothing = encode_coverage(Coverage(digest, ((), ())))
    said = ask(stranger, "PUT", "/v1/refs/mine", encode(Publish(manifest, nothing)), {**IN_MAP, "If-None-Match": "*"})
    assert said.status == 200
    for name in names:
        assert ask(stranger, "GET", f"/v1/objects/{name}").status == 404
    with Client.open(stranger) as client:
        lengths = objects(mimic, whole(digest, mimic))
        assert client.have(lengths) == client.sound(lengths) == set()
        with pytest.raises(ObjectMissing):
            client.publish(mimic, whole(digest, mimic), "mine", digest)


def test_what_is_pushed_is_there_for_whoever_pushed_it(guarded: Peer, tmp_path: Path, book: TokenBook) -> None:
    """The same bytes, of another namespace's snapshot too, are sent, and then belong to both; coverage that grows is seen."""
    text, _ = book.issue("stranger", ["read", "push"], ["another"])
    with Client.open(replace(guarded, token=text)) as client, Store.open(tmp_path / "mine") as mine:
        from ferries import IDENTITY, LINEAGE, MASTER, tokens_of

        mine.save(LAYOUT, IDENTITY, tokens_of(TOKENS), Ram(TOKENS), namespace="another", name="own", lineage=[LINEAGE] * 3, pending=7, head=MASTER)  # fmt: skip
        assert push(mine, client, ["own"]).objects == 6
        with Store.open(tmp_path / "other") as other:
            assert pull(other, client, ["own"], trimmed=True).objects
            pull(other, client, ["own"])
            assert_restores(other, "own", TOKENS)


def test_names_that_are_taken_are_not_told(guarded: Peer, folder: Path, tmp_path: Path, book: TokenBook) -> None:
    text, _ = book.issue("stranger", ["push"], ["another"])
    _, snapshot, _ = shown(folder)
    digest, manifest = encode_snapshot(replace(snapshot, namespace="another"))
    body = encode(Publish(manifest, encode_coverage(Coverage(digest, ((), ())))))
    for label in ("book", "BOOK"):
        said = ask(replace(guarded, token=text), "PUT", f"/v1/refs/{label}", body, {**IN_MAP, "If-None-Match": "*"})
        assert (said.status, said.error) == (412, "RefConflict")
        assert label == "book" or b"book" not in said.body


def test_wrong_tokens_at_rate(guarded: Peer, book: TokenBook) -> None:
    wrong = replace(guarded, token="kvf1.0123456789abcdef." + "A" * 43)
    said = [ask(wrong, "GET", "/v1/info") for _ in range(FAILURES + 20)]
    assert [one.status for one in said[:FAILURES]] == [401] * FAILURES
    assert said[-1].status == 429 and said[-1].error == "TooMany" and int(said[-1].headers["Retry-After"]) >= 1
    text, _ = book.issue("right", ["read"], None)
    assert ask(replace(guarded, token=text), "GET", "/v1/info").status == 200, "nobody is locked out by a neighbour"
    assert ask(wrong, "GET", "/v1/info", source="127.0.0.2").status == 401, "another address"


def test_guesses_at_pairing(guarded: Peer, tmp_path: Path) -> None:
    wrong = replace(guarded, token="kvf1.0123456789abcdef." + "A" * 43)
    for _ in range(FAILURES + 5):
        ask(wrong, "GET", "/v1/info")
    secret = Offers(tmp_path / "config").open(["read"], None)
    for _ in range(ATTEMPTS + 3):
        assert ask(guarded, "POST", "/v1/pair", encode(Pair("00000000", "x")), IN_MAP).status == 429
    said = ask(guarded, "POST", "/v1/pair", encode(Pair(secret, "x")), IN_MAP, source="127.0.0.2")
    assert said.status == 200, "none of those cost an attempt"


@pytest.mark.parametrize("device", ["", "d" * 201, "\x1b[2J", "a\nb"])
def test_a_device_that_cannot_be_named_costs_nothing(guarded: Peer, tmp_path: Path, device: str) -> None:
    secret = Offers(tmp_path / "config").open(["read"], None)
    assert ask(guarded, "POST", "/v1/pair", encode(Pair(secret, device)), IN_MAP).status == 400
    assert ask(guarded, "POST", "/v1/pair", encode(Pair(secret, "phone")), IN_MAP).status == 200


def test_a_damaged_list_of_tokens_is_no_fault_of_the_client(guarded: Peer, tmp_path: Path, book: TokenBook) -> None:
    text, _ = book.issue("right", ["read"], None)
    (tmp_path / "config" / "tokens.json").write_text("[")
    said = ask(replace(guarded, token=text), "GET", "/v1/info")
    assert said.status == 500 and str(tmp_path).encode() not in said.body


def test_pages_in_a_browser_can_not_point_their_name_here(peer: Peer) -> None:
    for host in (
        "evil.example",
        "evil.example:8765",
        "127.0.0.1.evil.example",
        "10.0.0.1",
        "[::2]:80",
        "localhost.evil",
        "",
    ):
        said = ask(peer, "GET", "/v1/refs", headers={"Host": host})
        assert (said.status, said.error) == (403, "NotAllowed"), host
    for host in ("localhost", "LOCALHOST:1", "127.0.0.1:8765", "127.9.9.9", "[::1]", "[::1]:8765"):
        assert ask(peer, "GET", "/v1/refs", headers={"Host": host}).status == 200, host
