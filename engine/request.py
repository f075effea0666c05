"""Requests as the host side sees them: token ids in, token ids out. No JAX, no text."""

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.errors import InvalidRequestError

MAX_LOGPROBS = 20
"""The most alternatives a request may ask for at each position."""

MAX_STOP_TOKEN_IDS = 16
"""The most additional stop tokens of one request (they are checked on the device)."""


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen.

    The order is that of the Grok-1 release: temperature first, then top-k, top-p and min-p, each on the
    distribution that the one before it left (renormalised).

    Raises `InvalidRequestError` naming the parameter that is out of range.
    """

    max_tokens: int = 16
    """The most tokens to generate, at least 1."""
    temperature: float = 1.0
    """0 is greedy; otherwise the logits are divided by it."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this, in (0, 1]. 1 keeps all."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one, in [0, 1]."""
    seed: int = 0
    """With the position it alone decides the request's randomness. Any 64-bit unsigned integer."""
    ignore_eos: bool = False
    """Generate past the model's end-of-sequence tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Further token ids that end the request (the token itself is returned as the last one)."""
    logprobs: int | None = None
    """None: no log-probabilities. n: that of the chosen token, and the n most likely alternatives."""

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, expected: str) -> None:
            if not ok:
                raise InvalidRequestError(f"{name} is {getattr(self, name)!r}; expected {expected}", name)

        check(self.max_tokens >= 1, "max_tokens", "an integer of at least 1")
        check(math.isfinite(self.temperature) and 0 <= self.temperature <= 100, "temperature", "a number in [0, 100]")
        check(math.isfinite(self.top_p) and 0 < self.top_p <= 1, "top_p", "a number in (0, 1]")
        check(0 <= self.top_k < 2**31, "top_k", "0 (off) or a positive integer")
        check(math.isfinite(self.min_p) and 0 <= self.min_p <= 1, "min_p", "a number in [0, 1]")
        check(0 <= self.seed < 2**64, "seed", "an integer in [0, 2**64)")
        check(
            len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS, "stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} token ids"
        )
        check(
            self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
            "logprobs",
            f"an integer in [0, {MAX_LOGPROBS}]",
        )


