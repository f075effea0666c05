"""Guessing tokens ahead: speculative decoding (Leviathan et al., 2023; Chen et al., 2023).

Guesses are verified as further decode rows of the request: row i samples what comes after guess i - 1. A guess that is
the token sampled there is kept, and with it what was sampled after it; the first that is not ends the run. So every
token is the one that would have been sampled without guesses, because what is sampled depends on nothing but the
context, the seed and the position. For a guess that was made by other means this accepts x with probability p(x), just
as rejection sampling does; guesses of a draft model draw with the same noise as the model itself (a Gumbel coupling),
and agree with it more often than two independent draws.
"""

from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from engine.plan import DraftRequest, PlanRow, StepPlan, StepResult

Drafts = dict[int, tuple[int, ...]]
"""Guessed tokens by sequence id."""

_REST_STEPS = 8
"""Steps without guesses after nothing could be guessed: the host then prepares steps while the device works."""
_PATIENCE = 3
"""Runs of guesses without a single right one, after which a request is left alone for a while."""
_PAUSE_TOKENS = 24


class Drafter(Protocol):
    """Guesses the next tokens of requests. The scheduler clips what it is given."""

    def propose(self, requests: Sequence[DraftRequest]) -> Drafts:
        """Guesses for these requests, for each at most as many as it asks for."""

    def observe(self, plan: StepPlan) -> None:
        """A step that the model itself runs."""

    def warm_up(self) -> None:
        """Compiles what there is to compile."""


@dataclass
class _Pace:
    """How far ahead it pays to guess for one request."""

    limit: int
    num_tokens: int = 0
    """Tokens the request had at the last guess."""
    num_guessed: int = 0
    num_failures: int = 0
    resumes_at: int = 0
    """Tokens the request has when guessing goes on."""


class Paces:
    """Adapts the number of guesses to how many of each request turn out right: doubled when all do, else cut to one
    more than did."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._paces: dict[int, _Pace] = {}
        self._num_rests = 0

    def wants_turn(self) -> bool:
        """False for some steps after one in which nothing could be guessed."""
        self._num_rests = max(0, self._num_rests - 1)
        return not self._num_rests

    def limits(self, requests: Sequence[DraftRequest]) -> dict[int, int]:
        """How many tokens to guess for each request; 0 for one where it has not paid lately."""
        known = self._paces
        self._paces = {r.sequence_id: known.get(r.sequence_id) or _Pace(min(3, self._max_tokens)) for r in requests}
        return {r.sequence_id: min(r.num_tokens, self._adapt(r)) for r in requests}

    def note(self, requests: Sequence[DraftRequest], num_guessed: Mapping[int, int]) -> None:
        """Remembers how many guesses a step verifies for each sequence, to compare them with what comes."""
        for r in requests:
            pace = self._paces[r.sequence_id]
            pace.num_tokens = len(r.token_ids)
            pace.num_guessed = num_guessed.get(r.sequence_id, 0)
        if not any(num_guessed.values()):
            self._num_rests = _REST_STEPS

    def _adapt(self, r: DraftRequest) -> int:
        pace, count = self._paces[r.sequence_id], len(r.token_ids)
        if pace.num_guessed:
            num_right = count - pace.num_tokens - 1
            if num_right >= pace.num_guessed:
                pace.limit = min(2 * pace.limit, self._max_tokens)
            else:
                pace.limit = max(1, min(pace.limit, num_right + 1))
            pace.num_failures = 0 if num_right > 0 else pace.num_failures + 1
            pace.num_guessed = 0
            if pace.num_failures >= _PATIENCE:
                pace.num_failures, pace.resumes_at = 0, count + _PAUSE_TOKENS
        return 0 if count < pace.resumes_at else pace.limit


class NgramDrafter:
    """Guesses that what followed the last tokens before follows them again ("prompt lookup")."""

    def __init__(self, min_len: int, max_len: int) -> None:
        """Occurrences of the last `max_len` tokens are looked for, then of fewer, down to `min_len`."""
        self._lengths = range(max_len, min_len - 1, -1)

    def propose(self, requests: Sequence[DraftRequest]) -> Drafts:
        """See `Drafter`."""
        return {r.sequence_id: self._guess(r.token_ids, r.num_tokens) for r in requests if r.num_tokens}

    def observe(self, plan: StepPlan) -> None:
        """Nothing to learn: requests come with their tokens."""

    def warm_up(self) -> None:
        """Nothing to compile."""

    def _guess(self, token_ids: list[int], count: int) -> tuple[int, ...]:
        data, width = array("I", token_ids).tobytes(), array("I").itemsize
        for length in self._lengths:
            if length >= len(token_ids):
                continue
            found = _last_occurrence(data, data[-length * width :], len(data) - width, width)
            if found is not None:
                start = found // width + length
                return tuple(token_ids[start : start + count])
        return ()


def _last_occurrence(data: bytes, what: bytes, end: int, width: int) -> int | None:
    """Offset of the last occurrence of `what` in `data[:end]` that stands at a multiple of `width`."""
    found = data.rfind(what, 0, end)
    while found >= 0 and found % width:
        found = data.rfind(what, 0, found + len(what) - 1)
    return None if found < 0 else found


class StepExecutor(Protocol):
    """What a draft model needs of its runner."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs a step to its end."""

    def warm_up(self) -> Mapping[str, float]:
        """Compiles every program."""


