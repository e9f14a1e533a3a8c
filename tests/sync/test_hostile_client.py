"""Clients that break every rule: the server says no by name, and stays as it was."""

from __future__ import annotations

import contextlib
import re
import socket
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from ferries import quarantined
from live import ALL, serving
from raw_http import (
    ASKING,
    BOMB,
    FRAMES,
    IN_FRAMES,
    IN_MAP,
    MAPS,
    NO_HTTP,
    ONE,
    all_of,
    ask,
    dialled,
    files,
    routes,
    shown,
)

from kvstore.errors import InputInvalid
from sync.bodies import MAP_TYPE, Fetch, Had, Have, Publish, decode, encode
from sync.connection import Peer
from sync.server import Settings


@pytest.mark.parametrize("how", NO_HTTP)
def test_what_is_no_http(peer: Peer, how: str) -> None:
    sock = dialled(peer)
    with contextlib.suppress(OSError):
        sock.sendall(NO_HTTP[how])
        sock.shutdown(socket.SHUT_WR)
    said = all_of(sock)
    assert not re.search(rb"HTTP/1\.[01] [^4]", said), said[:200]


def test_a_connection_upgraded_to_nothing(peer: Peer) -> None:
    for extra in (
        {"Connection": "Upgrade", "Upgrade": "h2c"},
        {"Connection": "Upgrade", "Upgrade": "websocket"},
        {"Expect": "200-ok"},
    ):
        assert ask(peer, "GET", "/v1/info", headers=extra).status in (200, 417)
    assert ask(peer, "CONNECT", "example.org:443").status in (400, 404, 405)


def test_many_requests_before_the_first_answer(peer: Peer) -> None:
    sock = dialled(peer, b"GET /v1/info HTTP/1.1\r\nHost: localhost\r\n\r\n" * 500)
    sock.shutdown(socket.SHUT_WR)
    assert all_of(sock).count(b"HTTP/1.1 200 OK") <= 500


@pytest.mark.parametrize("how", MAPS)
def test_maps(peer: Peer, how: str) -> None:
    for route in ASKING:
        said = ask(peer, *route.split(), MAPS[how], {**IN_MAP, "If-None-Match": "*"})
        assert (said.status, said.error) in ((400, "InputInvalid"), (413, "InputInvalid")), (route, said)


def test_a_map_of_a_million_maps_is_never_built() -> None:
    tracemalloc.start()
    with pytest.raises(InputInvalid):
        decode(BOMB, Have, "a body")
    with pytest.raises(InputInvalid):
        decode(MAPS["a million maps in a key"], Have, "a body")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 << 20


@pytest.mark.parametrize("route", ASKING)
def test_bodies_too_large_and_bodies_packed(peer: Peer, route: str) -> None:
    import gzip

    method, path = route.split()
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {MAP_TYPE}\r\nIf-None-Match: *\r\n"
    for more, status in (
        ("Content-Length: 99999999999\r\n", b"413"),
        ("Transfer-Encoding: chunked\r\n", b"413"),
        ("Content-Encoding: gzip\r\nContent-Length: 5\r\n", b"400"),
    ):
        sock = dialled(peer, (head + more + "\r\n").encode())
        assert sock.recv(100).split()[1] == status
        sock.close()
    packed = gzip.compress(encode(Have((), False)))
    for name in ("gzip", "deflate", "br", "zstd", "identity, gzip"):
        assert ask(peer, method, path, packed, {**IN_MAP, "If-None-Match": "*", "Content-Encoding": name}).status == 400
    assert ask(peer, method, path, b"\x80", {"Content-Type": "text/plain", "If-None-Match": "*"}).status == 400


@pytest.mark.parametrize("how", FRAMES)
def test_frames(folder: Path, logged: list[dict[str, Any]], how: str) -> None:
    before = files(folder)
    with serving(folder, Settings(allow=ALL, log=logged.append)) as peer:
        said = ask(peer, "PUT", "/v1/objects", FRAMES[how], IN_FRAMES)
        assert said.status == 400 and said.error in ("InputInvalid", "ObjectCorrupt", "FormatTooNew", "Corrupt"), said
        assert len(quarantined(folder)) == {"a byte between": 1, "65 frames": 64}.get(how, 0)
        assert files(folder) == before
        assert ask(peer, "PUT", "/v1/objects", ONE, {"Content-Type": "text/plain"}).status == 400
        assert ask(peer, "PUT", "/v1/objects", ONE, IN_FRAMES).status == 200
    assert not [line for line in logged if "Traceback" in str(line.get("error"))]


