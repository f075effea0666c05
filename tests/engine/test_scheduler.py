import subprocess
import sys

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.errors import InvalidRequestError, PromptTooLongError, QueueFullError
from engine.plan import StepPlan
from engine.request import FinishReason, Request, SamplingParams

from .fake_device import EOS, VOCAB_SIZE, Loop, expected_answer, make_limits, next_token

FOREVER = SamplingParams(max_tokens=20, ignore_eos=True)


def prompt_answered_by(token: int) -> tuple[int, ...]:
    """A prompt after which the fake device samples this token first."""
    return next((a, b) for a in range(VOCAB_SIZE) for b in range(VOCAB_SIZE) if next_token([a, b]) == token)


def all_held(loop: Loop) -> int:
    return sum(pool.num_held for pool in loop.scheduler.pools)


def test_host_side_imports_without_jax():
    code = "import sys, engine.scheduler, engine.plan, engine.page_pool, engine.request; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_long_prompt_is_computed_in_buckets_and_samples_once():
    loop = Loop(make_limits())
    loop.add("r", (*range(13), 1, 2, 3, 5, 6), SamplingParams(max_tokens=1))
    loop.drain()
    plans = loop.device.plans
    rows = [(p.prefill_bucket, row.position, row.num_tokens, row.samples) for p in plans for row in p.prefill]
    assert rows == [(8, 0, 8, False), (8, 8, 8, False), (4, 16, 2, True)]
    assert not any(plan.decode for plan in plans)


def test_the_host_schedules_one_step_ahead():
    loop = Loop(make_limits())
    loop.add("r", (1, 2, 3), SamplingParams(max_tokens=4, ignore_eos=True))
    loop.step()
    assert loop.answers["r"] == []
    loop.step()
    # The first decode was planned before the token it computes was known here: that token is on the device.
    assert loop.device.plans[1].decode[0].token_ids == ()
    assert len(loop.answers["r"]) == 1


def test_decode_goes_on_while_another_prompt_is_computed():
    loop = Loop(make_limits())
    loop.add("a", (1, 2, 3), FOREVER)
    loop.step()
    loop.step()
    loop.add("b", tuple(range(12)), FOREVER)
    loop.step()
    plan = loop.device.plans[-1]
    assert [row.sequence_id for row in plan.prefill] == [1]
    assert [row.sequence_id for row in plan.decode] == [0]


def test_a_new_request_joins_at_the_next_step_after_a_slot_is_free():
    loop = Loop(make_limits(num_slots=1))
    loop.add("a", (1, 2), SamplingParams(max_tokens=1))
    loop.add("b", (3, 5), SamplingParams(max_tokens=1))
    loop.step()
    assert (loop.scheduler.num_running, loop.scheduler.num_waiting) == (1, 1)
    loop.step()
    assert loop.reasons["a"] is FinishReason.LENGTH
    assert all_held(loop) == 0
    loop.step()
    assert [row.sequence_id for row in loop.device.plans[-1].prefill] == [1]


def test_end_of_sequence_ends_a_request_unless_ignored():
    prompt = prompt_answered_by(EOS)
    loop = Loop(make_limits())
    loop.add("stops", prompt, SamplingParams(max_tokens=3))
    loop.add("goes on", prompt, SamplingParams(max_tokens=3, ignore_eos=True))
    loop.drain()
    assert (loop.answers["stops"], loop.reasons["stops"]) == ([EOS], FinishReason.STOP)
    assert len(loop.answers["goes on"]) == 3
    assert loop.reasons["goes on"] is FinishReason.LENGTH


def test_a_stop_token_ends_a_request_even_where_end_of_sequence_is_ignored():
    loop = Loop(make_limits())
    loop.add("r", prompt_answered_by(7), SamplingParams(max_tokens=3, ignore_eos=True, stop_token_ids=(3, 7)))
    loop.drain()
    assert (loop.answers["r"], loop.reasons["r"]) == ([7], FinishReason.STOP)


@pytest.mark.parametrize("num_steps", range(6))
def test_an_abort_frees_slot_and_pages_at_once_in_any_state(num_steps):
    loop = Loop(make_limits(num_slots=1))
    loop.add("r", tuple(range(11)), FOREVER)
    for _ in range(num_steps):
        loop.step()
    loop.scheduler.abort("r")
    assert (all_held(loop), loop.scheduler.num_running, loop.scheduler.num_waiting) == (0, 0, 0)
    loop.add("next", (3, 1), SamplingParams(max_tokens=6, ignore_eos=True))
    loop.drain()
    assert loop.reasons == {"r": FinishReason.ABORTED, "next": FinishReason.LENGTH}
    assert loop.answers["next"] == expected_answer((3, 1), SamplingParams(max_tokens=6, ignore_eos=True))[0]


def test_a_queued_request_can_be_aborted():
    loop = Loop(make_limits(num_slots=1))
    for name in "abc":
        loop.add(name, (1, 2), SamplingParams(max_tokens=2, ignore_eos=True))
    loop.step()
    loop.scheduler.abort("b")
    loop.drain()
    assert loop.reasons == {"a": FinishReason.LENGTH, "b": FinishReason.ABORTED, "c": FinishReason.LENGTH}
    assert loop.answers["b"] == []


def test_aborting_an_unknown_request_is_no_error():
    loop = Loop(make_limits())
    loop.scheduler.abort("nobody")
    assert not loop.scheduler.has_work()


