"""The scheduler where pages run out."""

import itertools

from engine.request import FinishReason

from .fake_device import Loop, make_limits
from .schedules import greedy, rows_of


def crowded(**changes: object) -> Loop:
    """Room for a request and a half."""
    return Loop(make_limits(**{"num_slots": 3, "num_pages": 9, **changes}))


def test_the_youngest_gives_way_and_goes_on_from_its_cached_pages():
    loop = crowded()
    loop.add("old", (1, 2), greedy(25))
    loop.add("young", (3, 4), greedy(25))
    loop.drain()
    assert set(loop.preempted) == {"young"}
    assert loop.scheduler.num_preemptions == len(loop.preempted)
    starts = [first for _, first, _ in rows_of(loop, 1)]
    assert any(before > after > 0 for before, after in itertools.pairwise(starts)), "all computed again"
    loop.check_answers()


def test_the_lower_priority_gives_way_even_if_it_is_older():
    loop = crowded()
    loop.add("low", (1, 2), greedy(25), priority=1)
    loop.step()
    loop.add("high", (3, 4), greedy(25), priority=0)
    loop.drain()
    assert set(loop.preempted) == {"low"}
    loop.check_answers()


def test_only_requests_of_the_same_shard_give_way():
    loop = Loop(make_limits(num_slots=4, num_shards=2, num_pages=14))
    for name in "abc":
        loop.add(name, (1, ord(name) - 90), greedy(20))
    loop.drain()
    assert set(loop.preempted) == {"c"}
    loop.check_answers()


def run_until_preempted(loop: Loop) -> str:
    """Steps until somebody was preempted with a token that has not been seen; returns the request."""
    for _ in range(100):
        loop.step()
        if loop.preempted:
            return loop.preempted[-1]
    raise AssertionError("nobody was preempted")


def test_a_token_under_way_at_preemption_is_not_lost():
    loop = crowded()
    loop.add("old", (1, 2), greedy(25))
    loop.add("young", (3, 4), greedy(25))
    name = run_until_preempted(loop)
    s = loop.waiting()[name]
    # It was known when the step ended: the loop takes results in after scheduling.
    num_known = len(loop.answers[name])
    assert num_known == len(s.token_ids) - 2 > 0
    sampled = sum(row.sequence_id == 1 and row.samples for p in loop.device.plans for row in p.prefill + p.decode)
    assert num_known == sampled
    loop.drain()
    loop.check_answers()


def test_a_request_is_aborted_while_preempted():
    loop = crowded()
    loop.add("old", (1, 2), greedy(25))
    loop.add("young", (3, 4), greedy(25))
    loop.scheduler.abort(run_until_preempted(loop))
    assert loop.scheduler.num_waiting == 0
    loop.drain()
    assert loop.reasons == {"old": FinishReason.LENGTH, "young": FinishReason.ABORTED}
    loop.check_answers()


def test_the_token_under_way_may_be_the_last_of_a_preempted_request():
    for max_tokens in range(8, 26):
        loop = crowded()
        loop.add("old", (1, 2), greedy(25))
        loop.add("young", (3, 4), greedy(max_tokens))
        loop.drain()
        loop.check_answers()
        if loop.preempted and loop.scheduler.num_preemptions == 1 and rows_of(loop, 1)[-1][1] == max_tokens:
            return
    raise AssertionError("no such case was met")


def test_many_that_do_not_fit_together_all_end_within_bounded_steps():
    loop = Loop(make_limits(num_slots=6, num_pages=10, max_queue_len=99))
    for index in range(12):
        loop.add(f"r{index}", (index, 2, 3), greedy(30))
    # Even one after the other they take no more than 12 times 31 steps.
    assert loop.drain() <= 12 * 32
    assert loop.preempted
    loop.check_answers()


def test_a_tenant_is_charged_once_for_a_prompt_however_often_it_is_preempted():
    loop = crowded()
    loop.add("old", (1, 2), greedy(25), tenant="a")
    loop.add("young", (3, 4), greedy(24), tenant="b")
    run_until_preempted(loop)
    while "young" not in loop.running():
        loop.step()
    assert loop.scheduler._waiting._served["b"] == 2 + len(loop.answers["young"])
