"""An engine for asyncio: bounded admission, deadlines, cancellation, text, drain.

The engine runs on its own thread (`engine_thread`); everything else here runs on one event loop. Each step is handed
over once, whatever it holds, and a call's consumer takes all that has come since it last looked.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from engine.errors import (
    DeadlineExceededError,
    DrainingError,
    EngineDeadError,
    EngineError,
    InvalidRequestError,
    QueueFullError,
    RequestCancelledError,
)
from engine.request import EngineProtocol, EngineStats, FinishReason, Request, RequestOutput
from serve_app.call_stream import CallStream, RequestState, delta_of
from serve_app.engine_requests import engine_requests
from serve_app.engine_thread import EngineThread, Progress
from serve_app.generation import Delta, GenerationCall
from serve_app.rerank import Candidates
from serve_app.text.base import Tokenizer
from serve_app.text_stream import TextStream

_DEAD = "the engine stopped on an internal failure; the replica is being replaced"


@dataclass
class AsyncEngineStats:
    """The engine's counters, and those of the serving layer around it."""

    engine: EngineStats
    num_in_flight: int
    """Requests admitted and not ended."""
    num_ended: dict[str, int] = field(default_factory=dict)
    """Requests that ended, by reason: stop or length, as their clients were told; aborted, refused."""
    draining: bool = False


