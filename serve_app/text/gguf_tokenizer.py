"""The tokenizer inside a GGUF file."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from engine.errors import TokenizerError
from serve_app.text.base import Tokenizer
from serve_app.text.fast_tokenizer import FastTokenizer
from serve_app.text.gguf_fields import GGUFFields, TokenType, read_gguf_fields
from serve_app.text.gguf_sentencepiece import sentencepiece_tokenizer
from serve_app.text.pieces import byte_level_bytes


@dataclass(frozen=True)
class _PreTokenizer:
    """What a value of `tokenizer.ggml.pre` stands for."""

    split: pre_tokenizers.PreTokenizer
    normalizer: normalizers.Normalizer | None = None
    ignore_merges: bool = False
    """Whether a word that is a token as a whole is taken whole, even where the merges do not lead to it."""
    add_bos_token: bool = False
    """Where the file does not say."""


def _byte_level(use_regex: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _words(digits: str) -> pre_tokenizers.PreTokenizer:
    """The word pattern of tiktoken's cl100k_base, with `digits` for its runs of digits."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
    return pre_tokenizers.Sequence([split, _byte_level(use_regex=False)])


def _gpt2() -> _PreTokenizer:
    return _PreTokenizer(_byte_level(use_regex=True))


def _smollm() -> _PreTokenizer:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return _PreTokenizer(pre_tokenizers.Sequence([digits, _byte_level(use_regex=True)]))


def _llama3() -> _PreTokenizer:
    return _PreTokenizer(_words(r"\p{N}{1,3}"), ignore_merges=True, add_bos_token=True)


def _qwen2() -> _PreTokenizer:
    return _PreTokenizer(_words(r"\p{N}"), normalizer=normalizers.NFC())


_PRE_TOKENIZERS = {
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "llama-bpe": _llama3,
    "llama3": _llama3,
    "llama-v3": _llama3,
    "qwen2": _qwen2,
}


def load_gguf_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of the GGUF file `path`.

    Raises `TokenizerError` for a file that is missing, truncated or foreign, and for a tokenizer model or
    pre-tokenizer that is not known, by its name.
    """
    fields = read_gguf_fields(path)
    model = fields.require("tokenizer.ggml.model", str)
    if model == "gpt2":
        return _byte_level_bpe(fields)
    if model == "llama":
        return sentencepiece_tokenizer(fields)
    raise TokenizerError(
        f"{path} has a tokenizer of model {model!r}; known are 'gpt2' (byte-level BPE) and 'llama' (SentencePiece BPE)"
    )


def _byte_level_bpe(fields: GGUFFields) -> Tokenizer:
    tokens = fields.strings("tokenizer.ggml.tokens")
    types = fields.token_types(len(tokens))
    if TokenType.BYTE in types:
        raise TokenizerError(f"{fields.path} has byte tokens in a byte-level vocabulary, which spells bytes otherwise")
    pre = _pre_tokenizer(fields)
    backend = tokenizers.Tokenizer(_bpe_model(fields, tokens, pre.ignore_merges))
    backend.pre_tokenizer = pre.split
    if pre.normalizer is not None:
        backend.normalizer = pre.normalizer

    def added(*kinds: TokenType) -> list[AddedToken]:
        special = TokenType.CONTROL in kinds
        return [
            AddedToken(text, special=special, normalized=False)
            for text, kind in zip(tokens, types, strict=True)
            if kind in kinds
        ]

    backend.add_special_tokens(added(TokenType.CONTROL, TokenType.UNKNOWN))
    backend.add_tokens(added(TokenType.USER_DEFINED))
    info = fields.info(types)
    return FastTokenizer(backend, info, partial(_bytes_of, tokens, types), fields.around(info, pre.add_bos_token))


def _pre_tokenizer(fields: GGUFFields) -> _PreTokenizer:
    name = fields.require("tokenizer.ggml.pre", str)
    make = _PRE_TOKENIZERS.get(name)
    if make is None:
        raise TokenizerError(
            f"{fields.path} splits words by the pre-tokenizer {name!r}, which is not known here; "
            f"known ones: {', '.join(sorted(_PRE_TOKENIZERS))}"
        )
    return make()


def _bpe_model(fields: GGUFFields, tokens: list[str], ignore_merges: bool) -> models.BPE:
    vocab = {text: i for i, text in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise TokenizerError(f"{fields.path} has {len(tokens) - len(vocab)} tokens that are spelled like another one")
    pairs = [m.partition(" ") for m in fields.strings("tokenizer.ggml.merges")]
    merges = [(left, right) for left, _, right in pairs]
    try:
        return models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges)
    except Exception as e:  # the package raises bare Exception for a merge that leads out of the vocabulary
        raise TokenizerError(f"{fields.path}: vocabulary and merges do not fit together: {e}") from e


def _bytes_of(tokens: list[str], types: list[TokenType], token_id: int) -> bytes:
    kind = types[token_id]
    if kind is TokenType.UNUSED:
        return b""  # only fills the embedding up to a round size
    text = tokens[token_id]
    return byte_level_bytes(text) if kind is TokenType.NORMAL else text.encode("utf-8")
