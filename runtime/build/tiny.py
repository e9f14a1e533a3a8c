"""The ``tiny`` model: Gemma 3's architecture at toy size, with weights drawn from a seed.

It says nothing sensible, but what it says depends on everything it has read, and it does not fall into a loop, so a test that compares
greedy text notices wrong KV. That takes an output matrix of its own: with Gemma's tied one, random weights repeat the last token for ever.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from runtime.build.source import Source
from runtime.build.spec import EMBEDDING, FULL, LAYER_TENSORS, OUTPUT, OUTPUT_NORM, SLIDING, Spec, layer_shape
from runtime.build.vocabulary import SPACE, PieceType, Vocabulary

_CONTROL = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")
_VOCABULARY_SIZE = 1024
#: Gains that are not 1. Sharp attention (2) makes what is said depend on single tokens far back and keeps it out of loops; small
#: contributions to the residual stream (½) keep the numerical noise of different engines below the gap between the best two tokens.
_GAINS = {
    "attn_q_norm.weight": 2.0,
    "attn_k_norm.weight": 2.0,
    "post_attention_norm.weight": 0.5,
    "post_ffw_norm.weight": 0.5,
}

# Frequent first: a word counts as often as its place from the end.
_WORDS = """
the of and to in is that it was for on are as with his they at be this from have or by one had not but what all were when we there can an your
which their said if do will each about how up out them then she many some so these would other into has more her two like him see time could no
make than first been its who now people my made over did down only way find use may water long little very after words called just where most
know get through back much before go good new write our used me man too any day same right look think also around another came come work three
word must because does part even place well such here take why things help put years different away again off went old number great tell men say
small every found still between name should home big give air line set own under read last never us left end along while might next sound below
saw something thought both few those always looked show large often together asked house world going want school important until form food keep
children feet land side without boy once animals life enough took sometimes four head above kind began almost live page got earth need far hand
high year mother light parts country father let night following picture being study second eyes soon times story boys since white days ever paper
hard near sentence better best across during today others however sure means knew try told young miles sun ways thing whole hear example heard
several change answer room sea against top turned learn point city play toward five using himself usually money seen car morning body turn bring
memory cache token model store prefix block layer device context decode window phone write server snapshot digest bytes value number letter system
temperature degree boil river mountain question machine language result process simple local network remote record current general government
"""


def tiny_spec(vocabulary: Vocabulary) -> Spec:
    """The geometry: 6 layers of which the last is full attention, 2 heads sharing 1 KV head of 32, window 512, context 2,048."""
    layers = 6
    return Spec(
        name="tiny",
        layers=layers,
        hidden=64,
        ffn=128,
        heads=2,
        kv_heads=1,
        head_dim=32,
        vocabulary=len(vocabulary),
        window=512,
        context=2048,
        layer_types=tuple(FULL if i % 6 == 5 else SLIDING for i in range(layers)),
        rope_base_full=1.0e6,
        rope_factor_full=1.0,
        rope_base_sliding=1.0e4,
        norm_epsilon=1.0e-6,
        attention_scale=32.0**-0.5,
        eos_token_ids=(1, 5),
        chunk_bounds=((0, 3), (3, 6)),
    )


def tiny_vocabulary() -> Vocabulary:
    """1,024 pieces: control tokens, all bytes, printable ASCII, and merges learned from a list of common words."""
    letters = [SPACE, "\n", *(chr(c) for c in range(33, 127))]
    pieces = [*_CONTROL, *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    types = [PieceType.CONTROL] * len(_CONTROL) + [PieceType.BYTE] * 256 + [PieceType.NORMAL] * len(letters)
    types[_CONTROL.index("<unk>")] = PieceType.UNKNOWN
    learned = _learn_merges(_VOCABULARY_SIZE - len(pieces))
    first = len(pieces) - len(letters)
    scores = [0.0] * first + [-float(rank) for rank in range(len(learned) + len(letters))]
    # letters rank below every merge, as SentencePiece has it: they are where merging starts from
    scores[first:] = [-float(len(learned) + rank) for rank in range(len(letters))] + [
        -float(rank) for rank in range(len(learned))
    ]
    return Vocabulary(
        pieces=(*pieces, *learned),
        scores=tuple(scores),
        types=(*types, *[PieceType.NORMAL] * len(learned)),
        bos=_CONTROL.index("<bos>"),
        eos=_CONTROL.index("<eos>"),
        pad=_CONTROL.index("<pad>"),
        unknown=_CONTROL.index("<unk>"),
    )


def _learn_merges(count: int) -> list[str]:
    """The ``count`` pieces byte-pair encoding learns from the words, in order; ties go to the pair that sorts first."""
    listed = _WORDS.split()
    words = [([SPACE, *word], len(listed) - place) for place, word in enumerate(listed)]
    pairs: Counter[tuple[str, str]] = Counter()
    for symbols, weight in words:
        for pair in pairwise(symbols):
            pairs[pair] += weight
    learned: dict[str, None] = {}
    while len(learned) < count:
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        learned[best[0] + best[1]] = None
        for symbols, weight in words:
            if best[0] in symbols:
                _join(symbols, best, weight, pairs)
    return list(learned)


def _join(symbols: list[str], best: tuple[str, str], weight: int, pairs: Counter[tuple[str, str]]) -> None:
    """Join every ``best`` in a word, and keep the counts of neighbouring pairs right."""
    for pair in pairwise(symbols):
        pairs[pair] -= weight
    i = 0
    while i < len(symbols) - 1:
        if (symbols[i], symbols[i + 1]) == best:
            symbols[i : i + 2] = [best[0] + best[1]]
        i += 1
    for pair in pairwise(symbols):
        pairs[pair] += weight


class TinyWeights:
    """Seeded tensors, each drawn from a stream of its own. Raw generator output is used, because numpy promises its stability."""

    def __init__(self, spec: Spec, seed: int) -> None:
        self._spec = spec
        self._seed = seed
        self._names = {EMBEDDING, OUTPUT, OUTPUT_NORM}
        self._names |= {f"blk.{i}.{tensor}" for i in range(spec.layers) for tensor in LAYER_TENSORS}

    def has(self, name: str) -> bool:
        return name in self._names

    def tensor(self, name: str) -> NDArray[np.float32]:
        spec = self._spec
        if name == OUTPUT_NORM:
            return np.ones(spec.hidden, np.float32)
        if name in (EMBEDDING, OUTPUT):
            rows = self._draw(name, (spec.vocabulary, spec.hidden)) / np.float32(spec.hidden**0.5)
            if name == OUTPUT:
                rows[: len(_CONTROL) + 256] = 0.0  # never say a control token or half a character
            return rows
        tensor = name.split(".", 2)[2]
        shape = layer_shape(spec, tensor)
        drawn = self._draw(name, shape)
        if tensor.endswith("norm.weight"):
            return np.float32(_GAINS.get(tensor, 1.0)) * (1 + np.float32(0.1) * drawn)
        return drawn / np.float32(shape[1] ** 0.5)

    def _draw(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Uniform with variance 1."""
        raw = np.random.PCG64([self._seed, *name.encode()]).random_raw(math.prod(shape))
        unit = (raw >> np.uint64(40)).astype(np.float32) / np.float32(2**23) - np.float32(1)
        return (unit * np.float32(3**0.5)).reshape(shape)

    def row_blocks(self, name: str, rows: int) -> Iterator[NDArray[np.float32]]:
        whole = self.tensor(name)
        for start in range(0, len(whole), rows):
            yield whole[start : start + rows]


def tiny_source(seed: int) -> Source:
    """The tiny model for ``seed``."""
    vocabulary = tiny_vocabulary()
    spec = tiny_spec(vocabulary)
    return Source(
        spec=spec,
        weights=TinyWeights(spec, seed),
        vocabulary=vocabulary,
        origin={"kind": "seed", "seed": seed},
        license="Apache-2.0",
        terms=None,
        chat=True,
    )
