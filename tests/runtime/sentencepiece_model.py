"""SentencePiece itself over one of our vocabularies: the reference for token ids."""

from __future__ import annotations

from functools import cache
from typing import Any

import sentencepiece
from sentencepiece import sentencepiece_model_pb2 as schema

from runtime.build.vocabulary import Vocabulary


@cache
def processor(vocabulary: Vocabulary) -> Any:
    model = schema.ModelProto()
    trainer, normaliser = model.trainer_spec, model.normalizer_spec
    trainer.model_type = schema.TrainerSpec.BPE
    trainer.vocab_size = len(vocabulary)
    trainer.byte_fallback = True
    trainer.unk_id, trainer.bos_id = vocabulary.unknown, vocabulary.bos
    trainer.eos_id, trainer.pad_id = vocabulary.eos, vocabulary.pad
    trainer.unk_piece, trainer.bos_piece = vocabulary.pieces[vocabulary.unknown], vocabulary.pieces[vocabulary.bos]
    trainer.eos_piece, trainer.pad_piece = vocabulary.pieces[vocabulary.eos], vocabulary.pieces[vocabulary.pad]
    normaliser.name = "identity"
    normaliser.add_dummy_prefix = normaliser.remove_extra_whitespaces = False
    normaliser.escape_whitespaces = True
    for piece, score, kind in zip(vocabulary.pieces, vocabulary.scores, vocabulary.types, strict=True):
        model.pieces.add(piece=piece, score=score, type=int(kind))
    return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
