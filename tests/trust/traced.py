"""One operation in a process of its own under ``strace``, which counts its system calls, or kills it or fails it at one of them.

The process is forked when everything is imported and waits for ``strace`` to attach: so calls are counted from the operation's first
one, and an attempt takes milliseconds. ``strace`` counts each thread by itself.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from battery import Missing, need

from kvstore.errors import KVError

CALLS = (
    "openat,close,read,write,pread64,pwrite64,preadv,writev,lseek,fsync,fdatasync,ftruncate,rename,renameat,renameat2,"
    "unlink,unlinkat,mkdir,mkdirat,rmdir,newfstatat,fstat,getdents64,flock,fcntl,dup,fadvise64,mmap,statfs"
)
"""What an operation does to files, by Python and by SQLite."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How the process ended: killed; or it returned; or it raised, and what."""

    killed: bool
    raised: str | None
    clear: bool
    """What it raised is an error for people: one of ours, or the system's with the place."""

    @property
    def returned(self) -> bool:
        return not self.killed and self.raised is None


def run(work: Callable[[], object], *options: str) -> Ended:
    """Runs ``work`` in a forked process under ``strace`` with ``options``."""
    strace = need("strace")
    start, began = os.pipe()
    told, telling = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(began)
            os.close(told)
            _child(work, start, telling)
        finally:
            os._exit(1)
    os.close(start)
    os.close(telling)
    command = [strace, "-f", "-o", "/dev/null", "-e", f"trace={CALLS}", *options, "-p", str(pid)]
    tracer = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert tracer.stderr is not None
    try:
        said = tracer.stderr.readline()
        if "attached" not in said:
            os.kill(pid, signal.SIGKILL)
            raise Missing(f"strace may not attach to a process here: {said.strip()}")
        os.write(began, b"x")
        tracer.stderr.read()
    finally:
        os.close(began)
        status = os.waitpid(pid, 0)[1]
        tracer.wait()
        tracer.stderr.close()
        with os.fdopen(told, "rb") as pipe:
            answer = pipe.read().decode(errors="replace")
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL, f"died of signal {os.WTERMSIG(status)}"
        return Ended(True, None, True)
    verdict, _, text = answer.partition("\n")
    assert verdict in ("returned", "clear", "unclear"), f"the process ended with {status} and said {answer!r}"
    return Ended(False, None if verdict == "returned" else text, verdict != "unclear")


def _child(work: Callable[[], object], start: int, telling: int) -> None:
    """Its answer goes out in one write on a descriptor that was open before, so that it is heard whatever fails."""
    os.read(start, 1)
    try:
        work()
        answer = "returned\n"
    except BaseException as error:
        answer = f"{'clear' if is_clear(error) else 'unclear'}\n{type(error).__name__}: {error}"
    for _ in range(3):  # the fault may hit this very call
        try:
            os.write(telling, answer.encode())
            break
        except OSError:
            continue
    os._exit(0)


def is_clear(error: BaseException) -> bool:
    """Whether an error tells a user what happened: one of ours, or the system's with its number and the place."""
    if isinstance(error, KVError):
        return bool(error.message)
    return isinstance(error, OSError) and error.errno is not None and error.filename is not None


def calls(work: Callable[[], object]) -> Counter[str]:
    """How often the thread that makes a system call most often makes it, by call."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        ended = run(work, "-o", str(log))
        assert ended.returned, ended
        threads: dict[str, Counter[str]] = {}
        for line in log.read_text(errors="replace").splitlines():
            found = re.match(r"(\d+) +(\w+)\(", line)
            if found is not None:
                threads.setdefault(found[1], Counter())[found[2]] += 1
    most: Counter[str] = Counter()
    for counter in threads.values():
        most |= counter
    return most
