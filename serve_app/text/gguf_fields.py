"""The tokenizer's part of a GGUF file's metadata, checked."""

from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import TypeVar

from engine.errors import CheckpointError, TokenizerError
from engine.weights.gguf_header import GGUFValue, read_gguf_header
from serve_app.text.base import IdsAround, TokenizerInfo
from serve_app.text.pieces import check_token_id

_T = TypeVar("_T", bool, int, str, list)


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`; the numbers are SentencePiece's."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def read_gguf_fields(path: Path) -> "GGUFFields":
    """The metadata of `path`. Raises `TokenizerError` for a file that is missing, truncated or foreign."""
    try:
        return GGUFFields(path, read_gguf_header(path).metadata)
    except CheckpointError as e:
        raise TokenizerError(str(e)) from e


class GGUFFields:
    """Typed access to the metadata of one file."""

    def __init__(self, path: Path, values: Mapping[str, GGUFValue]) -> None:
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

    def info(self, types: list[TokenType], strips_leading_space: bool = False) -> TokenizerInfo:
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
            strips_leading_space=strips_leading_space,
        )

    def around(self, info: TokenizerInfo, add_bos_default: bool) -> IdsAround:
        """The ids that `add_special_tokens` puts before and after a text."""
        add_bos = self.get("tokenizer.ggml.add_bos_token", bool)
        add_eos = self.get("tokenizer.ggml.add_eos_token", bool)
        return info.around(self.path, add_bos=add_bos_default if add_bos is None else add_bos, add_eos=bool(add_eos))
