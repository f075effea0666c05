"""Stop strings over text that comes in pieces."""

from collections.abc import Sequence

from engine.errors import InvalidRequestError


class StopStringMatcher:
    """Passes text on up to the first stop string, and never any text that may yet turn out to be part of one.

    The stop string that is complete first wins; of those complete at the same character, the longest. So the outcome
    does not depend on how the text was cut into pieces.

    Example, with stops ["END"]: push("the E") gives ("the ", None), push("N") gives ("", None), and then push("D.")
    gives ("", "END"), or push("T") gives ("ENT", None).
    """

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        """`include_in_output`: whether the stop string itself is passed on. Raises `InvalidRequestError` for an empty
        stop string."""
        if any(not stop for stop in stops):
            raise InvalidRequestError("a stop string is empty; expected at least one character", "stop")
        # Longest first: the first complete one in this order is the one that wins.
        self._patterns = [_Pattern(stop) for stop in sorted(stops, key=len, reverse=True)]
        self._include_in_output = include_in_output
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Returns the text that is safe to emit, and the stop string once one is complete.

        What follows a complete stop string is dropped, in this push and in later ones.
        """
        if self._matched is not None:
            return "", self._matched
        if not self._patterns:
            return text, None
        for i, char in enumerate(text):
            for pattern in self._patterns:
                pattern.advance(char)
            stop = next((p.text for p in self._patterns if p.is_complete), None)
            if stop is not None:
                return self._stop_after(self._held + text[: i + 1], stop), stop
        text = self._held + text
        safe_len = len(text) - max(p.matched_len for p in self._patterns)
        self._held = text[safe_len:]
        return text[:safe_len], None

    def finish(self) -> str:
        """The text held back; the generation ended, so it is part of no stop string."""
        held, self._held = self._held, ""
        return held

    def _stop_after(self, text: str, stop: str) -> str:
        self._matched, self._held = stop, ""
        return text if self._include_in_output else text[: len(text) - len(stop)]


class _Pattern:
    """One stop string and how much of it the text ends with (Knuth, Morris and Pratt, 1977).

    A character costs constant time on average, whatever the stop string: a client's "aaaa...b" cannot slow a replica.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched_len = 0
        # fallback[n]: length of the longest proper prefix of text that text[:n] ends with.
        self._fallback = [0, 0]
        for char in text[1:]:
            self._fallback.append(self._next_len(self._fallback[-1], char))

    @property
    def is_complete(self) -> bool:
        return self.matched_len == len(self.text)

    def advance(self, char: str) -> None:
        self.matched_len = self._next_len(self.matched_len, char)

    def _next_len(self, length: int, char: str) -> int:
        while length and self.text[length] != char:
            length = self._fallback[length]
        return length + 1 if self.text[length] == char else 0
