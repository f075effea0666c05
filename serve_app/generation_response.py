"""The answer to one generation request, streamed or whole, as an ASGI response."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.errors import DeadlineExceededError, EngineError
from serve_app.backend import Backend
from serve_app.errors import answer_for
from serve_app.generation import Delta, GenerationCall
from serve_app.http import log_error, request_id_of, send_error, send_json, to_json, until_disconnect
from serve_app.metrics import Metrics
from serve_app.responses import AnswerShape, Collector, Usage

logger = logging.getLogger(__name__)

# The replica ends a request at its deadline; this much later the ingress does, should the replica not answer at all.
_DEADLINE_GRACE_S = 5.0


@dataclass(frozen=True)
class StreamMode:
    """How to stream."""

    include_usage: bool


class GenerationResponse(Response):
    """Generates while it answers, and stops generating when the client goes away."""

    def __init__(
        self,
        backend: Backend,
        call: GenerationCall,
        shape: AnswerShape,
        metrics: Metrics,
        *,
        stream: StreamMode | None,
        arrived_at: float,
    ) -> None:
        """`stream`: None for one whole answer. `arrived_at`: `time.monotonic()` when the request came."""
        super().__init__()
        self._backend = backend
        self._call = call
        self._shape = shape
        self._metrics = metrics
        self._stream = stream
        self._clock = _Clock(metrics, arrived_at)
        self._usage = Usage(sum(map(len, call.prompts)), call.choices_per_prompt)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers; see ASGI."""
        await until_disconnect(receive, self._answer(request_id_of(scope), send))

    async def _answer(self, request_id: str, send: Send) -> None:
        deltas = self._backend.generate(self._call)
        started = False
        try:
            async with asyncio.timeout(self._patience_s()), aclosing(deltas):
                if self._stream is None:
                    await self._send_whole(deltas, send)
                    return
                first = await anext(deltas)
                started = True
                await self._send_stream(first, deltas, send, self._stream)
        except Exception as caught:
            error = _told(caught, self._call)
            answer = answer_for(error, request_id)
            log_error(error, request_id, answer.status)
            if not started:
                await send_error(send, answer)
                return
            await send(_event(answer.body, more=False))
        finally:
            self._clock.end(self._usage, one_piece=self._call.num_candidates > 1)

    def _patience_s(self) -> float | None:
        return None if self._call.deadline_s is None else self._call.deadline_s + _DEADLINE_GRACE_S

    def _take(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            self._usage.add(delta)
        self._clock.tick(self._usage)

    async def _send_whole(self, deltas: AsyncGenerator[list[Delta], None], send: Send) -> None:
        collector = Collector(self._call.num_choices)
        async for batch in deltas:
            self._take(batch)
            for delta in batch:
                collector.add(delta)
        await send_json(send, 200, self._shape.whole(collector.whole(), self._usage))

    async def _send_stream(
        self, first: list[Delta], rest: AsyncGenerator[list[Delta], None], send: Send, mode: StreamMode
    ) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        extra: dict[str, object] = {"usage": None} if mode.include_usage else {}
        opening = self._shape.opening(self._call.num_choices)
        await self._send_chunks(opening, first, extra, send)
        async for batch in rest:
            await self._send_chunks([], batch, extra, send)
        if mode.include_usage:
            await send(_event(self._shape.usage_chunk(self._usage)))
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _send_chunks(
        self, opening: list[dict[str, object]], batch: list[Delta], extra: dict[str, object], send: Send
    ) -> None:
        """All chunks of a batch in one write."""
        self._take(batch)
        chunks = [*opening, *(self._shape.chunk(delta) for delta in batch)]
        body = b"".join(b"data: " + to_json(chunk | extra) + b"\n\n" for chunk in chunks)
        await send({"type": "http.response.body", "body": body, "more_body": True})


def _event(content: object, *, more: bool = True) -> dict[str, object]:
    return {"type": "http.response.body", "body": b"data: " + to_json(content) + b"\n\n", "more_body": more}


def _told(error: Exception, call: GenerationCall) -> Exception:
    """The engine's own errors as they are; silence past the deadline as a missed deadline."""
    if isinstance(error, TimeoutError) and not isinstance(error, EngineError):
        return DeadlineExceededError(f"no answer came within the deadline of {call.deadline_s:g} s")
    return error


class _Clock:
    """Measures one request for the histograms."""

    def __init__(self, metrics: Metrics, arrived_at: float) -> None:
        self._metrics = metrics
        self._arrived_at = arrived_at
        self._first_at: float | None = None
        self._num_first = 0
        self._last_at = arrived_at

    def tick(self, usage: Usage) -> None:
        """Tokens came; `usage` counts them."""
        self._last_at = time.monotonic()
        if self._first_at is None:
            self._first_at = self._last_at
            self._num_first = _longest(usage)
            self._metrics.ttft.observe(self._first_at - self._arrived_at)

    def end(self, usage: Usage, *, one_piece: bool) -> None:
        """The request ended, one way or the other. `one_piece`: each answer came at once, chosen of several."""
        self._metrics.latency.observe(time.monotonic() - self._arrived_at)
        if self._first_at is None:
            return
        self._metrics.prompt_tokens.inc(usage.num_prompt_tokens)
        self._metrics.completion_tokens.inc(usage.num_completion_tokens)
        # Those that came with the first one took no time that could be seen.
        num_later = _longest(usage) - self._num_first
        if num_later and not one_piece:
            self._metrics.tpot.observe((self._last_at - self._first_at) / num_later)


def _longest(usage: Usage) -> int:
    """Tokens of the longest choice so far."""
    return max(usage.num_generated.values(), default=0)