class ModelDrafter:
    """Guesses by a smaller model with the same vocabulary. Its cache has the geometry of the large one's: the same page
    ids hold the same positions, so that pages shared, cached or copied there are so here.

    Where its cache lacks a position (a page cached before, a request that was not guessed for) guesses get worse, and
    nothing else happens.
    """

    def __init__(self, runner: StepExecutor, row_buckets: Sequence[int], num_shards: int, slots_per_shard: int) -> None:
        """`row_buckets`: padded row counts of one shard, ascending."""
        self._runner, self._row_buckets = runner, row_buckets
        self._num_shards, self._slots_per_shard = num_shards, slots_per_shard
        self._num_computed: OrderedDict[int, int] = OrderedDict()
        """Positions of each sequence in the cache; of those seen last, more than can run at once."""

    def warm_up(self) -> None:
        """Compiles the draft model's programs."""
        self._runner.warm_up()

    def observe(self, plan: StepPlan) -> None:
        """Computes the prompt chunks of a step for the draft model, too, and copies its pages alike."""
        if not plan.prefill and not plan.copies:
            return
        rows = tuple(replace(row, samples=False) for row in plan.prefill)
        self._runner.execute(StepPlan(rows, plan.prefill_bucket, (), 0, plan.copies))
        for row in rows:
            self._note(row.sequence_id, row.position + row.num_tokens)

    def propose(self, requests: Sequence[DraftRequest]) -> Drafts:
        """See `Drafter`."""
        wanted = [r for r in requests if r.num_tokens]
        rows = self._catch_up(wanted)
        reached = {row.sequence_id for row in rows if row.samples}
        ready = [r for r in wanted if r.sequence_id in reached]
        drafts: dict[int, list[int]] = {r.sequence_id: [] for r in ready}
        for index in range(max((r.num_tokens for r in ready), default=0)):
            if index:
                rows = [
                    _row(r, len(r.token_ids) + index - 1, drafts[r.sequence_id][-1], True)
                    for r in ready
                    if r.num_tokens > index
                ]
            for sequence_id, token in self._sample(rows):
                drafts[sequence_id].append(token)
        for r in ready:
            # The last guess is not computed; wrong ones are computed over, from the last known token on.
            self._note(r.sequence_id, len(r.token_ids) + len(drafts[r.sequence_id]) - 1)
        return {sequence_id: tuple(tokens) for sequence_id, tokens in drafts.items()}

    def _catch_up(self, requests: Sequence[DraftRequest]) -> list[PlanRow]:
        """Rows for the known tokens of each request that are not computed, as far as a step has room. One that gets to
        its last token samples there."""
        num_free = [self._row_buckets[-1]] * self._num_shards
        rows = []
        for r in requests:
            shard, last = r.slot // self._slots_per_shard, len(r.token_ids) - 1
            start = min(self._num_computed.get(r.sequence_id, last), last)
            end = min(last + 1, start + num_free[shard])
            rows += [_row(r, position, r.token_ids[position], position == last) for position in range(start, end)]
            num_free[shard] -= end - start
            self._note(r.sequence_id, end)
        return rows

    def _sample(self, rows: Sequence[PlanRow]) -> list[tuple[int, int]]:
        """Runs decode rows: (sequence id, token) of those that sample."""
        if not rows:
            return []
        counts = [0] * self._num_shards
        for row in rows:
            counts[row.slot // self._slots_per_shard] += 1
        bucket = next(b for b in self._row_buckets if b >= max(counts))
        result = self._runner.execute(StepPlan((), 0, tuple(rows), bucket))
        sampled = zip(rows, result.decode, strict=True)
        return [(row.sequence_id, tokens[0].token_id) for row, tokens in sampled if tokens]

    def _note(self, sequence_id: int, num_computed: int) -> None:
        self._num_computed[sequence_id] = num_computed
        self._num_computed.move_to_end(sequence_id)
        if len(self._num_computed) > 4 * self._num_shards * self._slots_per_shard:
            self._num_computed.popitem(last=False)


def _row(r: DraftRequest, position: int, token_id: int, samples: bool) -> PlanRow:
    # Reports are made of the model's own probabilities.
    params = replace(r.params, logprobs=None)
    window = r.window, r.adaptive_window
    return PlanRow(r.sequence_id, r.slot, position, 1, (token_id,), r.page_ids, params, samples, *window)
