"""Has every verb about servers, buckets and devices answer once, with the real thing behind it where that can run here."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pages import ROOT

STORY = ROOT / "kvstore" / "data" / "ferry.txt"


@contextlib.contextmanager
def running(*words: str) -> Iterator[subprocess.Popen[str]]:
    """A verb that doesn't end by itself, with --json."""
    process = subprocess.Popen([sys.executable, "-m", "kvstore", *words, "--json"], stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def value(process: subprocess.Popen[str]) -> Any:
    """The first JSON object that it prints over several lines."""
    assert process.stdout is not None
    text = ""
    while not text.endswith("\n}\n"):
        line = process.stdout.readline()
        assert line, f"it ended: {text}"
        text += line
    return json.loads(text)


def served(
    ask: Callable[..., Any], told: Callable[[str, Any], None], patch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """serve, pair, tokens, servers, mirror, clone: a server of the store, and this process as another machine too."""
    patch.setenv("KVFERRY_CONFIG", str(tmp_path / "config"))
    with running("serve", "--tls", "--port", "0", "--no-log") as process:
        said = value(process)
        told("serve", said)
        port = said["address"].rpartition(":")[2]
        offer = ask("pair", "--host", "127.0.0.1", "--port", port, "--namespace", "default")
        ask("pair", offer["url"], "--device", "phone")
        ask("mirror", said["address"], "--ref", name, "--verify", "--dry-run")
        ask("mirror", said["address"], "--ref", name)
        ask("clone", said["address"], "clone")
        ask("servers ls")
        ask("find", "--bundle", "tiny", str(STORY), "--remote", said["address"])
        ask("generate", "--bundle", "tiny", "--prompt", "The ferry", "-n", "1", "--remote", said["address"])
    key = ask("keys new", "--name", "mac")["key"]
    ask("keys trust", key)
    ask("keys ls")
    ask("sign", name)
    ask("show", name)
    ask("keys untrust", key)
    ask("tokens add", "phone")
    for token in ask("tokens ls"):
        ask("tokens revoke", token["id"])
    ask("servers forget", f"127.0.0.1:{port}")


def watched(told: Callable[[str, Any], None], tmp_path: Path) -> None:
    """watch: one file that is taken in, one that is cut, names that are pushed, and a remote that is away."""
    inbox = tmp_path / "inbox"
    inbox.mkdir()
    data = (tmp_path / "a.kvferry").read_bytes()
    (inbox / "a.kvferry").write_bytes(data)
    (inbox / "cut.kvferry").write_bytes(data[:-1])
    missing = {"pushed", "failed", "imported", "incomplete"}
    with running(
        "watch", "--inbox", str(inbox), "--push", str(tmp_path / "away" / "remote"), "--push", str(tmp_path / "watched")
    ) as process:
        assert process.stdout is not None
        end = time.monotonic() + 60
        while missing and time.monotonic() < end:
            line = json.loads(process.stdout.readline())
            told("watch", line)
            missing.discard(line["event"])
    assert not missing


def elsewhere(ask: Callable[..., Any], patch: pytest.MonkeyPatch, name: str, published: tuple[str, ...]) -> None:
    """peers, bucket gc, send: what this machine lacks is stood in for."""
    import sync.blobs
    from sync.discovery import Found

    patch.setattr("sync.discovery.peers", lambda seconds: [Found("mac", ("10.0.0.5",), 8765, "ab" * 32)])
    ask("peers", "--seconds", "0.1")
    from obstore.store import MemoryStore

    blobs = sync.blobs.Blobs(MemoryStore(), "s3://test")
    patch.setattr("sync.blobs.Blobs.open", lambda url: blobs)
    ask("push", "s3://test", name)
    ask("bucket gc", "s3://test", "--dry-run")
    ask("bucket gc", "s3://test", "--grace=0", "--yes")
    patch.setattr("runtime.send_command._copy", lambda *given: None)
    patch.setattr("shutil.which", lambda name, which=os.fspath: which(f"/usr/bin/{name}"))
    ask("send", "g", "--device", "phone", "--bundle-id", "com.example.app", *published)
