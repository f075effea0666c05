"""The text of one request: tokens in, text out, ended by a stop string."""

from collections.abc import Sequence

from serve_app.text.base import Tokenizer
from serve_app.text.detokenizer import IncrementalDetokenizer
from serve_app.text.stop import StopStringMatcher


class TextStream:
    """Detokenizes as tokens come and holds back what could still become a stop string."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], *, continues_text: bool) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, continues_text=continues_text)
        self._matcher = StopStringMatcher(tuple(stop)) if stop else None

    def push(self, token_ids: Sequence[int]) -> tuple[str, int, bool]:
        """(new text, how many of the tokens count, whether a stop string was found).

        Tokens after the one that completed a stop string do not count.
        """
        if self._matcher is None:
            return self._detokenizer.push(token_ids), len(token_ids), False
        text = ""
        for position, token_id in enumerate(token_ids):
            piece, matched = self._matcher.push(self._detokenizer.push([token_id]))
            text += piece
            if matched is not None:
                return text, position + 1, True
        return text, len(token_ids), False

    def finish(self) -> tuple[str, bool]:
        """(the text held back, whether its end holds a stop string). No token comes after it."""
        tail = self._detokenizer.finish()
        if self._matcher is None:
            return tail, False
        text, matched = self._matcher.push(tail)
        if matched is not None:
            return text, True
        return text + self._matcher.finish(), False
