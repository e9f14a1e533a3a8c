"""`PortableEngine.weight_bytes` counts what loaded functions read of the weight files, against the files themselves."""

from __future__ import annotations

from pathlib import Path

from runtime.bundle import Bundle
from runtime.mlpackage import Blob, Package
from runtime.mlpackage.ir import BITS
from runtime.portable import PortableEngine


def blobs(package: Path, function: str | None) -> dict[tuple[str, int], int]:
    """Stored size of every constant of a function that lies in a weight file."""
    found: dict[tuple[str, int], int] = {}
    for op in Package.open(package).function(function).ops:
        values = [value for args in op.inputs.values() for value in args] + list(op.attributes.values())
        for value in values:
            if isinstance(value, Blob):
                found[value.file, value.offset] = -(-value.spec.size * BITS[value.spec.dtype] // 8)
    return found


def test_a_loaded_function_counts_its_blobs_once_and_functions_share_them(bundle: Bundle, tiny_bundle: Path) -> None:
    engine = PortableEngine(tiny_bundle)
    assert (engine.weight_bytes().stored, engine.weight_bytes().decoded) == (0, 0)
    first = bundle.config.chunks[0]
    engine.function(first, "decode")
    decode = engine.weight_bytes()
    all_of_decode = sum(blobs(tiny_bundle / first, "decode").values())
    # A bias of zeros and a constant that nothing reads are not asked for; nothing else may be missing.
    assert 0.95 * all_of_decode <= decode.stored <= all_of_decode
    assert decode.decoded > decode.stored, "fp16 and int8 become float32"
    engine.function(first, "decode")
    assert engine.weight_bytes() == decode
    for function in bundle.config.prefill_functions.values():
        engine.function(first, function)
    wide = engine.weight_bytes()
    assert decode.stored <= wide.stored < 1.02 * decode.stored, "every function reads the same matrices"
    file = sum(path.stat().st_size for path in (tiny_bundle / first).rglob("weight.bin"))
    assert wide.stored <= file
    second = sum(blobs(tiny_bundle / bundle.config.chunks[1], "decode").values())
    engine.function(bundle.config.chunks[1], "decode")
    assert 0.95 * second <= engine.weight_bytes().stored - wide.stored <= second


def test_int8_is_counted_as_stored_and_not_as_computed(bundle: Bundle, tiny_bundle: Path) -> None:
    engine = PortableEngine(tiny_bundle)
    engine.function(bundle.config.lmhead, None)
    matrix = bundle.config.vocab_size * bundle.config.hidden
    assert matrix < engine.weight_bytes().stored < 1.1 * matrix
