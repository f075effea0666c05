"""Random schedules: requests come, go on, are guessed ahead, preempted and aborted in any order, under any limits. Each
answer must be the one that the request would have got alone; the rest is asserted by `Loop` at every step."""

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.errors import PromptTooLongError, QueueFullError
from engine.request import SamplingParams
from engine.scheduler import DraftRequest

from .fake_device import PAGE_SIZE, VOCAB_SIZE, Loop, expected, make_limits

MAX_MODEL_LEN = 44


@st.composite
def random_limits(draw: st.DrawFn) -> object:
    """Few slots, and from just enough pages for one request to enough for all."""
    num_shards, per_shard = draw(st.integers(1, 2)), draw(st.integers(1, 4))
    exact = draw(st.booleans())
    rows = draw(st.sampled_from([(per_shard,), (1, per_shard), (per_shard, per_shard + 3), (per_shard + 6,)]))
    return make_limits(
        num_shards * per_shard,
        num_shards,
        MAX_MODEL_LEN,
        num_pages=num_shards * draw(st.integers(4, 11 * per_shard)),
        prefill_buckets=draw(st.sampled_from([(4,), (8,)] if exact else [(4,), (8,), (4, 8), (4, 12, 16)])),
        decode_row_buckets=tuple(sorted(set(rows))),
        max_queue_len=draw(st.integers(2, 9)),
        max_queued_tokens=draw(st.sampled_from([None, None, 50])),
        step_token_budget=draw(st.sampled_from([None, 6, 12])),
        prefix_caching=draw(st.booleans()),
        exact=exact,
        window=draw(st.sampled_from([None, None, 1, 5, 11])),
        priority_ageing_s=2.0,
    )


# A few beginnings, so that prompts share some of them.
PROMPTS = st.builds(
    lambda start, length, rest: ((start, 5, 7, 1, 2) * 6)[:length] + tuple(rest),
    st.integers(0, 1),
    st.integers(0, 28),
    st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=6),
).filter(bool)


class SchedulerMachine(RuleBasedStateMachine):
    """Loop's `drafter` knows the answers, and is right, wrong or partly right as the machine says."""

    @initialize(limits=random_limits(), num_draft_tokens=st.integers(0, 4))
    def start(self, limits, num_draft_tokens: int) -> None:
        drafter = self.guess if num_draft_tokens else None
        self.loop = Loop(limits, drafter=drafter, num_draft_tokens=num_draft_tokens)
        self.num_right = 0
        self.num_refused = 0

    def guess(self, d: DraftRequest) -> tuple[int, ...]:
        """The next tokens, the first `num_right` of them right; fewer than asked for where that is odd."""
        request = next(s.request for s in self.loop.scheduler._sequences.values() if s.sequence_id == d.sequence_id)
        want = expected(request, self.loop.limits).tokens[len(d.token_ids) - d.num_prompt_tokens :]
        want = (want + [1] * d.num_tokens)[: d.num_tokens - (self.num_right % 2)]
        return tuple(t if i < self.num_right else (t + 1) % VOCAB_SIZE for i, t in enumerate(want))

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 16),
        ignore_eos=st.booleans(),
        stop=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=1).map(tuple),
        logprobs=st.sampled_from([None, 0]),
        priority=st.integers(0, 2),
        tenant=st.sampled_from([None, "a"]),
        salt=st.sampled_from([None, None, "x"]),
        window=st.sampled_from([None, None, 1, 6]),
    )
    def add(self, prompt, max_tokens, ignore_eos, stop, logprobs, priority, tenant, salt, window) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos, stop_token_ids=stop, logprobs=logprobs)
        before = self.loop.scheduler.num_waiting
        try:
            self.loop.add(
                f"r{len(self.loop.requests)}",
                prompt,
                params,
                priority=priority,
                tenant=tenant,
                cache_salt=salt,
                window=window,
            )
        except QueueFullError:
            limits = self.loop.limits
            assert before >= limits.max_queue_len or (limits.max_queued_tokens is not None and before)
        except PromptTooLongError:
            num_tokens = len(prompt) + max_tokens
            assert num_tokens > min(MAX_MODEL_LEN, self.loop.limits.pages_per_shard * PAGE_SIZE)
            assert self.loop.scheduler.num_waiting == before

    @rule(count=st.integers(1, 6), ahead=st.booleans(), num_right=st.integers(0, 4))
    def step(self, count: int, ahead: bool, num_right: int) -> None:
        self.loop.ahead, self.num_right = ahead, num_right
        for _ in range(count):
            self.loop.step()

    @precondition(lambda self: self.loop.requests)
    @rule(data=st.data())
    def abort(self, data) -> None:
        self.loop.scheduler.abort(data.draw(st.sampled_from(sorted(self.loop.requests))))

    @rule(seconds=st.sampled_from([0.5, 3.0]))
    def pass_time(self, seconds: float) -> None:
        self.loop.now_s += seconds

    @rule()
    def forget_cached(self) -> None:
        self.loop.scheduler.forget_cached()

    @invariant()
    def slots_and_pages_are_accounted_for(self) -> None:
        if hasattr(self, "loop"):
            self.loop.scheduler.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        self.loop.drain()
        self.loop.check_answers()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=400,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.generate,),
)
