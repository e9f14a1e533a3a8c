"""Row 10: what networks do to a transfer: cut at any byte, stall, reset, flip a bit, lose or double an answer, ignore a Range or lie about it.

Measured: 240 in about 25 s. A store pulls from a server, or pushes to one, through a proxy of ours that does one such thing once. The transfer then either ends well
or with an error of ours; nothing wrong is visible on either side; and the same transfer without the fault ends well, carrying nothing that landed before.
"""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

from battery import Lost, Size, Tally, WrongBytes
from ferries import assert_restores, object_files, save, verify
from live import serving
from proxy import DOWN, UP, Fault, Proxy, measured

import sync.connection
from kvstore import KVError, Store
from sync import Moved, pull, push
from sync.client import Client
from sync.connection import Peer

TITLE = "network faults through a proxy"
REQUIRED = 200
TOKENS, OLD = 700, 300
PULLS = ("cut", "reset", "stall", "flip", "double", "lose")
PUSHES = ("cut", "reset", "stall", "flip", "lose")


def faults(kinds: tuple[str, ...], passed: dict[str, int], count: int, chance: random.Random) -> Iterator[Fault]:
    """``count`` faults, spread over all bytes of a clean run, both ways."""
    for number in range(count):
        way = DOWN if number % 3 else UP
        total = passed[way]
        at = total * number // count if number % 2 else chance.randrange(total)
        ranges = (None, None, "ignored", "lied", "short")[chance.randrange(5)] if way == DOWN else None
        yield Fault(kinds[number % len(kinds)], min(at, total - 1), way, ranges)


def run(size: Size, tally: Tally, scratch: Path) -> None:
    sync.connection.SECONDS = 0.4
    sync.connection.PAUSE = 0.01
    chance = random.Random(f"network {size.seed}")
    with Store.open(scratch / "full") as full:
        save(full, "book", TOKENS)
    with Store.open(scratch / "old") as old:
        save(old, "book", OLD)
    count = size.pick(12, 120)
    with serving(scratch / "full") as server:
        passed = measured((server.host, server.port), lambda port: _pull(scratch / "old", scratch / "clean", port))
        for number, fault in enumerate(faults(PULLS, passed, count, chance)):
            with tally.attempt(f"pull, {fault}"):
                _attempt_pull(scratch, server, fault, number)
    with serving(scratch / "target") as server:
        passed = measured((server.host, server.port), lambda port: _push(scratch / "full", port))
    shutil.rmtree(scratch / "target")
    for number, fault in enumerate(faults(PUSHES, passed, count, chance)):
        with tally.attempt(f"push, {fault}"):
            _attempt_push(scratch, fault, number)


def _pull(origin: Path, folder: Path, port: int) -> Moved:
    if not folder.exists():
        shutil.copytree(origin, folder)
    with Store.open(folder) as store, Client.open(Peer("127.0.0.1", port)) as remote:
        return pull(store, remote, ["book"])


def _push(folder: Path, port: int) -> Moved:
    with Store.open(folder) as store, Client.open(Peer("127.0.0.1", port)) as remote:
        return push(store, remote, ["book"])


def _attempt_pull(scratch: Path, server: Peer, fault: Fault, number: int) -> None:
    folder = scratch / f"pull{number}"
    first: Moved | None = None
    # An error is told by name; any other than ours fails the attempt.
    with Proxy((server.host, server.port), fault) as proxy, contextlib.suppress(KVError):
        first = _pull(scratch / "old", folder, proxy.port)
    verify(folder)
    with Store.open(folder) as store:
        _holds(store, TOKENS if first is not None else None)
    waiting = len(list((folder / "quarantine").glob("*/*")))
    before = len(object_files(folder))
    second = _pull(scratch / "old", folder, server.port)
    missing = len(object_files(folder)) - before
    if second.objects + second.resumed != missing or second.resumed > waiting:
        raise AssertionError(
            f"carried {second.objects} and resumed {second.resumed} of {missing}, {waiting} had landed"
        )
    with Store.open(folder) as store:
        _holds(store, TOKENS)
    shutil.rmtree(folder)


def _attempt_push(scratch: Path, fault: Fault, number: int) -> None:
    target = scratch / f"push{number}"
    shutil.copytree(scratch / "old", target)
    done = False
    with serving(target) as server:
        with Proxy((server.host, server.port), fault) as proxy, contextlib.suppress(KVError):
            _push(scratch / "full", proxy.port)
            done = True
        verify(target)
        with Store.open(target) as store:
            _holds(store, TOKENS if done else None)
        _push(scratch / "full", server.port)
    verify(target)
    with Store.open(target) as store:
        _holds(store, TOKENS)
    shutil.rmtree(target)


def _holds(store: Store, tokens: int | None) -> None:
    """The name restores to what it was, or to what it was to become; to ``tokens`` where that is known."""
    match = store.match("book")
    if match.snapshot.tokens not in ((OLD, TOKENS) if tokens is None else (tokens,)):
        raise Lost(f"book has {match.snapshot.tokens} tokens")
    try:
        assert_restores(store, "book", match.snapshot.tokens)
    except AssertionError as error:
        raise WrongBytes("book") from error