def test_a_full_queue_refuses_and_keeps_what_it_has():
    loop = Loop(make_limits(max_queue_len=2))
    loop.add("a", (1,), FOREVER)
    loop.add("b", (1,), FOREVER)
    with pytest.raises(QueueFullError, match="2 requests are waiting"):
        loop.scheduler.add(Request("c", (1,), FOREVER))
    loop.drain()
    assert set(loop.reasons) == {"a", "b"}


def test_queued_prompt_tokens_are_bounded_but_one_prompt_always_fits():
    loop = Loop(make_limits(max_queued_tokens=6))
    loop.add("a", tuple(range(9)), SamplingParams(max_tokens=1))
    with pytest.raises(QueueFullError, match="9 prompt tokens are waiting, 6 may"):
        loop.scheduler.add(Request("b", (1,), FOREVER))


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "error", "message", "param"),
    [
        ((), 1, InvalidRequestError, "the prompt is empty", "prompt"),
        ((1, VOCAB_SIZE), 1, InvalidRequestError, r"token id 13 is outside the vocabulary \[0, 13\)", "prompt"),
        ((1, -1), 1, InvalidRequestError, "token id -1 is outside", "prompt"),
        ((1,) * 40, 1, PromptTooLongError, "has 40 tokens; the context length is 40", "prompt"),
        ((1,) * 35, 6, PromptTooLongError, "35 prompt tokens and max_tokens 6 are 41 .* length is 40", "max_tokens"),
    ],
)
def test_a_request_that_can_never_run_is_refused_with_the_numbers(prompt, max_tokens, error, message, param):
    loop = Loop(make_limits())
    with pytest.raises(error, match=message) as caught:
        loop.scheduler.add(Request("r", prompt, SamplingParams(max_tokens=max_tokens)))
    assert caught.value.param == param
    assert not loop.scheduler.has_work()


def test_a_request_may_fill_the_context_exactly():
    loop = Loop(make_limits())
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    loop.add("r", (1,) * 35, params)
    loop.drain()
    assert loop.answers["r"] == expected_answer((1,) * 35, params)[0]


def test_a_request_id_in_use_is_refused_and_may_be_used_again_later():
    loop = Loop(make_limits())
    loop.add("r", (1,), SamplingParams(max_tokens=1))
    with pytest.raises(InvalidRequestError, match="'r' is already running"):
        loop.scheduler.add(Request("r", (1,)))
    loop.drain()
    loop.scheduler.add(Request("r", (1,)))
    assert loop.scheduler.num_waiting == 1


def test_requests_go_to_the_shard_with_most_free_slots():
    loop = Loop(make_limits(num_slots=4, num_shards=2))
    for name in "abcd":
        loop.add(name, (1, 2), FOREVER)
    loop.step()
    assert len(loop.device.plans[0].prefill) == 2
    loop.step()
    assert len(loop.device.plans[1].prefill) == 2
    assert loop.scheduler.num_running == 4


def first_chunks(plans: list[StepPlan], shard: int, slots_per_shard: int) -> list[int]:
    """Sequence ids in the order in which their first chunks ran on a shard."""
    rows = [row for plan in plans for row in plan.prefill if row.position == 0]
    return [row.sequence_id for row in rows if row.slot // slots_per_shard == shard]


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, go on and are aborted in any order; each answer must be the one its definition gives."""

    @initialize(num_shards=st.sampled_from([1, 2, 3]), per_shard=st.integers(1, 3))
    def start(self, num_shards: int, per_shard: int) -> None:
        self.limits = make_limits(num_shards * per_shard, num_shards)
        self.loop = Loop(self.limits)
        self.requests: dict[str, Request] = {}
        self.aborted: set[str] = set()

    @rule(
        prompt=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=22).map(tuple),
        max_tokens=st.integers(1, 17),
        ignore_eos=st.booleans(),
        stop=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=2).map(tuple),
    )
    def add(self, prompt: tuple[int, ...], max_tokens: int, ignore_eos: bool, stop: tuple[int, ...]) -> None:
        name = f"r{len(self.requests)}"
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos, stop_token_ids=stop)
        if self.loop.scheduler.num_waiting == self.limits.max_queue_len:
            with pytest.raises(QueueFullError):
                self.loop.scheduler.add(Request(name, prompt, params))
            return
        self.loop.add(name, prompt, params)
        self.requests[name] = Request(name, prompt, params)

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.loop.step()

    @rule(which=st.integers(0, 30))
    def abort(self, which: int) -> None:
        name = f"r{which}"
        self.loop.scheduler.abort(name)
        if name in self.requests and name not in self.loop.reasons:
            self.aborted.add(name)

    @invariant()
    def slots_and_pages_are_accounted_for(self) -> None:
        self.loop.scheduler.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        self.loop.drain()
        assert set(self.loop.reasons) == set(self.requests), "a request was lost"
        for name, request in self.requests.items():
            answer, reason = expected_answer(request.prompt_token_ids, request.params)
            got = self.loop.answers[name]
            if name in self.aborted:
                assert self.loop.reasons[name] is FinishReason.ABORTED
                assert got == answer[: len(got)]
            else:
                assert (got, self.loop.reasons[name]) == (answer, reason)
        assert all_held(self.loop) == 0
        for shard in range(self.limits.num_shards):
            order = first_chunks(self.loop.device.plans, shard, self.limits.num_slots // self.limits.num_shards)
            assert order == sorted(order), "not first come, first served"


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
