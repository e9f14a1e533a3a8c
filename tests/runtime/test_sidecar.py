"""The embedding tables against values worked out by hand and against exact rational arithmetic."""

from __future__ import annotations

import math
import pickle
import struct
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from runtime.bundle import BundleDamaged, BundleFileMissing, Sidecar, SidecarSpec, TokenOutOfRange


def rounded(value: Fraction, digits: int, lowest: int, highest: int) -> Fraction:
    """To the nearest binary number of ``digits`` significant bits, ties to even, exponent from ``lowest``."""
    if value == 0:
        return value
    exponent = abs(value).numerator.bit_length() - value.denominator.bit_length()
    exponent -= abs(value) < Fraction(2) ** exponent
    exponent = max(exponent, lowest)
    step = Fraction(2) ** (exponent - digits + 1)
    whole, rest = divmod(value, step)
    whole += 1 if rest * 2 > step or (rest * 2 == step and whole % 2) else 0
    assert abs(whole * step) < Fraction(2) ** (highest + 1), "overflow"
    return whole * step


def f32(value: Fraction) -> Fraction:
    return rounded(value, 24, -126, 127)


def f16(value: Fraction) -> Fraction:
    return rounded(value, 11, -14, 15)


def exact(q: int, scale: float, square: float) -> Fraction:
    factor = f32(f32(Fraction(scale) / 127) * f32(Fraction(math.sqrt(square))))
    return f16(f32(q * factor))


def int8_table(folder: Path, rows: list[list[int]], scales: list[float], square: float = 1.0) -> Sidecar:
    (folder / "q").write_bytes(b"".join(struct.pack(f"{len(r)}b", *r) for r in rows))
    (folder / "s").write_bytes(struct.pack(f"<{len(scales)}f", *scales))
    return Sidecar(SidecarSpec("q", len(rows), len(rows[0]), "s", square), folder / "q", folder / "s")


ONE = 127.0
HALF_ULP = 127.0 * 2049 / 2048  # divided by 127 it is 1 + 2**-11, half a step of fp16 above 1, exactly


@pytest.mark.parametrize(
    ("q", "scale", "square", "expected"),
    [
        (1, ONE, 1.0, 1.0),
        (-128, ONE, 1.0, -128.0),
        (127, ONE, 4.0, 254.0),
        (0, 3.7, 640.0, 0.0),
        (5, 0.0, 640.0, 0.0),
        # A tie between 1 and 1 + 2**-10: the even one is below.
        (1, HALF_ULP, 1.0, 1.0),
        (-1, HALF_ULP, 1.0, -1.0),
        # A tie between 1 + 2**-10 and 1 + 2**-9: the even one is above.
        (1, 127.0 * 2051 / 2048, 1.0, 1 + 2**-9),
        (-1, 127.0 * 2051 / 2048, 1.0, -1 - 2**-9),
        # Three quarters of a step above 3.
        (3, HALF_ULP, 1.0, 3 + 2**-9),
        # 5 * factor is a little above the tie 1 + 2**-11, but float32 has the tie itself next to it, so fp16 gets 1.
        (5, float.fromhex("0x1.969934p+4"), 1.0, 1.0),
        # Here the order counts: scale / 127, then the square root, then q; in any other order it is 0x1.5a0p+3.
        (24, float.fromhex("0x1.219912p+1"), 640.0, float.fromhex("0x1.5a4p+3")),
        # The smallest fp16 number, half of it (a tie with 0), and a little more than half.
        (1, ONE * 2.0**-24, 1.0, 2.0**-24),
        (1, ONE * 2.0**-25, 1.0, 0.0),
        (3, ONE * 2.0**-26, 1.0, 2.0**-24),
        # The largest fp16 number, and the last value below the tie with infinity.
        (1, ONE * 65504, 1.0, 65504.0),
        (1, ONE * 65519, 1.0, 65504.0),
    ],
)
def test_values_worked_out_by_hand(tmp_path: Path, q: int, scale: float, square: float, expected: float) -> None:
    assert Fraction(expected) == exact(q, struct.unpack("<f", struct.pack("<f", scale))[0], square)
    row = int8_table(tmp_path, [[q, 1]], [scale], square).row(0)
    assert row.dtype == np.float16
    assert float(row[0]) == expected


def test_the_hand_worked_cases_tell_wrong_roundings_apart() -> None:
    """Each shortcut that a reader might take gives another fp16 number in one of the cases above."""
    tie = float.fromhex("0x1.969934p+4")
    assert f16(5 * Fraction(tie) / 127) == Fraction(1025, 1024) != exact(5, tie, 1.0)
    scale, root = Fraction(float.fromhex("0x1.219912p+1")), f32(Fraction(math.sqrt(640)))
    root_first = f16(f32(24 * f32(f32(scale * root) / 127)))
    scale_last = f16(f32(24 * f32(scale * f32(root / 127))))
    q_early = f16(f32(f32(24 * f32(scale / 127)) * root))
    assert {root_first, scale_last, q_early} == {Fraction(float.fromhex("0x1.5a0p+3"))}
    assert exact(24, float(scale), 640.0) == Fraction(float.fromhex("0x1.5a4p+3"))