LABELS = ["%ff", "%00", "a%00b", "%ed%a0%80", "%0a", "%1b%5b2J", "%20", "a%20", "%c0%ae%c0%ae", "n" * 201, "%e2%80%ae", "%", "%zz",
          "..%2f..%2f..%2fetc%2fpasswd", "/etc/passwd", "%2e%2e/%2e%2e/x", "....//", "a?b", "a;b", "%25ff", "*"]  # fmt: skip


@pytest.mark.parametrize("label", LABELS)
def test_labels(peer: Peer, folder: Path, label: str) -> None:
    outside = sorted(path.name for path in folder.parent.iterdir())
    for method in ("GET", "PUT", "DELETE"):
        sent = {**IN_MAP, "If-Match": '"' + "0" * 64 + '"'}
        said = ask(peer, method, f"/v1/refs/{label}", encode(Publish(b"x", b"y")) if method == "PUT" else b"", sent)
        assert said.status in (400, 404) and said.error in (
            "LabelInvalid",
            "InputInvalid",
            "SnapshotMissing",
            "SnapshotCorrupt",
        ), said
    assert sorted(path.name for path in folder.parent.iterdir()) == outside


PATHS = ["/v1/%72efs/book", "//v1/refs/book", "/v1/./refs/book", "/v1/../v1/info", "/v1/objects/../info", "/v1/objects/%2e%2e%2finfo", "/v1/objects/" + "A" * 64,
         "/v1/objects/" + "0" * 63, "/v1/snapshots/..%2f..%2fformat.json", "/v1/snapshots/" + "0" * 64 + "/format", "/format.json", "/",
         "/v1/refs?limit=-1", "/v1/refs?limit=0", "/v1/refs?limit=1001", "/v1/refs?limit=99999999999999999999", "/v1/refs?limit=%D9%A3",
         "/v1/refs?limit=1e3", "/v1/refs?limit="]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_paths_and_parameters(peer: Peer, path: str) -> None:
    said = ask(peer, "GET", path)
    assert said.status in (400, 404) and said.error == "InputInvalid", said


def test_odd_parameters_that_mean_nothing(peer: Peer) -> None:
    for query in (
        "after=" + "a" * 7000,
        "after=%ff",
        "after=%ed%a0%80",
        "&".join(f"k{i}=v" for i in range(900)),
        "after=&after=zzz",
        "=&=&&",
    ):
        assert ask(peer, "GET", f"/v1/refs?{query}").status in (200, 400)
    assert ask(peer, "GET", "/v1/refs?after=" + "a" * 9000).status == 400


def filled(path: str, digest: str, name: str) -> str:
    return path.replace("{digest}", digest).replace("{name}", name).replace("{label}", "book")


def test_methods(peer: Peer, folder: Path) -> None:
    there = routes(folder)
    digest, _, names = shown(folder)
    for _, path in there:
        allowed = {method for method, other in there if other == path}
        for method in ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "FOO"):
            if method not in allowed:
                said = ask(peer, method, filled(path, digest.hex, names[0]))
                expected = {404, 405} if path == "/v1/pair" else {405}
                assert said.status in (expected if method != "FOO" else {400}), (method, path, said)


RANGES: list[tuple[str, int]] = [
    ("bytes=0-0", 206), ("bytes=5-", 206), ("bytes=0-999999999999999999", 206), ("bytes=0-1,5-9", 200), ("bytes=-5", 200), ("lines=1-2", 200),
    ("bytes", 200), ("bytes=", 200), ("bytes=5", 200), ("", 200), ("bytes=0-0," * 700, 200),
    ("bytes=9999999999-", 416), ("bytes=5-2", 416), ("bytes=a-b", 400), ("bytes=0-b", 400), ("bytes=1-2-3", 400),
    ("bytes=" + "9" * 400 + "-", 400), ("bytes=0x1-0x2", 400), ("bytes=+1-5", 400),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "status"), RANGES)
