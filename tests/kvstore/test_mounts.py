"""Network file systems are told by the system's table of mounts; a store there opens, and keeps its index in memory."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kvmemory import expect_rows, files, find, save

from kvstore import Store, doctor, mounts, prune
from kvstore.check import check
from kvstore.errors import StoreBusy
from kvstore.files import Root
from kvstore.holders import parse_locks
from kvstore.inventory import Level
from kvstore.mounts import Mount, mount_of, network_file_system, parse_mount, parse_mountinfo

MOUNTINFO = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
23 22 0:5 / /dev rw,nosuid - devtmpfs devtmpfs rw,size=4096k
24 22 0:41 / /home rw,relatime shared:3 master:1 - nfs4 server:/home rw,vers=4.2,addr=10.0.0.1
25 24 254:1 / /home/me/scratch rw,relatime - xfs /dev/vdb rw
26 22 0:42 / /mnt/My\\040Share\\134x rw,relatime - cifs //nas/kv rw
27 22 0:43 / /mnt/ssh rw - fuse.sshfs me@host:/ rw
28 22 0:44 / /mnt/usb rw - fuseblk /dev/sda1 rw
29 22 0:45 / /mnt/over rw - ext4 /dev/vdc rw
30 22 0:46 / /mnt/over rw - lustre mgs:/x rw
31 22 0:47 / /mnt/vm rw - 9p hostshare rw,trans=virtio
32 22 0:48 / /mnt/cloud rw - fuse.rclone remote: rw
33 22 0:49 / /mnt/enc rw - fuse.gocryptfs /enc rw
nonsense
34 22
"""

MACOS = """\
/dev/disk3s1s1 on / (apfs, sealed, local, read-only, journaled)
devfs on /dev (devfs, local, nobrowse)
/dev/disk3s5 on /System/Volumes/Data (apfs, local, journaled, nobrowse)
//me@nas/kv on /Volumes/My Share (1) (smbfs, nodev, nosuid, mounted by me)
server:/home on /Volumes/home (nfs, nodev, nosuid, mounted by me)
"""


@pytest.mark.parametrize(
    ("path", "kind", "shared"),
    [
        ("/", "ext4", False),
        ("/homes/x", "ext4", False),
        ("/home", "nfs4", True),
        ("/home/me/kv", "nfs4", True),
        ("/home/me/scratch/kv", "xfs", False),
        ("/mnt/My Share\\x/kv", "cifs", True),
        ("/mnt/ssh/a/b", "fuse.sshfs", True),
        ("/mnt/usb/kv", "fuseblk", False),
        ("/mnt/over/kv", "lustre", True),
        ("/mnt/vm", "9p", True),
        ("/mnt/cloud/kv", "fuse.rclone", True),
        ("/mnt/enc/kv", "fuse.gocryptfs", False),
    ],
)
def test_the_table_of_linux(path: str, kind: str, shared: bool) -> None:
    mount = mount_of(path, parse_mountinfo(MOUNTINFO))
    assert mount is not None and (mount.type, mount.shared) == (kind, shared)


@pytest.mark.parametrize(
    ("path", "kind", "shared"),
    [
        ("/Users/me", "apfs", False),
        ("/System/Volumes/Data/kv", "apfs", False),
        ("/Volumes/My Share (1)/kv", "smbfs", True),
        ("/Volumes/home", "nfs", True),
    ],
)
def test_the_table_of_macos(path: str, kind: str, shared: bool) -> None:
    mount = mount_of(path, parse_mount(MACOS))
    assert mount is not None and (mount.type, mount.shared) == (kind, shared)


