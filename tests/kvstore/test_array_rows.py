"""Arrays of any library as `Rows`: saved and loaded in place, and refused by name where they are not what a layout says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import ArrayRows, Group, Identity, Layout, Lineage, Store
from kvstore.errors import InputInvalid

LAYOUT = Layout((Group("full", None, (1,), 2, 8), Group("sliding", 64, (0, 2), 1, 4)))
WIDTH = {0: 4, 1: 16, 2: 4}
IDENTITY = Identity.of({"weights": "w", "tokenizer": "t"})


def arrays(tokens: int, seed: int | None = None) -> dict[int, tuple[Any, Any]]:
    """Random, or zeros."""
    random = np.random.default_rng(seed)
    make = np.zeros if seed is None else random.standard_normal
    return {i: (make((tokens, w)).astype(np.float16), make((tokens, w)).astype(np.float16)) for i, w in WIDTH.items()}


def changed(layers: dict[int, tuple[Any, Any]], layer: int, part: int, to: Any) -> dict[int, tuple[Any, Any]]:
    pair = list(layers[layer])
    pair[part] = to
    return {**layers, layer: (pair[0], pair[1])}


@pytest.mark.parametrize("tokens", [1, 64, 130])
def test_arrays_are_saved_and_loaded_in_place(tmp_path: Path, tokens: int) -> None:
    ours, theirs = arrays(tokens + 3, seed=5), arrays(tokens)
    with Store.open(tmp_path / "store") as store:
        store.save(
            LAYOUT, IDENTITY, range(tokens), ArrayRows(LAYOUT, ours), namespace="default", name="a",
            lineage=[Lineage.of({"engine": "test"})] * -(-tokens // 64),
        )  # fmt: skip
        match = store.find(LAYOUT, IDENTITY, [*range(tokens), 5], namespace="default")
        assert match is not None and match.n == tokens
        store.load(match, into=ArrayRows(LAYOUT, theirs))
    for layer in WIDTH:
        for a, b in zip(ours[layer], theirs[layer], strict=True):
            assert a[:tokens].tobytes() == b.tobytes() and b.any()


def test_spans_are_k_then_v_of_each_layer_and_alive() -> None:
    layers = arrays(10, seed=1)
    made = ArrayRows(LAYOUT, layers)
    assert made.tokens == 10
    spans = made.spans(1, 2, 5)
    assert [bytes(s) for s in spans] == [layers[i][j][2:5].tobytes() for i in (0, 2) for j in (0, 1)]
    assert [bytes(s) for s in made.spans(0, 9, 10)] == [a[9:].tobytes() for a in layers[1]]
    spans[3][:] = bytes(24)
    assert not layers[2][1][2:5].any() and layers[2][1][5:].any()
    for start, stop in ((-1, 2), (3, 2), (0, 11)):
        with pytest.raises(InputInvalid, match="within 0 to 10"):
            made.spans(0, start, stop)


def test_any_buffer_will_do_and_axes_may_be_split() -> None:
    layers = arrays(6, seed=2)
    whole = ArrayRows(LAYOUT, layers).spans(0, 1, 4)
    split = changed(layers, 1, 0, layers[1][0].reshape(1, 6, 2, 8))
    split = changed(split, 1, 1, bytearray(layers[1][1].tobytes()))
    assert ArrayRows(LAYOUT, split).spans(0, 1, 4) == whole


@pytest.mark.parametrize(
    ("layer", "part", "to", "message"),
    [
        (2, 1, np.zeros((10, 4), np.float32), r"layer 2 V: .*fp16.*found format 'f'"),
        (0, 0, np.zeros((10, 4), np.uint16), r"layer 0 K: .*found format 'H'"),
        (1, 0, np.zeros((16, 10), np.float16).T, r"layer 1 K: .*not contiguous"),
        (1, 1, bytes(33), r"layer 1 V: expected contiguous rows of 32 bytes, found 33 bytes"),
        (1, 1, b"", r"layer 1 V: .*found 0 bytes"),
        (2, 0, np.zeros((9, 4), np.float16), "as many tokens in every buffer, found 9 in layer 2 K, 10 in layer 1 K"),
    ],
)
def test_what_the_layout_does_not_say_is_refused(layer: int, part: int, to: Any, message: str) -> None:
    with pytest.raises(InputInvalid, match=message):
        ArrayRows(LAYOUT, changed(arrays(10), layer, part, to))


def test_missing_and_extra_layers_are_refused() -> None:
    layers = arrays(3)
    for wrong in ({i: layers[i] for i in (0, 1)}, {**layers, 7: layers[0]}):
        with pytest.raises(InputInvalid, match=r"expected K and V of \[0, 1, 2\]"):
            ArrayRows(LAYOUT, wrong)
