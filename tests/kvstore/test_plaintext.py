"""Sizes and tables as people read them."""

from __future__ import annotations

import unicodedata

import pytest

from kvstore.plaintext import cut, labelled, short, size_text, table


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"), (1, "1 B"), (999, "999 B"), (1000, "1.00 kB"), (1536, "1.54 kB"), (9994, "9.99 kB"), (9996, "10.0 kB"),
        (36_900_000, "36.9 MB"), (99_949_999, "99.9 MB"), (99_950_001, "100 MB"), (555_182_404, "555 MB"), (999_499_999, "999 MB"),
        (999_500_000, "1.00 GB"), (2_400_000_000, "2.40 GB"), (1_234_000_000_000, "1.23 TB"), (1_234_000_000_000_000, "1,234.00 TB"),
    ],
)  # fmt: skip
def test_sizes_have_three_digits_in_powers_of_ten(count: int, text: str) -> None:
    assert size_text(count) == text


ROWS = [("book", 1500, "36.9 MB", "461397f61219"), ("日本語の本", 5, "196 B", "0c1f5a3e9b7d")]
HEADER = ("name", "tokens", "size", "snapshot")


def columns(line: str) -> int:
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in line)


def test_columns_stand_below_each_other() -> None:
    assert table(ROWS, HEADER, right=("size",)).splitlines() == [
        "name        tokens     size  snapshot",
        "book         1,500  36.9 MB  461397f61219",
        "日本語の本       5    196 B  0c1f5a3e9b7d",
    ]


@pytest.mark.parametrize("width", [80, 60, 40, 20])
@pytest.mark.parametrize("name", ["b", "b" * 30, "b" * 200, "本" * 100])
def test_a_table_fits_its_terminal(width: int, name: str) -> None:
    lines = table([(name, *ROWS[0][1:]), *ROWS], HEADER, width, right=("size",)).splitlines()
    assert len(lines) == 4
    assert max(map(columns, lines)) <= width
    if width >= 60:
        assert {line.split()[-1] for line in lines} == {"snapshot", ROWS[0][-1], ROWS[1][-1]}, (
            "the first column gives way first"
        )


def test_a_pipe_gets_everything() -> None:
    assert "b" * 200 in table([("b" * 200, 1, "1 B", "x")], HEADER)


def test_labels_and_long_texts() -> None:
    text = labelled([("path", "/a"), ("functions", "one two three four five six"), ("none", "")], 32, "  ")
    assert text.splitlines() == [
        "  path       /a",
        "  functions  one two three four",
        "             five six",
        "  none",
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, None), (True, "yes"), (7, "7"), ("fp16", "fp16"), ("ab" * 32, "abababababab"), ("AB" * 32, "AB" * 32),
        ([1.0, 0.5], "1.0, 0.5"), ([1.0] * 16, "16 values"), (["s", "s", "f"], "2 s, f"), ([["embed", "ab" * 32]], "embed abababababab"),
        (["s", "f"] * 4, "8 values"), ([], ""),
    ],
)  # fmt: skip
def test_values_in_a_few_words(value: object, text: str | None) -> None:
    assert short(value) == text


def test_cut() -> None:
    assert cut("abcdef", 6) == cut("abcdef", None) == "abcdef"
    assert cut("abcdef", 4) == "abc…"
    assert cut("日本語", 4) == "日…"
