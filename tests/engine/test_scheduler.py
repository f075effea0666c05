import subprocess
import sys

import pytest

from engine.errors import InvalidRequestError, PromptTooLongError, QueueFullError
from engine.request import FinishReason, Request, SamplingParams

from .fake_device import EOS, PAGE_SIZE, VOCAB_SIZE, Loop, first_answer, make_limits
from .schedules import FOREVER


def prompt_answered_by(token: int) -> tuple[int, ...]:
    """A prompt after which the fake device samples this token first."""
    return next((a, b) for a in range(VOCAB_SIZE) for b in range(VOCAB_SIZE) if first_answer((a, b)) == token)


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
    assert loop.num_held() == 0
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
    assert (loop.num_held(), loop.scheduler.num_running, loop.scheduler.num_waiting) == (0, 0, 0)
    loop.add("next", (3, 1), SamplingParams(max_tokens=6, ignore_eos=True))
    loop.drain()
    assert loop.reasons == {"r": FinishReason.ABORTED, "next": FinishReason.LENGTH}
    loop.check_answers()


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
    loop = Loop(make_limits(num_slots=1, max_queue_len=1))
    loop.add("a", (1,), FOREVER)
    loop.add("b", (1,), FOREVER)
    with pytest.raises(QueueFullError, match="2 requests are waiting"):
        loop.scheduler.add(Request("c", (1,), FOREVER))
    loop.drain()
    assert set(loop.reasons) == {"a", "b"}


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (Request("r", ()), InvalidRequestError),
        (Request("r", (1,) * 40), PromptTooLongError),
        (Request("r", (1,) * 12, SamplingParams(max_tokens=1)), PromptTooLongError),
    ],
    ids=["empty", "beyond the context", "beyond the pages"],
)
def test_a_request_that_can_never_run_is_refused_at_once(request_, error):
    loop = Loop(make_limits(num_slots=1, num_pages=3))
    with pytest.raises(error):
        loop.scheduler.add(request_)
    assert not loop.scheduler.has_work()


def test_a_request_may_fill_the_context_exactly():
    loop = Loop(make_limits())
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    loop.add("r", (1,) * 35, params)
    loop.drain()
    loop.check_answers()


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


def test_page_utilization_counts_positions_with_tokens():
    loop = Loop(make_limits(num_slots=2))
    assert (loop.scheduler.page_utilization(), loop.scheduler.cache_usage()) == (1.0, 0.0)
    loop.add("r", (1, 2, 3, 4, 5), FOREVER)
    for _ in range(3):
        loop.step()
    assert loop.scheduler.page_utilization() == pytest.approx(6 / (2 * PAGE_SIZE))
    assert loop.scheduler.cache_usage() == pytest.approx(2 / 20)


def chunks_of(loop: Loop) -> list[int]:
    """The longest decode chunk of each step with decode rows."""
    return [max(row.max_new_tokens for row in plan.decode) for plan in loop.device.plans if plan.decode]


def test_decode_chunks_double_while_nothing_waits():
    loop = Loop(make_limits(decode_chunk=8, decode_chunk_min=1))
    loop.add("r", (1, 2), SamplingParams(max_tokens=24, ignore_eos=True))
    loop.drain()
    # The prompt waited in the first step; the last one had a single token left.
    assert chunks_of(loop) == [2, 4, 8, 8, 1]
    loop.check_answers()


def test_decode_chunks_are_short_while_something_waits():
    loop = Loop(make_limits(num_slots=1, decode_chunk=8, decode_chunk_min=2))
    loop.add("a", (1, 2), SamplingParams(max_tokens=9, ignore_eos=True))
    loop.add("b", (1, 2), SamplingParams(max_tokens=5, ignore_eos=True))
    loop.drain()
    assert chunks_of(loop)[:4] == [2, 2, 2, 2]
    loop.check_answers()


def test_a_request_keeps_chunks_short_even_in_the_step_that_it_starts_in():
    loop = Loop(make_limits(decode_chunk=4, decode_chunk_min=4))
    loop.add("cached", (1, 2, 3, 4), SamplingParams(max_tokens=1))
    loop.add("long", (5, 6), SamplingParams(max_tokens=30, ignore_eos=True))
    for _ in range(3):
        loop.step()
    loop.add("short", (1, 2, 3, 4), SamplingParams(max_tokens=3, ignore_eos=True), decode_chunk=1)
    loop.step()
    assert {row.sequence_id: row.max_new_tokens for row in loop.device.plans[-1].decode} == {1: 1, 2: 1}
    loop.drain()
    loop.check_answers()
