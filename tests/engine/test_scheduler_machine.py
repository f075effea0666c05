"""Random schedules: requests come, go on, are guessed ahead, preempted and aborted in any order, under any limits. Each
answer must be the one that the request would have got alone; the rest is asserted by `Loop` at every step."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.errors import PromptTooLongError, QueueFullError
from engine.plan import DraftRequest
from engine.request import AdaptiveWindow, SamplingParams
from engine.sequence import SchedulerLimits

from .fake_device import PAGE_SIZE, VOCAB_SIZE, Loop, expected, make_limits

MAX_MODEL_LEN = 44


def random_limits(rng: random.Random) -> SchedulerLimits:
    """Few slots, and pages from just enough for a short request to enough for all."""
    num_shards, per_shard, exact = rng.choice([1, 1, 2]), rng.randint(1, 4), rng.random() < 0.3
    rows = rng.choice([(per_shard,), (1, per_shard), (per_shard, per_shard + 3), (per_shard + 6,)])
    decode_chunk = rng.choice([1, 1, 2, 5])
    return make_limits(
        num_shards * per_shard,
        num_shards,
        MAX_MODEL_LEN,
        num_pages=num_shards * rng.randint(5, rng.choice([8, 6 + 4 * per_shard])),
        prefill_buckets=rng.choice([(4,), (8,)] if exact else [(4,), (8,), (4, 8), (4, 12, 16), (2, 8), (1, 2, 4)]),
        decode_row_buckets=tuple(sorted(set(rows))),
        max_queue_len=rng.randint(2, 9),
        max_queued_tokens=rng.choice([None, None, 50]),
        decode_chunk=decode_chunk,
        decode_chunk_min=rng.randint(1, decode_chunk),
        step_token_budget=rng.choice([None, 6, 12]),
        prefix_caching=rng.random() < 0.8,
        exact=exact,
        window=rng.choice([None, None, None, 1, 5, 11]),
        priority_ageing_s=2.0,
    )


class Workload:
    """A loop with random requests, which guesses ahead: right, wrong or partly right."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.num_draft_tokens = rng.choice([0, 0, 2, 4])
        self.loop = Loop(
            random_limits(rng),
            drafter=self.guess if self.num_draft_tokens else None,
            num_draft_tokens=self.num_draft_tokens,
        )

    def guess(self, d: DraftRequest) -> tuple[int, ...]:
        """The next tokens, any number of them right, and sometimes fewer than asked for."""
        request = next(s.request for s in self.loop.running().values() if s.sequence_id == d.sequence_id)
        want = expected(request, self.loop.limits).tokens[len(d.token_ids) - d.num_prompt_tokens :]
        num_right = self.rng.randint(0, d.num_tokens)
        want = (want + [1] * d.num_tokens)[: self.rng.randint(num_right, d.num_tokens)]
        return tuple(t if i < num_right else (t + 1) % VOCAB_SIZE for i, t in enumerate(want))

    def add(self) -> None:
        """Adds a request, or sees it refused for a good reason."""
        rng, loop, limits = self.rng, self.loop, self.loop.limits
        # A few beginnings, so that prompts share some of them.
        beginning = ((rng.randint(0, 1), 5, 7, 1, 2) * 6)[: rng.choice([0, 4, 8, 12, 16, rng.randint(0, 28)])]
        prompt = (*beginning, *(rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([0, 0, 1, 3, 6])))) or (3,)
        params = SamplingParams(
            max_tokens=rng.choice([1, 2, 6, 12, 16]),
            ignore_eos=rng.random() < 0.8,
            stop_token_ids=tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([0, 0, 0, 1]))),
            logprobs=rng.choice([None, 0]),
        )
        window = rng.choice([None, None, None, 1, 6])
        adaptive = rng.choice([None, AdaptiveWindow(least=2, divisor=2)]) if window else None
        num_waiting, num_tokens = loop.scheduler.num_waiting, len(prompt) + params.max_tokens
        try:
            loop.add(
                f"r{len(loop.requests)}",
                prompt,
                params,
                priority=rng.choice([0, 0, 1, 2]),
                tenant=rng.choice([None, "a", "b"]),
                cache_salt=rng.choice([None, None, None, "x"]),
                window=window,
                adaptive_window=adaptive,
                decode_chunk=rng.choice([None, None, min(2, limits.decode_chunk)]),
                chunk_overlap=rng.choice([0, 0, 0, 3]),
            )
        except QueueFullError:
            assert num_waiting >= limits.max_queue_len or (limits.max_queued_tokens is not None and num_waiting)
        except PromptTooLongError:
            assert num_tokens > min(MAX_MODEL_LEN, limits.pages_per_shard * PAGE_SIZE)
            assert loop.scheduler.num_waiting == num_waiting

    def step(self, count: int, ahead: bool) -> None:
        """Some steps, with the results of each taken in after the next was scheduled, or before."""
        self.loop.ahead = ahead
        for _ in range(count):
            self.loop.step()

    def abort(self) -> None:
        """Aborts any request that ever was."""
        if self.loop.requests:
            self.loop.scheduler.abort(self.rng.choice(list(self.loop.requests)))

    def finish(self) -> None:
        """Lets everything end, and checks it."""
        self.loop.drain()
        self.loop.check_answers()


@settings(max_examples=1200, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_random_schedules_give_every_request_its_answer(seed):
    rng = random.Random(seed)
    work = Workload(rng)
    for _ in range(rng.randint(1, 12)):
        for _ in range(rng.randint(0, 3)):
            work.add()
        work.step(rng.randint(1, 6), rng.random() < 0.6)
        work.loop.now_s += rng.choice([0.0, 0.5, 3.0])
        if rng.random() < 0.1:
            work.abort()
    work.finish()


class SchedulerMachine(RuleBasedStateMachine):
    """The same with every action chosen by hypothesis, which finds a short schedule that fails."""

    @initialize(seed=st.integers(0, 2**32 - 1))
    def start(self, seed: int) -> None:
        self.work = Workload(random.Random(seed))

    @rule(count=st.integers(1, 4))
    def add(self, count: int) -> None:
        for _ in range(count):
            self.work.add()

    @rule(count=st.integers(1, 6), ahead=st.booleans())
    def step(self, count: int, ahead: bool) -> None:
        self.work.step(count, ahead)

    @rule()
    def abort(self) -> None:
        self.work.abort()

    @rule(seconds=st.sampled_from([0.5, 3.0]))
    def pass_time(self, seconds: float) -> None:
        self.work.loop.now_s += seconds

    @rule()
    def forget_cached(self) -> None:
        self.work.loop.scheduler.forget_cached()

    @invariant()
    def slots_and_pages_are_accounted_for(self) -> None:
        if hasattr(self, "work"):
            self.work.loop.scheduler.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "work"):
            self.work.finish()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
