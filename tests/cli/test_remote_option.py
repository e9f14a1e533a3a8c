"""`find --remote` and `generate --remote`: a prompt's KV from a server, only the blocks that it can use."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import Kvferry

sys.path.append(str(Path(__file__).parents[1] / "sync"))
from live import serving

from sync.connection import Peer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Peer]:
    with serving(tmp_path / "producer") as peer:
        yield peer


@pytest.mark.parametrize("way", ["server", "folder"])
def test_generate_from_what_another_machine_prefilled(
    kvferry: Kvferry, story: Path, server: Peer, tmp_path: Path, way: str
) -> None:
    remote = server.where if way == "server" else str(tmp_path / "producer")
    words = story.read_text()[:2600]
    short = tmp_path / "short.txt"
    short.write_text(words)
    made = kvferry(
        "--store",
        str(tmp_path / "producer"),
        "prefill",
        "--bundle",
        "tiny",
        str(story),
        "--tokens",
        "1500",
        "--name",
        "book",
        "--receipt",
        "0",
    )
    assert made.code == 0, made.err
    found = kvferry("find", "--bundle", "tiny", str(short), "--remote", remote, "--json").json
    asked = found["asked_tokens"]
    assert 500 < asked < 1500 and found["reused_tokens"] == 0 and found["remote"]["reused_tokens"] >= asked - 3
    alone = kvferry("generate", "--bundle", "tiny", "--prompt", words, "-n", "12", "--json").json
    fetched = kvferry("generate", "--bundle", "tiny", "--prompt", words, "-n", "12", "--remote", remote, "--json").json
    assert fetched["tokens"] == alone["tokens"] and alone["reused_tokens"] == 0
    assert fetched["reused_tokens"] == fetched["fetched"]["tokens"] == found["remote"]["reused_tokens"]
    blocks = -(-fetched["reused_tokens"] // 64)
    assert blocks + 8 <= fetched["fetched"]["objects"] <= blocks + 10, (
        "all full rows, of the sliding ones a window of 512"
    )
    again = kvferry("generate", "--bundle", "tiny", "--prompt", words, "-n", "12", "--remote", remote, "--json").json
    assert (
        again["fetched"]["objects"] == 0
        and again["reused_tokens"] == fetched["reused_tokens"]
        and again["tokens"] == alone["tokens"]
    )


def test_where_it_does_not_fit(kvferry: Kvferry) -> None:
    for words in (("--from", "a"), ("--prompt", "x", "--no-reuse")):
        answer = kvferry("generate", "--bundle", "tiny", *words, "--remote", "/nowhere")
        assert answer.code == 2 and "--prompt" in answer.err
    answer = kvferry("generate", "--bundle", "tiny", "--prompt", "x", "--remote", "http://127.0.0.1:1")
    assert answer.code == 8 and "kvferry serve" in answer.err