@given(
    q=st.lists(st.integers(-128, 127), min_size=1, max_size=40),
    scale=st.floats(min_value=0.0, max_value=8.0, width=32),
    square=st.sampled_from([1.0, 64.0, 256.0, 640.0, 1536.0, 2.5]),
)
@example(q=[1, 3, 5], scale=2.0**-149, square=1.0)
def test_every_value_equals_exact_arithmetic(
    tmp_path_factory: pytest.TempPathFactory, q: list[int], scale: float, square: float
) -> None:
    table = int8_table(tmp_path_factory.mktemp("table"), [q], [scale], square)
    assert [Fraction(float(v)) for v in table.row(0)] == [exact(v, scale, square) for v in q]


def test_all_256_integers_at_many_scales(tmp_path: Path) -> None:
    random = np.random.default_rng(5)
    scales = [float(s) for s in random.uniform(0.01, 30, 60).astype(np.float32)]
    rows = [list(range(-128, 128))] * len(scales)
    made = int8_table(tmp_path, rows, scales, 640.0).take(range(len(scales)))
    for i, scale in enumerate(scales):
        assert [Fraction(float(v)) for v in made[i]] == [exact(q, scale, 640.0) for q in rows[i]]


def test_fp16_rows_come_back_bit_for_bit(tmp_path: Path) -> None:
    bits = np.arange(65536, dtype="<u2").reshape(256, 256)
    (tmp_path / "h").write_bytes(bits.tobytes())
    table = Sidecar(SidecarSpec("h", 256, 256, None, None), tmp_path / "h", None)
    assert np.array_equal(table.take([0, 255, 7, 7]).view(np.uint16), bits[[0, 255, 7, 7]])
    assert np.array_equal(table.row(124).view(np.uint16), bits[124])  # infinities and NaN stay as they are


def test_take_gives_the_rows_in_the_order_asked_for(tmp_path: Path) -> None:
    table = int8_table(tmp_path, [[1, 2], [3, 4], [5, 6]], [ONE, ONE * 2, ONE])
    assert table.take([2, 1, 1, 0]).tolist() == [[5, 6], [6, 8], [6, 8], [1, 2]]
    assert table.take([]).shape == (0, 2)
    assert table.take(np.array([2], dtype=np.int32)).tolist() == [[5, 6]]  # type: ignore[arg-type]


def test_the_caller_owns_the_rows(tmp_path: Path) -> None:
    table = int8_table(tmp_path, [[1, 2]], [ONE])
    row = table.row(0)
    row[:] = 0
    assert table.row(0).tolist() == [1, 2]


@pytest.mark.parametrize("token", [-1, 3, 2**63, -(2**70)])
def test_a_token_without_a_row_is_refused(tmp_path: Path, token: int) -> None:
    table = int8_table(tmp_path, [[1], [2], [3]], [ONE] * 3)
    for call in (lambda: table.row(token), lambda: table.take([0, token])):
        with pytest.raises(TokenOutOfRange, match=f"token {token}: expected an id from 0 to 2") as caught:
            call()
        assert isinstance(caught.value, IndexError)
        assert pickle.loads(pickle.dumps(caught.value)).details == {"token": token, "rows": 3}


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, 3e38, ONE * 65520])
def test_a_scale_that_gives_no_finite_value_is_damage(tmp_path: Path, scale: float) -> None:
    table = int8_table(tmp_path, [[1, 0], [1, 3]], [ONE, scale])
    assert table.row(0).tolist() == [1, 0]
    with pytest.raises(BundleDamaged, match=r"row 1\b") as caught:
        table.take([0, 1])
    assert caught.value.file == "s"


@pytest.mark.parametrize(("file", "size"), [("q", 5), ("q", 7), ("q", 0), ("s", 11), ("s", 13), ("s", 0)])
def test_a_file_of_another_size_is_damage(tmp_path: Path, file: str, size: int) -> None:
    int8_table(tmp_path, [[1, 2]] * 3, [ONE] * 3)
    (tmp_path / file).write_bytes(bytes(size))
    with pytest.raises(BundleDamaged, match=f"found {size} bytes") as caught:
        Sidecar(SidecarSpec("q", 3, 2, "s", 1.0), tmp_path / "q", tmp_path / "s")
    assert caught.value.expected.startswith("6 bytes (3 x 2 x 1)" if file == "q" else "12 bytes (3 x 4)")


def test_a_missing_table_is_named(tmp_path: Path) -> None:
    with pytest.raises(BundleFileMissing, match=r"^q: expected this file"):
        Sidecar(SidecarSpec("q", 3, 2, None, None), tmp_path / "q", None)


def test_a_file_replaced_by_renaming_does_not_change_an_open_table(tmp_path: Path) -> None:
    table = int8_table(tmp_path, [[1, 2]], [ONE])
    (tmp_path / "new").write_bytes(b"\7\7")
    (tmp_path / "new").replace(tmp_path / "q")
    assert table.row(0).tolist() == [1, 2]
