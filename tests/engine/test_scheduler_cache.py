"""The scheduler with its prefix cache, windows, and the same places for the same positions."""

import pytest

from engine.errors import PromptTooLongError
from engine.request import Request, SamplingParams

from .fake_device import Loop, expected, make_limits
from .schedules import FOREVER, PREFIX, greedy, rows_of


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


@pytest.mark.parametrize("ahead", [True, False])
def test_a_conversation_finds_its_generated_tokens_again(ahead):
    loop = Loop(make_limits(), ahead=ahead)
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
    loop.add("other", (9,), greedy(9))
    loop.add("a", PREFIX, greedy(1))
    loop.drain()
    assert [row.slot // 2 for row in loop.device.plans[0].prefill] == [0, 1]
    loop.add("b", (*PREFIX, 1), greedy(1))
    loop.step()
    assert loop.running()["b"].slot // 2 == 1


def test_a_short_common_prefix_does_not_crowd_one_shard():
    loop = Loop(make_limits(num_slots=8, num_shards=2, max_queue_len=8))
    loop.add("first", PREFIX, greedy(1))
    loop.drain()
    for index in range(4):
        loop.add(f"r{index}", (*PREFIX, index), FOREVER)
    loop.step()
    assert sorted(s.slot // 4 for s in loop.running().values()) == [0, 0, 1, 1]


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


@pytest.mark.parametrize("decode_chunk", [1, 5])
@pytest.mark.parametrize("place", range(8))
def test_a_stop_token_that_nothing_computed_is_not_cached(place, decode_chunk):
    limits = make_limits(decode_chunk=decode_chunk, decode_chunk_min=decode_chunk)
    prompt = PREFIX[:5]
    answer = expected(Request("r", prompt, greedy(12)), limits).tokens
    answer = answer[: answer.index(answer[place]) + 1]
    loop = Loop(limits)
    loop.add("a", prompt, SamplingParams(max_tokens=12, ignore_eos=True, stop_token_ids=(answer[-1],)))
    loop.drain()
    assert loop.answers["a"] == answer
    loop.add("b", (*prompt, *answer, 1), greedy(2))
    loop.drain()
    loop.check_answers()
