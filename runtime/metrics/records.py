"""One line of `metrics.jsonl`, as a value and as bytes. The fields are the published app's, spelled as it spells them; docs/metrics.md says
what each is. What we add stands in one object, ``kvferry``, which its reader passes over.

A record never holds text, token ids or names of snapshots: only counts, times, sizes and what computed. Of paths it has the name of the
bundle's folder.
"""

from __future__ import annotations

import msgspec

from kvstore.errors import Corrupt

MEBIBYTE = 1 << 20
"""The unit of every field that ends in ``MB``."""

_CAPITALS = {"id": "ID", "mb": "MB"}


def published(name: str) -> str:
    """``peak_footprint_mb`` is ``peakFootprintMB``."""
    first, *rest = name.split("_")
    return first + "".join(_CAPITALS.get(word, word.capitalize()) for word in rest)


class Ours(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename=published):
    """The fields that only kvferry writes. Absent is None, here and in `Record`."""

    run: str | None = None
    verb: str | None = None
    engine: str | None = None
    compute: str | None = None
    machine: str | None = None
    written_bytes: int | None = None
    new_objects: int | None = None
    spec_step_tokens: list[int] | None = None
    spec_step_drafts: list[int] | None = None
    spec_drafted_with_pending: int | None = None
    spec_accepted_with_pending: int | None = None
    spec_drafted_without_pending: int | None = None
    spec_accepted_without_pending: int | None = None


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename=published):
    """One line. The app's reader takes no line without the first five."""

    kind: str
    timestamp: str
    device_model: str
    os_version: str
    app_build: str

    model_id: str | None = None
    hf_revision: str | None = None
    compute_units: str | None = None
    bundle_folder: str | None = None
    context_length: int | None = None

    prompt_tokens: int | None = None
    reused_tokens: int | None = None
    generated_tokens: int | None = None
    finish_reason: str | None = None
    error_phase: str | None = None
    error_reason: str | None = None

    model_load_seconds: float | None = None
    ttft_seconds: float | None = None
    prefill_seconds: float | None = None
    decode_tok_per_sec: float | None = None
    per_token_millis: list[float] | None = None
    per_token_min_ms: float | None = None
    per_token_median_ms: float | None = None
    per_token_mean_ms: float | None = None
    per_token_max_ms: float | None = None
    feed_widths: list[int] | None = None

    spec_enabled: bool | None = None
    spec_rounds: int | None = None
    spec_drafted: int | None = None
    spec_accepted: int | None = None
    spec_acceptance_rate: float | None = None
    spec_fallback_rounds: int | None = None

    kv_op: str | None = None
    kv_bytes: int | None = None
    kv_duration_seconds: float | None = None

    footprint_after_prefill_mb: float | None = None
    footprint_at_end_mb: float | None = None
    peak_footprint_mb: float | None = None
    available_memory_mb: float | None = None

    thermal_state_start: str | None = None
    thermal_state_end: str | None = None
    battery_level: float | None = None
    battery_state: str | None = None

    models: list[str] | None = None
    kvferry: Ours | None = None


FIELDS = tuple(field.encode_name for field in msgspec.structs.fields(Record))
OUR_FIELDS = tuple(field.encode_name for field in msgspec.structs.fields(Ours))


class LineDamaged(Corrupt):
    """A line is no record."""


def encode(record: Record) -> bytes:
    """The line, its end included: JSON with sorted keys, like the app's. No times that are not finite are given to it."""
    return msgspec.json.encode(record, order="sorted") + b"\n"


def decode(line: bytes) -> Record:
    """A line, the app's or ours; fields that nobody here knows are passed over. Raises `LineDamaged`."""
    try:
        return _DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LineDamaged(f"expected one JSON object with the fields of metrics.jsonl, found: {error}") from error


_DECODER = msgspec.json.Decoder(Record)
