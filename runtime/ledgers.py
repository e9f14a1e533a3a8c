"""The three ledgers of this process as the system counts them: what a plan foretells, measured where it runs."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.plaintext import size_text, table

if TYPE_CHECKING:
    from .engine import Engine
    from .hostkv import HostKV

STATUS = Path("/proc/self/status")
_FOOTPRINT, _MAPPED, _RESIDENT, _PEAK = ("RssAnon", "RssShmem", "VmSwap"), ("RssFile",), ("VmRSS",), ("VmHWM",)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of this process; None: the system has no such counter, or this is not known to be it.

    ``footprint_bytes``: what it allocated (Linux: anonymous and shared memory, which the KV rows are, and what of it is swapped out; macOS: its physical footprint). ``wired_bytes``: macOS: what the whole
    system has wired, of which weights for the Neural Engine are a part. ``mapped_bytes``: pages of files in memory. ``resident_bytes`` and ``peak_bytes`` (since
    the process began): Linux: everything of it in memory; macOS: ``peak_bytes`` is the footprint's.
    """

    footprint_bytes: int | None
    wired_bytes: int | None
    mapped_bytes: int | None
    resident_bytes: int
    peak_bytes: int | None


@dataclass(frozen=True, slots=True)
class Stats:
    """Before and after a command's work. ``weights_stored_bytes``: what the engine's functions read of weight files, which are mapped; ``weights_decoded_bytes``: arrays made of
    them, part of the footprint; None: Core ML does not say. ``kv_bytes``: rows that are held; ``physical_bytes``: memory of the machine."""

    before: Memory
    after: Memory
    weights_stored_bytes: int | None
    weights_decoded_bytes: int | None
    kv_bytes: int
    physical_bytes: int

    def value(self) -> dict[str, Any]:
        """For ``--json``."""
        return asdict(self)

    def text(self) -> str:
        """For people."""
        names = ("footprint", "wired", "mapped", "resident", "peak")
        rows = [(name, *(_told(getattr(at, f"{name}_bytes")) for at in (self.before, self.after))) for name in names]
        rows += [
            ("weights, as stored", "", _told(self.weights_stored_bytes)),
            ("weights, decoded", "", _told(self.weights_decoded_bytes)),
        ]
        rows += [("KV", "", size_text(self.kv_bytes)), ("memory of the machine", "", size_text(self.physical_bytes))]
        return table(rows, ("memory", "before", "after"), right=("before", "after"))


def measure() -> Memory:
    """This process now. Imports psutil."""
    import psutil

    resident = int(psutil.Process().memory_info().rss)
    if STATUS.is_file():
        return linux_memory(STATUS.read_text(encoding="ascii", errors="replace"), resident)
    if sys.platform == "darwin":
        footprint, mapped, peak = _task()
        return Memory(footprint, int(psutil.virtual_memory().wired), mapped, resident, peak)
    return Memory(None, None, None, resident, None)


def linux_memory(status: str, resident: int) -> Memory:
    """From the text of ``/proc/self/status``, whose sizes are in units of 1,024 bytes. A line that is missing gives None."""
    sizes: dict[str, int] = {}
    for line in status.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB":
            sizes[name] = int(words[0]) * 1024

    def of(names: tuple[str, ...]) -> int | None:
        return sum(sizes[name] for name in names) if sizes.keys() >= set(names) else None

    return Memory(of(_FOOTPRINT), None, of(_MAPPED), of(_RESIDENT) or resident, of(_PEAK))


class Gauge:
    """Measures from when it is made to `read`. Made with ``on`` false it measures nothing and imports nothing."""

    def __init__(self, on: bool) -> None:
        self._before = measure() if on else None

    def read(self, engine: Engine, kv: HostKV) -> Stats | None:
        """Now, with what ``engine`` and ``kv`` hold; None: off."""
        if self._before is None:
            return None
        import psutil

        from .portable import PortableEngine

        weights = engine.weight_bytes() if isinstance(engine, PortableEngine) else None
        return Stats(
            before=self._before,
            after=measure(),
            weights_stored_bytes=None if weights is None else weights.stored,
            weights_decoded_bytes=None if weights is None else weights.decoded,
            kv_bytes=sum((kv.position - first) * kv.layout.row_bytes(i) for i, first in enumerate(kv.covered)),
            physical_bytes=int(psutil.virtual_memory().total),
        )


class _TaskVMInfo(ctypes.Structure):
    """The head of ``task_vm_info`` (``mach/task_info.h``), as far as its third revision."""

    _pack_ = 4
    _fields_ = [
        ("virtual_size", ctypes.c_uint64),
        ("region_count", ctypes.c_int32),
        ("page_size", ctypes.c_int32),
        ("before_external", ctypes.c_uint64 * 6),
        ("external", ctypes.c_uint64),
        ("after_external", ctypes.c_uint64 * 9),
        ("phys_footprint", ctypes.c_uint64),
        ("addresses", ctypes.c_uint64 * 2),
        ("phys_footprint_peak", ctypes.c_int64),
    ]


_TASK_VM_INFO = 22


def _task() -> tuple[int | None, int | None, int | None]:
    """macOS: footprint, file-backed pages in memory, the footprint's peak. Written from the system's headers; never run."""
    system = ctypes.CDLL(None)
    info = _TaskVMInfo()
    count = ctypes.c_uint32(ctypes.sizeof(info) // 4)
    task = ctypes.c_uint32.in_dll(system, "mach_task_self_")
    if system.task_info(task, _TASK_VM_INFO, ctypes.byref(info), ctypes.byref(count)) != 0:
        return None, None, None
    whole = count.value * 4 >= ctypes.sizeof(info)
    return int(info.phys_footprint), int(info.external), int(info.phys_footprint_peak) if whole else None


def _told(count: int | None) -> str:
    return "unknown" if count is None else size_text(count)
