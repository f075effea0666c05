"""A device made of dictionaries: it stores tokens in pages as the real one stores keys and values, and samples a number
computed from every token of the context that it finds there. A wrong page, position or token changes what it samples.
"""

from engine.plan import PlanRow, SampledToken, StepPlan, StepResult
from engine.request import FinishReason, Request, SamplingParams
from engine.scheduler import Scheduler, SchedulerLimits

VOCAB_SIZE, EOS, PAGE_SIZE = 13, 4, 4


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


def next_token(context: list[int]) -> int:
    """What the device samples after these tokens."""
    return (sum((i + 1) * (token + 2) for i, token in enumerate(context)) + 5 * len(context)) % VOCAB_SIZE


def expected_answer(prompt: tuple[int, ...], params: SamplingParams) -> tuple[list[int], FinishReason]:
    """The answer, by the definition of the parameters."""
    tokens: list[int] = []
    while True:
        token = next_token([*prompt, *tokens])
        tokens.append(token)
        if (token == EOS and not params.ignore_eos) or token in params.stop_token_ids:
            return tokens, FinishReason.STOP
        if len(tokens) == params.max_tokens:
            return tokens, FinishReason.LENGTH


class FakeDevice:
    """Executes plans, and asserts of each that it keeps to the limits."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.memory: dict[tuple[int, int, int], int] = {}
        self.last_tokens: dict[int, int] = {}
        self.plans: list[StepPlan] = []
        self._computed: dict[int, int] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs a step at once."""
        self._check(plan)
        self.plans.append(plan)
        return StepResult(tuple(map(self._run, plan.prefill)), tuple(map(self._run, plan.decode)))

    def _shard(self, row: PlanRow) -> int:
        return row.slot // (self.limits.num_slots // self.limits.num_shards)

    def _check(self, plan: StepPlan) -> None:
        rows, limits = plan.prefill + plan.decode, self.limits
        assert rows, "an empty plan"
        assert len({row.slot for row in rows}) == len(rows), "a slot is computed twice in a step"
        pages = [(self._shard(row), page) for row in rows for page in row.page_ids]
        assert len(set(pages)) == len(pages), "two requests share a page"
        prefill_shards = [self._shard(row) for row in plan.prefill]
        assert len(set(prefill_shards)) == len(prefill_shards), "two chunks for one data shard"
        assert plan.prefill_bucket in (limits.prefill_buckets if plan.prefill else (0,))
        assert all(1 <= row.num_tokens <= plan.prefill_bucket for row in plan.prefill)
        assert all(row.position % limits.page_size == 0 for row in plan.prefill), "a chunk starts inside a page"
        assert plan.decode_rows in (limits.decode_row_buckets if plan.decode else (0,))
        per_shard = [sum(self._shard(row) == shard for row in plan.decode) for shard in range(limits.num_shards)]
        assert max(per_shard) <= plan.decode_rows or not plan.decode
        for row in rows:
            assert row.position == self._computed.get(row.sequence_id, 0), "positions are skipped or computed twice"
            self._computed[row.sequence_id] = row.position + row.num_tokens
            assert len(row.page_ids) * limits.page_size >= row.position + row.num_tokens, "too few pages"
            assert all(0 <= page < limits.num_pages // limits.num_shards for page in row.page_ids)

    def _run(self, row: PlanRow) -> SampledToken | None:
        tokens = row.token_ids or (self.last_tokens[row.slot],)
        assert len(tokens) == row.num_tokens
        end = row.position + row.num_tokens
        places = [(self._shard(row), row.page_ids[p // PAGE_SIZE], p % PAGE_SIZE) for p in range(end)]
        self.memory.update(zip(places[row.position :], tokens, strict=True))
        if not row.samples:
            return None
        token = next_token([self.memory[place] for place in places])
        self.last_tokens[row.slot] = token
        return SampledToken(token, None)


class Loop:
    """The engine's loop on the fake device: a step's result is taken in after the next step was scheduled."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.scheduler = Scheduler(limits)
        self.device = FakeDevice(limits)
        self.answers: dict[str, list[int]] = {}
        self.reasons: dict[str, FinishReason] = {}
        self._under_way: tuple[StepPlan, StepResult] | None = None

    def add(self, request_id: str, prompt: tuple[int, ...], params: SamplingParams) -> None:
        self.scheduler.add(Request(request_id, prompt, params))
        self.answers[request_id] = []

    def step(self) -> None:
        plan = self.scheduler.schedule()
        before, self._under_way = self._under_way, None
        if plan is not None:
            self._under_way = plan, self.device.execute(plan)
        outputs = [] if before is None else self.scheduler.update(*before)
        for output in self.scheduler.take_aborted() + outputs:
            assert output.request_id not in self.reasons, "an output after the last one"
            self.answers[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                self.reasons[output.request_id] = output.finish_reason
        self.scheduler.check_integrity()

    def drain(self) -> None:
        """Steps until nothing is left to do."""
        for _ in range(10_000):
            if self._under_way is None and not self.scheduler.has_work():
                return
            self.step()
        raise AssertionError("the scheduler never ends")
