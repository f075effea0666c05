"""Text of a growing token sequence, without ever taking anything back."""

import codecs
from collections.abc import Iterable

from serve_app.text.base import Tokenizer


class IncrementalDetokenizer:
    """Turns the tokens of one generation into text as they come.

    All pushes and `finish` together give `tokenizer.decode` of all tokens, however they were cut into chunks. The cost
    of a token does not depend on how many came before.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, *, continues_text: bool = False) -> None:
        """`continues_text`: the tokens go on from a text that the client has, so that a space in front of the first
        word is part of it (and not SentencePiece's dummy prefix, which `decode` takes off)."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip_pending = tokenizer.strips_leading_space and not continues_text

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that is certain now: whole characters, and U+FFFD only for bytes that no later one can complete."""
        data = b"".join(self._tokenizer.output_bytes(i, self._skip_special_tokens) for i in token_ids)
        if self._strip_pending and data:
            self._strip_pending = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def finish(self) -> str:
        """What is left: U+FFFD where the tokens end inside a character."""
        return self._utf8.decode(b"", final=True)
