"""What every tokenizer offers, whatever file it came from."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

from engine.errors import InvalidRequestError, TokenizerError

IdsAround = tuple[tuple[int, ...], tuple[int, ...]]
"""Ids put before a text, and after it."""


@dataclass(frozen=True)
class TokenizerInfo:
    """Facts about a vocabulary."""

    vocab_size: int
    """Ids in [0, vocab_size) have a token. A model may have more rows than that (padding)."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """Tokens that end a generation. The first is the tokenizer's own; a generation config may add others."""
    special_token_ids: frozenset[int]
    """Control tokens: `skip_special_tokens` leaves them out of text."""
    chat_template: str | None
    """Jinja source, where the files hold one."""
    strips_leading_space: bool = False
    """Whether encoding puts a space before the text (SentencePiece's dummy prefix), so that decoding takes one off."""

    def around(self, source: object, *, add_bos: bool, add_eos: bool) -> "IdsAround":
        """What `add_special_tokens` adds. Raises `TokenizerError`, naming `source`, where there is no such token."""
        before: tuple[int, ...] = ()
        if add_bos:
            if self.bos_token_id is None:
                raise TokenizerError(f"{source} asks for a BOS token before every text but names none")
            before = (self.bos_token_id,)
        if add_eos and not self.eos_token_ids:
            raise TokenizerError(f"{source} asks for an EOS token after every text but names none")
        return before, self.eos_token_ids[:1] if add_eos else ()


class Tokenizer(ABC):
    """Text to token ids and back. Safe to share between threads.

    Decoding is defined token by token: each token stands for a fixed run of bytes, the runs are joined, and the result
    is read as UTF-8 with U+FFFD for what is not. That is what byte-level tokenizers do anyway; for byte fallback it
    differs from the libraries only in how many U+FFFD malformed bytes give. It is what makes exact streaming possible:
    no later token changes an earlier one's bytes. For the same reason `clean_up_tokenization_spaces` of old Hugging
    Face configs ("a ." to "a.") is never applied: it loses text.
    """

    def __init__(self, info: TokenizerInfo) -> None:
        self._info = info
        self._bytes_by_id: dict[int, bytes] = {}

    @property
    def vocab_size(self) -> int:
        """Ids in [0, vocab_size) have a token."""
        return self._info.vocab_size

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text, where the model has one."""
        return self._info.bos_token_id

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a generation; the tokenizer's own first."""
        return self._info.eos_token_ids

    @property
    def bos_token(self) -> str:
        """Text of `bos_token_id` for chat templates; "" where there is none."""
        return "" if self.bos_token_id is None else self.token_text(self.bos_token_id)

    @property
    def eos_token(self) -> str:
        """Text of the tokenizer's own end-of-sequence token for chat templates; "" where there is none."""
        return self.token_text(self.eos_token_ids[0]) if self.eos_token_ids else ""

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Control tokens, left out of text by `skip_special_tokens`."""
        return self._info.special_token_ids

    @property
    def chat_template(self) -> str | None:
        """Jinja source of the chat template, where the files hold one."""
        return self._info.chat_template

    @property
    def strips_leading_space(self) -> bool:
        """Whether `decode` takes one space off the beginning, because `encode` put one there."""
        return self._info.strips_leading_space

    def encode(self, text: str, *, add_special_tokens: bool, parse_special: bool = True) -> list[int]:
        """Token ids of `text`.

        `add_special_tokens` adds what the model's files ask for around a text (usually BOS). `parse_special` turns the
        text of a control token ("<|im_end|>") into that token; without it, such text is ordinary text. A byte that the
        vocabulary has no token for (SmolLM2's lacks six control characters, such as U+0004) is dropped, as by the
        reference implementation.

        Raises `InvalidRequestError` for text that is not Unicode (a lone surrogate, as JSON's "\\ud800" gives).
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as e:
            raise InvalidRequestError(
                f"the text holds half of a surrogate pair (U+{ord(text[e.start]):04X}) at character {e.start}, "
                "which is not Unicode text; send the whole character"
            ) from None
        return self._encode(text, add_special_tokens, parse_special)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`; malformed UTF-8 becomes U+FFFD. Raises `TokenizerError` for a negative id."""
        data = b"".join(self.output_bytes(i, skip_special_tokens) for i in ids)
        if self.strips_leading_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", errors="replace")

    def output_bytes(self, token_id: int, skip_special_tokens: bool) -> bytes:
        """What `token_id` adds to a text: its bytes, or none where it is special and those are skipped."""
        if skip_special_tokens and token_id in self.special_token_ids:
            return b""
        return self.token_bytes(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes one token stands for; they need not be whole characters.

        Ids past the vocabulary (rows that only pad the model's embedding) have none. Raises `TokenizerError` for a
        negative id.
        """
        data = self._bytes_by_id.get(token_id)
        if data is None:
            if token_id < 0:
                raise TokenizerError(f"{token_id} is no token id; expected a number in [0, {self.vocab_size})")
            data = self._piece_bytes(token_id) if token_id < self.vocab_size else b""
            self._bytes_by_id[token_id] = data
        return data

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text, U+FFFD for what is no whole character."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    @abstractmethod
    def _encode(self, text: str, add_special_tokens: bool, parse_special: bool) -> list[int]:
        """`encode` for text that is known to be Unicode."""

    @abstractmethod
    def _piece_bytes(self, token_id: int) -> bytes:
        """Bytes of a token in [0, vocab_size); special tokens stand for their names."""
