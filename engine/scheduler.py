"""Which requests run in the next step. Host only: no JAX, no arrays.

One rule covers prefill, chunked prefill and decode: a request has computed some of its tokens, and a step catches it
up. Scheduling runs one step ahead of the device, so a request may have a token that is sampled but not seen yet.
"""

import itertools
from collections import deque
from dataclasses import dataclass, field

from engine.errors import InvalidRequestError, PromptTooLongError, QueueFullError
from engine.page_pool import PagePool
from engine.plan import PlanRow, SampledToken, StepPlan, StepResult
from engine.request import FinishReason, Request, RequestOutput


@dataclass(frozen=True)
class SchedulerLimits:
    """The sizes that the scheduler keeps to."""

    num_slots: int
    """Slots of all data shards together."""
    num_shards: int
    """Data shards; slots and pages are divided evenly among them."""
    num_pages: int
    """Pages of all shards together."""
    page_size: int
    """Positions of a page."""
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    prefill_buckets: tuple[int, ...]
    """Padded chunk lengths, ascending, multiples of the page size."""
    decode_row_buckets: tuple[int, ...]
    """Padded row counts of one shard, ascending; the last is the slots of a shard."""
    max_queue_len: int
    max_queued_tokens: int | None


@dataclass(eq=False)
class Sequence:
    """A request on its way: what is known of it and how far it has been computed."""

    sequence_id: int
    request: Request
    token_ids: list[int]
    """Prompt and generated tokens that the host has seen."""
    num_computed_tokens: int = 0
    """Positions computed, or being computed by steps under way."""
    num_pending: int = 0
    """Tokens sampled by steps under way."""
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    page_ids: tuple[int, ...] = ()
    """`pages` as plain data for plans."""

    @property
    def num_tokens(self) -> int:
        """Tokens that exist, seen or not."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)


class Scheduler:
    """First come, first served; a new request joins at the next step, a finished one leaves at once."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        shards = limits.num_shards
        self.pools = [PagePool(limits.num_pages // shards) for _ in range(shards)]
        self._slots_per_shard = limits.num_slots // shards
        self._free_slots = [
            list(range((shard + 1) * self._slots_per_shard - 1, shard * self._slots_per_shard - 1, -1))
            for shard in range(shards)
        ]
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._sequences: dict[str, Sequence] = {}
        self._aborted: list[RequestOutput] = []
        self._sequence_ids = itertools.count()

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    def has_work(self) -> bool:
        """Whether any request is queued, running or waiting to hear of its end."""
        return bool(self._sequences or self._aborted)

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises `PromptTooLongError` or `InvalidRequestError` where it could never run, `QueueFullError` where the queue
        is full.
        """
        self._validate(request)
        limits = self.limits
        queued_tokens = sum(s.num_prompt_tokens for s in self._waiting)
        if len(self._waiting) >= limits.max_queue_len:
            raise QueueFullError(f"the queue is full: {len(self._waiting)} requests are waiting; try again later")
        if (
            limits.max_queued_tokens is not None
            and queued_tokens
            and (queued_tokens + len(request.prompt_token_ids) > limits.max_queued_tokens)
        ):
            raise QueueFullError(
                f"the queue is full: {queued_tokens} prompt tokens are waiting, {limits.max_queued_tokens} may; "
                "try again later"
            )
        sequence = Sequence(next(self._sequence_ids), request, list(request.prompt_token_ids))
        self._sequences[request.request_id] = sequence
        self._waiting.append(sequence)

    def abort(self, request_id: str) -> None:
        """Ends a request and frees its slot and pages. An unknown id is no error: it may just have ended."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return
        if sequence.slot is None:
            self._waiting.remove(sequence)
        self._finish(sequence)
        self._aborted.append(RequestOutput(request_id, (), finish_reason=FinishReason.ABORTED))

    def schedule(self) -> StepPlan | None:
        """The next step, or None where nothing can be computed before a step under way is known."""
        self._admit()
        decode = [s for s in self._running if self._wants_decode(s)]
        prefill = self._choose_prefill()
        if not decode and not prefill:
            return None
        # A chunk's bucket is that of its longest row: all shards run the same program.
        bucket = 0
        if prefill:
            bucket = self._bucket(max(s.num_prompt_tokens - s.num_computed_tokens for s in prefill))
        prefill_rows = tuple(
            self._advance(s, min(bucket, s.num_prompt_tokens - s.num_computed_tokens)) for s in prefill
        )
        decode_rows = tuple(self._advance(s, 1) for s in decode)
        return StepPlan(prefill_rows, bucket, decode_rows, self._row_bucket(decode))

    def update(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Takes in what a step sampled: one output for each request that got a token."""
        running = {s.sequence_id: s for s in self._running}
        outputs = []
        rows = zip(plan.prefill + plan.decode, result.prefill + result.decode, strict=True)
        for row, sampled in rows:
            sequence = running.get(row.sequence_id)
            # The request may have ended while the step was under way.
            if sampled is None or sequence is None:
                continue
            sequence.num_pending -= 1
            outputs.append(self._take(sequence, sampled))
        return outputs

    def take_aborted(self) -> list[RequestOutput]:
        """The last outputs of requests aborted since the last call."""
        aborted, self._aborted = self._aborted, []
        return aborted

    def cache_usage(self) -> float:
        """Share of pages held."""
        return sum(pool.num_held for pool in self.pools) / max(1, self.limits.num_pages)

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless every slot and page is accounted for."""
        for pool in self.pools:
            pool.check_integrity()
        held = [s.slot for s in self._running if s.slot is not None]
        free = [slot for slots in self._free_slots for slot in slots]
        assert sorted(held + free) == list(range(self.limits.num_slots)), "slots are lost or held twice"
        assert sum(pool.num_held for pool in self.pools) == sum(len(s.pages) for s in self._running)
        assert len(self._sequences) == len(self._running) + len(self._waiting)

    def _validate(self, request: Request) -> None:
        limits, prompt = self.limits, request.prompt_token_ids
        if request.request_id in self._sequences:
            raise InvalidRequestError(f"request id {request.request_id!r} is already running", "request_id")
        if not prompt:
            raise InvalidRequestError("the prompt is empty; expected at least one token", "prompt")
        outside = next((t for t in prompt if not 0 <= t < limits.vocab_size), None)
        if outside is not None:
            raise InvalidRequestError(
                f"prompt token id {outside} is outside the vocabulary [0, {limits.vocab_size})", "prompt"
            )
        if len(prompt) >= limits.max_model_len:
            raise PromptTooLongError(
                f"the prompt has {len(prompt)} tokens; the context length is {limits.max_model_len}, one of which must "
                "be left for the answer",
                "prompt",
            )
        if len(prompt) + request.params.max_tokens > limits.max_model_len:
            raise PromptTooLongError(
                f"{len(prompt)} prompt tokens and max_tokens {request.params.max_tokens} are "
                f"{len(prompt) + request.params.max_tokens} tokens together; the context length is "
                f"{limits.max_model_len}",
                "max_tokens",
            )

    def _admit(self) -> None:
        while self._waiting:
            shard = max(range(self.limits.num_shards), key=lambda i: len(self._free_slots[i]))
            if not self._free_slots[shard]:
                return
            sequence = self._waiting.popleft()
            sequence.slot = self._free_slots[shard].pop()
            self._running.append(sequence)

    def _shard(self, sequence: Sequence) -> int:
        assert sequence.slot is not None
        return sequence.slot // self._slots_per_shard

    def _wants_decode(self, s: Sequence) -> bool:
        """Whether the prompt is computed and another token may be wanted."""
        return (
            s.num_computed_tokens >= s.num_prompt_tokens
            and s.num_computed_tokens == s.num_tokens - 1
            and s.num_tokens - s.num_prompt_tokens < s.request.params.max_tokens
        )

    def _choose_prefill(self) -> list[Sequence]:
        """The oldest request of each shard whose prompt is not computed."""
        chosen: dict[int, Sequence] = {}
        for sequence in self._running:
            if sequence.num_computed_tokens < sequence.num_prompt_tokens:
                chosen.setdefault(self._shard(sequence), sequence)
        return list(chosen.values())

    def _bucket(self, num_tokens: int) -> int:
        buckets = self.limits.prefill_buckets
        return next((b for b in buckets if b >= num_tokens), buckets[-1])

    def _row_bucket(self, decode: list[Sequence]) -> int:
        if not decode:
            return 0
        counts = [0] * self.limits.num_shards
        for sequence in decode:
            counts[self._shard(sequence)] += 1
        return next(b for b in self.limits.decode_row_buckets if b >= max(counts))

    def _advance(self, s: Sequence, num_tokens: int) -> PlanRow:
        """Plans the next `num_tokens` positions of a request and gives it the pages they need."""
        assert s.slot is not None
        start = s.num_computed_tokens
        end = start + num_tokens
        missing = -(-end // self.limits.page_size) - len(s.pages)
        if missing > 0:
            s.pages += self.pools[self._shard(s)].allocate(missing)
            s.page_ids = tuple(s.pages)
        s.num_computed_tokens = end
        samples = end == s.num_tokens
        row = PlanRow(
            s.sequence_id,
            s.slot,
            start,
            num_tokens,
            tuple(s.token_ids[start:end]),
            s.page_ids,
            s.request.params,
            samples,
        )
        s.num_pending += samples
        return row

    def _take(self, s: Sequence, sampled: SampledToken) -> RequestOutput:
        s.token_ids.append(sampled.token_id)
        params = s.request.params
        reason = None
        is_eos = sampled.token_id in self.limits.eos_token_ids and not params.ignore_eos
        if is_eos or sampled.token_id in params.stop_token_ids:
            reason = FinishReason.STOP
        elif len(s.token_ids) - s.num_prompt_tokens >= params.max_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._finish(s)
        logprobs = None if sampled.logprobs is None else (sampled.logprobs,)
        return RequestOutput(s.request.request_id, (sampled.token_id,), logprobs, reason)

    def _finish(self, s: Sequence) -> None:
        """Frees what a request holds. Steps under way may still write to its pages: they run before any step that gives
        those pages to another."""
        del self._sequences[s.request.request_id]
        if s.slot is None:
            return
        shard = self._shard(s)
        self._running.remove(s)
        self.pools[shard].free(s.pages)
        self._free_slots[shard].append(s.slot)
        s.slot, s.pages, s.page_ids = None, [], ()
