"""The tokenizer inside a GGUF file."""

from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import TypeVar

import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from engine.errors import TokenizerError
from serve_app.text.base import Tokenizer, TokenizerInfo
from serve_app.text.fast_tokenizer import FastTokenizer
from serve_app.text.gguf_metadata import MetadataValue, read_gguf_metadata
from serve_app.text.pieces import byte_level_bytes, check_token_id

_T = TypeVar("_T", bound=bool | int | str | list[MetadataValue])


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`; the numbers are SentencePiece's."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


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
    fields = _Fields(path, read_gguf_metadata(path, lambda key: key.startswith("tokenizer.")))
    model = fields.require("tokenizer.ggml.model", str)
    if model != "gpt2":
        raise TokenizerError(f"{path} has a tokenizer of model {model!r}; the known one is 'gpt2' (byte-level BPE)")
    return _byte_level_bpe(fields)


class _Fields:
    """Typed access to the metadata of one file."""

    def __init__(self, path: Path, values: dict[str, MetadataValue]) -> None:
        self.path = path
        self._values = values

    def get(self, key: str, kind: type[_T]) -> _T | None:
        """The value of `key`, None where the file has none. Raises `TokenizerError` where it is no `kind`."""
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise TokenizerError(f"{self.path}: {key} is a {type(value).__name__}; expected a {kind.__name__}")
        return value

    def require(self, key: str, kind: type[_T]) -> _T:
        """As `get`, but raises `TokenizerError` where the file has no `key`."""
        value = self.get(key, kind)
        if value is None:
            raise TokenizerError(f"{self.path} has no {key}; it holds no usable tokenizer")
        return value

    def strings(self, key: str) -> list[str]:
        """The strings of `key`."""
        values = self.require(key, list)
        if not all(isinstance(v, str) for v in values):
            raise TokenizerError(f"{self.path}: {key} holds something other than strings")
        return values

    def token_types(self, num_tokens: int) -> list[TokenType]:
        """One type for each token; all are normal where the file does not say."""
        values = self.get("tokenizer.ggml.token_type", list)
        if values is None:
            return [TokenType.NORMAL] * num_tokens
        if len(values) != num_tokens:
            raise TokenizerError(f"{self.path} has {num_tokens} tokens and {len(values)} token types")
        try:
            by_value = {v: TokenType(v) for v in set(values)}
        except (ValueError, TypeError) as e:
            raise TokenizerError(f"{self.path}: tokenizer.ggml.token_type: {e}") from e
        return [by_value[v] for v in values]

    def info(self, types: list[TokenType]) -> TokenizerInfo:
        """The special tokens and the chat template."""

        def token_id(name: str) -> int | None:
            key = f"tokenizer.ggml.{name}_token_id"
            return check_token_id(f"{self.path}: {key}", self.get(key, int), len(types))

        # End of sequence, of turn, of message: a generation ends at each of them.
        ends = [i for i in (token_id("eos"), token_id("eot"), token_id("eom")) if i is not None]
        return TokenizerInfo(
            vocab_size=len(types),
            bos_token_id=token_id("bos"),
            eos_token_ids=tuple(dict.fromkeys(ends)),
            special_token_ids=frozenset(i for i, t in enumerate(types) if t in (TokenType.CONTROL, TokenType.UNKNOWN)),
            chat_template=self.get("tokenizer.chat_template", str),
        )

    def around(self, info: TokenizerInfo, add_bos_default: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ids that `add_special_tokens` puts before and after a text."""
        add_bos = self.get("tokenizer.ggml.add_bos_token", bool)
        add_bos = add_bos_default if add_bos is None else add_bos
        add_eos = self.get("tokenizer.ggml.add_eos_token", bool) or False
        if add_bos and info.bos_token_id is None:
            raise TokenizerError(f"{self.path} asks for a BOS token before every text but names none")
        if add_eos and not info.eos_token_ids:
            raise TokenizerError(f"{self.path} asks for an EOS token after every text but names none")
        before = (info.bos_token_id,) if add_bos and info.bos_token_id is not None else ()
        return before, info.eos_token_ids[:1] if add_eos else ()


def _byte_level_bpe(fields: _Fields) -> Tokenizer:
    tokens = fields.strings("tokenizer.ggml.tokens")
    types = fields.token_types(len(tokens))
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


def _pre_tokenizer(fields: _Fields) -> _PreTokenizer:
    name = fields.require("tokenizer.ggml.pre", str)
    make = _PRE_TOKENIZERS.get(name)
    if make is None:
        raise TokenizerError(
            f"{fields.path} splits words by the pre-tokenizer {name!r}, which is not known here; "
            f"known ones: {', '.join(sorted(_PRE_TOKENIZERS))}"
        )
    return make()


def _bpe_model(fields: _Fields, tokens: list[str], ignore_merges: bool) -> models.BPE:
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