def test_ranges(peer: Peer, folder: Path, asked: str, status: int) -> None:
    _, _, names = shown(folder)
    data = (folder / "objects" / names[0][0] / names[0][1:]).read_bytes()
    said = ask(peer, "GET", f"/v1/objects/{names[0]}", headers={"Range": asked})
    assert said.status == status
    if status == 206:
        start, stop, size = map(int, re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", said.headers["Content-Range"]).groups())  # type: ignore[union-attr]
        assert said.body == data[start : stop + 1] and size == len(data) and said.body
    elif status == 200:
        assert said.body == data and "Content-Range" not in said.headers
    else:
        assert said.error == "InputInvalid"
    etag = ask(peer, "HEAD", f"/v1/objects/{names[0]}").headers["ETag"]
    for condition in ('"00"', f"W/{etag}", etag.strip('"'), "Mon, 30 Nov 2026 00:00:00 GMT"):
        whole_one = ask(peer, "GET", f"/v1/objects/{names[0]}", headers={"Range": "bytes=5-", "If-Range": condition})
        assert (whole_one.status, whole_one.body) == (200, data)


CONDITIONS = [{}, {"If-Match": "*"}, {"If-Match": '"' + "g" * 64 + '"'}, {"If-Match": "0" * 64}, {"If-Match": '"00"'}, {"If-None-Match": '"0"'},
              {"If-Match": '"' + "0" * 64 + '"', "If-None-Match": "*"}]  # fmt: skip


@pytest.mark.parametrize("headers", CONDITIONS)
def test_conditions(peer: Peer, headers: dict[str, str]) -> None:
    assert ask(peer, "PUT", "/v1/refs/book", encode(Publish(b"", b"")), {**IN_MAP, **headers}).status == 400
    assert ask(peer, "DELETE", "/v1/refs/book", headers=headers).status == 400


LINKS = ["object", "object's folder", "manifest", "coverage", "ref", "refs", "snapshots", "objects"]


@pytest.mark.parametrize("what", LINKS)
def test_links_in_the_store_are_not_followed(folder: Path, tmp_path: Path, what: str) -> None:
    """Even where what they lead to is sound."""
    digest, _, names = shown(folder)
    with serving(folder, Settings(allow=ALL)) as peer:
        path = {
            "object": folder / "objects" / names[0][0] / names[0][1:],
            "object's folder": folder / "objects" / names[0][0],
            "manifest": folder / "snapshots" / digest.hex,
            "coverage": folder / "snapshots" / f"{digest}.cov",
            "ref": next((folder / "refs").iterdir()),
            "refs": folder / "refs",
            "snapshots": folder / "snapshots",
            "objects": folder / "objects",
        }[what]
        asked = {"object": [f"/v1/objects/{names[0]}"], "object's folder": [f"/v1/objects/{names[0]}"], "objects": [f"/v1/objects/{names[0]}"],
                 "manifest": [f"/v1/snapshots/{digest}", f"/v1/snapshots/{digest}/coverage"], "coverage": [f"/v1/snapshots/{digest}/coverage"],
                 "ref": ["/v1/refs/book"], "refs": ["/v1/refs/book", "/v1/refs"],
                 "snapshots": [f"/v1/snapshots/{digest}", f"/v1/snapshots/{digest}/coverage"]}[what]  # fmt: skip
        assert all(ask(peer, "GET", one).status == 200 for one in asked)
        path.rename(tmp_path / "outside")
        path.symlink_to(tmp_path / "outside")
        for one in asked:
            said = ask(peer, "GET", one)
            assert said.status in (404, 500), (one, said)
        if "object" in what:
            said = ask(peer, "POST", "/v1/fetch", encode(Fetch((bytes.fromhex(names[0]),))), IN_MAP)
            assert said.status in (404, 500)
            have = Have(((bytes.fromhex(names[0]), 64 * 192),), True)
            found = ask(peer, "POST", "/v1/have", encode(have), IN_MAP)
            assert found.status != 200 or decode(found.body, Had, "it").have == b"\0"
        assert ask(peer, "GET", "/v1/info").status == 200


def test_a_link_for_the_quarantine(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    with contextlib.suppress(FileNotFoundError):
        (folder / "quarantine").rmdir()
    (folder / "quarantine").symlink_to(tmp_path / "outside")
    with serving(folder, Settings(allow=ALL)) as peer:
        assert ask(peer, "PUT", "/v1/objects", ONE, IN_FRAMES).status == 500
        assert not list((tmp_path / "outside").iterdir())
