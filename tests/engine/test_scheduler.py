import itertools
import subprocess
import sys

import pytest

from engine.errors import InvalidRequestError, PromptTooLongError, QueueFullError
from engine.request import FinishReason, Request, SamplingParams
from engine.scheduler import DraftRequest

from .fake_device import EOS, PAGE_SIZE, VOCAB_SIZE, Loop, expected, first_answer, make_limits

FOREVER = SamplingParams(max_tokens=20, ignore_eos=True)


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
    loop = Loop(make_limits(max_queue_len=2))
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


def rows_of(loop: Loop, sequence_id: int) -> list[tuple[str, int, int]]:
    """(kind, first position, positions) of everything computed for a sequence."""
    found = []
    for plan in loop.device.plans:
        for kind, rows in [("prefill", plan.prefill), ("decode", plan.decode)]:
            found += [(kind, row.position, row.num_tokens) for row in rows if row.sequence_id == sequence_id]
    return found


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


PREFIX = (1, 2, 3, 5, 8, 0, 12, 7, 6, 11, 9, 10)
"""Three pages."""


def test_a_second_request_computes_only_what_follows_the_common_prefix():
    loop = Loop(make_limits())
    loop.add("a", (*PREFIX, 1), greedy(2))
    loop.drain()
    loop.add("b", (*PREFIX, 2, 3), greedy(2))
    loop.drain()
    assert rows_of(loop, 1)[0] == ("prefill", 12, 2)
    assert (loop.num_cached, loop.scheduler.num_cached_tokens) == ({"a": 0, "b": 12}, 12)
    loop.check_answers()


@pytest.mark.parametrize("other", [{"cache_salt": "s"}, {"window": 99}])
def test_requests_of_another_salt_or_window_share_nothing(other):
    loop = Loop(make_limits())
    loop.add("a", (*PREFIX, 1), greedy(2))
    loop.drain()
    loop.add("b", (*PREFIX, 1), greedy(2), **other)
    loop.drain()
    assert loop.num_cached == {"a": 0, "b": 0}
    loop.check_answers()


def test_a_prompt_wholly_cached_is_one_decode_row_on_a_copy_of_its_last_page():
    loop = Loop(make_limits())
    loop.add("a", PREFIX, greedy(1))
    loop.drain()
    loop.add("b", PREFIX, greedy(3))
    loop.step()
    plan = loop.device.plans[-1]
    assert (plan.prefill, len(plan.copies)) == ((), 1)
    loop.drain()
    assert rows_of(loop, 1)[0] == ("decode", 11, 1)
    assert loop.num_cached == {"a": 0, "b": 11}
    loop.check_answers()


def test_the_second_of_two_equal_prompts_hits_what_the_first_has_just_computed():
    loop = Loop(make_limits())
    loop.add("a", (*PREFIX, 1), greedy(3))
    loop.add("b", (*PREFIX, 1), greedy(3))
    loop.drain()
    assert loop.num_cached == {"a": 0, "b": 12}
    assert rows_of(loop, 1)[0] == ("decode", 12, 1)
    loop.check_answers()


def test_a_conversation_finds_its_generated_tokens_again():
    loop = Loop(make_limits())
    loop.add("a", PREFIX[:6], greedy(7))
    loop.drain()
    loop.add("b", (*PREFIX[:6], *loop.answers["a"], 1), greedy(2))
    loop.drain()
    assert loop.num_cached["b"] == 12
    loop.check_answers()


def test_a_forgotten_cache_is_not_hit():
    loop = Loop(make_limits())
    loop.add("a", PREFIX, greedy(1))
    loop.drain()
    loop.scheduler.forget_cached()
    loop.add("b", PREFIX, greedy(1))
    loop.drain()
    assert loop.num_cached["b"] == 0


def test_a_request_goes_where_its_prefix_is():
    loop = Loop(make_limits(num_slots=4, num_shards=2))
    loop.add("a", PREFIX, greedy(1))
    loop.drain()
    loop.add("other", (9,), FOREVER)
    loop.add("b", (*PREFIX, 1), greedy(1))
    loop.step()
    slots = {name: s.slot for name, s in loop.running().items()}
    assert slots["b"] // 2 == loop.device.plans[0].prefill[0].slot // 2 == 0


def test_a_long_request_with_a_small_window_runs_in_a_pool_that_could_not_hold_it():
    # 39 positions are 10 pages; a window of 6 and a chunk of 4 never need more than 4.
    loop = Loop(make_limits(num_slots=1, num_pages=4, prefill_buckets=(4,)))
    loop.add("r", (1, 2, 3) * 8, greedy(15), window=6)
    loop.drain()
    loop.check_answers()
    with pytest.raises(PromptTooLongError):
        loop.add("whole", (1, 2, 3) * 8, greedy(15))


def test_the_window_of_the_layers_frees_pages_too():
    loop = Loop(make_limits(num_slots=1, num_pages=5, window=6))
    loop.add("r", (1, 2, 3) * 8, greedy(15))
    loop.drain()
    loop.check_answers()


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
    for _ in range(5):
        loop.step()
    assert loop.scheduler._waiting._served["b"] == 2 + len(loop.answers["young"])


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


def first_places(loop: Loop, name_to_id: dict[str, int]) -> dict[str, dict[int, tuple[str, int]]]:
    return {name: dict(loop.device.places[number]) for name, number in name_to_id.items()}