def test_where_nothing_can_be_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert mount_of("/x", []) is None
    assert network_file_system(tmp_path) is None
    monkeypatch.setattr(mounts, "_mounts", list)
    assert network_file_system(tmp_path) is None


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder that the table of mounts calls NFS."""
    (tmp_path / "nfs").mkdir()
    table = [Mount("/", "ext4"), Mount(str(tmp_path / "nfs"), "nfs4")]
    monkeypatch.setattr(mounts, "_mounts", lambda: table)
    return tmp_path / "nfs"


def test_a_store_on_a_network_file_system(network: Path) -> None:
    """Everything works, and no index file is made, opened or touched there."""
    path = network / "s"
    with Store.open(path) as one, Store.open(path) as two:
        items = list(range(200))
        save(one, items, name="a")
        assert find(two, [*items, 1]).n == 200  # what others save is seen
        save(two, [*items, 7, 8], name="b")
        assert find(one, [*items, 7, 8, 9]).n == 202
        expect_rows(one, one.match("b"))
        two.shelf.records.remove(["b"])
        prune.apply(one, prune.plan(one))
        prune.purge(one)
        assert find(two, [*items, 7, 8, 9]).n == 200
        for level in (Level(0.0), Level(0.3), Level(1.0)):
            report = check(two, level)
            assert report.ok and report.notes == ()
        assert two._index is not None and not two._index.kept
    assert not list(path.glob("index.sqlite*"))


def test_an_index_that_lies_there_already_is_left_alone(network: Path, tmp_path: Path) -> None:
    with Store.open(tmp_path / "s") as store:
        save(store, list(range(70)), name="a")
    (tmp_path / "s").rename(network / "s")
    index = network / "s" / "index.sqlite"
    index.write_bytes(b"another machine's")
    before = files(network)
    with Store.open(network / "s") as store:
        assert find(store, [*range(70), 1]).n == 70
        assert check(store).ok
    assert index.read_bytes() == b"another machine's" and files(network) == before


def test_the_doctor_says_so(network: Path, tmp_path: Path) -> None:
    Store.open(network / "s").close()
    told = {f["what"]: f for f in doctor.examine(network / "s", tmp_path)}
    assert told["file system"]["state"] == "note"
    assert "nfs4" in told["file system"]["found"] and "index in memory" in told["file system"]["found"]
    assert "file system" not in {f["what"] for f in doctor.examine(tmp_path / "none", tmp_path)}


def test_an_exclusive_lock_on_nfs_is_taken_on_a_file_open_for_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Linux's NFS client has it: flock(2), notes."""
    Store.open(tmp_path / "s").close()
    real = fcntl.flock

    def as_nfs(fd: int, mode: int) -> None:
        writable = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
        if mode & fcntl.LOCK_EX and not writable:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        real(fd, mode)

    monkeypatch.setattr(fcntl, "flock", as_nfs)
    root = Root(tmp_path / "s")
    with root.lock("lock", exclusive=True), pytest.raises(StoreBusy), root.lock("lock", exclusive=False, seconds=0):
        pass
    with root.lock("lock", exclusive=False), root.lock("lock", exclusive=False):
        pass
    root.close()


def test_a_file_system_without_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvstore.disk import advice

    with Store.open(tmp_path / "s") as store:

        def refuse(fd: int, mode: int) -> None:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        monkeypatch.setattr(fcntl, "flock", refuse)
        with pytest.raises(OSError) as caught:
            save(store, [1, 2, 3])
        assert caught.value.filename == str(tmp_path / "s") and "locks" in advice(caught.value)
        assert not list((tmp_path / "s" / "snapshots").iterdir()), "nothing is written without the lock"


LOCKS = """\
1: POSIX  ADVISORY  WRITE 3568 fe:00:2531452 0 EOF
2: FLOCK  ADVISORY  READ  3517 fe:00:2531445 0 EOF
2: -> FLOCK  ADVISORY  WRITE 3600 fe:00:2531445 0 EOF
3: FLOCK  ADVISORY  READ  3520 fe:00:2531445 0 EOF
4: FLOCK  ADVISORY  READ  -1 fe:00:2531445 0 EOF
5: FLOCK  ADVISORY  READ  3521 fe:01:2531445 0 EOF
"""


def test_who_holds_a_lock() -> None:
    assert parse_locks(LOCKS, os.makedev(0xFE, 0), 2531445) == [3517, 3520]
    assert parse_locks(LOCKS, os.makedev(0xFE, 0), 2531445, writers=True) == []
    assert parse_locks(LOCKS, os.makedev(0xFE, 0), 2531452, writers=True) == [3568]
    assert parse_locks("", 0, 1) == []


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="Linux tells who holds a lock")
def test_a_busy_store_names_who_holds_it(tmp_path: Path) -> None:
    Store.open(tmp_path / "s").close()
    program = "import sys; from pathlib import Path; from kvstore.files import Root\nwith Root(Path(sys.argv[1])).lock('lock', exclusive=False): print(flush=True); input()"
    held = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "s")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert held.stdout is not None and held.stdout.readline() == b"\n"
    root = Root(tmp_path / "s")
    with (
        pytest.raises(StoreBusy, match=f"held for over 0 s by process {held.pid} ") as caught,
        root.lock("lock", exclusive=True, seconds=0),
    ):
        pass
    assert caught.value.details["holders"][0].startswith(f"process {held.pid} (")
    root.close()
    held.communicate(b"\n")
