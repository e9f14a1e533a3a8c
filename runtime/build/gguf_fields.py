"""The fields of a GGUF file as the families' readers want them: typed, in range, and refused by name where they are not."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TypeVar

from runtime.build.errors import field_error
from runtime.build.gguf_file import GgufFile, Value
from runtime.build.source import Origin
from runtime.build.spec import EMBEDDING, OUTPUT, OUTPUT_NORM, Spec, layer_shape

T = TypeVar("T", int, float, str)

CONTEXT = 2048
"""Tokens that a bundle's functions are made for."""


class Fields:
    """Typed access to the metadata of ``file``, which should be a model of ``architecture``; ``wanted`` is that in words, for refusals."""

    def __init__(self, file: GgufFile, architecture: str, wanted: str) -> None:
        self.path = str(file.path)
        self.architecture = architecture
        self._wanted = wanted
        self._file = file

    def key(self, suffix: str) -> str:
        """The architecture's own field ``suffix``."""
        return f"{self.architecture}.{suffix}"

    def get(self, key: str) -> Value | None:
        return self._file.metadata.get(key)

    def refuse(self, key: str, expected: str, found: object) -> Exception:
        return field_error(self.path, key, expected, found, f"Give the GGUF file of {self._wanted}")

    def integer(self, key: str, low: int, high: int) -> int:
        value = self.get(key)
        if type(value) is not int or not low <= value <= high:
            raise self.refuse(key, f"an integer from {low} to {high}", value)
        return value

    def number(self, key: str, low: float, high: float) -> float:
        value = self.get(key)
        if type(value) is not float or not low <= value <= high:
            raise self.refuse(key, f"a number from {low:g} to {high:g}", value)
        return value

    def absent(self, key: str, *neutral: Value) -> None:
        """The field isn't there, or says what changes nothing."""
        if self.get(key) not in (None, *neutral):
            raise self.refuse(key, " or ".join(["no such field", *map(repr, neutral)]), self.get(key))

    def even(self, key: str) -> int:
        """A head's width."""
        value = self.integer(key, 2, 1024)
        if value % 2:
            raise self.refuse(key, "an even number, for rotary pairs", value)
        return value

    def heads(self) -> tuple[int, int]:
        """Query heads, and the KV heads that they share evenly."""
        heads = self.integer(self.key("attention.head_count"), 1, 256)
        kv_heads = self.integer(self.key("attention.head_count_kv"), 1, heads)
        if heads % kv_heads:
            raise self.refuse(self.key("attention.head_count_kv"), f"a divisor of the {heads} heads", kv_heads)
        return heads, kv_heads

    def rope_factor(self) -> float:
        """What rotary frequencies are divided by."""
        kind = self.get(self.key("rope.scaling.type"))
        if kind in (None, "none"):
            return 1.0
        if kind != "linear":
            raise self.refuse(self.key("rope.scaling.type"), "'none' or 'linear'", kind)
        return self.number(self.key("rope.scaling.factor"), 1.0, 1024.0)

    def array(self, key: str, kind: type[T], length: int | None = None) -> tuple[T, ...]:
        """An array of ``kind``, exactly; of ``length`` items if given."""
        value = self.get(key)
        held = value if isinstance(value, tuple) else ()
        items = tuple(item for item in held if isinstance(item, kind) and type(item) is kind)
        if not isinstance(value, tuple) or len(items) != len(value) or length not in (None, len(value)):
            count = "" if length is None else f"{length} of "
            raise self.refuse(key, f"an array of {count}{kind.__name__}", type(value).__name__)
        return items

    def pieces(self) -> tuple[str, ...]:
        """The vocabulary by token id."""
        key = "tokenizer.ggml.tokens"
        pieces = self.array(key, str)
        if not 256 < len(pieces) <= 1 << 20:
            raise self.refuse(key, "an array of 257 to 1,048,576 strings", len(pieces))
        return pieces

    def different(self, pieces: tuple[str, ...]) -> None:
        """No piece twice."""
        if len(set(pieces)) != len(pieces):
            raise self.refuse(
                "tokenizer.ggml.tokens", "pieces that differ from one another", "a piece that occurs twice"
            )

    def token(self, name: str, vocabulary: int) -> int:
        """The id of the special token ``name``."""
        return self.integer(f"tokenizer.ggml.{name}_token_id", 0, vocabulary - 1)

    def optional_token(self, name: str, vocabulary: int) -> int | None:
        return None if self.get(f"tokenizer.ggml.{name}_token_id") is None else self.token(name, vocabulary)

    def name(self) -> str:
        """The model's own name as a folder's: lower-case words with dashes."""
        given = self.get("general.name")
        words = re.findall(r"[a-z0-9.]+", (given if isinstance(given, str) else self._file.path.stem).lower())
        return "-".join(words) or self.architecture

    def license(self, default: str) -> str:
        value = self.get("general.license")
        return value if isinstance(value, str) else default

    def check_tensors(self, spec: Spec) -> None:
        """Exactly the tensors that ``spec`` needs, in its shapes; an output matrix of its own may be there."""
        entries = self._file.entries
        expected: dict[str, tuple[int, ...]] = {EMBEDDING: (spec.vocabulary, spec.hidden), OUTPUT_NORM: (spec.hidden,)}
        if OUTPUT in entries:
            expected[OUTPUT] = expected[EMBEDDING]
        for i in range(spec.layers):
            expected |= {f"blk.{i}.{tensor}": layer_shape(spec, tensor) for tensor in spec.layer_tensors}
        for name, shape in expected.items():
            entry = entries.get(name)
            if entry is None or entry.shape != shape:
                found = None if entry is None else list(entry.shape)
                raise self.refuse(f"tensor {name}", f"shape {list(shape)}", found)
        unknown = sorted(set(entries) - set(expected))
        if unknown:
            raise self.refuse("tensors", f"only tensors of {self._wanted}", unknown[:3])


def gguf_origin(sha256: str) -> Origin:
    """What a bundle of the file with this SHA-256 (hex) is made from."""
    return {"kind": "gguf", "sha256": sha256}


def chunk_bounds(layers: int, most: int) -> tuple[tuple[int, int], ...]:
    """As many chunks of at most ``most`` layers as it takes, as equal as they can be."""
    chunks = -(-layers // most)
    return tuple(pairwise(layers * c // chunks for c in range(chunks + 1)))
