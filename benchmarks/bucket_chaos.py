"""One bucket on SeaweedFS: producers push, consumers pull, a collector deletes what no name needs, and processes are killed at random.

A push that returned is acknowledged: from then on its name restores that snapshot, or one that the same producer pushed later. Names are moved all the
time, and all producers draw from few texts, so that what one leaves to the collector another needs again. The grace is seconds, not a day.
Bar: nothing lost, no wrong byte.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from kv import machine, parser, show

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "sync"))

from ferries import assert_restores, save
from seaweed import running

from kvstore import Store
from kvstore.errors import Missing, Refused, Unreachable
from sync import bucket_gc, pull, push
from sync.blobs import Blobs
from sync.bucket import Bucket

URL = "s3://kvferry/chaos"
NAMES, TEXTS, MOST = 3, 6, 450
"""Names of a producer; texts of all; tokens of a snapshot at most."""
AGAIN = 6
"""Pulls of one name before it counts as lost: it may move, and what it stood for be collected, while it is pulled."""


def opened(grace: float, create: bool = False) -> Bucket:
    return Bucket.open(Blobs.open(URL), create=create, grace=timedelta(seconds=grace))


def note(folder: Path, file: str, *what: object) -> None:
    """Appends a line, whole or not at all."""
    fd = os.open(folder / file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, (json.dumps(what) + "\n").encode())
    os.close(fd)


def lines(folder: Path, pattern: str) -> Iterator[list[Any]]:
    for path in sorted(folder.glob(pattern)):
        for line in path.read_text().splitlines():
            yield json.loads(line)


def producer(folder: Path, number: int, grace: float, random_: random.Random) -> None:
    """Saves and pushes until it is killed. Says what it will push, and what was pushed."""
    with Store.open(folder / f"producer{number}") as store, opened(grace) as bucket:
        while True:
            name, text, tokens = (
                f"p{number}-{random_.randrange(NAMES)}",
                f"text{random_.randrange(TEXTS)}",
                random_.randrange(1, MOST),
            )
            digest = save(store, name, tokens, text).digest
            assert digest is not None
            note(folder, f"meant{number}", name, digest.hex, tokens, text)
            try:
                push(store, bucket, [name], force=True)
            except (Unreachable, Refused, Missing) as error:
                note(folder, "events", "push failed", type(error).__name__, str(error)[:300])
            else:
                note(folder, f"pushed{number}", name, digest.hex)
                note(folder, "events", "push", "")


def consumer(folder: Path, number: int, grace: float, random_: random.Random) -> None:
    with opened(grace) as bucket:
        while True:
            names = sorted({line[0] for line in lines(folder, "pushed*")})
            if names:
                told(folder, bucket, random_.choice(names), {})
            else:
                time.sleep(0.1)


def told(folder: Path, bucket: Bucket, name: str, allowed: dict[str, set[str]]) -> None:
    """Pulls an acknowledged name and compares every byte; notes how it ended. ``allowed``: digests that a name may stand for."""
    for attempt in range(AGAIN):
        with tempfile.TemporaryDirectory(dir=folder) as scratch, Store.open(Path(scratch) / "store") as store:
            try:
                digest = pull(store, bucket, [name]).snapshots[0].digest.hex
            except Unreachable as error:
                note(folder, "events", "pull failed", type(error).__name__, str(error)[:300])
                return
            except (Missing, Refused) as error:
                note(folder, "events", "pull again", type(error).__name__, str(error)[:300])
                if attempt == AGAIN - 1:
                    note(folder, "events", "lost", name, str(error)[:300])
                continue
            meant = {line[1]: (line[2], line[3]) for line in lines(folder, "meant*") if line[0] == name}
            try:
                tokens, text = meant[digest]
                assert name not in allowed or digest in allowed[name], f"{digest} was replaced by an acknowledged push"
                assert_restores(store, name, tokens, text)
            except (AssertionError, KeyError) as error:
                note(folder, "events", "wrong", name, repr(error)[:300])
            else:
                note(folder, "events", "pull", "")
            return


def collector(folder: Path, number: int, grace: float, random_: random.Random) -> None:
    with opened(grace) as bucket:
        while True:
            try:
                done = bucket_gc.apply(bucket, bucket_gc.plan(bucket), lambda _: None)
            except (Unreachable, Missing) as error:
                note(folder, "events", "collection failed", type(error).__name__, str(error)[:300])
            else:
                note(folder, "events", "collection", "", "", done.snapshots, done.objects)
            time.sleep(0.2)


ROLES = {"producer": producer, "consumer": consumer, "collector": collector}


@dataclass(slots=True)
class Crowd:
    """The processes, each restarted when it was killed."""

    folder: Path
    grace: float
    running: dict[tuple[str, int], subprocess.Popen[bytes]] = field(default_factory=dict)
    started: int = 0
    ended: Counter[str] = field(default_factory=Counter)

    def start(self, role: str, number: int) -> None:
        self.started += 1
        command = [sys.executable, __file__, "--role", role, "--number", str(number), "--seed", str(self.started)]
        command += ["--folder", str(self.folder), "--grace", str(self.grace)]
        with (self.folder / "stderr").open("ab") as log:
            self.running[role, number] = subprocess.Popen(command, stdout=log, stderr=log)

    def kill(self, one: tuple[str, int]) -> None:
        process = self.running[one]
        if process.poll() is not None:
            self.ended[one[0]] += 1  # by itself: a fault
        process.send_signal(signal.SIGKILL)
        process.wait()


def measure(
    folder: Path, seconds: float, producers: int, consumers: int, grace: float, every: float, seed: int
) -> dict[str, object]:
    """One run. ``every``: seconds between kills, on average."""
    random_, kills = random.Random(seed), Counter[str]()
    with running() as environment:
        os.environ.update(environment)
        opened(grace, create=True).close()
        crowd = Crowd(folder, grace)
        counts = {"producer": producers, "consumer": consumers, "collector": 1}
        try:
            for role, count in counts.items():
                for number in range(count):
                    crowd.start(role, number)
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                time.sleep(random_.uniform(0, 2 * every))
                one = random_.choice(sorted(crowd.running))
                crowd.kill(one)
                kills[one[0]] += 1
                crowd.start(*one)
        finally:
            for one in list(crowd.running):
                crowd.kill(one)
        with opened(grace) as bucket:
            last = acknowledged(folder)
            for name in sorted(last):
                told(folder, bucket, name, last)
            bucket_gc.apply(bucket, bucket_gc.plan(bucket), lambda _: None)
            for name in sorted(last):
                told(folder, bucket, name, last)
    events = list(lines(folder, "events"))
    ended = Counter(event[0] for event in events)
    faults = [event for event in events if event[0] in ("lost", "wrong")]
    return {
        "benchmark": "bucket_chaos",
        "seconds": seconds,
        "producers": producers,
        "consumers": consumers,
        "grace_seconds": grace,
        "kills": dict(sorted(kills.items())),
        "acknowledged": ended["push"],
        "names": len(last),
        "restored": ended["pull"],
        "pulled_again": ended["pull again"],
        "pushes_failed": ended["push failed"],
        "pulls_failed": ended["pull failed"],
        "collections": ended["collection"],
        "collections_failed": ended["collection failed"],
        "collected_snapshots": sum(event[3] for event in events if event[0] == "collection"),
        "collected_objects": sum(event[4] for event in events if event[0] == "collection"),
        "ended_by_themselves": sum(crowd.ended.values()),
        "lost": ended["lost"],
        "wrong": ended["wrong"],
        "faults": faults[:20],
        **machine(),
    }


def acknowledged(folder: Path) -> dict[str, set[str]]:
    """What each name may stand for: the last push of it that was acknowledged, or one that was begun later."""
    pushed = {line[0]: line[1] for line in lines(folder, "pushed*")}
    found: dict[str, set[str]] = {}
    for name, digest in pushed.items():
        meant = [line[1] for line in lines(folder, "meant*") if line[0] == name]
        # The same text and length may be pushed again: the earliest place that the acknowledged one can have.
        acknowledgements = [line[1] for line in lines(folder, "pushed*") if line[0] == name]
        at = _after(meant, acknowledgements)
        found[name] = {digest, *meant[at:]}
    return found


def _after(meant: list[str], pushed: list[str]) -> int:
    """Where in what was meant the last acknowledged push stands: acknowledgements come in the same order."""
    at = -1
    for digest in pushed:
        at = meant.index(digest, at + 1)
    return at


def main() -> None:
    made = parser("4 producers, 8 consumers, one bucket, kills, a collector", 1)
    made.add_argument("--seconds", type=float, default=60.0)
    made.add_argument("--producers", type=int, default=4)
    made.add_argument("--consumers", type=int, default=8)
    made.add_argument("--grace", type=float, default=6.0, help="seconds")
    made.add_argument("--every", type=float, default=0.5, help="seconds between kills")
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--role", choices=ROLES)
    made.add_argument("--number", type=int, default=0)
    options = made.parse_args()
    if options.role is not None:
        ROLES[options.role](options.folder, options.number, options.grace, random.Random(options.seed))
    with (
        tempfile.TemporaryDirectory(prefix="kvferry-chaos-", dir=options.folder) as folder,
        contextlib.suppress(KeyboardInterrupt),
    ):
        found = measure(
            Path(folder),
            options.seconds,
            options.producers,
            options.consumers,
            options.grace,
            options.every,
            options.seed,
        )
        log = Path(folder) / "stderr"
        sys.stderr.write(log.read_text()[-4000:])
        show(found, options.json)
        sys.exit(1 if found["lost"] or found["wrong"] or found["ended_by_themselves"] else 0)


if __name__ == "__main__":
    main()
