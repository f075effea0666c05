"""Tokenizers that the `tokenizers` package runs: those of tokenizer.json, and the BPE of GGUF files."""

import threading
from collections.abc import Callable

import tokenizers

from serve_app.text.base import IdsAround, Tokenizer, TokenizerInfo


class FastTokenizer(Tokenizer):
    """A `tokenizers.Tokenizer` with the bytes of its tokens."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        info: TokenizerInfo,
        piece_bytes: Callable[[int], bytes],
        around: IdsAround | None,
    ) -> None:
        """`around`: ids that `add_special_tokens` puts before and after a text; None: what the backend's own
        post-processor adds."""
        super().__init__(info)
        self._backend = backend
        self._bytes_of = piece_bytes
        self._around = around
        # Whether special tokens are recognised is a switch of the backend, not an argument of its encode.
        self._lock = threading.Lock()

    def _encode(self, text: str, add_special_tokens: bool, parse_special: bool) -> list[int]:
        with self._lock:
            self._backend.encode_special_tokens = not parse_special
            ids = self._backend.encode(text, add_special_tokens=add_special_tokens and self._around is None).ids
        if add_special_tokens and self._around is not None:
            before, after = self._around
            return [*before, *ids, *after]
        return ids

    def _piece_bytes(self, token_id: int) -> bytes:
        return self._bytes_of(token_id)
