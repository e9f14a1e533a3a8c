"""What a device can do, as numbers. Each says where it comes from, because most of them could not be measured here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from kvstore.errors import InputInvalid
from kvstore.jsonfile import JsonInvalid, read_object

Source = Literal["write-up", "measured here", "assumption"]
"""``write-up``: the device report of the published bundle's authors. ``measured here``: on the machine that this project was written on."""

SOURCES: tuple[Source, ...] = get_args(Source)
MIB, GIB = 1 << 20, 1 << 30
MB = 1_000_000
_FILE_LIMIT = 64 << 10
_WORDS = 400


@dataclass(frozen=True, slots=True)
class Figure:
    """A number of a profile, where it comes from, and in a sentence how."""

    value: float
    source: Source
    why: str


@dataclass(frozen=True, slots=True)
class Range:
    """What a field may be: ``whole`` numbers (bytes, tokens) or any, from ``low`` to ``high``; and what it says."""

    low: float
    high: float
    whole: bool
    what: str


_BYTES = 1 << 50
FIELDS: Mapping[str, Range] = {
    "physical_bytes": Range(1, _BYTES, True, "memory of the device"),
    "limit_share": Range(0.01, 1, False, "share of it that the three ledgers together may reach before the app is killed"),
    "speculation_from_bytes": Range(0, _BYTES, True, "memory from which speculation is on by default"),
    "app_bytes": Range(0, _BYTES, True, "the app's footprint without KV, buffers and working set"),
    "page_bytes": Range(512, 1 << 24, True, "a page of mapped memory"),
    "wired_per_stored": Range(0, 100, False, "bytes that the system wires for a stored byte of a function's weights"),
    "wide_from_tokens": Range(2, 1 << 20, True, "width from which a prefill function counts as wide"),
    "wide_copies": Range(0, 100, False, "copies of its chunk's weights that a resident wide function adds"),
    "narrow_copies": Range(0, 100, False, "the same of a narrow one"),
    "working_share": Range(0, 100, False, "working set of a prefill function, over its inputs and outputs without the cache"),
    "head_ane_copies": Range(0, 100, False, "copies of its weights that a batched head takes on the Neural Engine"),
    "clean_kept_bytes": Range(0, _BYTES, True, "mapped pages that stay in memory from one round of speculation to the next"),
    "reread_mb_per_second": Range(0.001, 1e6, False, "speed at which pages that did not stay are read again"),
    "decode_ms_per_token": Range(0.001, 1e6, False, "a decode step of a model whose weights take decode_weight_bytes"),
    "decode_weight_bytes": Range(1, _BYTES, True, "weights that such a step reads; other models are taken in proportion"),
    "restore_mb_per_second": Range(0.001, 1e6, False, "KV from the disk into memory, verified"),
    "restore_start_seconds": Range(0, 1e6, False, "a restore's time before its first byte"),
    "download_mb_per_second": Range(0.001, 1e6, False, "KV from the remote"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Profile:
    """A device. Every field but ``name`` is one of `FIELDS`; bytes are bytes, MB are millions of bytes."""

    name: str
    physical_bytes: Figure
    limit_share: Figure
    speculation_from_bytes: Figure
    app_bytes: Figure
    page_bytes: Figure
    wired_per_stored: Figure
    wide_from_tokens: Figure
    wide_copies: Figure
    narrow_copies: Figure
    working_share: Figure
    head_ane_copies: Figure
    clean_kept_bytes: Figure
    reread_mb_per_second: Figure
    decode_ms_per_token: Figure
    decode_weight_bytes: Figure
    restore_mb_per_second: Figure
    restore_start_seconds: Figure
    download_mb_per_second: Figure

    @property
    def limit_bytes(self) -> int:
        """What the three ledgers together may reach."""
        return int(self.limit_share.value * self.physical_bytes.value)

    @property
    def speculates(self) -> bool:
        """Whether speculation is on by default."""
        return self.physical_bytes.value >= self.speculation_from_bytes.value

    def figures(self) -> dict[str, Figure]:
        """Every number by its field."""
        return {name: getattr(self, name) for name in FIELDS}

    def document(self) -> dict[str, Any]:
        """The JSON object that `read_profile` takes."""
        return {"name": self.name, **{name: dataclasses.asdict(figure) for name, figure in self.figures().items()}}


_EVERYWHERE: Mapping[str, Figure] = {
    "limit_share": Figure(0.5, "assumption", "no limit is published; half agrees with every case of the write-up"),
    "speculation_from_bytes": Figure(7 * GIB, "write-up", "the published app's rule: off below 7 GiB"),
    "page_bytes": Figure(16384, "assumption", "pages of Apple's 64-bit ARM systems"),
    "wired_per_stored": Figure(
        1.0, "write-up", "1.5 to 1.7 GiB wired; the chunks and the sequential head of E2B take 1.69 GiB in files"
    ),
    "wide_from_tokens": Figure(64, "assumption", "256 and 512 are wide; with 32, 8 and 4 a short chat takes about 2 GiB"),
    "wide_copies": Figure(1.0, "assumption", "so that E2B takes 3 GiB and more with wide prefill resident, as in the write-up"),
    "narrow_copies": Figure(0.0, "assumption", "a short chat feeds through narrow functions and takes about 2 GiB"),
    "working_share": Figure(
        4.5, "measured here", "largest set of live values in wide functions: gemma3-270m 1.4 to 2.1, tiny and tiny-gemma4 1.9 to 4.3"
    ),
    "head_ane_copies": Figure(
        3.0, "assumption", "an int8 head (385 MiB) was killed there on a 6 GB phone that decodes with about 2 GiB"
    ),
}  # fmt: skip

_PHONES: Mapping[str, Figure] = {
    **_EVERYWHERE,
    "app_bytes": Figure(200 * MB, "assumption", "so that decoding E2B comes to 260 MiB, the least footprint in the write-up"),
    "reread_mb_per_second": Figure(130, "write-up", "124 rounds that each read 403 MB again took 383 s"),
    "restore_mb_per_second": Figure(130, "write-up", "6.54 MB of KV imported in 0.044 to 0.057 s"),
    "restore_start_seconds": Figure(0.05, "assumption", "a round number: nothing is published"),
    "download_mb_per_second": Figure(10, "assumption", "a slow wireless network"),
    "decode_weight_bytes": Figure(1_819_000_000, "write-up", "E2B's chunks in 6 bits and int8 head, which is what was timed"),
}  # fmt: skip

IPHONE15 = Profile(
    name="iphone15",
    **_PHONES,
    physical_bytes=Figure(6 * GIB, "write-up", "the 6 GB phone"),
    clean_kept_bytes=Figure(
        350 * MB, "assumption", "between the 6-bit head (304 MB) and the int8 one (403 MB), which was read again every round"
    ),
    decode_ms_per_token=Figure(90, "write-up", "86 to 93 ms a token"),
)  # fmt: skip

IPHONE17PRO = Profile(
    name="iphone17pro",
    **_PHONES,
    physical_bytes=Figure(12 * GIB, "write-up", "the 12 GB phone"),
    clean_kept_bytes=Figure(700 * MB, "assumption", "twice that of the 6 GB phone"),
    decode_ms_per_token=Figure(62, "write-up", "60 to 64 ms a token"),
)

MAC = Profile(
    name="mac",
    **_EVERYWHERE,
    physical_bytes=Figure(16 * GIB, "assumption", "a Mac with 16 GB"),
    app_bytes=Figure(330 * MB, "measured here", "`prefill --stats` of gemma3-270m, before the work, on Linux"),
    clean_kept_bytes=Figure(2 * GIB, "assumption", "a round number: no Mac was measured"),
    reread_mb_per_second=Figure(1000, "assumption", "a round number: no Mac was measured"),
    decode_ms_per_token=Figure(62, "assumption", "as iphone17pro: no Mac was measured"),
    decode_weight_bytes=Figure(1_819_000_000, "assumption", "as iphone17pro"),
    restore_mb_per_second=Figure(1200, "measured here", "36.9 MB in 0.030 s, cold, on Linux (docs/benchmarks.md)"),
    restore_start_seconds=Figure(0.01, "measured here", "finding and planning a restore, rounded up, on Linux"),
    download_mb_per_second=Figure(50, "assumption", "a good wireless network"),
)

PROFILES: Mapping[str, Profile] = {profile.name: profile for profile in (IPHONE15, IPHONE17PRO, MAC)}


def profile_of(given: str) -> Profile:
    """A built-in profile by its name, else the profile in the file of that path. Raises `InputInvalid`."""
    if given in PROFILES:
        return PROFILES[given]
    path = Path(given).expanduser()
    try:
        document, _ = read_object(path, limit=_FILE_LIMIT)
    except JsonInvalid as error:
        raise _refusal(path.name, error.field, error.expected, error.found) from error
    except OSError as error:
        known = ", ".join(PROFILES)
        raise _refusal("--profile", "value", f"{known} or a file", f"{given!r} ({error.strerror})") from error
    return read_profile(document, path.name)


def read_profile(document: Mapping[str, Any], file: str) -> Profile:
    """The profile that a parsed JSON object is: exactly the fields of `Profile.document`. Raises `InputInvalid`, which names the field."""
    name = document.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= _WORDS or not name.isprintable():
        raise _refusal(file, "name", f"a text of 1 to {_WORDS} characters", _shown(document, "name"))
    for extra in sorted(document.keys() - {"name", *FIELDS}):
        raise _refusal(file, extra[:_WORDS], "no such field", "one")
    return Profile(name, **{field: _figure(document, field, file) for field in FIELDS})


def _figure(document: Mapping[str, Any], field: str, file: str) -> Figure:
    given, rule = document.get(field), FIELDS[field]
    if not isinstance(given, dict):
        raise _refusal(file, field, "an object with value, source and why", _shown(document, field))
    for extra in sorted(given.keys() - {"value", "source", "why"}):
        raise _refusal(file, f"{field}.{extra[:_WORDS]}", "no such field", "one")
    value, source, why = given.get("value"), given.get("source"), given.get("why", "")
    number = _number(value, rule)
    if number is None:
        kind = "a whole number" if rule.whole else "a number"
        expected = f"{kind} from {rule.low:g} to {rule.high:g} ({rule.what})"
        raise _refusal(file, f"{field}.value", expected, _shown(given, "value"))
    if source not in SOURCES:
        raise _refusal(file, f"{field}.source", " or ".join(map(repr, SOURCES)), _shown(given, "source"))
    if not isinstance(why, str) or len(why) > _WORDS:
        raise _refusal(file, f"{field}.why", f"a text of at most {_WORDS} characters", _shown(given, "why"))
    return Figure(number, source, why)


def _number(value: object, rule: Range) -> float | None:
    """``value`` if it is a number that the rule allows; ``true`` is none."""
    if type(value) is not int and (rule.whole or type(value) is not float):
        return None
    assert isinstance(value, int | float)
    return value if rule.low <= value <= rule.high else None


def _shown(values: Mapping[str, Any], name: str) -> str:
    return repr(values[name])[:80] if name in values else "no such field"


def _refusal(file: str, field: str, expected: str, found: str) -> InputInvalid:
    return InputInvalid(
        f"{file}: {field}: expected {expected}, found {found}. `kvferry plan --profile mac --show-profile` prints a whole one to change.",
        file=file,
        field=field,
        expected=expected,
        found=found,
    )
