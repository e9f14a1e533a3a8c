"""Pull 2,000 tokens (36.9 MB) over loopback from `kvferry serve`, verified and synced, against an rsync daemon that serves the same files, and nginx.

rsync neither verifies against names nor syncs; with --fsync it syncs. nginx is one file of the same bytes, read into place and hashed with BLAKE3, not written.
Bar: >= 2 x rsync. The server is a process of its own; a fresh store each time. ``--consumers``: that many processes pull at once, once.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from blake3 import blake3
from kv import (
    IDENTITY,
    LAYOUT,
    everything,
    host,
    machine,
    parser,
    ratio,
    rounds,
    save_arguments,
    seconds,
    show,
    summary,
)

from kvstore import Store
from sync import pull
from sync.client import Client
from sync.remotes import peer_of

TOKENS = 2000
KVFERRY = [sys.executable, "-m", "kvstore"]


def main() -> None:
    made = parser("pull 2,000 tokens over loopback", 11)
    made.add_argument("--consumers", type=int, default=50, help="processes that pull at once; 0: none")
    options = made.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kvferry-bench-", dir=options.folder))
    try:
        show(measure(folder, options.rounds, options.consumers), options.json)
    finally:
        shutil.rmtree(folder)


def measure(folder: Path, count: int, consumers: int) -> dict[str, object]:
    kv = host(TOKENS)
    data = everything(kv, TOKENS)
    store = folder / "served"
    with Store.open(store) as opened:
        opened.save(LAYOUT, IDENTITY, list(range(1000, 1000 + TOKENS)), kv, name="book", **save_arguments(TOKENS))
    (folder / "blob").write_bytes(data)
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(serve(store, folder / "plain"))
        tls = stack.enter_context(serve(store, folder / "tls", "--tls"))
        pair(folder / "tls", tls["address"])
        sides: dict[str, Callable[[], float]] = {
            "kvferry": lambda: pulled(folder, plain["address"], folder / "plain"),
            "kvferry_tls": lambda: pulled(folder, tls["address"], folder / "tls"),
        }
        if shutil.which("rsync"):
            port = stack.enter_context(rsync(folder, store))
            sides["rsync"] = lambda: rsynced(folder, port)
            sides["rsync_fsync"] = lambda: rsynced(folder, port, "--fsync")
        if shutil.which("nginx"):
            web = stack.enter_context(nginx(folder))
            into = memoryview(bytearray(len(data)))
            sides["nginx_read_hash"] = lambda: seconds(lambda: fetched(web, into))
        rounds(1, sides)
        times = rounds(count, sides)
        unchanged = again(folder, plain["address"], folder / "plain")
        crowd = None if not consumers else crowded(folder, plain, consumers, len(data))
    return {
        "benchmark": "transfer",
        "tokens": TOKENS,
        "bytes": len(data),
        "rounds": count,
        "times": summary(times),
        "mb_per_second": {name: round(len(data) / 1e6 / sorted(t)[len(t) // 2]) for name, t in times.items()},
        "ratio_to_rsync": None if "rsync" not in times else ratio(times, "rsync", "kvferry"),
        "tls_ratio_to_rsync": None if "rsync" not in times else ratio(times, "rsync", "kvferry_tls"),
        "ratio_to_rsync_fsync": None if "rsync" not in times else ratio(times, "rsync_fsync", "kvferry"),
        "time_to_nginx": None if "nginx_read_hash" not in times else ratio(times, "kvferry", "nginx_read_hash"),
        "unchanged": unchanged,
        "consumers": crowd,
        "peers": {"rsync": version("rsync", "--version"), "nginx": version("nginx", "-v")},
        "machine": machine(),
    }


def version(program: str, option: str) -> str | None:
    if not shutil.which(program):
        return None
    done = subprocess.run([program, option], capture_output=True, text=True, check=False)
    return (done.stdout or done.stderr).splitlines()[0].strip()


@contextlib.contextmanager
def serve(store: Path, config: Path, *options: str) -> Iterator[dict[str, Any]]:
    """A server process; yields what it said, and its ``pid``."""
    environment = {**os.environ, "KVFERRY_CONFIG": str(config)}
    command = [*KVFERRY, "--store", str(store), "serve", "--port", "0", "--no-log", "--json", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
    assert process.stdout is not None
    try:
        said = ""
        while line := process.stdout.readline():
            said += line
            if line == "}\n":
                break
        yield {**json.loads(said), "pid": process.pid}
    finally:
        process.terminate()
        process.wait(30)


def pair(config: Path, address: str) -> None:
    port = address.rpartition(":")[2]
    environment = {**os.environ, "KVFERRY_CONFIG": str(config)}
    offer = subprocess.run(
        [*KVFERRY, "pair", "--host", "127.0.0.1", "--port", port, "--json"],
        capture_output=True,
        check=True,
        env=environment,
    )
    subprocess.run(
        [*KVFERRY, "pair", json.loads(offer.stdout)["url"]], check=True, env=environment, stdout=subprocess.DEVNULL
    )


def pulled(folder: Path, address: str, config: Path) -> float:
    """Seconds from asking the server who it is to the name in a store, durable."""
    path = folder / "consumer"
    with Store.open(path) as store:
        store.indexed(lambda index: None)
        os.sync()

        def run() -> None:
            with Client.open(peer_of(address, config)) as remote:
                assert pull(store, remote, ["book"]).objects == 64

        taken = seconds(run)
    shutil.rmtree(path)
    return taken


def again(folder: Path, address: str, config: Path) -> dict[str, float]:
    """What a second pull of the same name carries."""
    path = folder / "consumer"
    with Store.open(path) as store, Client.open(peer_of(address, config)) as remote:
        pull(store, remote, ["book"])
        moved = pull(store, remote, ["book"])
    shutil.rmtree(path)
    return {"payload_bytes": moved.payload_bytes, "ms": round(1e3 * moved.seconds, 1)}


@contextlib.contextmanager
def rsync(folder: Path, store: Path) -> Iterator[int]:
    port = free_port()
    config = folder / "rsyncd.conf"
    config.write_text(
        f"use chroot = no\n[store]\npath = {store}/objects\nread only = yes\nuid = {os.getuid()}\ngid = {os.getgid()}\n"
    )
    command = ["rsync", "--daemon", "--no-detach", f"--config={config}", f"--port={port}", "--address=127.0.0.1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        answering(port)
        yield port
    finally:
        process.terminate()
        process.wait(10)


def rsynced(folder: Path, port: int, *options: str) -> float:
    target = folder / "copy"
    command = ["rsync", "-rt", *options, f"rsync://127.0.0.1:{port}/store/", f"{target}/"]
    os.sync()
    taken = seconds(lambda: subprocess.run(command, check=True))
    shutil.rmtree(target)
    return taken


@contextlib.contextmanager
def nginx(folder: Path) -> Iterator[int]:
    port = free_port()
    config = folder / "nginx.conf"
    config.write_text(
        f"daemon off; pid {folder}/nginx.pid; error_log stderr crit; worker_processes 1; user root;\n"
        f"events {{}}\nhttp {{ access_log off; sendfile on; client_body_temp_path {folder}/b; proxy_temp_path {folder}/p; "
        f"fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;\n"
        f"server {{ listen 127.0.0.1:{port}; root {folder}; }} }}\n"
    )
    process = subprocess.Popen(["nginx", "-c", str(config), "-p", str(folder)], stderr=subprocess.DEVNULL)
    try:
        answering(port)
        yield port
    finally:
        process.terminate()
        process.wait(10)


def fetched(port: int, into: memoryview) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/blob")
    answer, at, hasher = connection.getresponse(), 0, blake3()
    while at < len(into):
        count = answer.readinto(into[at : at + (1 << 20)])
        assert count
        hasher.update(into[at : at + count])
        at += count
    hasher.digest()
    connection.close()


def crowded(folder: Path, server: dict[str, Any], consumers: int, size: int) -> dict[str, object]:
    """Processes that pull at once, each into a store of its own: their own seconds, the server's memory before and at most."""
    before = resident(server["pid"])
    script = (
        "import sys, time, json\nfrom pathlib import Path\nfrom kvstore import Store\nfrom sync import pull\nfrom sync.client import Client\n"
        "from sync.remotes import peer_of\nstore, address, config = sys.argv[1:]\nprint('ready', flush=True)\nsys.stdin.readline()\n"
        "began = time.perf_counter()\nwith Store.open(Path(store)) as s, Client.open(peer_of(address, Path(config))) as c:\n"
        "    assert pull(s, c, ['book']).objects == 64\nprint(time.perf_counter() - began)\n"
    )
    arguments = [server["address"], str(folder / "plain")]
    waiting = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(folder / f"crowd{n}"), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for n in range(consumers)
    ]
    for process in waiting:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    began = time.perf_counter()
    for process in waiting:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    most = before
    while any(process.poll() is None for process in waiting):
        most = max(most, resident(server["pid"]))
        time.sleep(0.02)
    taken = time.perf_counter() - began
    each = [
        float(process.stdout.read()) for process in waiting if process.returncode == 0 and process.stdout is not None
    ]
    return {
        "count": consumers,
        "errors": consumers - len(each),
        "seconds": round(taken, 2),
        "mb_per_second": round(consumers * size / 1e6 / taken),
        "slowest_seconds": round(max(each), 2),
        "server_resident_mb_before": round(before / 1e6, 1),
        "server_resident_mb_most": round(most / 1e6, 1),
    }


def resident(pid: int) -> int:
    import psutil

    return int(psutil.Process(pid).memory_info().rss)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


def answering(port: int) -> None:
    for _ in range(200):
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port)).close()
            return
        time.sleep(0.02)
    raise TimeoutError(f"nothing answers on port {port}")


if __name__ == "__main__":
    main()
