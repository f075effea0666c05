"""A device made of dictionaries. For each position it stores in pages a number computed from the token and from every
number that the position sees, as the keys and values of a deep model depend on all that came before. A wrong page,
position, token or window changes that number, every later one, and what is sampled.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from engine.plan import DraftRequest, PageCopy, PlanRow, SampledToken, StepPlan, StepResult
from engine.request import FinishReason, Request, SamplingParams, TokenLogprobs
from engine.scheduler import Scheduler, SchedulerLimits
from engine.sequence import Sequence as Running
from engine.shard_cache import ShardCache

VOCAB_SIZE, EOS, PAGE_SIZE = 13, 4, 4
_PRIME = 2**31 - 1

Place = tuple[str, int]
"""What computes a position: the kind of program, and the place in its chunk."""

Drafter = Callable[[DraftRequest], tuple[int, ...]]


def make_limits(num_slots: int = 4, num_shards: int = 1, max_model_len: int = 40, **changes: object) -> SchedulerLimits:
    """Limits as the engine derives them, small."""
    per_shard = num_slots // num_shards
    values: dict = {
        "num_slots": num_slots,
        "num_shards": num_shards,
        "num_pages": num_slots * -(-max_model_len // PAGE_SIZE),
        "page_size": PAGE_SIZE,
        "max_model_len": max_model_len,
        "vocab_size": VOCAB_SIZE,
        "eos_token_ids": frozenset({EOS}),
        "prefill_buckets": (4, 8),
        "decode_row_buckets": tuple(sorted({1, per_shard})),
        "max_queue_len": 5,
        "max_queued_tokens": None,
    }
    return SchedulerLimits(**(values | changes))


def position_value(position: int, token: int, place: Place | None, seen: Iterable[tuple[int, int]]) -> int:
    """What is stored for a position that sees these (position, value). `place` counts where rounding would differ."""
    kind, offset = place or ("", 0)
    start = (token + 3) * 7919 + position * 104729 + len(kind) * 1299709 + offset * 15485863
    return sum((value * (3 * j + 5) for j, value in seen), start) % _PRIME


def first_seen(position: int, of: Request | PlanRow, limits: SchedulerLimits) -> int:
    """The first position that a position sees."""
    window = of.window
    if of.adaptive_window is not None:
        assert window is not None
        window = min(window, max(of.adaptive_window.least, (position + 1) // of.adaptive_window.divisor))
    return max(0, *(position - w + 1 for w in (window, limits.window) if w is not None), 0)


@dataclass(frozen=True)
class Expected:
    """The answer to a request, by the definition of its parameters."""

    tokens: list[int]
    logprobs: list[float]
    reason: FinishReason


def expected(request: Request, limits: SchedulerLimits) -> Expected:
    """The answer of the fake device where the request is alone."""
    tokens, values, params = list(request.prompt_token_ids), list[int](), request.params
    num_prompt, logprobs = len(tokens), list[float]()
    while True:
        for position in range(len(values), len(tokens)):
            place = None
            if limits.exact:
                bucket = limits.prefill_buckets[-1]
                place = ("prefill", position % bucket) if position < num_prompt else ("decode", 0)
            seen = range(first_seen(position, request, limits), position)
            values.append(position_value(position, tokens[position], place, ((j, values[j]) for j in seen)))
        token = values[-1] % VOCAB_SIZE
        tokens.append(token)
        logprobs.append(-float(values[-1]))
        reason = None
        if (token in limits.eos_token_ids and not params.ignore_eos) or token in params.stop_token_ids:
            reason = FinishReason.STOP
        elif len(logprobs) == params.max_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            return Expected(tokens[num_prompt:], logprobs, reason)


def first_answer(prompt: tuple[int, ...]) -> int:
    """What the fake device samples after this prompt."""
    return expected(Request("", prompt, SamplingParams(max_tokens=1)), make_limits()).tokens[0]


@dataclass(frozen=True)
class Cell:
    """What the device keeps of one position."""

    position: int
    value: int
    place: Place


class FakeDevice:
    """Executes plans, and asserts of each that it keeps to the limits."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.plans: list[StepPlan] = []
        self.num_prompts = 0
        """Prompts that waited when the next step was planned."""
        self.places: dict[int, dict[int, Place]] = defaultdict(dict)
        """For each sequence and each of its positions, what computed the number that the sequence saw."""
        self._memory: dict[tuple[int, int], dict[int, Cell]] = defaultdict(dict)
        self._sampled: dict[int, tuple[int, int, int]] = {}
        """For each slot: (step, sequence, token) that was sampled last."""
        self._ended: set[int] = set()
        """Sequences that sampled their stop token. The host may not know yet, and have them go on: for nothing."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs a step at once."""
        self._check(plan)
        self.plans.append(plan)
        copied = {(c.shard, c.target): dict(self._memory[c.shard, c.source]) for c in plan.copies}
        assert len(copied) == len(plan.copies), "two copies to one page"
        self._memory.update(copied)
        prefill = tuple(self._run(row, "prefill") for row in plan.prefill)
        result = StepResult(prefill, tuple(self._run(row, "decode") for row in plan.decode))
        rows = Counter(row.sequence_id for row in plan.prefill + plan.decode if row.samples)
        for row, sampled in zip(plan.prefill + plan.decode, result.prefill + result.decode, strict=True):
            # What follows a guess may not be true, and the host waits for it.
            if rows[row.sequence_id] == 1 and sampled and self._ends(row, sampled[-1].token_id):
                self._ended.add(row.sequence_id)
        return result

    def shard(self, row: PlanRow) -> int:
        """The data shard of a row."""
        return row.slot // self.limits.slots_per_shard

    def _check(self, plan: StepPlan) -> None:
        rows, limits = plan.prefill + plan.decode, self.limits
        assert rows, "an empty plan"
        for row in rows:
            end = row.position + row.num_tokens + row.max_new_tokens - 1
            assert 1 <= len(row.page_ids) * limits.page_size >= end, "too few pages"
            assert end <= limits.max_model_len
            assert 1 <= row.max_new_tokens <= limits.decode_chunk
            assert all(0 <= page < limits.pages_per_shard for page in row.page_ids)
        groups = [list(g) for _, g in itertools.groupby(rows, key=lambda row: row.slot)]
        assert len({group[0].slot for group in groups}) == len(groups), "a slot is computed twice in a step"
        self._check_prefill(plan)
        self._check_decode(plan)
        if limits.step_token_budget is not None and plan.prefill and plan.decode:
            num_tokens = plan.prefill_bucket + max(self._rows_by_shard(plan))
            budget = limits.step_token_budget * max(1, self.num_prompts)
            assert num_tokens <= budget or plan.prefill_bucket == limits.prefill_buckets[0]

    def _check_prefill(self, plan: StepPlan) -> None:
        limits = self.limits
        shards = [self.shard(row) for row in plan.prefill]
        assert len(set(shards)) == len(shards), "two chunks for one data shard"
        assert plan.prefill_bucket in (limits.prefill_buckets if plan.prefill else (0,))
        multiple = limits.prefill_buckets[-1] if limits.exact else limits.page_size
        if plan.prefill_bucket % limits.page_size:
            multiple = 1
        for row in plan.prefill:
            assert 1 <= row.num_tokens == len(row.token_ids) <= plan.prefill_bucket
            assert row.position % multiple == 0, "a chunk starts at the wrong place"
            assert row.max_new_tokens == 1

    def _check_decode(self, plan: StepPlan) -> None:
        rows = max(self._rows_by_shard(plan), default=0)
        fitting = (b for b in self.limits.decode_row_buckets if b >= rows)
        assert plan.decode_rows == (next(fitting) if plan.decode else 0), "not the smallest row count"
        for row in plan.decode:
            assert row.samples or row.max_new_tokens == 1
        for before, row in itertools.pairwise(plan.decode):
            if row.slot == before.slot:
                assert row.sequence_id == before.sequence_id
                assert row.position == before.position + 1
                assert row.token_ids, "a token that only the device knows, behind another row"
                assert before.max_new_tokens == 1, "a row behind one that goes on by itself"

    def _rows_by_shard(self, plan: StepPlan) -> list[int]:
        return [sum(self.shard(row) == shard for row in plan.decode) for shard in range(self.limits.num_shards)]

    def _run(self, row: PlanRow, kind: str) -> tuple[SampledToken, ...]:
        if row.sequence_id in self._ended:
            return self._run_for_nothing(row)
        tokens = row.token_ids
        if not tokens:
            step, sequence_id, token = self._sampled[row.slot]
            assert (step, sequence_id) == (len(self.plans) - 2, row.sequence_id), "the slot holds another token"
            tokens = (token,)
        assert len(tokens) == row.num_tokens
        assert kind == "prefill" or row.num_tokens == 1
        for offset, token in enumerate(tokens):
            value = self._compute(row, row.position + offset, token, (kind, offset))
        sampled: list[SampledToken] = []
        while row.samples:
            token, report = value % VOCAB_SIZE, TokenLogprobs(-float(value), ())
            sampled.append(SampledToken(token, None if row.params.logprobs is None else report))
            self._sampled[row.slot] = len(self.plans) - 1, row.sequence_id, token
            if self._ends(row, token) or len(sampled) == row.max_new_tokens:
                break
            # A chunk goes on from what it sampled.
            value = self._compute(row, row.position + len(sampled), token, (kind, 0))
        return tuple(sampled)

    def _ends(self, row: PlanRow, token: int) -> bool:
        is_eos = token in self.limits.eos_token_ids and not row.params.ignore_eos
        return is_eos or token in row.params.stop_token_ids

    def _run_for_nothing(self, row: PlanRow) -> tuple[SampledToken, ...]:
        """Whatever this writes and samples must never be seen."""
        for position in range(row.position, row.position + row.num_tokens + row.max_new_tokens - 1):
            page = self._memory[self.shard(row), row.page_ids[position // PAGE_SIZE]]
            page[position % PAGE_SIZE] = Cell(position, 1, ("nothing", 0))
        return (SampledToken(0, None),) * row.max_new_tokens

    def _compute(self, row: PlanRow, position: int, token: int, place: Place) -> int:
        seen = [(j, self._read(row, j)) for j in range(first_seen(position, row, self.limits), position)]
        value = position_value(position, token, place if self.limits.exact else None, seen)
        page = self._memory[self.shard(row), row.page_ids[position // PAGE_SIZE]]
        page[position % PAGE_SIZE] = Cell(position, value, place)
        self.places[row.sequence_id][position] = place
        return value

    def _read(self, row: PlanRow, position: int) -> int:
        cell = self._memory[self.shard(row), row.page_ids[position // PAGE_SIZE]].get(position % PAGE_SIZE)
        assert cell is not None, f"position {position} of sequence {row.sequence_id} was never computed"
        assert cell.position == position, "another position is in its place"
        self.places[row.sequence_id][position] = cell.place
        return cell.value


@dataclass
class Loop:
    """The engine's loop on the fake device: a step's result is taken in after the next step was scheduled, or, with
    `ahead` false, before. Each step is held against what the scheduler knows."""

    limits: SchedulerLimits
    drafter: Drafter | None = None
    num_draft_tokens: int = 0
    ahead: bool = True
    now_s: float = 0.0
    requests: dict[str, Request] = field(default_factory=dict)
    answers: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[float]] = field(default_factory=dict)
    reasons: dict[str, FinishReason] = field(default_factory=dict)
    num_cached: dict[str, int] = field(default_factory=dict)
    admitted: list[str] = field(default_factory=list)
    """In the order of their first slots."""
    preempted: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.limits, clock=lambda: self.now_s)
        self.device = FakeDevice(self.limits)
        self._under_way: tuple[StepPlan, StepResult] | None = None
        self._evicted: set[tuple[int, int]] = set()
        for shard in self.scheduler.shards:
            self._watch_pages(shard)
        preempt = self.scheduler._preempt_for
        self.scheduler._preempt_for = lambda s: self._preempt(preempt, s)  # type: ignore[method-assign]

    def add(self, request_id: str, prompt: Sequence[int], params: SamplingParams, **more: object) -> None:
        """Adds a request. It is not remembered where it is refused."""
        request = Request(request_id, tuple(prompt), params, **more)  # type: ignore[arg-type]
        self.scheduler.add(request)
        self.requests[request_id] = request
        self.answers[request_id], self.logprobs[request_id] = [], []

    def running(self) -> dict[str, Running]:
        """The sequences that hold a slot, by request id."""
        return {s.request.request_id: s for s in self.scheduler._running}

    def waiting(self) -> dict[str, Running]:
        """The sequences without a slot, by request id."""
        return {s.request.request_id: s for s in self.scheduler._waiting}

    def num_held(self) -> int:
        """Pages held, over all shards."""
        return sum(shard.pool.num_held for shard in self.scheduler.shards)

    def step(self) -> StepPlan | None:
        """One turn; returns the step that was started."""
        if not self.ahead:
            self._take_in()
        drafts = self._guess()
        prompts = [s for s in self.scheduler._running if not s.started or s.wants_prefill]
        self.device.num_prompts = self.scheduler.num_waiting + len(prompts)
        registered = [set(shard.pool._keys) for shard in self.scheduler.shards]
        self._evicted.clear()
        waited = self.waiting()
        running = self.running()
        started = {s.sequence_id for s in running.values() if s.started}
        first_preempted = len(self.preempted)
        plan = self.scheduler.schedule(drafts)
        self._note_admissions(waited, running, set(self.preempted[first_preempted:]))
        if plan is None:
            assert self._under_way is not None or not self.scheduler._sequences, "nothing is done, and nothing awaited"
        else:
            self._check_pages(plan, registered)
            self._check_chunk(plan, running, self.preempted[first_preempted:])
            self._check_progress(plan, started)
        before, self._under_way = self._under_way, None if plan is None else (plan, self.device.execute(plan))
        self._deliver(self.scheduler.take_aborted())
        if before is not None:
            self._deliver(self.scheduler.update(*before))
        self.scheduler.check_integrity()
        return plan

    def drain(self, most_steps: int = 5_000) -> int:
        """Steps until nothing is left to do; returns their number."""
        for count in range(most_steps):
            if self._under_way is None and not self.scheduler.has_work():
                return count
            self.step()
        raise AssertionError("the scheduler never ends")

    def check_answers(self) -> None:
        """Asserts that every request has ended with the answer that it would have got alone."""
        assert set(self.reasons) == set(self.requests), "a request was lost"
        for name, request in self.requests.items():
            want, got = expected(request, self.limits), self.answers[name]
            if self.reasons[name] is FinishReason.ABORTED:
                assert got == want.tokens[: len(got)], name
            else:
                assert (got, self.reasons[name]) == (want.tokens, want.reason), name
            if request.params.logprobs is not None:
                assert self.logprobs[name] == want.logprobs[: len(got)], name
        for shard in self.scheduler.shards:
            assert shard.pool.num_free + shard.pool.num_cached == shard.pool.num_pages, "pages are still held"

    def _take_in(self) -> None:
        before, self._under_way = self._under_way, None
        if before is not None:
            self._deliver(self.scheduler.update(*before))

    def _guess(self) -> dict[int, tuple[int, ...]]:
        if self.drafter is None:
            return {}
        preempted, running = len(self.preempted), self.running()
        asked = self.scheduler.draft_requests(self.num_draft_tokens)
        assert (len(self.preempted), self.running()) == (preempted, running), "asking for guesses cost a slot"
        for d in asked:
            assert 1 <= d.num_tokens <= self.num_draft_tokens
            assert len(d.page_ids) * PAGE_SIZE >= len(d.token_ids) + d.num_tokens, "no room for guesses"
        return {d.sequence_id: self.drafter(d) for d in asked}

    def _deliver(self, outputs: Sequence) -> None:
        for output in outputs:
            name = output.request_id
            assert name not in self.reasons, "an output after the last one"
            self.answers[name] += output.token_ids
            self.logprobs[name] += [report.logprob for report in output.logprobs or ()]
            if output.finish_reason is not FinishReason.ABORTED:
                assert output.token_ids
                assert self.num_cached.setdefault(name, output.num_cached_tokens) == output.num_cached_tokens
            if output.finish_reason is not None:
                self.reasons[name] = output.finish_reason

    def _note_admissions(self, waited: dict, running: dict, preempted: set[str]) -> None:
        now = self.running()
        new = [n for n in waited if n in now or n in preempted]
        for name in new:
            s = waited[name]
            passed = [
                w
                for other, w in self.waiting().items()
                if other in waited
                and other not in preempted
                and (w.request.tenant, w.request.priority) == (s.request.tenant, s.request.priority)
                and w.rank < s.rank
            ]
            assert not passed, f"{name} was admitted before an older one of its tenant and priority"
        in_order = [n for n in now if n in new] + [n for n in new if n not in now]
        self.admitted += [n for n in in_order if n not in self.admitted]

    def _check_pages(self, plan: StepPlan, registered: list[set[int]]) -> None:
        """Nothing is written where another, now or later, may read."""
        sequences = {s.sequence_id: s for s in self.scheduler._running}
        for row in plan.prefill + plan.decode:
            s, shard = sequences[row.sequence_id], self.device.shard(row)
            pool = self.scheduler.shards[shard].pool
            end = row.position + row.num_tokens + row.max_new_tokens - 1
            for index in range(row.position // PAGE_SIZE, -(-end // PAGE_SIZE)):
                page = row.page_ids[index]
                # The window may have left the page with this very step.
                assert s.pages[index] in (page, None), "a row names a page that is not its own"
                assert pool.num_holders(page) == (s.pages[index] is not None), "a page of others is written"
                known = page in registered[shard] and (shard, page) not in self._evicted
                assert not known, "a page known to the cache is written"
            for index in range(first_seen(row.position, row, self.limits) // PAGE_SIZE, len(s.pages)):
                assert index >= len(row.page_ids) or s.pages[index] in (row.page_ids[index], None)
        for copy in plan.copies:
            assert copy.source != copy.target

    def _check_chunk(self, plan: StepPlan, running: dict[str, Running], preempted: list[str]) -> None:
        """A decode chunk keeps to every request in it, and preempts nobody."""
        chunk = max((row.max_new_tokens for row in plan.decode), default=1)
        assert chunk == 1 or not preempted, "a chunk took the pages of others"
        planned = {row.sequence_id for row in plan.decode}
        wishes = [s.request.decode_chunk for s in running.values() if s.sequence_id in planned]
        assert all(wish is None or chunk <= wish for wish in wishes), "a chunk longer than a request allows"

    def _check_progress(self, plan: StepPlan, started: set[int]) -> None:
        """The first-ranked of each shard is always computed, unless it waits for what it has sampled. One that needs a
        single row may have to wait for the next step, when the row is kept for it."""
        planned = {row.sequence_id for row in plan.prefill + plan.decode}
        for shard in self.scheduler.shards:
            here = self.scheduler._running_on(shard)
            if here:
                s = min(here, key=lambda s: s.rank)
                waits = s.num_drafted or s.num_generated == s.request.params.max_tokens
                assert s.sequence_id in planned or waits or (s.sequence_id not in started and s.wants_decode)

    def _preempt(self, preempt: Callable[[Running], bool], s: Running) -> bool:
        shard, before = self.scheduler._shard(s), self.running()
        here = self.scheduler._running_on(shard)
        goes_on = preempt(s)
        for name in before.keys() - self.running().keys():
            assert before[name] is max(here, key=lambda r: r.rank), "not the last-ranked was preempted"
            pages = {r.request.request_id: len(r.pages) * PAGE_SIZE - r.num_tokens for r in here if r.slot is not None}
            assert max(pages.values(), default=0) < PAGE_SIZE, "guesses hold pages that others want"
            self.preempted.append(name)
        assert goes_on == (s.slot is not None)
        return goes_on

    def _watch_pages(self, shard: ShardCache) -> None:
        """No sequence ever holds more pages than its request was admitted for."""
        provide, start, evict = shard.provide, shard.start, shard.pool._evict

        def check(s: Running) -> None:
            most = shard.num_pages_needed(s, s.num_prompt_tokens + s.request.params.max_tokens)
            assert sum(page is not None for page in s.pages) <= most, "more pages than it was said to need"

        def watched_provide(s: Running, start: int, end: int) -> list[PageCopy]:
            copies = provide(s, start, end)
            check(s)
            return copies

        def watched_start(s: Running) -> None:
            start(s)
            check(s)

        def watched_evict() -> int:
            page = evict()
            self._evicted.add((shard.shard, page))
            return page

        shard.provide, shard.start = watched_provide, watched_start  # type: ignore[method-assign]
        shard.pool._evict = watched_evict  # type: ignore[method-assign]
