"""Drafts by prompt lookup, against the rule written out the long way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.items import Item, SoftToken
from runtime.lookup import prompt_lookup

SOFT = SoftToken(9, b"s" * 32)


@pytest.mark.parametrize(
    ("tokens", "most", "drafts"),
    [
        ([1, 2, 3], 3, ()),  # four tokens at least
        ([7, 7, 7, 7], 3, (7,)),  # overlapping, though a single token follows
        ([7, 7, 7, 7, 7, 7], 3, (7,)),  # the latest place, though an earlier one has more behind it
        ([1, 2, 3, 4, 5, 6, 1, 2, 3], 3, (4, 5, 6)),
        ([1, 2, 3, 4, 5, 6, 1, 2, 3], 2, (4, 5)),
        ([1, 2, 3, 4, 5, 6, 1, 2, 3], 0, ()),
        ([1, 2, 3, 4, 5, 6, 1, 2, 3], -1, ()),
        ([1, 2, 3, 4, 1, 2, 3, 5, 9, 1, 2, 3], 3, (5, 9, 1)),  # the latest place
        ([1, 2, 3, 1, 2, 3], 3, (1, 2, 3)),
        ([2, 3, 4, 9, 1, 3, 4], 3, ()),  # two of three are not enough
        ([1, 2, 4, 9, 1, 3, 4], 3, ()),
        ([1, 2, 3, 4, SOFT, 5, 1, 2, 3], 3, (4,)),  # a soft token cannot be copied
        ([1, SOFT, 3, 4, 6, 1, SOFT, 3], 3, (4, 6, 1)),  # but it is as good a neighbour as any
    ],
)
def test_a_draft(tokens: list[Item], most: int, drafts: tuple[int, ...]) -> None:
    assert prompt_lookup(tokens, most) == drafts


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(0, 4))
def test_every_draft_is_what_the_rule_says(tokens: list[int], most: int) -> None:
    places = [at for at in range(len(tokens) - 3) if tokens[at : at + 3] == tokens[-3:]]
    expected = tokens[max(places) + 3 :][:most] if places else []
    assert prompt_lookup(tokens, most) == tuple(expected)
