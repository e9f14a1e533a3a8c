"""The models ``tiny`` and ``tiny-llama``: Gemma 3's and Llama's architecture at toy size, with weights drawn from a seed.

They say nothing sensible, but what they say depends on everything they have read, and they do not fall into a loop, so a test that compares
greedy text notices wrong KV. That takes an output matrix of its own: with a tied one, random weights repeat the last token for ever.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from runtime.build import gemma3, llama
from runtime.build.byte_pairs import BytePairs, byte_letters
from runtime.build.source import Origin, Source
from runtime.build.spec import EMBEDDING, FULL, LAYER_TENSORS, OUTPUT, OUTPUT_NORM, SLIDING, Spec, layer_shape
from runtime.build.vocabulary import SPACE, PieceType, Vocabulary

_CONTROL = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")
_LLAMA_CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_VOCABULARY_SIZE = 1024
_LLAMA_VOCABULARY_SIZE = 896
#: Factors that are not 1: of a norm's gain or, in a family without that norm, of the matrix before it. Sharp attention makes what is said
#: depend on single tokens far back and keeps it out of loops; small contributions to the residual stream keep the numerical noise of different
#: engines below the gap between the best two tokens. The norm after attention makes up for what averaging loses; without it the factor is larger.
_FACTORS = (
    ("attn_q_norm.weight", 2.0, "attn_q.weight", 2.0),
    ("attn_k_norm.weight", 2.0, "attn_k.weight", 2.0),
    ("post_attention_norm.weight", 0.5, "attn_output.weight", 1.0),
    ("post_ffw_norm.weight", 0.5, "ffn_down.weight", 0.5),
)

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
        architecture=gemma3.ARCHITECTURE,
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
        activation="gelu_tanh",
        embedding_square=64,
        layer_tensors=gemma3.GEMMA3_TENSORS,
        eos_token_ids=(1, 5),
        chunk_bounds=((0, 3), (3, 6)),
    )


def tiny_llama_spec(vocabulary: BytePairs) -> Spec:
    """The geometry: 3 layers of full attention, 9 heads sharing 3 KV heads of 16, context 2,048."""
    layers = 3
    return Spec(
        name="tiny-llama",
        architecture=llama.ARCHITECTURE,
        layers=layers,
        hidden=64,
        ffn=128,
        heads=9,
        kv_heads=3,
        head_dim=16,
        vocabulary=len(vocabulary),
        window=None,
        context=2048,
        layer_types=(FULL,) * layers,
        rope_base_full=1.0e5,
        rope_factor_full=1.0,
        rope_base_sliding=None,
        norm_epsilon=1.0e-5,
        attention_scale=0.25,
        activation="silu",
        embedding_square=1,
        layer_tensors=LAYER_TENSORS,
        eos_token_ids=(vocabulary.eos, 0),
        chunk_bounds=((0, 1), (1, 3)),
    )


def tiny_vocabulary() -> Vocabulary:
    """1,024 pieces: control tokens, all bytes, printable ASCII, and merges learned from a list of common words."""
    letters = [SPACE, "\n", *(chr(c) for c in range(33, 127))]
    pieces = [*_CONTROL, *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    types = [PieceType.CONTROL] * len(_CONTROL) + [PieceType.BYTE] * 256 + [PieceType.NORMAL] * len(letters)
    types[_CONTROL.index("<unk>")] = PieceType.UNKNOWN
    learned = list(dict.fromkeys(a + b for a, b in _learn_merges(_VOCABULARY_SIZE - len(pieces), SPACE)))
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


def tiny_llama_vocabulary() -> BytePairs:
    """896 pieces: control tokens, all bytes, and merges learned from the same words."""
    letters = byte_letters()
    pieces = [*_LLAMA_CONTROL, *letters]
    pairs = _learn_merges(_LLAMA_VOCABULARY_SIZE - len(pieces), letters[ord(" ")])
    pieces += dict.fromkeys(a + b for a, b in pairs)
    end = _LLAMA_CONTROL.index("<|im_end|>")
    return BytePairs(
        pieces=tuple(pieces),
        types=(PieceType.CONTROL,) * len(_LLAMA_CONTROL) + (PieceType.NORMAL,) * (len(pieces) - len(_LLAMA_CONTROL)),
        merges=tuple(pairs),
        single_digits=True,
        bos=None,
        eos=end,
        pad=end,
        unknown=_LLAMA_CONTROL.index("<|endoftext|>"),
    )


def _learn_merges(count: int, space: str) -> list[tuple[str, str]]:
    """The pairs byte-pair encoding joins in the words (which begin with ``space``) until it has ``count`` pieces, in order; ties go to the pair
    that sorts first."""
    listed = _WORDS.split()
    words = [([space, *word], len(listed) - place) for place, word in enumerate(listed)]
    pairs: Counter[tuple[str, str]] = Counter()
    for symbols, weight in words:
        for pair in pairwise(symbols):
            pairs[pair] += weight
    joined: list[tuple[str, str]] = []
    learned: set[str] = set()
    while len(learned) < count:
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        assert pairs[best] > 0, "every word is one piece already"
        joined.append(best)
        learned.add(best[0] + best[1])
        for symbols, weight in words:
            if best[0] in symbols:
                _join(symbols, best, weight, pairs)
    return joined


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
    """Seeded tensors, each drawn from a stream of its own. Raw generator output is used, because numpy promises its stability.

    The output matrix never says the first ``unsaid`` tokens: control tokens, and what may be half a character.
    """

    def __init__(self, spec: Spec, seed: int, unsaid: int = len(_CONTROL) + 256) -> None:
        self._spec = spec
        self._seed = seed
        self._unsaid = unsaid
        self._names = {EMBEDDING, OUTPUT, OUTPUT_NORM}
        self._names |= {f"blk.{i}.{tensor}" for i in range(spec.layers) for tensor in spec.layer_tensors}
        self._factors = dict(
            (norm, np.float32(gain)) if norm in spec.layer_tensors else (matrix, np.float32(factor))
            for norm, gain, matrix, factor in _FACTORS
        )

    def has(self, name: str) -> bool:
        return name in self._names

    def tensor(self, name: str) -> NDArray[np.float32]:
        spec = self._spec
        if name == OUTPUT_NORM:
            return np.ones(spec.hidden, np.float32)
        if name in (EMBEDDING, OUTPUT):
            square = spec.embedding_square if name == EMBEDDING else spec.hidden
            rows = self._draw(name, (spec.vocabulary, spec.hidden)) / np.float32(square**0.5)
            if name == OUTPUT:
                rows[: self._unsaid] = 0.0
            return rows
        tensor = name.split(".", 2)[2]
        shape = layer_shape(spec, tensor)
        drawn = self._draw(name, shape)
        factor = self._factors.get(tensor, np.float32(1))
        if tensor.endswith("norm.weight"):
            return factor * (1 + np.float32(0.1) * drawn)
        return factor * (drawn / np.float32(shape[1] ** 0.5))

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
    """``tiny`` for ``seed``."""
    vocabulary = tiny_vocabulary()
    spec = tiny_spec(vocabulary)
    return Source(spec, TinyWeights(spec, seed), vocabulary, _origin(seed), "Apache-2.0", None, gemma3.TURNS)


def tiny_llama_source(seed: int) -> Source:
    """``tiny-llama`` for ``seed``."""
    vocabulary = tiny_llama_vocabulary()
    spec = tiny_llama_spec(vocabulary)
    weights = TinyWeights(spec, seed, len(_LLAMA_CONTROL) + 256)
    return Source(spec, weights, vocabulary, _origin(seed), "Apache-2.0", None, llama.CHATML)


def _origin(seed: int) -> Origin:
    return {"kind": "seed", "seed": seed}