@dataclass(frozen=True)
class AdaptiveWindow:
    """A sliding window that grows with the context: position i has min(most, max(least, (i + 1) // divisor)) positions.

    Raises `InvalidRequestError` for numbers below 1 or of 2^30 and above.
    """

    least: int = 64
    divisor: int = 2

    def __post_init__(self) -> None:
        if not (1 <= self.least < 2**30 and 1 <= self.divisor < 2**30):
            raise InvalidRequestError(
                f"an adaptive window of at least {self.least} and 1/{self.divisor} of the context; expected numbers "
                "from 1 to 2^30 - 1",
                "window",
            )

    def size(self, position: int, most: int) -> int:
        """The window of a position."""
        return min(most, max(self.least, (position + 1) // self.divisor))


@dataclass(frozen=True)
class Request:
    """One prompt with its sampling parameters."""

    request_id: str
    """Unique among the requests that are in the engine."""
    prompt_token_ids: tuple[int, ...]
    """At least one token."""
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    """Lower runs earlier. Waiting lowers it (see `EngineConfig.priority_ageing_s`), so that nothing waits for ever."""
    tenant: str | None = None
    """Whom the request is counted to: waiting tenants get equal shares of the engine. None is a tenant, too."""
    cache_salt: str | None = None
    """Requests share cached prefixes only with those of the same salt."""
    window: int | None = None
    """Sliding window in positions, at least 1: position i sees j with i - window < j <= i in every layer, or less where
    the layer's own window is smaller. None: the model's own windows."""
    adaptive_window: AdaptiveWindow | None = None
    """How the window grows with the context; `window` is then the most that it grows to. None: it is always that."""

    decode_chunk: int | None = None
    """Tokens that one step may sample of this request, at least 1; None: as many as the engine's config says. The other
    requests of the step keep to it, too."""
    chunk_overlap: int = 0
    """Positions, counted back from the end of a decode chunk, whose keys and values are computed again at the start of
    the next. They come out the same, so this costs time and changes nothing; it is there to be compared."""

    def __post_init__(self) -> None:
        if self.chunk_overlap < 0:
            raise InvalidRequestError(f"chunk_overlap is {self.chunk_overlap}; expected at least 0", "chunk_overlap")
        if self.decode_chunk is not None and self.decode_chunk < 1:
            raise InvalidRequestError(f"decode_chunk is {self.decode_chunk}; expected at least 1", "decode_chunk")
        if self.adaptive_window is not None and self.window is None:
            raise InvalidRequestError("adaptive_window is given without the window that it grows to", "window")
        if self.window is not None and not 1 <= self.window < 2**30:
            raise InvalidRequestError(f"window is {self.window}; expected at least 1 position", "window")


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"
    """An end-of-sequence token, a stop token, or (set by the serving layer) a stop string."""
    LENGTH = "length"
    """`max_tokens` or the context length was reached."""
    ABORTED = "aborted"
    """Cancelled by `Engine.abort`."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of probabilities at one position, of the model's distribution (before temperature)."""

    logprob: float
    """Of the chosen token."""
    top: tuple[tuple[int, float], ...]
    """(token id, log-probability) of the most likely tokens, best first; as many as the request asked for."""


@dataclass(frozen=True)
class RequestOutput:
    """What one step added to one request. All tokens of a step come in one output."""

    request_id: str
    token_ids: tuple[int, ...]
    """The new tokens, oldest first; may be empty in the last output of an aborted request."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One for each new token, where the request asked for them."""
    finish_reason: FinishReason | None = None
    """None while the request goes on."""
    num_cached_tokens: int = 0
    """Prompt tokens whose keys and values were found in the prefix cache."""


@dataclass(frozen=True)
class EngineStats:
    """Counters (since start) and gauges (now) of one engine."""

    num_running: int = 0
    """Requests that hold a slot."""
    num_waiting: int = 0
    """Requests in the queue."""
    num_slots: int = 0
    cache_usage: float = 0.0
    """Share of cache positions in use, 0 to 1."""
    num_steps: int = 0
    num_decode_rows: int = 0
    """Rows of decode steps: one for each request in each step, and one for each token guessed or computed again. With
    chunks each row may give several tokens."""
    num_prompt_tokens: int = 0
    """Prompt tokens computed."""
    num_padding_tokens: int = 0
    """Prefill positions computed for nothing (bucket minus tokens)."""
    num_generated_tokens: int = 0
    num_cached_tokens: int = 0
    """Tokens found in the prefix cache instead of being computed."""
    num_preemptions: int = 0
    """Times a running request gave up its pages, to be computed again later."""
    num_draft_tokens: int = 0
    """Tokens guessed ahead and verified (speculative decoding)."""
    num_accepted_tokens: int = 0
    """Of those, the ones that turned out right."""
    page_utilization: float = 1.0
    """Share of the positions of held pages that hold a token, 0 to 1; 1 where none is held."""
    num_compilations_since_warm_up: int = 0
    num_cache_misses: int = 0
    """Programs that were compiled since the weights were loaded, because the compilation cache did not have them."""


class EngineProtocol(Protocol):
    """What the serving layer needs of an engine. All calls come from one thread.

    `engine.engine.Engine` is the real one; tests drive the serving layer with a fake that is computable by hand.
    """

    @property
    def max_model_len(self) -> int:
        """The context length: prompt plus generated tokens, in tokens."""

    @property
    def vocab_size(self) -> int:
        """Token ids are in [0, vocab_size)."""

    def add_request(self, request: Request) -> None:
        """Queues a request.

        Raises `InvalidRequestError` where it could never run, `QueueFullError` where the queue is full.
        """

    def abort(self, request_id: str) -> None:
        """Ends a request; its slot is free from the next step on. Unknown ids are no error (it may just have ended)."""

    def has_work(self) -> bool:
        """Whether `step` has anything to do."""

    def step(self) -> Sequence[RequestOutput]:
        """Runs one step and returns what it added to each request (an aborted one gets a last, empty output)."""

    def score(self, prompt: Sequence[int], answer: Sequence[int]) -> float:
        """Perplexity of the answer's tokens after the prompt: how unlikely a model finds them, at least 1.

        An engine that was built to score nothing raises `ConfigError`.
        """

    def warm_up(self, progress: Callable[[int, int, str], None] | None = None) -> Mapping[str, float]:
        """Compiles every program, after which nothing compiles; returns the seconds each took.

        `progress` is called with (programs done, programs in all, what comes next).
        """

    def stats(self) -> EngineStats:
        """Counters and gauges."""
