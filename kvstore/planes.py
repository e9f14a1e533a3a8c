"""Codec 1 of objects: content of two-byte elements as a plane of low bytes and a compressed plane of high bytes. No I/O.

In fp16 KV the low byte is noise, which no compressor makes smaller; sign, exponent and first bits of the mantissa, in the high byte, take about
three quarters of their room. numpy and zstandard are imported where they are used. `docs/format.md`, "Planes", is the description.
"""

from __future__ import annotations

from collections.abc import Sequence

from .digest import ContentDigest
from .errors import ObjectCorrupt

Buffer = bytes | memoryview

MAX_PLANES = 1 << 26
"""Largest content that is kept as planes, in bytes: it bounds what a reader holds of one object besides its content."""
_MAX_WINDOW = MAX_PLANES // 2
_MAGIC = b"\x28\xb5\x2f\xfd"
_FRAME_HEADER = 18
"""Bytes of a Zstandard frame's header, at most."""
_LEVEL = 3
"""Higher levels, and other orders of the plane, gained under 1 % on real KV for 2 to 50 times the time: docs/design/016-byte-planes.md."""


def fits_planes(content: int, stored: int | None = None) -> bool:
    """Whether that many bytes of content may be kept as planes: in ``stored`` bytes, where that is given."""
    return 0 < content <= MAX_PLANES and content % 2 == 0 and (stored is None or content // 2 < stored < content)


def encode_planes(parts: Sequence[Buffer]) -> bytes | None:
    """The payload of content given as consecutive parts; None where it would not be smaller, or must not be kept as planes."""
    length = sum(len(part) for part in parts)
    if not fits_planes(length):
        return None
    import numpy as np
    import zstandard

    pairs = np.frombuffer(b"".join(parts), np.uint8).reshape(-1, 2)
    low, high = pairs[:, 0].tobytes(), pairs[:, 1].tobytes()
    compressor = zstandard.ZstdCompressor(
        level=_LEVEL, write_checksum=False, write_content_size=True, write_dict_id=False
    )
    payload = low + compressor.compress(high)
    return payload if fits_planes(length, len(payload)) else None


def decode_planes(name: ContentDigest, payload: memoryview, length: int) -> memoryview:
    """The ``length`` bytes of content, in memory of their own, from the payload of object ``name``.

    `ObjectCorrupt` unless it is what `docs/format.md` asks for; what the frame says of itself is compared before anything is allocated
    by it. Whether the content is the right one is for the caller to find out by its digest.
    """
    if not fits_planes(length, len(payload)):
        raise _bad(name, "stored length of planes", f"more than half of {length} bytes and less than all", len(payload))
    import numpy as np

    low = np.frombuffer(payload[: length // 2], np.uint8)
    high = np.frombuffer(_high_plane(name, payload[length // 2 :], length // 2), np.uint8)
    # Half the time of two strided copies; few and large steps, because between them threads wait for the interpreter.
    content = np.multiply(high, np.uint16(256), dtype="<u2")
    np.add(content, low, out=content)
    return content.view(np.uint8).data


def _high_plane(name: ContentDigest, frame: memoryview, size: int) -> bytes:
    """What the one Zstandard frame holds: ``size`` bytes."""
    import zstandard

    if frame[:4] != _MAGIC:
        raise _bad(name, "Zstandard magic number", _MAGIC.hex(), bytes(frame[:4]).hex())
    try:
        said = zstandard.get_frame_parameters(frame[:_FRAME_HEADER])
        found = (said.content_size, said.dict_id, said.has_checksum)
        if found != (size, 0, False):
            raise _bad(name, "Zstandard frame", f"(content size, dictionary, checksum) of {(size, 0, False)}", found)
        if said.window_size > _MAX_WINDOW:
            raise _bad(name, "Zstandard window", f"at most {_MAX_WINDOW} bytes", said.window_size)
        # The result is allocated by the content size, which is right; a frame that holds more than it states, or less, is an error.
        decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
        plane = decompressor.decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise _bad(name, "Zstandard frame", f"one frame of {size} bytes", f"something else ({error})") from error
    if len(plane) != size:
        raise _bad(name, "high plane", f"{size} bytes", len(plane))
    return plane


def _bad(name: ContentDigest, field: str, expected: object, found: object) -> ObjectCorrupt:
    what = f"object {name}"
    return ObjectCorrupt.at(what, f"{field}: expected {expected}, found {found}", field=field, name=name.hex)
