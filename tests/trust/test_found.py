"""What the battery has found, each as a test of its own."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path

import battery
import pytest
from kvmemory import find, save

from kvstore import Layout, Store
from kvstore.codec import MAX_UPDATED
from kvstore.errors import FormatTooNew, InputInvalid, KVError
from kvstore.layout import Group
from kvstore.report import listing

assert battery.HERE  # it says where `kvmemory` is


def brief(error: KVError) -> str:
    assert len(str(error)) < 2000
    return str(error)


def test_an_index_whose_damaged_schema_is_no_text(tmp_path: Path) -> None:
    """SQLite quotes it in its message, which Python then can't decode."""
    with Store.open(tmp_path / "s") as store:
        save(store, [1, 2, 3], name="a")
        assert find(store, [1, 2, 3, 4]) is not None
    index = tmp_path / "s" / "index.sqlite"
    data = index.read_bytes()
    assert b"CREATE TABLE" in data
    index.write_bytes(data.replace(b"CREATE TABLE", b"CREATE \xa8ABLE", 1))
    with Store.open(tmp_path / "s") as store:
        match = find(store, [1, 2, 3, 4])
    assert match is not None and match.n == 3


@pytest.mark.parametrize("shown", [-5e9, -1.0, 3e11])
def test_a_name_that_is_given_while_the_clock_is_out_of_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: float
) -> None:
    with Store.open(tmp_path / "s") as store:
        monkeypatch.setattr(time, "time", lambda: shown)
        save(store, [1, 2, 3], name="a")
        ref = store.shelf.records.ref("a")
        assert ref is not None and ref.updated == (0 if shown < 0 else MAX_UPDATED)


def test_the_latest_time_of_a_name_is_shown_east_of_greenwich(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Pacific/Kiritimati")
    time.tzset()
    try:
        with Store.open(tmp_path / "s") as store:
            with monkeypatch.context() as clock:
                clock.setattr(time, "time", lambda: 3e11)
                save(store, [1, 2, 3], name="a")
            (row,), damage = listing(store.shelf)
        assert not damage and row["updated"].startswith("9999-12-31T")
    finally:
        monkeypatch.undo()
        time.tzset()


def test_messages_quote_no_more_than_people_read(tmp_path: Path) -> None:
    with pytest.raises(InputInvalid) as caught:
        Layout((Group("g", None, (0,), 1, 1),), "x" * 10_000)
    brief(caught.value)
    with pytest.raises(InputInvalid) as caught:
        Layout((Group("g" * 10_000, 100, (0,), 1, 1),))
    brief(caught.value)
    Store.open(tmp_path / "s").close()
    (tmp_path / "s" / "format.json").write_text(json.dumps({"format": 2, "features": ["x" * 10_000]}))
    with pytest.raises(FormatTooNew) as refused:
        Store.open(tmp_path / "s")
    brief(refused.value)


def test_safetensors_of_a_type_that_is_no_text_and_an_index_of_names_that_are_none(tmp_path: Path) -> None:
    from runtime.build.errors import SourceDamaged
    from runtime.build.safetensors_file import SafetensorsFolder

    header = json.dumps({"a": {"dtype": {}, "shape": [1], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    with pytest.raises(SourceDamaged, match="dtype"):
        SafetensorsFolder(tmp_path)
    for name in ("x" * 300, "a\0b"):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(SourceDamaged, match=r"weight_map\.a"):
            SafetensorsFolder(tmp_path)


def test_a_gguf_whose_key_is_half_the_file(tmp_path: Path) -> None:
    from runtime.build.errors import BuildError
    from runtime.build.gguf_file import GgufFile

    key = b"\x80" + b"k" * 10_000
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) + key + struct.pack("<I", 99)
    (tmp_path / "m.gguf").write_bytes(head + bytes(64))
    with pytest.raises(BuildError) as caught:
        GgufFile(tmp_path / "m.gguf")
    brief(caught.value).encode()


def test_prompts_nested_deeper_than_can_be_read(tmp_path: Path) -> None:
    from runtime.gate.prompts import _text

    with pytest.raises(InputInvalid, match="line 1"):
        _text(tmp_path / "p.jsonl", 1, "[" * 100_000)


def test_tokens_and_offers_that_somebody_changed(tmp_path: Path) -> None:
    from sync.pairing import Offers
    from sync.tokens import TokenBook, TokenRefused

    book = TokenBook(tmp_path / "book")
    text, token = book.issue("phone", ("read",), None)
    file = tmp_path / "book" / "tokens.json"
    file.write_text(file.read_text().replace(token.digest, "no hex"))
    with pytest.raises(InputInvalid):
        TokenBook(tmp_path / "book").check(text)
    offers = Offers(tmp_path / "offers")
    secret = offers.open(("read",), None)
    file = tmp_path / "offers" / "offer.json"
    value = json.loads(file.read_text())
    file.write_text(json.dumps({**value, "digest": "\u00e9" * 64}))
    with pytest.raises(TokenRefused):
        offers.take(secret)
