"""The one thread that calls an engine. Commands come in through a queue; outputs go out through callbacks."""

import concurrent.futures
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from engine.errors import EngineDeadError, EngineError
from engine.request import EngineProtocol, EngineStats, Request, RequestOutput

logger = logging.getLogger(__name__)

Progress = Callable[[int, int, str], None]
"""Called with (programs done, programs in all, what comes next)."""


class EngineListener(Protocol):
    """Hears what the engine does. Called on the engine thread: hand over and return."""

    def on_outputs(self, outputs: Sequence[RequestOutput]) -> None:
        """What one step added."""

    def on_refused(self, request_id: str, error: EngineError) -> None:
        """The engine did not take a request."""

    def on_scored(self, request_id: str, perplexity: float | None) -> None:
        """What `EngineThread.score` asked for; None where it was aborted before."""

    def on_death(self) -> None:
        """The loop has ended on an internal failure. Nothing else will be heard."""


class _Answer(NamedTuple):
    """What waits to be scored."""

    request_id: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


class EngineThread:
    """Runs an engine's steps while it has work, and sleeps on the command queue while it has none.

    Between two steps at most one answer is scored: those who generate wait for one score, not for all.
    """

    def __init__(self, engine: EngineProtocol, listener: EngineListener) -> None:
        self._engine = engine
        self._listener = listener
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._to_score: deque[_Answer] = deque()
        self._stopping = False
        self._step_started_at: float | None = None
        self._stats = EngineStats()
        self.error: BaseException | None = None
        """What ended the loop, once it is dead."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether commands are still carried out."""
        return self._thread.is_alive() and self.error is None and not self._stopping

    @property
    def stats(self) -> EngineStats:
        """The engine's counters as of the last step or command."""
        return self._stats

    def seconds_in_step(self) -> float:
        """How long the step in progress has taken; 0 between steps."""
        started_at = self._step_started_at
        return 0.0 if started_at is None else time.monotonic() - started_at

    def add(self, request: Request) -> None:
        """Queues a request; a refusal is told to `on_refused`."""
        self._commands.put(lambda: self._add(request))

    def abort(self, request_id: str) -> None:
        """Ends a request before the next step, and forgets that it waits to be scored."""
        self._commands.put(lambda: self._abort(request_id))

    def score(self, request_id: str, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> None:
        """Scores an answer; `on_scored` hears of it, or `on_refused`."""
        self._commands.put(lambda: self._to_score.append(_Answer(request_id, prompt, tokens)))

    def warm_up(self, progress: Progress | None = None) -> Mapping[str, float]:
        """Compiles every program on the engine thread, and waits for it. Raises what the engine raised."""
        done: concurrent.futures.Future[Mapping[str, float]] = concurrent.futures.Future()

        def command() -> None:
            try:
                done.set_result(self._engine.warm_up(progress))
            except BaseException as error:
                done.set_exception(error)
                raise

        self._commands.put(command)
        while not done.done():
            concurrent.futures.wait([done], timeout=1.0)
            if not done.done() and not self._thread.is_alive():
                raise EngineDeadError("the engine thread ended before the warm-up did")
        return done.result()

    def stop(self) -> None:
        """Ends the thread after the step in progress. Does not wait."""

        def command() -> None:
            self._stopping = True

        self._commands.put(command)

    def join(self, timeout_s: float) -> None:
        """Waits until the thread has ended, at most `timeout_s` seconds."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            logger.exception("the engine's loop stopped")
            self.error = error
            self._listener.on_death()

    def _loop(self) -> None:
        while True:
            self._carry_out_commands()
            if self._stopping:
                return
            if self._to_score:
                self._score(self._to_score.popleft())
            if self._engine.has_work():
                self._step_started_at = time.monotonic()
                outputs = self._engine.step()
                self._step_started_at = None
                self._stats = self._engine.stats()
                if outputs:
                    self._listener.on_outputs(outputs)
            else:
                self._stats = self._engine.stats()

    def _carry_out_commands(self) -> None:
        """All commands that are there; waits for one where the engine has nothing to do."""
        if not self._engine.has_work() and not self._to_score:
            self._commands.get()()
        while not self._stopping:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            command()

    def _add(self, request: Request) -> None:
        try:
            self._engine.add_request(request)
        except EngineError as error:
            self._listener.on_refused(request.request_id, error)

    def _abort(self, request_id: str) -> None:
        self._engine.abort(request_id)
        for answer in [a for a in self._to_score if a.request_id == request_id]:
            self._to_score.remove(answer)
            self._listener.on_scored(request_id, None)

    def _score(self, answer: _Answer) -> None:
        self._step_started_at = time.monotonic()
        try:
            perplexity = self._engine.score(answer.prompt, answer.tokens)
        except EngineError as error:
            self._listener.on_refused(answer.request_id, error)
        else:
            self._listener.on_scored(answer.request_id, perplexity)
        self._step_started_at = None
