"""Gemma 4's ``config.json``: every field that the graph depends on has to be there, and is refused by name.

Nothing is filled in: the defaults of the public implementations' configuration classes are not those of the published models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.build.errors import ArchitectureUnsupported, SourceFieldError, field_error
from runtime.build.gemma4.spec import Gemma4Spec
from runtime.build.spec import FULL, SLIDING

CONFIG = "config.json"
CONTEXT = 2048
#: Snapshots keep sliding layers in whole blocks of this many tokens.
WINDOW_MULTIPLE = 64
_TEXT_TYPE = "gemma4_text"
_FIX = "Give the folder of a Gemma 4 E2B-like text model as it was published"


class _Fields:
    """Typed access to one object of the document."""

    def __init__(self, values: Mapping[str, Any], at: str = "") -> None:
        self._values = values
        self._at = at

    def refuse(self, name: str, expected: str, kind: type[SourceFieldError] = SourceFieldError) -> SourceFieldError:
        found = self._values.get(name)
        if found is None and name in self._values:
            found = "null"
        return field_error(CONFIG, self._at + name, expected, found, _FIX, kind)

    def child(self, name: str) -> _Fields:
        value = self._values.get(name)
        if not isinstance(value, Mapping):
            raise self.refuse(name, "an object")
        return _Fields(value, f"{self._at}{name}.")

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def integer(self, name: str, low: int, high: int) -> int:
        value = self._values.get(name)
        if type(value) is not int or not low <= value <= high:
            raise self.refuse(name, f"an integer from {low} to {high}")
        return value

    def even(self, name: str) -> int:
        value = self.integer(name, 2, 1024)
        if value % 2:
            raise self.refuse(name, "an even number, for rotary pairs")
        return value

    def number(self, name: str, low: float, high: float) -> float:
        value = self._values.get(name)
        if (type(value) is not int and type(value) is not float) or not low <= value <= high:
            raise self.refuse(name, f"a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self._values.get(name)
        if type(value) is not bool:
            raise self.refuse(name, "true or false")
        return value

    def exactly(self, name: str, wanted: object) -> None:
        if name not in self._values or type(self._values[name]) is not type(wanted) or self._values[name] != wanted:
            raise self.refuse(name, repr(wanted))

    def absent_or(self, name: str, *neutral: object) -> None:
        """A field of later models, which changes nothing where it is absent, null or ``neutral``."""
        if self.has(name) and self._values[name] not in neutral:
            raise self.refuse(name, " or ".join(["no such field", *map(repr, neutral)]))

    def layer_types(self, name: str, layers: int) -> tuple[str, ...]:
        value = self._values.get(name)
        if not isinstance(value, list) or len(value) != layers or any(kind not in (SLIDING, FULL) for kind in value):
            raise self.refuse(name, f"{layers} entries, each {SLIDING!r} or {FULL!r}")
        return tuple(value)

    def tokens(self, name: str, vocabulary: int) -> tuple[int, ...]:
        value = self._values.get(name)
        listed = value if isinstance(value, list) else [value]
        if not listed or any(type(token) is not int or not 0 <= token < vocabulary for token in listed):
            raise self.refuse(name, f"token ids below {vocabulary}")
        return tuple(dict.fromkeys(listed))


def read_config(document: Mapping[str, Any], name: str) -> Gemma4Spec:
    """The geometry that ``document`` (``config.json``, parsed) gives; the text decoder's part of it, or all of it, is the decoder's.

    Raises ArchitectureUnsupported for another model, SourceFieldError for a field that is missing or can't be converted.
    """
    root = _Fields(document)
    text = root.child("text_config") if root.has("text_config") else root
    if document.get("model_type") not in ("gemma4", _TEXT_TYPE):
        raise root.refuse("model_type", f"'gemma4' or {_TEXT_TYPE!r}", ArchitectureUnsupported)
    if text is not root:
        text.exactly("model_type", _TEXT_TYPE)
    layers = text.integer("num_hidden_layers", 3, 256)
    shared = text.integer("num_kv_shared_layers", 1, layers - 2)
    vocabulary = text.integer("vocab_size", 258, 1 << 20)
    text.exactly("vocab_size_per_layer_input", vocabulary)
    kinds = text.layer_types("layer_types", layers)
    if kinds[-1] != FULL:
        raise text.refuse("layer_types", f"{FULL!r} as the last entry")
    if {*kinds[: layers - shared]} != {SLIDING, FULL}:
        raise text.refuse("layer_types", f"both kinds among the {layers - shared} layers that own K and V")
    text.exactly("num_key_value_heads", 1)
    text.absent_or("num_global_key_value_heads", 1)
    for off in ("attention_k_eq_v", "attention_bias", "enable_moe_block"):
        text.exactly(off, False)
    text.absent_or("use_bidirectional_attention", False)
    text.exactly("tie_word_embeddings", True)
    text.exactly("hidden_activation", "gelu_pytorch_tanh")
    text.number("final_logit_softcapping", 1e-3, 1e6)  # monotone: it changes no argmax, so the heads leave it out
    text.integer("max_position_embeddings", CONTEXT, 1 << 24)
    window = text.integer("sliding_window", WINDOW_MULTIPLE, CONTEXT)
    if window % WINDOW_MULTIPLE:
        raise text.refuse("sliding_window", f"a multiple of {WINDOW_MULTIPLE}")
    rope = text.child("rope_parameters")
    sliding, full = rope.child(SLIDING), rope.child(FULL)
    sliding.exactly("rope_type", "default")
    sliding.absent_or("partial_rotary_factor", 1.0)
    full.exactly("rope_type", "proportional")
    full.absent_or("factor", 1.0)
    return Gemma4Spec(
        name=name,
        layers=layers,
        hidden=text.integer("hidden_size", 32, 16384),
        ffn=text.integer("intermediate_size", 32, 1 << 17),
        heads=text.integer("num_attention_heads", 1, 256),
        head_dim=text.even("head_dim"),
        global_head_dim=text.even("global_head_dim"),
        ple=text.integer("hidden_size_per_layer_input", 1, 4096),
        vocabulary=vocabulary,
        window=window,
        context=CONTEXT,
        first_shared=layers - shared,
        layer_types=kinds,
        rope_base_sliding=sliding.number("rope_theta", 1.0, 1e9),
        rope_base_full=full.number("rope_theta", 1.0, 1e9),
        rope_share_full=full.number("partial_rotary_factor", 1e-3, 1.0),
        norm_epsilon=text.number("rms_norm_eps", 1e-12, 1e-2),
        double_wide=text.flag("use_double_wide_mlp"),
        bos_token_id=(root if root.has("bos_token_id") else text).integer("bos_token_id", 0, vocabulary - 1),
        eos_token_ids=(root if root.has("eos_token_id") else text).tokens("eos_token_id", vocabulary),
    )
