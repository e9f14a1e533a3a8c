"""Transfers of a model without a window and with several KV heads, as SmolLM2's: there is nothing to trim."""

from __future__ import annotations

from pathlib import Path

from ferries import assert_restores, pulled, pushed, save, verify

from kvstore import Group, Layout, Store

FULL = Layout((Group("full", None, (0, 1, 2, 3), 3, 8),))
TOKENS = 200
BYTES = TOKENS * FULL.bytes_per_token


def test_whole_and_trimmed_carry_the_same_and_restore(mac: Store, phone: Store, stick: Path) -> None:
    save(mac, "book", TOKENS, layout=FULL)
    sent = pushed(mac, stick, "book")
    # one group, four blocks of 64 tokens, the last of them begun
    assert (sent.objects, sent.payload_bytes, sent.skipped) == (4, BYTES, 0)
    got = pulled(phone, stick, "book", trim=True)
    assert (got.objects, got.payload_bytes, got.skipped) == (4, BYTES, 0)
    again = pulled(phone, stick, "book")
    assert (again.objects, again.payload_bytes, again.skipped) == (0, 0, 4)
    assert_restores(phone, "book", TOKENS, layout=FULL)
    verify(phone.shelf.path)


def test_a_longer_text_carries_its_new_blocks_alone(mac: Store, phone: Store, stick: Path) -> None:
    save(mac, "book", 128, layout=FULL)
    pulled_from(mac, phone, stick)
    save(mac, "book", TOKENS, layout=FULL)
    sent = pushed(mac, stick, "book")
    assert (sent.objects, sent.skipped) == (2, 2)
    got = pulled(phone, stick, "book")
    assert (got.objects, got.payload_bytes, got.skipped) == (2, 72 * FULL.bytes_per_token, 2)
    assert_restores(phone, "book", TOKENS, layout=FULL)


def pulled_from(mac: Store, phone: Store, stick: Path) -> None:
    pushed(mac, stick, "book")
    pulled(phone, stick, "book")
    assert_restores(phone, "book", 128, layout=FULL)