@pytest.mark.parametrize("num_pages", [12, 40])
def test_exact_computes_each_position_at_the_same_place_alone_and_under_load(num_pages):
    limits = make_limits(num_pages=num_pages, exact=True, prefill_buckets=(8,), max_queue_len=99)
    loaded = Loop(limits)
    prompts = [(*PREFIX[:n], *PREFIX[:m]) for n, m in [(12, 12), (12, 3), (8, 1), (12, 12), (3, 0), (12, 7), (8, 0)]]
    for index, prompt in enumerate(prompts):
        loaded.add(f"r{index}", prompt, greedy(12))
    loaded.drain()
    loaded.check_answers()
    assert any(loaded.num_cached.values())
    assert bool(loaded.preempted) == (num_pages == 12)
    for index, prompt in enumerate(prompts):
        alone = Loop(limits)
        alone.add("r", prompt, greedy(12))
        alone.drain()
        # The sequences saw what these places computed, whoever computed it; the last row may have come too late.
        got, want = loaded.device.places[index], alone.device.places[0]
        assert {p: got[p] for p in range(len(prompt) + 11)} == {p: want[p] for p in range(len(prompt) + 11)}


class Guesser:
    """Guesses the first `num_right` tokens right, and others after them."""

    def __init__(self, num_right: int) -> None:
        self.num_right = num_right
        self.loop: Loop | None = None
        self.num_guessed = self.num_accepted = 0

    def __call__(self, d: DraftRequest) -> tuple[int, ...]:
        assert self.loop is not None
        request = self.loop.scheduler._running[0].request
        assert self.loop.scheduler._running[0].sequence_id == d.sequence_id
        answer = expected(request, self.loop.limits).tokens
        right = answer[len(d.token_ids) - d.num_prompt_tokens :][: min(self.num_right, d.num_tokens)]
        guess = [*right, *[VOCAB_SIZE - 1] * d.num_tokens][: d.num_tokens]
        self.num_guessed += len(guess)
        return tuple(guess)


def guessing(num_right: int, num_tokens: int = 3, **changes: object) -> tuple[Loop, Guesser]:
    guesser = Guesser(num_right)
    limits = make_limits(**{"num_slots": 1, "decode_row_buckets": (1, 2, 4), **changes})
    guesser.loop = Loop(limits, drafter=guesser, num_draft_tokens=num_tokens, ahead=False)
    return guesser.loop, guesser


@pytest.mark.parametrize(("num_right", "num_steps"), [(3, 5), (1, 9), (0, 17)])
def test_right_guesses_save_steps_and_wrong_ones_change_nothing(num_right, num_steps):
    loop, guesser = guessing(num_right)
    params = SamplingParams(max_tokens=17, ignore_eos=True, logprobs=0)
    loop.add("r", (2, 1), params)
    loop.drain()
    assert len(loop.device.plans) <= num_steps + 1
    if num_right:
        assert len(loop.device.plans) < 17
    assert loop.scheduler.num_draft_tokens == guesser.num_guessed
    loop.check_answers()


def test_accepted_guesses_are_counted():
    loop, _ = guessing(2)
    loop.add("r", (2, 1), greedy(8))
    loop.drain()
    # The prompt gives 1 token; then 1 and 2 right guesses (of 3), again, and 1 with no guess: it is the last.
    assert [len(plan.decode) for plan in loop.device.plans] == [0, 4, 4, 1]
    assert (loop.scheduler.num_draft_tokens, loop.scheduler.num_accepted_tokens) == (6, 4)
    loop.check_answers()


@pytest.mark.parametrize("max_tokens", range(1, 10))
def test_guesses_never_lead_beyond_max_tokens(max_tokens):
    loop, _ = guessing(3)
    loop.add("r", (2, 1), greedy(max_tokens))
    loop.drain()
    assert len(loop.answers["r"]) == max_tokens
    loop.check_answers()


@pytest.mark.parametrize("place", range(1, 8))
def test_a_stop_token_among_accepted_guesses_ends_there(place):
    loop, _ = guessing(3)
    answer = expected(Request("r", (2, 1), greedy(12)), loop.limits).tokens
    stop = answer[place]
    loop.add("r", (2, 1), SamplingParams(max_tokens=12, ignore_eos=True, stop_token_ids=(stop,), logprobs=0))
    loop.drain()
    assert loop.answers["r"] == answer[: answer.index(stop) + 1]
    loop.check_answers()


def test_guesses_do_not_take_pages_that_others_need():
    loop, _ = guessing(0, num_tokens=8, num_slots=2, num_pages=6, decode_row_buckets=(2, 10))
    loop.drafter = lambda d: (1,) * d.num_tokens
    loop.add("a", (1, 2, 3), greedy(9))
    loop.add("b", (4, 5, 6), greedy(9))
    loop.drain()
    # 12 positions each fill the pool exactly.
    assert loop.preempted == []
    assert loop.scheduler.num_draft_tokens > 0
    loop.check_answers()


def test_a_request_that_has_not_started_is_not_asked_for_guesses():
    loop, _ = guessing(0, num_slots=3, decode_row_buckets=(8,))
    loop.drafter = lambda d: (1,) * d.num_tokens
    loop.add("a", tuple(range(13)), greedy(3))
    loop.add("b", (1,), greedy(3))
    loop.drain()
    loop.check_answers()


def test_page_utilization_counts_positions_with_tokens():
    loop = Loop(make_limits(num_slots=2))
    assert (loop.scheduler.page_utilization(), loop.scheduler.cache_usage()) == (1.0, 0.0)
    loop.add("r", (1, 2, 3, 4, 5), FOREVER)
    for _ in range(3):
        loop.step()
    assert loop.scheduler.page_utilization() == pytest.approx(6 / (2 * PAGE_SIZE))
    assert loop.scheduler.cache_usage() == pytest.approx(2 / 20)
