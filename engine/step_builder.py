"""Puts one step together from sequences that come in the order of their rank. Host only."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from dataclasses import replace

from engine.plan import PageCopy, PlanRow, StepPlan
from engine.sequence import SchedulerLimits, Sequence
from engine.shard_cache import ShardCache


class StepBuilder:
    """One step: a prompt chunk for each data shard, and decode rows.

    A decoding sequence has one row. Rows that are left go, first come first served, to those that catch up with tokens
    known already, and to guesses.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        shards: Many[ShardCache],
        running: Many[Sequence],
        drafts: Mapping[int, tuple[int, ...]],
        chunk: int,
        num_queued: int,
        make_room: Callable[[Sequence], bool],
    ) -> None:
        """`chunk`: the most tokens sampled of each decoding sequence, where it has no guesses; `num_queued`: requests
        without a slot.

        `make_room(s)` preempts the last-ranked sequence of the shard of `s`, and says whether `s` is still there.
        """
        self._chunk = chunk
        self._limits, self._shards, self._drafts, self._make_room = limits, shards, drafts, make_room
        self._num_decoding = [0] * limits.num_shards
        for s in running:
            if s.started and s.wants_decode:
                self._num_decoding[self._shard(s).shard] += 1
        self._num_spare = [limits.num_rows - count for count in self._num_decoding]
        prompts = [s for s in running if not s.started or s.wants_prefill]
        self._num_prompts = num_queued + len(prompts)
        first = {self._shard(s).shard: s for s in sorted(prompts, key=lambda s: s.rank, reverse=True)}
        self._starts = {s.num_computed_tokens % limits.page_size for s in first.values()}
        """Where in a page the next chunks start, of the prompts that come first on their shards."""
        self._bucket = 0
        self._prefill: dict[int, PlanRow] = {}
        self._decode: list[PlanRow] = []
        self._copies: list[PageCopy] = []
        self.prefilled: list[Sequence] = []
        """The sequences that got a chunk."""

    def plan(self, s: Sequence) -> None:
        """Plans what the step computes for `s`, if anything."""
        shard = self._shard(s)
        if not s.started or s.wants_prefill:
            if shard.shard in self._prefill:
                return
            if not s.started:
                shard.start(s)
                if not s.wants_prefill:
                    # All but its last token was cached.
                    if not self._num_spare[shard.shard]:
                        return
                    self._num_spare[shard.shard] -= 1
        if s.wants_prefill:
            self._plan_chunk(s)
        elif s.wants_decode:
            self._plan_rows(s)

    def build(self) -> StepPlan | None:
        """The step, or None where it would be empty."""
        if not self._prefill and not self._decode:
            return None
        counts = [0] * self._limits.num_shards
        for row in self._decode:
            counts[row.slot // self._limits.slots_per_shard] += 1
        num_rows = next(b for b in self._limits.decode_row_buckets if b >= max(counts)) if self._decode else 0
        return StepPlan(tuple(self._prefill.values()), self._bucket, tuple(self._decode), num_rows, tuple(self._copies))

    def _shard(self, s: Sequence) -> ShardCache:
        assert s.slot is not None
        return self._shards[s.slot // self._limits.slots_per_shard]

    def _plan_chunk(self, s: Sequence) -> None:
        start, num_left = s.num_computed_tokens, s.num_prefill_tokens - s.num_computed_tokens
        # All shards run the same program: the first-ranked sequence chooses it.
        bucket = self._bucket or self._choose_bucket(start, num_left)
        if not self._may_start(start, bucket):
            return
        end = start + min(bucket, num_left)
        if not self._provide(s, start, end):
            return
        if not self._bucket:
            self._bucket = bucket
            self._limit_spare_rows()
        samples = end == s.num_tokens
        self._prefill[self._shard(s).shard] = self._row(s, start, tuple(s.token_ids[start:end]), end - start, samples)
        self.prefilled.append(s)
        s.num_computed_tokens = end
        s.num_pending += samples

    def _plan_rows(self, s: Sequence) -> None:
        shard = self._shard(s).shard
        start, spare = self._start_of_rows(s), self._num_spare[shard]
        end = min(s.num_tokens, start + 1 + spare)
        samples = end == s.num_tokens
        num_new = min(self._chunk, s.request.params.max_tokens - s.num_generated) if samples else 1
        if not self._provide(s, start, end + num_new - 1):
            return
        drafts: tuple[int, ...] = ()
        if samples and not s.num_pending and num_new == 1:
            num_left = s.request.params.max_tokens - s.num_generated - 1
            # Guesses take no pages here, which others may need.
            num_positions = len(s.pages) * self._limits.page_size - end
            most = min(start + 1 + spare - end, num_left, num_positions)
            drafts = self._drafts.get(s.sequence_id, ())[: max(0, most)]
        for position in range(start, end - 1):
            self._decode.append(self._row(s, position, (s.token_ids[position],), 1, False))
        last = tuple(s.token_ids[end - 1 : end])
        self._decode.append(replace(self._row(s, end - 1, last, 1, samples), max_new_tokens=num_new))
        for index, token in enumerate(drafts):
            self._decode.append(self._row(s, end + index, (token,), 1, True))
        self._num_spare[shard] -= end + len(drafts) - start - 1
        s.num_computed_tokens = end + num_new - 1
        s.num_pending += num_new if samples else 0
        s.num_drafted = len(drafts)

    def _start_of_rows(self, s: Sequence) -> int:
        """Where the rows of a decoding sequence start: with the first token not computed, or, where it wants its last
        chunk's end computed again, before that."""
        overlap, computed = s.request.chunk_overlap, s.num_computed_tokens
        if not overlap or self._chunk == 1 or s.num_pending:
            return computed
        overlap = min(overlap, self._num_spare[self._shard(s).shard], computed - s.num_prefill_tokens)
        return computed - max(0, overlap)

    def _row(self, s: Sequence, position: int, token_ids: tuple[int, ...], num_tokens: int, samples: bool) -> PlanRow:
        assert s.slot is not None
        return PlanRow(
            s.sequence_id,
            s.slot,
            position,
            num_tokens,
            token_ids,
            s.page_ids,
            s.request.params,
            samples,
            s.request.window,
            s.request.adaptive_window,
        )

    def _provide(self, s: Sequence, start: int, end: int) -> bool:
        """Makes positions writable, by preempting others where need be; false where `s` itself had to give way."""
        while True:
            try:
                self._copies += self._shard(s).provide(s, start, end)
            except MemoryError:
                if not self._make_room(s):
                    return False
            else:
                return True

    def _num_rows_planned(self) -> int:
        """Rows of the fullest shard that are planned or will be."""
        return self._limits.num_rows - min(self._num_spare)

    def _limit_spare_rows(self) -> None:
        """Leaves to guesses, and to those that catch up, what the chunk leaves of the budget."""
        if self._limits.step_token_budget is not None:
            most = max(0, self._budget() - self._bucket)
            num_used = [self._limits.num_rows - spare for spare in self._num_spare]
            self._num_spare = [
                min(spare, max(0, most - used)) for spare, used in zip(self._num_spare, num_used, strict=True)
            ]

    def _budget(self) -> int:
        """Tokens of a step with decode rows: more for a crowd of prompts than for a single one."""
        assert self._limits.step_token_budget is not None
        return self._limits.step_token_budget * max(1, self._num_prompts)

    def _may_start(self, start: int, bucket: int) -> bool:
        """Chunks of whole pages are written page by page."""
        return bucket % self._limits.page_size > 0 or start % self._limits.page_size == 0

    def _choose_bucket(self, start: int, num_left: int) -> int:
        """The chunk length for a sequence with that many tokens left from `start` on.

        The next larger bucket, or, where more than a quarter of that would be padding, the next smaller one.
        """
        limits = self._limits
        if limits.exact:
            return limits.prefill_buckets[-1]
        starts = {start, *self._starts}
        allowed = tuple(b for b in limits.prefill_buckets if all(self._may_start(s, b) for s in starts))
        num_rows = self._num_rows_planned()
        if limits.step_token_budget is not None and num_rows:
            room = self._budget() - num_rows
            allowed = tuple(b for b in allowed if b <= room) or allowed[:1]
        above = next((b for b in allowed if b >= num_left), None)
        below = next((b for b in reversed(allowed) if b <= num_left), None)
        if above is None or (below is not None and (above - num_left) * 4 > above):
            assert below is not None
            return below
        return above