class AsyncEngine:
    """Serves one engine to many concurrent callers of one event loop.

    `max_in_flight` bounds the requests that run or wait; one more is refused with `QueueFullError` at once.
    `step_timeout_s`: a step that takes longer counts as a dead engine in `check_health`.
    """

    def __init__(
        self,
        engine: EngineProtocol,
        tokenizer: Tokenizer,
        *,
        max_in_flight: int,
        step_timeout_s: float | None = None,
    ) -> None:
        self.max_model_len = engine.max_model_len
        self.vocab_size = engine.vocab_size
        self._tokenizer = tokenizer
        self._max_in_flight = max_in_flight
        self._step_timeout_s = step_timeout_s
        self._thread = EngineThread(engine, self)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._requests: dict[str, RequestState] = {}
        self._streams: set[CallStream] = set()
        self._ids = itertools.count()
        self._num_ended: Counter[str] = Counter()
        self._draining = False
        self._idle: asyncio.Event | None = None
        self._thread.start()

    # ---- the caller's side, on the event loop ----

    def warm_up(self, progress: Progress | None = None) -> Mapping[str, float]:
        """Compiles every program (blocks); the seconds each took. Call it before the first `generate`."""
        return self._thread.warm_up(progress)

    async def generate(
        self, call: GenerationCall, sign_of_life_s: float | None = None
    ) -> AsyncGenerator[list[Delta], None]:
        """Yields what each step adds to the call's choices until all have ended.

        With `sign_of_life_s` it yields an empty list whenever nothing has come for so long.

        Closing the iterator (or cancelling the task in it) frees the slots within one step. Raises
        `InvalidRequestError`, `OverloadedError`, `DeadlineExceededError`, `RequestCancelledError`, `EngineDeadError`.
        """
        self._check_admission(call)
        requests = engine_requests(call, self._ids, self.max_model_len, self.vocab_size)
        stream = self._admit(call, requests)
        timer = self._start_timer(call, stream)
        try:
            while not stream.ended:
                yield await stream.take(sign_of_life_s)
        finally:
            if timer is not None:
                timer.cancel()
            self._close(stream)

    async def drain(self) -> None:
        """Refuses new calls from now on and returns when those that run have ended."""
        self._draining = True
        while self._requests or self._streams:
            self._idle = self._idle or asyncio.Event()
            self._idle.clear()
            await self._idle.wait()

    def check_health(self) -> None:
        """Raises `EngineDeadError` where the engine cannot serve any more."""
        if not self._thread.alive:
            raise EngineDeadError(_DEAD) from self._thread.error
        seconds = self._thread.seconds_in_step()
        if self._step_timeout_s is not None and seconds > self._step_timeout_s:
            raise EngineDeadError(f"a step has taken {seconds:.0f} s; the limit is {self._step_timeout_s:.0f} s")

    def stats(self) -> AsyncEngineStats:
        """Counters and gauges as of the last step."""
        return AsyncEngineStats(self._thread.stats, len(self._requests), dict(self._num_ended), self._draining)

    def stop(self, timeout_s: float = 10.0) -> None:
        """Ends the engine thread. Calls that still run fail with `EngineDeadError`."""
        self._thread.stop()
        self._thread.join(timeout_s)
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._fail_all, "the replica has been shut down")

    # ---- the engine's side, on the engine thread (see EngineListener) ----

    def on_outputs(self, outputs: Sequence[RequestOutput]) -> None:
        """Hands a step over to the event loop."""
        self._hand_over(lambda: self._deliver(outputs))

    def on_refused(self, request_id: str, error: EngineError) -> None:
        """Hands a refusal over to the event loop."""
        self._hand_over(lambda: self._refuse(request_id, error))

    def on_scored(self, request_id: str, perplexity: float | None) -> None:
        """Hands a score over to the event loop."""
        self._hand_over(lambda: self._take_score(request_id, perplexity))

    def on_death(self) -> None:
        """Fails every call."""
        self._hand_over(lambda: self._fail_all(_DEAD))

    def _hand_over(self, callback: Callable[[], None]) -> None:
        # Before the first call there is no loop, and nobody who could miss anything.
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback)

    # ---- admission ----

    def _check_admission(self, call: GenerationCall) -> None:
        self._loop = self._loop or asyncio.get_running_loop()
        if not self._thread.alive:
            raise EngineDeadError(_DEAD)
        if self._draining:
            raise DrainingError("the server is shutting down and takes no new requests")
        if not call.prompts:
            raise InvalidRequestError("prompt is empty; expected at least one prompt", "prompt")
        num_free = self._max_in_flight - len(self._requests)
        if call.num_requests > self._max_in_flight:
            name, each = ("rerank", call.num_candidates) if call.num_candidates > 1 else ("n", call.choices_per_prompt)
            times = f", {name} is {each}" if each > 1 else ""
            raise InvalidRequestError(
                f"{len(call.prompts)} prompts in one request{times}; this server holds {self._max_in_flight} at a time",
                "prompt" if len(call.prompts) > self._max_in_flight else name,
            )
        if call.num_requests > num_free:
            raise QueueFullError(
                f"{len(self._requests)} of {self._max_in_flight} places are taken, {call.num_requests} wanted; retry"
            )

    def _admit(self, call: GenerationCall, requests: list[Request]) -> CallStream:
        stream = CallStream()
        self._streams.add(stream)
        candidates = Candidates(call) if call.num_candidates > 1 else None
        wants_tokens = call.params.logprobs is not None or candidates is not None
        for index, request in enumerate(requests):
            text = TextStream(self._tokenizer, call.stop, continues_text=call.continues_text)
            state = RequestState(index, stream, text, wants_tokens, candidates)
            self._requests[request.request_id] = state
            stream.open_ids.add(request.request_id)
            self._thread.add(request)
        return stream

    def _start_timer(self, call: GenerationCall, stream: CallStream) -> asyncio.TimerHandle | None:
        if call.deadline_s is None:
            return None
        assert self._loop is not None
        error = DeadlineExceededError(f"the request did not finish within {call.deadline_s:g} s")
        return self._loop.call_later(call.deadline_s, self._expire, stream, error)

    # ---- delivery, on the event loop ----

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            state = self._requests.get(output.request_id)
            if state is None:
                continue
            state.ended = output.finish_reason is not None
            # What a step under way adds to a candidate whose text has ended is not part of it.
            if output.request_id in state.stream.open_ids and not state.awaits_score:
                self._deliver_to(state, output)
            self._forget_if_through(output.request_id, state)

    def _deliver_to(self, state: RequestState, output: RequestOutput) -> None:
        if output.finish_reason is FinishReason.ABORTED:
            state.stream.open_ids.discard(output.request_id)
            state.stream.fail(RequestCancelledError("the request was cancelled"))
            return
        delta = delta_of(state, output)
        if delta.finish_reason is not None and output.finish_reason is None:
            self._thread.abort(output.request_id)
        if state.candidates is not None:
            self._collect(state, state.candidates, output.request_id, delta)
            return
        if delta.finish_reason is not None:
            state.stream.open_ids.discard(output.request_id)
        if delta.text or delta.token_ids or delta.finish_reason is not None:
            state.stream.push(delta)

    def _collect(self, state: RequestState, candidates: Candidates, request_id: str, delta: Delta) -> None:
        """Keeps what a candidate got, and has it scored when it has ended. Its client waits for the score."""
        candidates.add(delta)
        if delta.finish_reason is not None:
            state.awaits_score = True
            self._thread.score(request_id, *candidates.to_score(state.index))

    def _take_score(self, request_id: str, perplexity: float | None) -> None:
        state = self._requests.get(request_id)
        if state is None:
            return
        state.awaits_score = False
        if request_id in state.stream.open_ids and state.candidates is not None and perplexity is not None:
            state.stream.open_ids.discard(request_id)
            answer = state.candidates.choose(state.index, perplexity)
            if answer is not None:
                state.stream.push(answer)
        else:
            state.finish_reason = None  # its client has gone, or its time was up
        self._forget_if_through(request_id, state)

    def _forget_if_through(self, request_id: str, state: RequestState) -> None:
        if state.ended and not state.awaits_score:
            self._forget(request_id, state.finish_reason or FinishReason.ABORTED)

    def _refuse(self, request_id: str, error: EngineError) -> None:
        state = self._requests[request_id]
        self._forget(request_id, "refused")
        state.stream.open_ids.discard(request_id)
        state.stream.fail(error)
        self._abort_open(state.stream)

    def _expire(self, stream: CallStream, error: EngineError) -> None:
        stream.fail(error)
        self._abort_open(stream)

    def _fail_all(self, message: str) -> None:
        for request_id, state in list(self._requests.items()):
            told = None if request_id in state.stream.open_ids else state.finish_reason
            self._forget(request_id, told or FinishReason.ABORTED)
        for stream in self._streams:
            if stream.open_ids:
                stream.open_ids.clear()
                stream.fail(EngineDeadError(message))

    def _abort_open(self, stream: CallStream) -> None:
        for request_id in stream.open_ids:
            self._thread.abort(request_id)
        stream.open_ids.clear()

    def _close(self, stream: CallStream) -> None:
        self._abort_open(stream)
        self._streams.discard(stream)
        self._wake_drain()

    def _forget(self, request_id: str, reason: str) -> None:
        del self._requests[request_id]
        self._num_ended[str(reason)] += 1
        self._wake_drain()

    def _wake_drain(self) -> None:
        if self._idle is not None:
            self._idle.set()
