"""The scheduler with tokens guessed ahead (speculative decoding)."""

import pytest

from engine.plan import DraftRequest
from engine.request import Request, SamplingParams

from .fake_device import PAGE_SIZE, VOCAB_SIZE, Loop, expected, make_limits
from .schedules import greedy


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


def test_pages_given_for_guesses_that_did_not_come_are_taken_back_before_anybody_is_preempted():
    loop, _ = guessing(0, num_tokens=16, num_slots=2, num_pages=9, decode_row_buckets=(2, 18))
    most_unused = 0

    def guess(d: DraftRequest) -> tuple[int, ...]:
        nonlocal most_unused
        most_unused = max(most_unused, len(d.page_ids) - -(-len(d.token_ids) // PAGE_SIZE))
        return ()

    loop.drafter = guess
    loop.add("a", (1, 2, 3), greedy(20))
    loop.step()
    loop.step()
    loop.add("b", tuple(range(7)), greedy(12))
    loop.drain()
    # Together they need 9 pages at most, and "a" was given up to 6 where it needed 3 of them.
    assert most_unused >= 3
    assert loop.preempted == []
    loop.check_answers()


@pytest.mark.parametrize(("decode_chunk", "most"), [(1, 1), (3, 3), (None, 5)])
def test_a_step_adds_no_more_tokens_than_the_request_allows(decode_chunk, most):
    loop, _ = guessing(4, num_tokens=4, decode_row_buckets=(1, 8), decode_chunk=8, decode_chunk_min=1)
    loop.add("r", (2, 1), SamplingParams(max_tokens=20, ignore_eos=True), decode_chunk=decode_chunk)
    counts, before = [], 0
    while loop.scheduler.has_work():
        loop.step()
        counts.append(len(loop.answers["r"]) - before)
        before += counts[-1]
    assert max(counts) == most
    loop.check_answers()
