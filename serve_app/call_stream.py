"""What an engine adds to one call, on its way to whoever waits for it."""

import asyncio
from dataclasses import dataclass

from engine.errors import EngineError
from engine.request import FinishReason, RequestOutput
from serve_app.generation import Delta, join
from serve_app.rerank import Candidates
from serve_app.text_stream import TextStream


class CallStream:
    """What has come for one call and was not yet taken."""

    def __init__(self) -> None:
        self.open_ids: set[str] = set()
        """Engine requests of this call whose client still waits."""
        self._pending: dict[int, Delta] = {}
        self._error: EngineError | None = None
        self._news = asyncio.Event()

    @property
    def ended(self) -> bool:
        """Nothing more will come after what `take` returns."""
        return not self.open_ids and not self._pending and self._error is None

    def push(self, delta: Delta) -> None:
        """Adds a delta, joined with an earlier one of the same choice that was not taken yet."""
        earlier = self._pending.get(delta.index)
        self._pending[delta.index] = delta if earlier is None else join(earlier, delta)
        self._news.set()

    def fail(self, error: EngineError) -> None:
        """Ends the call. Deltas that came before are delivered first."""
        self._error = self._error or error
        self._news.set()

    async def take(self, within_s: float | None = None) -> list[Delta]:
        """All that has come; waits where nothing has, and returns nothing if nothing comes within that time.

        Raises the error that ended the call.
        """
        try:
            async with asyncio.timeout(within_s):
                await self._news.wait()
        except TimeoutError:
            return []
        self._news.clear()
        if not self._pending and self._error is not None:
            raise self._error
        deltas, self._pending = list(self._pending.values()), {}
        if self._error is not None:
            self._news.set()
        return deltas


@dataclass
class RequestState:
    """One choice in the engine, or one candidate for a choice."""

    index: int
    """Among the call's engine requests."""
    stream: CallStream
    text: TextStream
    wants_tokens: bool
    """Whether deltas carry token ids and log-probabilities."""
    candidates: Candidates | None
    """Where the candidates of the call are collected; None: each request is a choice."""
    num_tokens: int = 0
    finish_reason: FinishReason | None = None
    """Why it ended as its client knows it: by a stop string, too, of which the engine has only an abort."""
    ended: bool = False
    """The engine has nothing more for it."""
    awaits_score: bool = False
    """Generated, its text ended, and not scored yet."""


def delta_of(state: RequestState, output: RequestOutput) -> Delta:
    """The output as text. May end the request (a stop string) where the engine did not."""
    finish_reason = output.finish_reason
    # The token that ended the request (end of sequence, or a stop token) is counted but is no part of the text.
    num_text = len(output.token_ids) - (1 if finish_reason is FinishReason.STOP else 0)
    text, num_used, stopped = state.text.push(output.token_ids[:num_text])
    if not stopped:
        num_used = len(output.token_ids)
        if finish_reason is not None:
            tail, stopped = state.text.finish()
            text += tail
    if stopped:
        finish_reason = FinishReason.STOP
    state.finish_reason = finish_reason
    state.num_tokens += num_used
    wants = state.wants_tokens
    return Delta(
        index=state.index,
        text=text,
        num_tokens=state.num_tokens,
        token_ids=output.token_ids[:num_used] if wants else (),
        logprobs=(output.logprobs or ())[:num_used] if wants else (),
        finish_reason=finish_reason,
        num_cached_tokens=output.num_cached_tokens,
    )
