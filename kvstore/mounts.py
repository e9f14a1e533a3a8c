"""Which file system a folder lies on, and whether other machines write to it too: there SQLite's index is refused.

SQLite keeps its write-ahead log in memory that processes of one machine share; two machines would damage it. Only Linux's half has been
run: macOS is asked through ``mount``, whose answer is parsed here by the words of its manual.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

NETWORK = frozenset(
    [
        "9p",
        "acfs",
        "afpfs",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "coda",
        "davfs",
        "gfs2",
        "glusterfs",
        "gpfs",
        "lustre",
        "ncpfs",
        "nfs",
        "nfs4",
        "ocfs2",
        "orangefs",
        "panfs",
        "pvfs2",
        "smb3",
        "smbfs",
        "vboxsf",
        "virtiofs",
        "vmhgfs",
        "webdav",
        "wekafs",
    ]
)
"""Types by which Linux and macOS call what other machines, or the host of a virtual one, may write to as well."""
_FUSE = frozenset(
    [
        "afpfs",
        "beegfs",
        "ceph",
        "ceph-fuse",
        "cephfs",
        "curlftpfs",
        "davfs",
        "davfs2",
        "gcsfuse",
        "glusterfs",
        "goofys",
        "gvfsd-fuse",
        "juicefs",
        "moosefs",
        "mfs",
        "prl_fs",
        "rclone",
        "s3fs",
        "seaweedfs",
        "smbnetfs",
        "sshfs",
        "vmhgfs-fuse",
        "wekafs",
    ]
)
"""The same of file systems that a process serves: ``fuse.<one of these>``."""


@dataclass(frozen=True, slots=True)
class Mount:
    """One entry of the system's table: where, and the type."""

    point: str
    type: str

    @property
    def shared(self) -> bool:
        """Whether other machines may write there too."""
        kind, _, inner = self.type.partition(".")
        return kind in NETWORK or (kind in ("fuse", "fusefs", "macfuse", "osxfuse") and inner in _FUSE)


def parse_mountinfo(text: str) -> list[Mount]:
    """The table as ``/proc/self/mountinfo`` gives it; later entries lie over earlier ones. Lines of another form are passed over."""
    mounts = []
    for line in text.splitlines():
        before, dash, after = line.partition(" - ")
        fields = before.split(" ")
        if dash and len(fields) >= 6 and after:
            mounts.append(Mount(re.sub(r"\\([0-7]{3})", _octal, fields[4]), after.split(" ")[0]))
    return mounts


def _octal(found: re.Match[str]) -> str:
    return chr(int(found[1], 8))


def parse_mount(text: str) -> list[Mount]:
    """The table as macOS's ``mount`` prints it: ``//me@host/kv on /Volumes/kv (smbfs, nodev, nosuid, mounted by me)``."""
    found = (re.fullmatch(r".* on (/.*) \(([^,)]+).*\)", line) for line in text.splitlines())
    return [Mount(one[1], one[2].strip()) for one in found if one is not None]


def mount_of(path: str, mounts: Iterable[Mount]) -> Mount | None:
    """The one that an absolute path without links lies on."""
    best = None
    for mount in mounts:
        point = mount.point.rstrip("/")
        deep = best is None or len(point) >= len(best.point.rstrip("/"))
        if deep and (path == point or path.startswith(f"{point}/")):
            best = mount
    return best


def network_file_system(path: Path) -> str | None:
    """The type of the network file system that a folder lies on; None if it is this machine's own, or nobody can tell."""
    mount = mount_of(os.path.realpath(path), _mounts())
    return mount.type if mount is not None and mount.shared else None


def _mounts() -> list[Mount]:
    if sys.platform == "darwin":  # pragma: no cover - macOS
        import subprocess

        try:
            told = subprocess.run(["/sbin/mount"], capture_output=True, text=True, timeout=10, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            return []
        return parse_mount(told)
    try:
        return parse_mountinfo(Path("/proc/self/mountinfo").read_text(errors="surrogateescape"))
    except OSError:  # another system, or a sandbox without /proc
        return []
