"""SentencePiece models that were taken apart into GGUF metadata, put together again."""

from pathlib import Path

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from engine.errors import TokenizerError
from serve_app.text.base import Tokenizer
from serve_app.text.gguf_fields import GGUFFields, TokenType
from serve_app.text.sentencepiece_tokenizer import SentencePieceTokenizer, has_dummy_prefix


def sentencepiece_tokenizer(fields: GGUFFields) -> Tokenizer:
    """The tokenizer of a file whose `tokenizer.ggml.model` is "llama".

    Raises `TokenizerError` for metadata that is no SentencePiece model.
    """
    tokens = fields.strings("tokenizer.ggml.tokens")
    types = fields.token_types(len(tokens))
    scores = fields.require("tokenizer.ggml.scores", list)
    if len(scores) != len(tokens) or not all(isinstance(s, float) for s in scores):
        raise TokenizerError(
            f"{fields.path}: tokenizer.ggml.scores must hold one number for each of {len(tokens)} tokens"
        )
    model = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    for token, score, kind in zip(tokens, scores, types, strict=True):
        model.pieces.add(piece=token, score=score, type=int(kind))
    model.trainer_spec.model_type = sentencepiece_model_pb2.TrainerSpec.BPE  # type: ignore[attr-defined]
    model.trainer_spec.byte_fallback = TokenType.BYTE in types
    model.trainer_spec.vocab_size = len(tokens)
    model.normalizer_spec.name = "identity"
    add_space_prefix = fields.get("tokenizer.ggml.add_space_prefix", bool)
    model.normalizer_spec.add_dummy_prefix = True if add_space_prefix is None else add_space_prefix
    model.normalizer_spec.remove_extra_whitespaces = (
        fields.get("tokenizer.ggml.remove_extra_whitespaces", bool) or False
    )
    processor = _processor(fields.path, model.SerializeToString())
    info = fields.info(types, strips_leading_space=has_dummy_prefix(processor))
    return SentencePieceTokenizer(processor, info, fields.around(info, add_bos_default=True))


def _processor(path: Path, model_proto: bytes) -> sentencepiece.SentencePieceProcessor:
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=model_proto)
    except RuntimeError as e:
        raise TokenizerError(f"{path}: its tokens make no SentencePiece model: {e}") from e
