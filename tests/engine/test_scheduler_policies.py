"""Whom the scheduler admits: priorities, ageing, tenants."""

import pytest

from .fake_device import Loop, make_limits
from .schedules import greedy


def test_priorities_decide_who_is_admitted():
    loop = Loop(make_limits(num_slots=1))
    for name, priority in [("first", 0), ("low", 2), ("high", -1), ("middle", 0)]:
        loop.add(name, (1,), greedy(1), priority=priority)
        loop.step()
    loop.drain()
    assert loop.admitted == ["first", "high", "middle", "low"]


@pytest.mark.parametrize(("waited_s", "order"), [(59.0, ["new", "old"]), (61.0, ["old", "new"])])
def test_waiting_makes_up_for_priority(waited_s, order):
    loop = Loop(make_limits(num_slots=1, priority_ageing_s=30.0))
    loop.add("running", (1,), greedy(9))
    loop.step()
    loop.add("old", (1,), greedy(1), priority=2)
    loop.now_s += waited_s
    loop.add("new", (1,), greedy(1), priority=0)
    loop.drain()
    assert loop.admitted == ["running", *order]


def test_a_steady_stream_of_urgent_requests_does_not_starve_others():
    loop = Loop(make_limits(num_slots=1, max_queue_len=99, priority_ageing_s=5.0))
    loop.add("patient", (1,), greedy(1), priority=3)
    for index in range(40):
        loop.add(f"urgent{index}", (1,), greedy(1), priority=0)
        loop.now_s += 1.0
        loop.step()
    assert "patient" in loop.reasons
    assert loop.admitted.index("patient") >= 10


@pytest.mark.parametrize("waited_s", [0.0, 1000.0])
def test_fifty_requests_of_one_tenant_do_not_delay_one_of_another(waited_s):
    loop = Loop(make_limits(num_slots=2, max_queue_len=99))
    for index in range(50):
        loop.add(f"a{index}", (1, 2), greedy(4), tenant="a")
    for _ in range(20):
        loop.step()
    ahead = len(loop.admitted)
    loop.now_s += waited_s
    loop.add("b", (3,), greedy(1), tenant="b")
    loop.drain()
    assert loop.admitted.index("b") - ahead <= 1


def test_tenants_get_equal_shares_of_tokens():
    loop = Loop(make_limits(num_slots=2, max_queue_len=199))
    for index in range(60):
        loop.add(f"long{index}", (1, 2, 3, 4), greedy(16), tenant="long")
        loop.add(f"short{index}", (1,), greedy(4), tenant="short")
    for _ in range(200):
        loop.step()
    tokens = {"long": 0, "short": 0}
    for name in loop.admitted:
        kind = name.rstrip("0123456789")
        tokens[kind] += len(loop.requests[name].prompt_token_ids) + len(loop.answers[name])
    assert abs(tokens["long"] - tokens["short"]) <= 2 * 20
