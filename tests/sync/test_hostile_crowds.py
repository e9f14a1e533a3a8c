"""Clients that are slow, many, or want too much: they are hung up on or told to wait, and the others are answered."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ferries import object_files, quarantined, save, verify
from live import ALL, serving
from raw_http import ASKING, BOMB, FRAMES, IN_FRAMES, IN_MAP, MAPS, NO_HTTP, all_of, ask, dialled, frame, shown

from kvstore import Group, Layout, Store
from kvstore.codec import HEADER
from kvstore.errors import StoreFull
from kvstore.quota import LEAST, set_quota
from sync import push
from sync.bodies import FRAMES_TYPE, MAP_TYPE, Have, encode
from sync.client import Client
from sync.connection import Peer
from sync.server import LANDINGS, Settings
from sync.throttle import ADDRESSES, Throttle
from sync.tokens import TokenBook

SLOWLY: dict[str, Callable[[socket.socket], None]] = {
    "nothing": lambda sock: None,
    "half a line": lambda sock: sock.sendall(b"GET /v1/in"),
    "headers in drips": lambda sock: _drip(sock, b"GET /v1/info HTTP/1.1\r\nHost: localhost\r\nX-More: " + b"m" * 500),
    "one request, then nothing": lambda sock: sock.sendall(b"GET /v1/info HTTP/1.1\r\nHost: localhost\r\n\r\n"),
    "one request, then drips": lambda sock: _drip(
        sock, b"GET /v1/info HTTP/1.1\r\nHost: localhost\r\n\r\nGET /" + b"m" * 500
    ),
}


def _drip(sock: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):
        for at in range(0, len(data), 5):
            sock.sendall(data[at : at + 5])
            time.sleep(0.02)


@pytest.mark.parametrize("how", SLOWLY)
def test_who_asks_nothing_is_hung_up_on(folder: Path, how: str) -> None:
    with serving(folder, Settings(idle=0.2)) as peer:
        sock = dialled(peer)
        SLOWLY[how](sock)
        said = all_of(sock)  # times out where it stays open
        assert said.count(b"HTTP/1.1 200") == ("one request" in how)


def test_a_request_under_way_is_not_idle(folder: Path) -> None:
    with serving(folder, Settings(idle=0.1, allow=ALL)) as peer:
        body = encode(Have((), False))
        head = f"POST /v1/have HTTP/1.1\r\nHost: localhost\r\nContent-Type: {MAP_TYPE}\r\nContent-Length: {len(body)}\r\n\r\n"
        sock = dialled(peer, head.encode())
        for at in range(len(body)):
            time.sleep(0.04)
            sock.sendall(body[at : at + 1])
        assert sock.recv(1000).startswith(b"HTTP/1.1 200")
        sock.close()


@pytest.mark.parametrize("path", ["/v1/have", "/v1/objects", "/v1/refs/x"])
@pytest.mark.parametrize("drips", [False, True])
def test_slow_bodies(folder: Path, path: str, drips: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sync.receiving.SILENCE", 0.2)
    monkeypatch.setattr("sync.listening.LINGERING", 0.1)
    monkeypatch.setattr("sync.receiving.SLOWEST", 1 << 20)
    method, kind = ("POST", MAP_TYPE) if path == "/v1/have" else ("PUT", FRAMES_TYPE)
    kind = MAP_TYPE if path == "/v1/refs/x" else kind
    with serving(folder, Settings(allow=ALL)) as peer:
        sock = dialled(
            peer,
            f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: 5000\r\n"
            f"If-None-Match: *\r\n\r\n".encode(),
        )
        if drips:
            _drip(sock, b"\x80" * 500)
        said = all_of(sock)
        assert b"HTTP/1.1 400" in said and b"InputInvalid" in said
        assert ask(peer, "GET", "/v1/info").status == 200
    assert not quarantined(folder)


def test_who_does_not_take_its_answer_is_hung_up_on(
    tmp_path: Path, logged: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the files that it asked for are closed."""
    monkeypatch.setattr("sync.server.TAKING", 0.2)
    layout = Layout((Group("full", None, (0,), 64, 1024),))
    with Store.open(tmp_path / "served") as store:
        save(store, "large", 64, layout=layout)
    _, _, names = shown(tmp_path / "served", "large")
    with serving(tmp_path / "served", Settings(log=logged.append)) as peer:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect((peer.host, peer.port))
        sock.sendall(f"GET /v1/objects/{names[0]} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        _until(lambda: any(line["route"] == "/v1/objects/{name}" for line in logged))
        sock.close()
        assert len(ask(peer, "GET", f"/v1/objects/{names[0]}").body) == HEADER + 64 * 64 * 1024 * 4


def _until(true: Callable[[], bool]) -> None:
    for _ in range(3000):
        if true():
            return
        time.sleep(0.01)
    raise AssertionError("it didn't come to that")


def test_an_idle_connection_makes_room(folder: Path) -> None:
    with serving(folder, Settings(each=4, total=6)) as peer:
        idle = [dialled(peer) for _ in range(4)]
        assert ask(peer, "GET", "/v1/info").status == 200
        assert idle[0].recv(100) == b"", "the oldest went"
        for sock in idle:
            sock.close()


def busy(peer: Peer, token: str | None = None, path: str = "/v1/objects") -> socket.socket:
    """A connection with a request under way, which waits for the rest of its body."""
    who = f"Authorization: Bearer {token}\r\n" if token else ""
    sock = dialled(
        peer,
        f"PUT {path} HTTP/1.1\r\nHost: localhost\r\n{who}Content-Type: {FRAMES_TYPE}\r\nContent-Length: 9999\r\n"
        f"Expect: 100-continue\r\n\r\n".encode(),
    )
    assert sock.recv(100).startswith(b"HTTP/1.1 100")
    return sock


def test_no_more_connections_than_that(folder: Path) -> None:
    with serving(folder, Settings(each=4, total=6, allow=ALL)) as peer:
        there = [busy(peer) for _ in range(4)]
        _until(lambda: ask(peer, "GET", "/healthz").status == 429)
        said = ask(peer, "GET", "/v1/info")
        assert said.error == "TooMany" and said.headers["Retry-After"] == "1"
        assert ask(peer, "GET", "/v1/info", source="127.0.0.2").status == 200, "another address"
        for sock in there:
            sock.close()
        _until(lambda: ask(peer, "GET", "/healthz").status == 200)


def test_one_tokens_slow_bodies_leave_room_for_others(folder: Path, tmp_path: Path) -> None:
    book = TokenBook(tmp_path / "config")
    (slow, _), (other, _) = (book.issue(name, ["push"], None) for name in ("slow", "other"))
    with serving(folder, Settings(allow=ALL, book=book)) as peer:
        there = [busy(peer, slow) for _ in range(LANDINGS // 2)]
        one = frame(b"bytes of an object")
        _until(lambda: ask(replace(peer, token=slow), "PUT", "/v1/objects", one, IN_FRAMES).status == 429)
        assert ask(replace(peer, token=other), "PUT", "/v1/objects", one, IN_FRAMES).status == 200
        for sock in there:
            sock.close()


@pytest.mark.slow
def test_a_thousand_connections_at_once(folder: Path) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    try:
        with serving(folder, Settings()) as peer:
            crowd = [dialled(peer) for _ in range(1000)]
            for _ in range(5):
                assert ask(peer, "GET", "/v1/refs").status == 200
            for sock in crowd:
                sock.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _abuse(peer: Peer, names: list[str]) -> None:
    """A round of everything at once, over some connections."""
    for how in ("a long header", "a thousand headers", "rubbish", "chunks of words"):
        with contextlib.suppress(OSError):
            sock = dialled(peer, NO_HTTP[how])
            sock.shutdown(socket.SHUT_WR)
            all_of(sock)
    for body in (BOMB, MAPS["nested"], MAPS["2,000 objects"]):
        for route in ASKING:
            with contextlib.suppress(OSError, http.client.HTTPException):
                ask(peer, *route.split(), body, {**IN_MAP, "If-None-Match": "*"})
    with contextlib.suppress(OSError):
        sock = dialled(peer, b"GET /v1/refs?after=a HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2000)
        sock.close()  # without an answer
        dialled(peer, f"GET /v1/objects/{names[0]} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() * 500).close()
    ask(peer, "PUT", "/v1/objects", FRAMES["65 frames"], IN_FRAMES)


@pytest.mark.slow
def test_abuse_leaves_no_trace_in_memory_and_others_are_answered(folder: Path, tmp_path: Path) -> None:
    """In a process of its own. The loop must never wait for the store: while all that goes on, whoever asks for its health is answered."""
    import subprocess
    import sys
    import threading

    import psutil

    command = [
        sys.executable,
        "-m",
        "kvstore",
        "serve",
        "--port",
        "0",
        "--allow",
        "push",
        "--no-log",
        "--store",
        str(folder),
    ]
    environment = {**os.environ, "KVFERRY_CONFIG": str(tmp_path / "config")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stdout is not None
            _, _, address = server.stdout.readline().rpartition(" http://")
            host, _, port = address.strip().partition(":")
            peer, process = Peer(host, int(port)), psutil.Process(server.pid)
            _, _, names = shown(folder)

            def crowd(rounds: int) -> None:
                threads = [
                    threading.Thread(target=lambda: [_abuse(peer, names) for _ in range(rounds)]) for _ in range(6)
                ]
                for thread in threads:
                    thread.start()
                while any(thread.is_alive() for thread in threads):
                    started = time.monotonic()
                    assert ask(peer, "GET", "/healthz").status == 200
                    waits.append(time.monotonic() - started)

            waits: list[float] = []
            crowd(2)  # what is imported, and pools of threads
            before = process.memory_info().rss
            files_before = process.num_fds()
            crowd(8)
            time.sleep(1.0)
            grown = process.memory_info().rss - before
            assert grown < 48 << 20, f"{grown:,} bytes"
            assert process.num_fds() <= files_before + 20
            assert max(waits) < 5.0 and len(waits) > 10
        finally:
            server.terminate()
        server.wait(20)
    verify(folder)


def test_what_one_token_may_leave_unpublished(folder: Path, tmp_path: Path, book: TokenBook) -> None:
    (one, _), (other, _) = (book.issue(name, ["read", "push"], None) for name in ("one", "other"))
    with serving(folder, Settings(allow=ALL, book=book, unpublished=5 * 20_736)) as peer:
        first, second = replace(peer, token=one), replace(peer, token=other)
        for number in range(5):
            assert ask(first, "PUT", "/v1/objects", frame(b"%d" % number * 20_000), IN_FRAMES).status == 200
        for _ in range(3):
            said = ask(first, "PUT", "/v1/objects", frame(b"more" * 5_000), IN_FRAMES)
            assert (said.status, said.error) == (507, "StoreFull")
        assert ask(first, "PUT", "/v1/objects", frame(b"0" * 20_000), IN_FRAMES).status == 200, "it is there"
        assert len(quarantined(folder)) == 5
        assert ask(second, "PUT", "/v1/objects", frame(b"more" * 5_000), IN_FRAMES).status == 200
        with Store.open(tmp_path / "mac") as mac, Client.open(second) as client:
            save(mac, "new", 150, "b")  # 3 blocks: 61,440 bytes of content
            push(mac, client, ["new"])
            save(mac, "newer", 150, "c")
            push(mac, client, ["newer"])
    verify(folder)


def test_a_full_store_tells_no_names(folder: Path, tmp_path: Path, book: TokenBook) -> None:
    text, _ = book.issue("stranger", ["read", "push"], ["another"])
    with Store.open(folder) as store:
        set_quota(store.shelf.root, LEAST)
    with serving(folder, Settings(allow=ALL, book=book)) as peer:
        said = ask(replace(peer, token=text), "PUT", "/v1/objects", frame(bytes(LEAST + 1)), IN_FRAMES)
        assert (said.status, said.error) == (507, "StoreFull")
        assert b"book" not in said.body and str(folder).encode() not in said.body
        assert not quarantined(folder)
        layout = Layout((Group("full", None, (0,), 64, 1024),))
        with (
            Store.open(tmp_path / "mac") as mac,
            Client.open(replace(peer, token=book.issue("x", ["read", "push"], None)[0])) as client,
        ):
            save(mac, "large", 64, layout=layout)
            with pytest.raises(StoreFull, match=re.escape(peer.where)) as caught:
                push(mac, client, ["large"])
            assert caught.value.details["quota"] == LEAST and caught.value.exit_code == 10
    assert len(object_files(folder)) == 6


def test_a_throttle_forgives_and_forgets() -> None:
    now = [0.0]
    throttle = Throttle(3, 2.0, lambda: now[0])
    for _ in range(3):
        assert throttle.wait("10.0.0.1") == 0
        throttle.failed("10.0.0.1")
    assert throttle.wait("10.0.0.1") == 2 and throttle.wait("10.0.0.2") == 0
    now[0] = 2.0
    assert throttle.wait("10.0.0.1") == 0
    throttle.failed("10.0.0.1")
    assert throttle.wait("10.0.0.1") == 2
    for _ in range(4):
        throttle.failed("2001:db8::1")
    assert throttle.wait("2001:db8::ffff:1") > 0 and throttle.wait("2001:db8:0:1::1") == 0
    for number in range(ADDRESSES):
        throttle.failed(f"10.1.{number >> 8}.{number & 255}")
    assert throttle.wait("2001:db8::1") == 0
    throttle.failed(None)
    assert throttle.wait("no address") == 0
