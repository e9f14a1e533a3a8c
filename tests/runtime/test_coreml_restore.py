"""Restored = uninterrupted through the Core ML engine, over stand-ins that compute with the portable one: same tokens, same KV bytes.

What Core ML's own arithmetic does to them is not shown here; that a restore goes through `decode` alone, into the host's memory and out of it
again, row by row, is.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from consumer import nonzero_outside, rows_digest
from core_ml_stand_in import Machine, engine_over, install_framework, install_proxy
from trimming import copy_trimmed

from kvstore import Store
from runtime.bundle import Bundle
from runtime.coreml import Edge
from runtime.portable import PortableEngine
from runtime.session import Session


@pytest.mark.parametrize(
    ("install", "lengths"), [(install_framework, (65, 700)), (install_proxy, (65,))], ids=["pyobjc", "coremltools"]
)
def test_a_restored_session_is_the_uninterrupted_one(
    install: Callable[[Machine, pytest.MonkeyPatch], Edge],
    lengths: tuple[int, ...],
    bundle: Bundle,
    engine: PortableEngine,
    ids: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine()
    edge = install(machine, monkeypatch)
    with Store.open(tmp_path / "whole") as store, Store.open(tmp_path / "trimmed") as device:
        producer = Session.open(bundle, engine_over(bundle.root, edge, tmp_path), store=store)
        plain = Session.open(bundle, engine)
        uninterrupted = {}
        for n in lengths:
            for session in (producer, plain):
                session.rollback(0)
                session.feed(ids[:n])
            assert rows_digest(producer, (0, 0)) == rows_digest(plain, (0, 0)), "the portable engine's bytes"
            producer.save(str(n), receipt=producer.receipt(4))
            copy_trimmed(store, str(n), device)
            uninterrupted[n] = (
                producer.generate(8),
                {f: rows_digest(producer, (0, f)) for f in (0, max(0, n - 512) // 64 * 64)},
            )
        machine.loaded.clear()
        for source in (store, device):
            consumer = Session.open(bundle, engine_over(bundle.root, edge, tmp_path), store=source, decode_only=True)
            for n in lengths:
                restored = consumer.restore(str(n))
                assert restored.reused_tokens == n and restored.match.snapshot.receipt is not None
                assert consumer.verify_receipt(restored.match.snapshot.receipt).identical
                made, rows = uninterrupted[n]
                assert consumer.generate(8).tokens == made.tokens
                assert rows_digest(consumer, consumer.kv.covered) == rows[consumer.kv.covered[1]]
                assert nonzero_outside(consumer) == 0
        assert {function for _, function, _ in machine.loaded} == {"decode", None}
        fields = dict(consumer.lineage[0].fields)
        assert fields["engine"] == "coreml" and fields["compute_units"] == "all" and fields["route"] == edge.name
        assert fields["os"] and fields["core"]
