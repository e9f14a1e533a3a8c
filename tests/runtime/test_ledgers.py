"""The measured ledgers: what is allocated, mapped and decoded in this process moves the counter that it belongs to."""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path

import numpy as np
import pytest

from runtime.bundle import Bundle
from runtime.decoding import Decoding
from runtime.hostkv import HostKV
from runtime.ledgers import STATUS, Gauge, Memory, _TaskVMInfo, linux_memory, measure
from runtime.portable import PortableEngine

SIZE = 64 << 20
SLACK = 24 << 20
linux = pytest.mark.skipif(not STATUS.is_file(), reason="needs /proc")


def test_the_lines_of_linux_are_read_in_their_unit() -> None:
    status = "Name:\tpython\nVmHWM:\t   500 kB\nVmRSS:\t 400 kB\nRssAnon:\t100 kB\nRssFile:\t 250 kB\nRssShmem:\t50 kB\nVmSwap:\t7 kB\n"
    kib = 1024
    assert linux_memory(status, 1) == Memory(157 * kib, None, 250 * kib, 400 * kib, 500 * kib)
    assert linux_memory("", 9) == Memory(None, None, None, 9, None), "a kernel that says less"


@linux
def test_each_kind_of_memory_counts_in_its_ledger(tmp_path: Path) -> None:
    before = measure()
    assert before.wired_bytes is None and before.peak_bytes is not None
    array = np.ones(SIZE, np.uint8)
    allocated = measure()
    assert before.footprint_bytes is not None and allocated.footprint_bytes is not None
    assert abs(allocated.footprint_bytes - before.footprint_bytes - SIZE) < SLACK
    file = tmp_path / "weights"
    file.write_bytes(array.tobytes())
    del array
    start = measure()
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[:: mmap.PAGESIZE]) == SIZE // mmap.PAGESIZE
        touched = measure()
    assert start.mapped_bytes is not None and touched.mapped_bytes is not None and touched.footprint_bytes is not None
    assert abs(touched.mapped_bytes - start.mapped_bytes - SIZE) < SLACK
    assert start.footprint_bytes is not None
    assert abs(touched.footprint_bytes - start.footprint_bytes) < SLACK, "clean pages are not the app's"
    assert touched.peak_bytes is not None and touched.peak_bytes >= touched.resident_bytes - SLACK


@linux
def test_host_kv_is_part_of_the_footprint(bundle: Bundle) -> None:
    before = measure().footprint_bytes
    kv = HostKV(bundle.layout(), 1 << 19)
    assert before is not None and abs((measure().footprint_bytes or 0) - before) < SLACK, "never written: no memory"
    for view in kv.spans(0, 0, kv.ctx):
        view[:] = b"\x01" * len(view)
    held = kv.ctx * bundle.layout().row_bytes(0)
    assert abs((measure().footprint_bytes or 0) - before - held) < SLACK < held


def test_a_gauge_says_what_the_engine_and_the_rows_hold(bundle: Bundle, ids: list[int]) -> None:
    engine = PortableEngine(bundle.root)
    gauge = Gauge(True)
    session = Decoding(bundle, engine, only_decode=True)
    session.feed(ids[:5])
    stats = gauge.read(engine, session.kv)
    assert stats is not None
    assert stats.kv_bytes == 5 * bundle.layout().bytes_per_token
    weights = engine.weight_bytes()
    assert (stats.weights_stored_bytes, stats.weights_decoded_bytes) == (weights.stored, weights.decoded)
    assert stats.physical_bytes > stats.after.resident_bytes > 0
    text = stats.text()
    assert "footprint" in text and "KV" in text and "3.84 kB" in text
    assert stats.value()["before"].keys() == stats.value()["after"].keys()


def test_a_gauge_that_is_off_measures_nothing(bundle: Bundle) -> None:
    assert Gauge(False).read(PortableEngine(bundle.root), HostKV(bundle.layout(), 8)) is None


def test_the_macos_structure_lies_as_in_the_headers() -> None:
    """``mach/task_info.h``: two 64-bit sizes around two 32-bit integers, then 64-bit counters; the count is in units of 4 bytes."""
    offsets = (_TaskVMInfo.external.offset, _TaskVMInfo.phys_footprint.offset, _TaskVMInfo.phys_footprint_peak.offset)
    assert offsets == (64, 144, 168) and ctypes.sizeof(_TaskVMInfo) == 176


@pytest.mark.macos
def test_macos_counts_its_own_footprint() -> None:
    assert sys.platform == "darwin"
    before = measure()
    array = np.ones(SIZE, np.uint8)
    after = measure()
    assert before.footprint_bytes is not None and after.footprint_bytes is not None
    assert abs(after.footprint_bytes - before.footprint_bytes - array.nbytes) < SLACK
    assert after.wired_bytes and after.mapped_bytes and after.peak_bytes
