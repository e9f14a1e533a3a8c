"""Whose KV it is: the identity of a model, and refusing another model's by name of the fields that differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgpack

from .digest import IdentityDigest, identity_digest
from .errors import (
    IdentityMismatch,
    InputInvalid,
    LayoutMismatch,
    SidecarMismatch,
    TokenizerMismatch,
    WeightsMismatch,
)
from .layout import Layout

REQUIRED = ("weights", "tokenizer")
MAX_FIELDS = 256
DEFAULT_NAMESPACE = "default"
ABSENT = "(absent)"
SHOWN = 100
"""Characters of a differing value that a message shows."""

Value = str | int | float | bool | bytes | None | tuple["Value", ...]


@dataclass(frozen=True)
class Identity:
    """Everything that changes a KV byte, as named values; two models share KV exactly if these are equal.

    ``fields`` is sorted by name. ``weights`` and ``tokenizer`` are required: without them two models of one shape, or two
    vocabularies of one size, would pass for each other. Use `Identity.of`.
    """

    fields: tuple[tuple[str, Value], ...]

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Identity:
        """From a mapping; lists become tuples, keys are sorted."""
        return cls(tuple(sorted((name, _value(name, value, 0)) for name, value in fields.items())))

    def __post_init__(self) -> None:
        names = [name for name, _ in self.fields]
        if names != sorted(set(names)) or len(names) > MAX_FIELDS:
            raise InputInvalid(f"identity: expected at most {MAX_FIELDS} distinct sorted fields, found {names[:20]}")
        for name in REQUIRED:
            if not dict(self.fields).get(name):
                raise InputInvalid(f"identity: expected a field {name!r}, found none; it is what keeps models apart")

    def wire(self) -> dict[str, Value]:
        """The canonical msgpack value: a map in field order, doubles as float 64."""
        return dict(self.fields)

    @cached_property
    def digest(self) -> IdentityDigest:
        try:
            return identity_digest(msgpack.packb(self.wire()))
        except (ValueError, OverflowError) as error:
            raise InputInvalid(f"identity: expected text and 64-bit numbers, found {error}") from error


def _value(name: str, value: Any, depth: int) -> Value:
    if isinstance(value, list | tuple) and depth < 4:
        return tuple(_value(name, v, depth + 1) for v in value)
    if value is None or isinstance(value, str | bool | int | float | bytes):
        return value
    raise InputInvalid(f"identity field {name!r}: expected plain values, found {type(value).__name__}")


def differences(expected: Identity, found: Identity) -> list[tuple[str, Value, Value]]:
    """Every differing field as (name, expected, found), sorted. Absent is ``"(absent)"``; 1 and 1.0 differ, as on disk."""
    a, b = expected.wire(), found.wire()
    pairs = [(k, a.get(k, ABSENT), b.get(k, ABSENT), (k in a) == (k in b)) for k in sorted(a.keys() | b.keys())]
    return [(k, x, y) for k, x, y, both in pairs if not both or msgpack.packb(x) != msgpack.packb(y)]


def require_same(expected: tuple[Identity, Layout], found: tuple[Identity, Layout], what: str) -> None:
    """Raises the narrowest `IdentityMismatch` unless ``found`` (``what``, say a snapshot) is for ``expected``."""
    fields: list[tuple[str, Any, Any]] = list(differences(expected[0], found[0]))
    if expected[1].digest != found[1].digest:
        fields.append(("layout", layout_text(expected[1]), layout_text(found[1])))
    if not fields:
        return
    names = {name for name, _, _ in fields}
    kind: type[IdentityMismatch] = IdentityMismatch
    for narrow, narrow_names in (
        (WeightsMismatch, {"weights"}),
        (SidecarMismatch, {"sidecars"}),
        (TokenizerMismatch, {"tokenizer"}),
        (LayoutMismatch, {"layout"}),
    ):
        if names == narrow_names:
            kind = narrow
    lines = "; ".join(f"{name}: {difference_text(want, got)}" for name, want, got in fields)
    raise kind(
        f"{what} holds the KV of another model ({lines}). Use the bundle that it was made with, or prefill again.",
        fields=fields,
    )


def layout_text(layout: Layout) -> str:
    """A layout in one line, for people."""
    return f"{layout.dtype} " + ", ".join(
        f"{g.name} {g.kv_heads}x{g.head_dim} window {g.window} layers {','.join(map(str, g.layers))}"
        for g in layout.groups
    )


def difference_text(want: Any, got: Any) -> str:
    """What was expected and what was found; of long values the place where they part, so that they never look alike."""
    texts = repr(want), repr(got)
    same = next((i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
    start = max(0, same - SHOWN // 2) if max(map(len, texts)) > SHOWN else 0
    shown = ("…" * (start > 0) + text[start : start + SHOWN] + "…" * (len(text) > start + SHOWN) for text in texts)
    return "expected {}, found {}".format(*shown)
