"""Which requests run in the next step. Host only: no JAX, no arrays.

One rule covers prefill, chunked prefill, prefix-cache hits, decode and resumption after preemption: a request has
computed some of its tokens, and a step catches it up. Scheduling runs one step ahead of the device, so a request may
have a token that is sampled but not seen yet.
"""

import itertools
import math
import time
from collections.abc import Callable, Mapping

from engine.admission import check_pages, check_queue, check_request
from engine.errors import InvalidRequestError
from engine.plan import DraftRequest, PlanRow, SampledToken, StepPlan, StepResult
from engine.request import FinishReason, Request, RequestOutput
from engine.sequence import SchedulerLimits, Sequence
from engine.shard_cache import ShardCache
from engine.step_builder import StepBuilder
from engine.waiting_queue import WaitingQueue

_TOKENS_FOR_ONE_MORE = 128
"""Prompt tokens that a shard may have to compute for one request less to run beside: all shards are padded to the one
that has most, so a beginning that many requests share is worth having on each."""


class Scheduler:
    """Continuous batching with priorities, fair shares, a shared prefix cache and preemption by recomputation."""

    def __init__(self, limits: SchedulerLimits, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds; only differences matter."""
        self.limits = limits
        self._clock = clock
        self.shards = [ShardCache(shard, limits) for shard in range(limits.num_shards)]
        self._waiting = WaitingQueue()
        self._running: list[Sequence] = []
        self._sequences: dict[str, Sequence] = {}
        self._aborted: list[RequestOutput] = []
        self._sequence_ids = itertools.count()
        self._chunk = limits.decode_chunk_min
        """How far the next chunk may go where nothing waits."""
        self.num_preemptions = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens found in the prefix cache so far, instead of being computed."""
        return sum(shard.num_cached_tokens for shard in self.shards)

    def has_work(self) -> bool:
        """Whether any request is queued, running or waiting to hear of its end."""
        return bool(self._sequences or self._aborted)

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises `PromptTooLongError` or `InvalidRequestError` where it could never run, `QueueFullError` where the queue
        is full.
        """
        if request.request_id in self._sequences:
            raise InvalidRequestError(f"request id {request.request_id!r} is already running", "request_id")
        check_request(request, self.limits)
        now = self._clock()
        sequence = Sequence(next(self._sequence_ids), request, list(request.prompt_token_ids))
        sequence.rank = (request.priority + now / self.limits.priority_ageing_s, sequence.sequence_id)
        check_pages(sequence, self.shards[0])
        check_queue(request, self._waiting, sum(len(shard.free_slots) for shard in self.shards), self.limits)
        self._sequences[request.request_id] = sequence
        self._waiting.enter(request.tenant)
        self._waiting.add(sequence)

    def abort(self, request_id: str) -> None:
        """Ends a request and frees its slot and pages. An unknown id is no error: it may just have ended."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return
        self._finish(sequence)
        self._aborted.append(RequestOutput(request_id, (), finish_reason=FinishReason.ABORTED))

    def may_draft(self) -> bool:
        """Whether rows are left for guesses beside those of the requests that generate."""
        return any(
            0 < sum(s.wants_decode for s in self._running_on(shard)) < self.limits.num_rows for shard in self.shards
        )

    def next_chunk(self) -> int:
        """How many tokens the next step may sample of each request that generates.

        From the config's least while anything waits to be computed, doubling up to its most while nothing does; never
        more than a running request allows, or than there are pages for.
        """
        limits = self.limits
        decoding = [s for s in self._running if s.started and s.wants_decode]
        if limits.decode_chunk == 1 or not decoding:
            return 1
        waits = len(self._waiting) > 0 or any(not s.started or s.wants_prefill for s in self._running)
        chunk = limits.decode_chunk_min if waits else max(self._chunk, limits.decode_chunk_min)
        # One that has not started may turn out to be all cached but for its last token, and have a row at once.
        in_step = [s for s in self._running if not s.started or s.wants_decode]
        chunk = min([chunk, *(s.request.decode_chunk for s in in_step if s.request.decode_chunk is not None)])
        for shard in self.shards:
            needed = sum(shard.num_pages_wanting(s, chunk) for s in self._running_on(shard))
            if needed > shard.pool.num_available:
                return 1
        return chunk

    def draft_requests(self, num_tokens: int) -> list[DraftRequest]:
        """Requests whose next tokens may be guessed, up to `num_tokens` each, with pages for the guesses.

        Rows that running requests leave free are shared out, so that guessing slows nobody down. Requests with a token
        that the host has not seen are left out.
        """
        requests = []
        for shard in self.shards:
            decoding = [s for s in self._running_on(shard) if s.wants_decode]
            num_spare = self.limits.num_rows - len(decoding)
            ready = [s for s in decoding if not s.num_pending and s.num_computed_tokens == s.num_tokens - 1]
            for index, s in enumerate(sorted(ready, key=lambda s: s.rank)):
                # The last token that may be generated need not be guessed: verifying finds it.
                left = s.request.params.max_tokens - s.num_generated - 1
                count = min(num_tokens, left, num_spare // (len(ready) - index))
                if s.request.decode_chunk is not None:
                    count = min(count, s.request.decode_chunk - 1)
                if count < 1 or not self._provide_for_guesses(s, count):
                    continue
                num_spare -= count
                assert s.slot is not None
                requests.append(
                    DraftRequest(
                        s.sequence_id,
                        s.slot,
                        s.token_ids,
                        s.num_prompt_tokens,
                        s.page_ids,
                        s.request.params,
                        s.request.window,
                        s.request.adaptive_window,
                        count,
                    )
                )
        return requests

    def schedule(self, drafts: Mapping[int, tuple[int, ...]] | None = None) -> StepPlan | None:
        """The next step, or None where nothing can be computed before a step under way is known.

        `drafts`: guessed tokens by sequence id, as `draft_requests` asked for them.
        """
        self._admit()
        chunk = 1 if drafts else self.next_chunk()
        self._chunk = min(2 * chunk, self.limits.decode_chunk)
        builder = StepBuilder(
            self.limits, self.shards, self._running, drafts or {}, chunk, len(self._waiting), self._preempt_for
        )
        for s in sorted(self._running, key=lambda s: s.rank):
            # One that is preempted to make room for an earlier one has no slot any more.
            if s.slot is not None:
                builder.plan(s)
        for s in builder.prefilled:
            self._shard(s).register(s)
        for s in self._running:
            self._shard(s).leave_window(s)
        return builder.build()

    def update(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Takes in what a step sampled: one output for each request that got tokens."""
        sequences = {s.sequence_id: s for s in self._sequences.values()}
        rows = zip(plan.prefill + plan.decode, result.prefill + result.decode, strict=True)
        outputs = []
        for sequence_id, group in itertools.groupby(rows, key=lambda pair: pair[0].sequence_id):
            sequence = sequences.get(sequence_id)
            sampling = [(row, sampled) for row, sampled in group if sampled]
            # The request may have ended while the step was under way.
            if sequence is not None and sampling:
                outputs.append(self._take(sequence, sampling))
        return outputs

    def take_aborted(self) -> list[RequestOutput]:
        """The last outputs of requests aborted since the last call."""
        aborted, self._aborted = self._aborted, []
        return aborted

    def cache_usage(self) -> float:
        """Share of pages held."""
        return sum(shard.pool.num_held for shard in self.shards) / max(1, self.limits.num_pages)

    def page_utilization(self) -> float:
        """Share of the positions of held pages that hold a token; 1 where none is held."""
        held = sum(shard.pool.num_held for shard in self.shards) * self.limits.page_size
        unused = sum(self._shard(s).num_unused_positions(s) for s in self._running)
        return 1.0 - unused / held if held else 1.0

    def forget_cached(self) -> None:
        """Empties the prefix cache."""
        for shard in self.shards:
            shard.pool.forget_cached()

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless every slot and page is accounted for."""
        for shard in self.shards:
            shard.pool.check_integrity()
            holders: dict[int, int] = {}
            for s in self._running:
                if self._shard(s) is shard:
                    for page in s.pages:
                        if page is not None:
                            holders[page] = holders.get(page, 0) + 1
            assert len(holders) == shard.pool.num_held, "pages are held by nobody who runs"
            assert all(shard.pool.num_holders(p) == count for p, count in holders.items()), "holders are miscounted"
        held = [s.slot for s in self._running if s.slot is not None]
        free = [slot for shard in self.shards for slot in shard.free_slots]
        assert sorted(held + free) == list(range(self.limits.num_slots)), "slots are lost or held twice"
        assert len(held) == len(self._running), "a running request has no slot"
        assert len(self._sequences) == len(self._running) + len(self._waiting)

    def _admit(self) -> None:
        while (s := self._waiting.next()) is not None and not s.num_pending:
            shard = self._choose_shard(s)
            if shard is None:
                # Nobody overtakes: a large request would wait for ever behind small ones.
                return
            self._waiting.remove(s)
            if not s.charged:
                # At once, so that a tenant's next request is compared by what this one will cost.
                self._waiting.charge(s.request.tenant, s.num_prompt_tokens)
                s.charged = True
            s.slot = shard.free_slots.pop()
            self._running.append(s)

    def _choose_shard(self, s: Sequence) -> ShardCache | None:
        """Where it costs least: cached tokens are weighed against the requests that run there; None where it has no
        room."""
        best, best_order = None, (-math.inf, -1)
        for shard in self.shards:
            if not shard.free_slots:
                continue
            if shard.num_pages_to_start(s) > self._num_unpromised(shard):
                continue
            num_running = self.limits.num_slots // self.limits.num_shards - len(shard.free_slots)
            num_cached = len(shard.cached_pages(s)) * self.limits.page_size
            order = num_cached - _TOKENS_FOR_ONE_MORE * num_running, len(shard.free_slots)
            if order > best_order:
                best, best_order = shard, order
        return best

    def _num_unpromised(self, shard: ShardCache) -> int:
        """Pages available beyond what those running need next."""
        return shard.pool.num_available - sum(map(shard.num_pages_wanting, self._running_on(shard)))

    def _provide_for_guesses(self, s: Sequence, count: int) -> bool:
        """Gives `s` pages for that many tokens more, where nobody will be preempted for want of them."""
        shard, num_pages_of = self._shard(s), self.limits.num_pages_of
        # The page of its next token is promised in any case.
        num_more = num_pages_of(s.num_tokens + count) - max(len(s.pages), num_pages_of(s.num_tokens + 1))
        if num_more > self._num_unpromised(shard):
            return False
        copies = shard.provide(s, s.num_tokens, s.num_tokens + count)
        assert not copies, "a page behind the known tokens was shared"
        return True

    def _preempt_for(self, s: Sequence) -> bool:
        """Takes slot and pages from the last-ranked on the shard of `s`, to be computed again later; false where that
        is `s` itself. Pages given for guesses and not needed so far are taken first."""
        shard = self._shard(s)
        running = self._running_on(shard)
        if sum(map(shard.give_back_unused, running)):
            return True
        victim = max(running, key=lambda r: r.rank)
        shard.vacate(victim)
        self._running.remove(victim)
        self._waiting.add(victim)
        self.num_preemptions += 1
        return victim is not s

    def _running_on(self, shard: ShardCache) -> list[Sequence]:
        return [r for r in self._running if self._shard(r) is shard]

    def _shard(self, s: Sequence) -> ShardCache:
        assert s.slot is not None
        return self.shards[s.slot // self.limits.slots_per_shard]

    def _take(self, s: Sequence, sampling: list[tuple[PlanRow, tuple[SampledToken, ...]]]) -> RequestOutput:
        """Takes the tokens sampled after the last known one, and those after guesses while the guesses were right."""
        tokens: list[SampledToken] = []
        reason = None
        for row, sampled in sampling:
            # Rows after the first are those of guesses.
            if tokens and row.token_ids[0] != tokens[-1].token_id:
                break
            for token in sampled:
                s.token_ids.append(token.token_id)
                tokens.append(token)
                reason = self._end_reason(s, token.token_id)
                if reason is not None:
                    break
            if reason is not None:
                break
        s.num_pending -= sampling[0][0].max_new_tokens
        if s.num_drafted:
            self.num_draft_tokens += s.num_drafted
            self.num_accepted_tokens += len(tokens) - 1
            s.num_drafted = 0
            if s.slot is not None:
                s.num_computed_tokens += len(tokens) - 1
        self._waiting.charge(s.request.tenant, len(tokens))
        if reason is not None:
            # The last token is not computed, nor what a chunk cut short would have computed.
            s.num_computed_tokens = min(s.num_computed_tokens, len(s.token_ids) - 1)
            self._finish(s)
        elif s.slot is not None:
            self._shard(s).register(s)
            # Guesses that were right move the window, too.
            self._shard(s).leave_window(s)
        reports = tuple(t.logprobs for t in tokens if t.logprobs is not None)
        return RequestOutput(
            s.request.request_id,
            tuple(t.token_id for t in tokens),
            reports or None,
            reason,
            s.num_cached_tokens or 0,
        )

    def _end_reason(self, s: Sequence, token_id: int) -> FinishReason | None:
        params = s.request.params
        is_eos = token_id in self.limits.eos_token_ids and not params.ignore_eos
        if is_eos or token_id in params.stop_token_ids:
            return FinishReason.STOP
        if len(s.token_ids) - s.num_prompt_tokens >= params.max_tokens:
            return FinishReason.LENGTH
        return None

    def _finish(self, s: Sequence) -> None:
        del self._sequences[s.request.request_id]
        if s.slot is None:
            self._waiting.remove(s)
        else:
            shard = self._shard(s)
            shard.register(s)
            self._running.remove(s)
            shard.vacate(s)
        self._waiting.leave(s.request.tenant)
