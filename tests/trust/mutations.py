"""Changed inputs for parsers: bytes changed as bytes, and values changed as values and written down again."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgpack

Mutate = Callable[[bytes, random.Random], bytes]
INTEGERS = (
    0,
    1,
    2,
    63,
    64,
    65,
    127,
    128,
    255,
    256,
    2**15,
    2**16 - 1,
    2**20,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**53,
    2**63 - 1,
    2**64 - 1,
)
SCALARS: Sequence[Any] = (
    None, True, False, *INTEGERS[:-1], -1, -(2**31), 0.5, -0.0, 1e308, 10**30, "", "a", "\0", "../x", "/etc/passwd", "e\u0301",
    "\ud83d\ude00", "x" * 5000, "float16", [], {}, [[]], [0], {"a": 1}, [None] * 300,
)  # fmt: skip


def some_bytes(data: bytes, chance: random.Random, words: Sequence[bytes] = ()) -> bytes:
    """One to four edits that know nothing of what the bytes mean."""
    made = bytearray(data)
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        at = chance.randrange(len(made) + 1)
        kind = chance.randrange(9 if words else 8)
        if kind == 0 and at < len(made):
            made[at] ^= 1 << chance.randrange(8)
        elif kind == 1 and at < len(made):
            made[at] = chance.choice([0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)])
        elif kind == 2:
            form, size = chance.choice([("<H", 2), (">H", 2), ("<I", 4), (">I", 4), ("<Q", 8), (">Q", 8)])
            made[at : at + size] = struct.pack(form, chance.choice(INTEGERS) % 256**size)
        elif kind == 3:
            del made[at : at + chance.choice([1, 1, 2, 4, 8, 32, 200])]
        elif kind == 4:
            made[at:at] = made[at : at + chance.choice([1, 4, 32, 300])] * chance.choice([1, 1, 2, 50])
        elif kind == 5:
            del made[at:]
        elif kind == 6:
            made[at:at] = chance.choice(
                [b"\0", b"\n", b"\xff" * 4, bytes(64), chance.randbytes(chance.randrange(1, 40))]
            )
        elif kind == 7:
            other = chance.randrange(len(made) + 1)
            made[at : at + 16] = made[other : other + 16]
        elif words:
            made[at:at] = chance.choice(words)
        else:
            made.append(chance.randrange(256))
    return bytes(made)


def some_value(value: Any, chance: random.Random) -> Any:
    """The same with one place changed: another scalar, something left out, twice, or elsewhere."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(list(value))
        kind = chance.randrange(12)
        if kind == 0:
            return {k: v for k, v in value.items() if k != key}
        if kind == 1:
            return {
                **value,
                chance.choice(["x", "", key + "x" if isinstance(key, str) else "y"]): chance.choice(SCALARS),
            }
        if kind == 2:
            return dict(reversed(value.items()))
        if kind == 3:
            return {**value, key: value[chance.choice(list(value))]}
        return {**value, key: some_value(value[key], chance)}
    if isinstance(value, list | tuple) and value and chance.random() < 0.9:
        at = chance.randrange(len(value))
        kind = chance.randrange(8)
        if kind == 0:
            return [*value[:at], *value[at + 1 :]]
        if kind == 1:
            return [*value[:at], value[at], *value[at:]]
        if kind == 2:
            return [*value[at:], *value[:at]]
        return [*value[:at], some_value(value[at], chance), *value[at + 1 :]]
    if isinstance(value, bytes) and chance.random() < 0.8:
        return some_bytes(value, chance)
    if type(value) is int and chance.random() < 0.6:
        return chance.choice([value + 1, value - 1, -value, value * 2, value + 64, value << 20])
    if isinstance(value, str) and chance.random() < 0.5:
        return chance.choice([value + "x", value[:-1], value * 20, value.upper(), value + "\u0301", "../" + value])
    return chance.choice(SCALARS)


def as_json(data: bytes, chance: random.Random) -> bytes:
    if chance.random() < 0.4:
        return some_bytes(data, chance, JSON_WORDS)
    value = json.loads(data)
    for _ in range(chance.choice([1, 1, 2, 3])):
        value = some_value(value, chance)
    return json.dumps(value, default=repr).encode("utf-8", "surrogatepass")


JSON_WORDS = (
    b"NaN", b"-Infinity", b"1e999", b'"\\ud800"', b"[" * 2000, b"{" * 50, b'"\\u0000"', b"null,", b"//", b"\xef\xbb\xbf", b"0" * 5000,
    b"9" * 5000, b'"a":1,"a":2,',
)  # fmt: skip


def as_msgpack(data: bytes, chance: random.Random) -> bytes:
    if chance.random() < 0.5:
        return some_bytes(data, chance, MSGPACK_WORDS)
    value = msgpack.unpackb(data, strict_map_key=False)
    for _ in range(chance.choice([1, 1, 2, 3])):
        value = some_value(value, chance)
    try:
        packed: bytes = msgpack.packb(value)
    except (OverflowError, ValueError):
        return some_bytes(data, chance, MSGPACK_WORDS)
    return packed


MSGPACK_WORDS = (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x01", b"\x91" * 700, b"\xc0", b"\xc1", b"\xcc\x01", b"\xca\x7f\xc0\0\0")  # fmt: skip


def as_text(words: Sequence[bytes]) -> Mutate:
    return lambda data, chance: some_bytes(data, chance, words)


def as_protobuf(parse: Callable[[bytes], Any]) -> Mutate:
    """Fields of a message changed where it stands; ``parse`` makes the message."""

    def mutate(data: bytes, chance: random.Random) -> bytes:
        if chance.random() < 0.4:
            return some_bytes(data, chance)
        message = parse(data)
        for _ in range(chance.choice([1, 1, 2])):
            _change(message, chance)
        made: bytes = message.SerializeToString()
        return made

    return mutate


def _change(message: Any, chance: random.Random) -> None:
    fields = message.ListFields()
    if not fields:
        return
    field, value = chance.choice(fields)
    many = hasattr(value, "__len__") and not isinstance(value, str | bytes)
    if chance.random() < 0.1:
        message.ClearField(field.name)
    elif many and field.message_type is not None:
        one = chance.choice(list(value))
        kind = chance.randrange(10)
        if kind == 0:
            value.remove(one)
        elif kind == 1:
            value.add().CopyFrom(one)
        else:
            _change(one, chance)
    elif field.message_type is not None:
        _change(value, chance)
    elif many:
        value.append(chance.choice(list(value)))
    elif isinstance(value, bytes):
        setattr(message, field.name, some_bytes(value, chance))
    elif isinstance(value, str):
        setattr(
            message,
            field.name,
            chance.choice(["", value + "x", "../" + value, "x" * 3000, "@model_path/../x", value[:-1]]),
        )
    elif isinstance(value, bool | float):
        setattr(message, field.name, type(value)(not value))
    else:
        changed = chance.choice([value + 1, value - 1, 0, 1, 2**31 - 1, 2**62, -1])
        try:
            setattr(message, field.name, changed)
        except ValueError:  # outside of what the field can hold
            setattr(message, field.name, 0)
